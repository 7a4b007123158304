// Package tz finds the changes of a time zone's clock.
package tz

import (
	"sort"
	"time"
)

const (
	day = 24 * time.Hour // no zone changes its clock twice in one

	// horizon is beyond whatever asks: a calendar's next instant, which is sought for less than six years.
	horizon = 10 * 366 * day
)

// Change returns the first instant after t from which t's location is another span ahead of UTC; the zero time if none
// comes in ten years.
//
// If a zone's changes follow a rule, Time.ZoneBounds also ends with the year, on the last day of a leap year with an
// end before t, and begins as if there had always been that rule. So Change only uses ends, and confirms them by Zone.
func Change(t time.Time) time.Time {
	_, offset := t.Zone()
	other := func(at time.Time) bool {
		_, o := at.Zone()
		return o != offset
	}
	for at := t; at.Sub(t) < horizon; {
		_, end := at.ZoneBounds() //nolint:forbidigo // with care
		if end.IsZero() {
			return end
		}
		if !end.After(at) {
			end = at.Add(day)
		}
		if !other(end) {
			at = end
			continue
		}
		if !other(end.Add(-1)) {
			return end
		}
		// Changes come on whole seconds.
		second := func(i int) time.Time { return time.Unix(at.Unix()+int64(i), 0).In(t.Location()) }
		return second(sort.Search(int(end.Unix()-at.Unix()), func(i int) bool { return other(second(i)) }))
	}
	return time.Time{}
}

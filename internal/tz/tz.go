// Package tz finds the changes of a time zone's clock. The instants of calendars are not here: see package calendar.
package tz

import (
	"sort"
	"time"
)

const (
	day = 24 * time.Hour // no zone changes its clock twice in a day

	// horizon is the longest time that is searched. It is longer than callers need: a calendar's next instant is searched
	// for in less than six years.
	horizon = 10 * 366 * day
)

// Change returns the first instant after t at which the offset of t's location from UTC changes. It returns the zero
// time if there is no change within ten years.
//
// If a zone's changes follow a rule, the bounds of Time.ZoneBounds are not reliable. They also end with the year. On
// the last day of a leap year the end is before t. The beginning ignores that the rule was not always in force. So
// Change uses only ends, and confirms them with Zone.
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

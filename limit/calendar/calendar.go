// Package calendar divides time into the minutes, hours, days, weeks and months of a time zone.
//
// Each instant belongs to exactly one stretch of each unit, for example to one day. A day begins at midnight. So the
// day on which summer time begins has 23 hours. If the clock jumps over midnight, the day begins with the jump. If the
// clock shows midnight twice, the day begins at the second midnight. Weeks begin on Monday. If the clock shows an hour
// twice, these are two hours. Minutes and hours never cross a change of the zone's offset. The time zones are those of
// package time.
package calendar

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/internal/tz"
)

// Unit is a length of time on a calendar.
type Unit int

// The units; the zero Unit is none.
const (
	Minute Unit = 1 + iota
	Hour
	Day
	Week
	Month
)

var names = []string{"", "minute", "hour", "day", "week", "month"}

const day = 24 * time.Hour

// usual are the usual lengths of the units, and longest are bounds for their lengths in any zone.
var (
	usual   = []time.Duration{0, time.Minute, time.Hour, day, 7 * day, 30 * day}
	longest = []time.Duration{0, time.Minute, time.Hour, 49 * time.Hour, 9 * day, 33 * day}
)

// Parse reads a unit's name: minute, hour, day, week or month.
func Parse(s string) (Unit, error) {
	if i := slices.Index(names, s); i > 0 {
		return Unit(i), nil
	}
	return 0, fmt.Errorf("calendar: %q is not one of %s", s, strings.Join(names[1:], ", "))
}

// Valid reports whether u is a unit.
func (u Unit) Valid() bool { return u >= Minute && u <= Month }

// String returns the unit's name.
func (u Unit) String() string {
	if !u.Valid() {
		return fmt.Sprintf("unit %d", int(u))
	}
	return names[u]
}

// Usual returns the length of most of the unit's stretches, which is sent to clients. For a month it is 30 days.
func (u Unit) Usual() time.Duration { return usual[u] }

// Longest returns a bound for the length of the unit's stretches.
func (u Unit) Longest() time.Duration { return longest[u] }

// Span returns the stretch of the unit that contains t, in a location; nil is UTC. The end is not in it. An invalid
// unit panics.
func (u Unit) Span(t time.Time, in *time.Location) (begin, end time.Time) {
	if in == nil {
		in = time.UTC
	}
	t = t.In(in)
	switch u {
	case Minute, Hour:
		return within(t, longest[u])
	case Day, Week, Month:
	default:
		panic("calendar: " + u.String())
	}
	y, m, d := t.Date()
	switch u {
	case Week:
		d -= (int(t.Weekday()) + 6) % 7
	case Month:
		d = 1
	}
	next := func(by int) time.Time {
		switch u {
		case Week:
			return midnight(y, m, d+7*by, in)
		case Month:
			return midnight(y, m+time.Month(by), 1, in)
		}
		return midnight(y, m, d+by, in)
	}
	begin, end = next(0), next(1)
	switch {
	case t.Before(begin): // the clock went back over midnight, and t is between the two midnights
		begin, end = next(-1), begin
	case !t.Before(end):
		begin, end = end, next(2)
	}
	return begin, end
}

// within returns the stretch of length that contains t on the zone's clock, as far as the clock runs evenly.
func within(t time.Time, length time.Duration) (begin, end time.Time) {
	_, offset := t.Zone()
	clock := t.Add(time.Duration(offset) * time.Second)
	begin = t.Add(-clock.Sub(clock.UTC().Truncate(length)))
	end = begin.Add(length)
	change := tz.Change(begin)
	if !change.IsZero() && !change.After(t) {
		begin, change = change, tz.Change(change)
	}
	if !change.IsZero() && change.Before(end) {
		end = change
	}
	return begin, end
}

// midnight returns the instant at which a date begins. If the clock shows midnight twice, it is the second midnight. If
// the clock jumps over midnight, it is the instant of the jump.
func midnight(y int, m time.Month, d int, in *time.Location) time.Time {
	wall := time.Date(y, m, d, 0, 0, 0, 0, time.UTC)
	var found time.Time
	for _, near := range []time.Duration{-36 * time.Hour, 36 * time.Hour} { // the offsets before and after
		_, offset := wall.Add(near).In(in).Zone()
		at := wall.Add(-time.Duration(offset) * time.Second).In(in)
		if _, o := at.Zone(); o == offset && at.After(found) {
			found = at
		}
	}
	if !found.IsZero() {
		return found
	}
	return tz.Change(wall.Add(-36 * time.Hour).In(in))
}

package policy

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/tokenrefill/refiller/internal/tz"
)

// ErrSchedule is returned for a calendar that can't be read.
var ErrSchedule = errors.New("policy: bad schedule")

// Steps has the instants at which a step's tokens fall due. Implementations are immutable and safe for concurrent use.
type Steps interface {
	// Next is the first instant strictly after t; the zero time if none comes.
	Next(t time.Time) time.Time
	String() string
}

// Every is a schedule with equal steps. Its instants are the whole multiples of the duration since the Unix epoch, so
// all replicas compute the same ones.
type Every time.Duration

// Next implements Steps.
func (e Every) Next(t time.Time) time.Time {
	step := time.Duration(e).Microseconds()
	if step < 1 {
		return time.Time{}
	}
	return time.UnixMicro((floorDiv(t.UnixMicro(), step) + 1) * step).UTC()
}

// String implements Steps.
func (e Every) String() string { return "every " + time.Duration(e).String() }

// Calendar is a schedule in cron's notation and a time zone.
type Calendar struct {
	spec      string
	zone      *time.Location
	schedule  *cron.SpecSchedule
	fixedHour bool // the hour field names hours
}

// ParseCalendar reads five cron fields (minute, hour, day of month, month, day
// of week) or a descriptor such as @daily. A nil zone means UTC.
//
// The hour field decides what happens when the clock changes. If it names hours, the instants in a skipped hour become
// one instant, the first one after the gap. Instants in a repeated hour come only the first time. If the field is *,
// skipped instants don't come, and repeated ones come twice.
func ParseCalendar(spec string, zone *time.Location) (*Calendar, error) {
	if zone == nil {
		zone = time.UTC
	}
	if strings.Contains(spec, "TZ=") {
		return nil, fmt.Errorf("%w %q: the time zone must be given separately", ErrSchedule, spec)
	}
	if strings.HasPrefix(strings.TrimSpace(spec), "@every") {
		return nil, fmt.Errorf("%w %q: for equal steps use every", ErrSchedule, spec)
	}
	schedule, err := cron.ParseStandard(spec)
	if err != nil {
		return nil, fmt.Errorf("%w %q: %w", ErrSchedule, spec, err)
	}
	fields, ok := schedule.(*cron.SpecSchedule)
	if !ok {
		return nil, fmt.Errorf("%w %q: want five fields or a descriptor such as @daily", ErrSchedule, spec)
	}
	fields.Location = time.UTC // see Next
	const star = 1 << 63       // set by package cron in a field that is *
	c := &Calendar{spec: spec, zone: zone, schedule: fields, fixedHour: fields.Hour&star == 0}
	if c.Next(time.Unix(0, 0)).IsZero() {
		return nil, fmt.Errorf("%w %q: no such day comes", ErrSchedule, spec)
	}
	return c, nil
}

// patience is the number of years after which Next gives up. That would happen only if the clock of a zone skipped the
// same day every year, and no zone does that.
const patience = 20

// Next implements Steps.
//
// It goes over the stretches between two changes of the zone's clock. Within a stretch the local time runs evenly. The
// library that reads the fields gets only such stretches, because it loses a day that begins with a change.
func (c *Calendar) Next(t time.Time) time.Time {
	last := t.AddDate(patience, 0, 0)
	for stretch := t; stretch.Before(last); {
		_, offset := stretch.In(c.zone).Zone()
		end := tz.Change(stretch.In(c.zone))
		next := c.onWall(t, offset)
		switch {
		case next.IsZero():
			return next
		case end.IsZero() || next.Before(end):
			if !c.fixedHour || !repeated(next) {
				return next
			}
			t = next
		default:
			_, after := end.Zone()
			if left := time.Duration(after-offset) * time.Second; c.fixedHour && next.Before(end.Add(left)) {
				return end
			}
			stretch, t = end, end.Add(-1)
		}
	}
	return time.Time{}
}

// onWall returns the first instant after t whose local time matches, in a zone that is always offset seconds ahead of
// UTC.
func (c *Calendar) onWall(t time.Time, offset int) time.Time {
	ahead := time.Duration(offset) * time.Second
	next := c.schedule.Next(t.UTC().Add(ahead))
	if next.IsZero() {
		return next
	}
	return next.Add(-ahead).In(c.zone)
}

// repeated reports whether the local time of t has occurred before, because clocks were put back shortly before t. No
// zone puts them back by more than a day.
func repeated(t time.Time) bool {
	for at := t.Add(-24 * time.Hour); ; {
		_, before := at.Zone()
		at = tz.Change(at)
		if at.IsZero() || at.After(t) {
			return false
		}
		if _, offset := at.Zone(); t.Sub(at) < time.Duration(before-offset)*time.Second {
			return true
		}
	}
}

// String implements Steps.
func (c *Calendar) String() string { return c.spec + " " + c.zone.String() }

// catchUp is the largest number of missed instants of a Calendar that Due considers.
const catchUp = 1000

// Due returns the step to credit next, and the step after it, in Unix microseconds. stored is the last step that was
// credited. due is the first step after stored that is not after now; 0 if there is none. next is the first step after
// due; 0 if there is none.
//
// If more than keep steps have come since stored, Due passes over the earlier ones, since the bucket could not hold
// their tokens. keep is at least 1. For any Steps but Every, it is at most 1,000. That bounds the work of a call after
// a long time without calls.
//
// If stored is later than the next three instants after now, it was set while the server's clock was ahead. Then due is
// 0 and next is the first instant after now. From this next the refill script detects that the clock was ahead.
func Due(s Steps, stored, now, keep int64) (due, next int64) {
	if stored > now {
		if first := after(s, now); first != 0 && stored > after(s, after(s, first)) {
			return 0, first
		}
	}
	keep = max(1, keep)
	if e, ok := s.(Every); ok {
		return e.due(stored, now, keep)
	}
	due = after(s, stored)
	if due == 0 || due > now {
		return 0, due
	}
	// Walk back in doubling spans until one holds keep instants. Two steps are seldom closer than a minute, so the first
	// span seldom holds more.
	keep = min(keep, catchUp)
	for span := keep * time.Minute.Microseconds(); ; span *= 2 {
		from := max(now-span, due-1)
		if window := latest(s, from, now, keep); window != nil {
			due = window[0]
			break
		}
		if from < due { // fewer than keep are due
			break
		}
	}
	return due, after(s, due)
}

// due does the work of Due by arithmetic, without walking over the instants.
func (e Every) due(stored, now, keep int64) (due, next int64) {
	step := time.Duration(e).Microseconds()
	if step < 1 {
		return 0, 0
	}
	first, last := floorDiv(stored, step)+1, floorDiv(now, step)
	if first > last {
		return 0, first * step
	}
	n := max(first, last-min(keep, last-first+1)+1)
	return n * step, (n + 1) * step
}

// latest returns the last keep instants in (from, to], oldest first; nil if there are fewer.
func latest(s Steps, from, to, keep int64) []int64 {
	ring := make([]int64, 0, keep)
	n := int64(0)
	for at := after(s, from); at != 0 && at <= to; at = after(s, at) {
		if n < keep {
			ring = append(ring, at)
		} else {
			ring[n%keep] = at
		}
		n++
	}
	if n < keep {
		return nil
	}
	return append(ring[n%keep:], ring[:n%keep]...)
}

// after returns the first instant after t in Unix microseconds; 0 if none comes.
func after(s Steps, t int64) int64 {
	n := s.Next(time.UnixMicro(t))
	if n.IsZero() {
		return 0
	}
	return n.UnixMicro()
}

func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}

package stats

import "time"

const (
	// TrendSlot is how long a slot of a trend is, and TrendSlots how many a trend has: a quarter of an hour together.
	TrendSlot  = 10 * time.Second
	TrendSlots = 90
)

// ring holds a point for each of the last slots of time: that of slot n, counted from 1970, is at n modulo its size.
type ring[P any] struct {
	slot   time.Duration
	points []slotted[P]
}

type slotted[P any] struct {
	slot  int64
	point P
}

func newRing[P any](slot time.Duration, slots int) *ring[P] {
	return &ring[P]{slot, make([]slotted[P], slots)}
}

// at is the point of the slot of an instant; zero, if it is the first instant of its slot that is asked for.
func (r *ring[P]) at(t time.Time) *P {
	slot := t.UnixNano() / int64(r.slot)
	p := r.in(slot)
	if p.slot != slot {
		p.slot, p.point = slot, *new(P)
	}
	return &p.point
}

// in is where the point of a slot is, or that of an earlier one.
func (r *ring[P]) in(slot int64) *slotted[P] { return &r.points[slot%int64(len(r.points))] }

// until are the points up to the slot of an instant, the oldest first; zero where there is none.
func (r *ring[P]) until(now time.Time) []P {
	last := now.UnixNano() / int64(r.slot)
	points := make([]P, len(r.points))
	for i := range points {
		slot := last - int64(len(r.points)-1-i)
		if p := r.in(slot); p.slot == slot {
			points[i] = p.point
		}
	}
	return points
}

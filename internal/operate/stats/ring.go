package stats

import "time"

const (
	// TrendSlot is the length of a slot of a trend, and TrendSlots the number of its slots. Together they are a quarter of
	// an hour.
	TrendSlot  = 10 * time.Second
	TrendSlots = 90
)

// ring holds a point for each of the last slots of time. The point of slot n, counted from 1970, is at index n modulo
// the size.
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

// at returns the point of the slot that contains t. The first call for a slot returns a zero point.
func (r *ring[P]) at(t time.Time) *P {
	slot := t.UnixNano() / int64(r.slot)
	p := r.in(slot)
	if p.slot != slot {
		p.slot, p.point = slot, *new(P)
	}
	return &p.point
}

// in returns the place for the point of a slot. The place may still hold the point of an earlier slot.
func (r *ring[P]) in(slot int64) *slotted[P] { return &r.points[slot%int64(len(r.points))] }

// until returns the points up to the slot that contains now, the oldest first. A slot without a point has a zero point.
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

package tally

import "time"

const (
	// TrendSlot is how long a slot of a trend is, and TrendSlots how many a trend has: a quarter of an hour together.
	TrendSlot  = 10 * time.Second
	TrendSlots = 90
	// maxTrends is how many buckets have a trend, the first ones configured: some 3 MB.
	maxTrends = 4096
)

// Trend is how a bucket stood of late, slot by slot, the oldest first.
type Trend []TrendPoint

// TrendPoint is how a bucket stood in a slot.
type TrendPoint struct {
	Known bool    // this replica heard of the bucket in that time
	Fill  float64 // tokens as a part of the capacity, at the slot's last answer
	Taken float64 // tokens taken per second, as far as this replica won the refills
}

// trend holds the points in a ring: that of slot n, counted from 1970, is at n modulo its size.
type trend struct {
	points [TrendSlots]struct {
		slot        int64
		fill, taken float32 // taken: tokens
	}
}

// add takes in that a bucket stood at fill, and that so many tokens had been taken since the refill before.
func (t *trend) add(at time.Time, fill float64, taken int64) {
	slot := at.UnixNano() / int64(TrendSlot)
	p := &t.points[slot%TrendSlots]
	if p.slot != slot {
		p.slot, p.taken = slot, 0
	}
	p.fill = float32(fill)
	p.taken += float32(taken)
}

// until is the trend up to an instant.
func (t *trend) until(now time.Time) Trend {
	last := now.UnixNano() / int64(TrendSlot)
	out := make(Trend, TrendSlots)
	for i := range out {
		slot := last - int64(TrendSlots-1-i)
		if p := &t.points[slot%TrendSlots]; p.slot == slot {
			out[i] = TrendPoint{Known: true, Fill: float64(p.fill), Taken: float64(p.taken) / TrendSlot.Seconds()}
		}
	}
	return out
}

// Trend is how a bucket stood in the last quarter of an hour; nil if that isn't known of it.
func (t *Tally) Trend(key string, now time.Time) Trend {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buckets[key]
	if b == nil || b.trend == nil || b.Seen.IsZero() {
		return nil
	}
	return b.trend.until(now)
}

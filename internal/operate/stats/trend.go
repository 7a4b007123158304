package stats

import "time"

// maxTrends is the largest number of buckets with a trend. They are the first ones in the configuration, and need some
// 12 MB.
const maxTrends = 4096

// Trend is the recent history of a bucket, slot by slot, the oldest first.
type Trend []TrendPoint

// TrendPoint is the state of a bucket in a slot.
type TrendPoint struct {
	Known bool    // this replica got a reply about the bucket in that time
	Fill  float64 // tokens as a part of the capacity, at the slot's last reply
	Taken float64 // tokens taken per second, according to the refills that this replica won
}

// add records the fill of a bucket, and the number of tokens taken since the previous refill.
func (p *TrendPoint) add(fill float64, taken int64) {
	p.Known, p.Fill = true, fill
	p.Taken += float64(taken) / TrendSlot.Seconds()
}

// Trend returns the history of a bucket in the last quarter of an hour. It returns nil if the history isn't known.
func (t *Stats) Trend(key string, now time.Time) Trend {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buckets[key]
	if b == nil || b.trend == nil || b.Seen.IsZero() {
		return nil
	}
	return b.trend.until(now)
}

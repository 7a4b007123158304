package stats

import (
	"maps"
	"sync"
	"time"
)

const (
	// MaxShares is the largest number of shares with a trend. They need some 1 MB.
	MaxShares = 256
	// Minutes is the length of the history of a share that Hour returns.
	Minutes = 60
)

// SharePoint is the state of a region's share of a pool in a slot, in parts of the pool's rate.
type SharePoint struct {
	Known               bool
	Floor, Lent, Demand float64 // Lent is the part of the share beyond the floor
}

// Shares keeps the recent history of shares of pools. The zero value is ready. The methods are safe for concurrent use.
type Shares struct {
	mu    sync.Mutex
	pools map[string]*shareTrend
}

// shareTrend is the recent history of a share.
type shareTrend struct {
	slots   *ring[SharePoint]
	minutes *ring[average]
	last    time.Time // when the share was last known
}

// average has the sum of several readings of a share, as parts of the pool's rate, and their number.
type average struct {
	sum      float64
	readings int
}

// Add records the states of the shares of all pools. It removes the history of a pool that was not among them for an
// hour. So a shorter outage of Redis or etcd, during which no share is known, removes nothing.
func (s *Shares) Add(at time.Time, shares map[string]SharePoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pools == nil {
		s.pools = map[string]*shareTrend{}
	}
	maps.DeleteFunc(s.pools, func(_ string, t *shareTrend) bool { return at.Sub(t.last) > Minutes*time.Minute })
	for pool, point := range shares {
		if s.pools[pool] == nil && len(s.pools) == MaxShares {
			continue
		}
		if s.pools[pool] == nil {
			s.pools[pool] = &shareTrend{slots: newRing[SharePoint](TrendSlot, TrendSlots),
				minutes: newRing[average](time.Minute, Minutes)}
		}
		s.pools[pool].last = at
		point.Known = true
		*s.pools[pool].slots.at(at) = point
		minute := s.pools[pool].minutes.at(at)
		minute.sum += point.Floor + point.Lent
		minute.readings++
	}
}

// Trend returns the history of the share of a pool in the last quarter of an hour, the oldest slot first. It returns
// nil if no history is known.
func (s *Shares) Trend(pool string, now time.Time) []SharePoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pools[pool] == nil {
		return nil
	}
	return s.pools[pool].slots.until(now)
}

// Hour returns the average of a pool's share in each minute of the last hour, in parts of the pool's rate, the oldest
// first. A minute in which the share isn't known is nil. The last minute is not over yet.
func (s *Shares) Hour(pool string, now time.Time) []*float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*float64, Minutes)
	if s.pools[pool] == nil {
		return out
	}
	for i, m := range s.pools[pool].minutes.until(now) {
		if m.readings > 0 {
			part := m.sum / float64(m.readings)
			out[i] = &part
		}
	}
	return out
}

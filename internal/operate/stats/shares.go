package stats

import (
	"maps"
	"sync"
	"time"
)

const (
	// MaxShares is how many shares have a trend: some 1 MB.
	MaxShares = 256
	// Minutes is how far back Hour tells of a share.
	Minutes = 60
)

// SharePoint is how a region's share of a pool stood in a slot, in parts of the pool's rate.
type SharePoint struct {
	Known               bool
	Floor, Lent, Demand float64 // Lent is what the share has beyond the floor
}

// Shares keep how shares of pools stood of late. The zero value is ready; its methods are safe for concurrent use.
type Shares struct {
	mu    sync.Mutex
	pools map[string]*shareTrend
}

// shareTrend is how a share stood of late.
type shareTrend struct {
	slots   *ring[SharePoint]
	minutes *ring[average]
}

// average is of the parts of the rate that the share was, as often as it was looked at.
type average struct {
	sum   float64
	looks int
}

// Add takes in how the shares of all pools stand; what is known of a pool that isn't among them is forgotten.
func (s *Shares) Add(at time.Time, shares map[string]SharePoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pools == nil {
		s.pools = map[string]*shareTrend{}
	}
	maps.DeleteFunc(s.pools, func(pool string, _ *shareTrend) bool {
		_, stays := shares[pool]
		return !stays
	})
	for pool, point := range shares {
		if s.pools[pool] == nil && len(s.pools) == MaxShares {
			continue
		}
		if s.pools[pool] == nil {
			s.pools[pool] = &shareTrend{newRing[SharePoint](TrendSlot, TrendSlots), newRing[average](time.Minute, Minutes)}
		}
		point.Known = true
		*s.pools[pool].slots.at(at) = point
		minute := s.pools[pool].minutes.at(at)
		minute.sum += point.Floor + point.Lent
		minute.looks++
	}
}

// Trend is how the share of a pool stood in the last quarter of an hour, the oldest slot first; nil if none is known.
func (s *Shares) Trend(pool string, now time.Time) []SharePoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pools[pool] == nil {
		return nil
	}
	return s.pools[pool].slots.until(now)
}

// Hour is what a pool's share was on average in each minute of the last hour, in parts of the pool's rate, the oldest
// first; nil for a minute in which it isn't known. The last minute is the one under way.
func (s *Shares) Hour(pool string, now time.Time) []*float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*float64, Minutes)
	if s.pools[pool] == nil {
		return out
	}
	for i, m := range s.pools[pool].minutes.until(now) {
		if m.looks > 0 {
			part := m.sum / float64(m.looks)
			out[i] = &part
		}
	}
	return out
}

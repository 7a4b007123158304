package stats

import (
	"cmp"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

const (
	// activeWindow is the time over which the activity of templates' buckets is added up; the window before it counts too.
	activeWindow = 30 * time.Second
	// maxActive is how many buckets a window counts.
	maxActive = 512
	// sampled is how many calls about buckets that a full window doesn't count come for each that makes room.
	sampled = 64
)

// Active is how many tokens a bucket of a template was refilled with of late, which is what was taken from it.
type Active struct {
	Key  string
	Rate float64 // tokens per second
}

// activity finds the buckets that are refilled most, among any number of them: it counts those that there is room for,
// and makes room by lowering all counts by the least one (after Misra and Gries), so that the busiest buckets stay.
type activity struct {
	mu          sync.Mutex
	start       time.Time
	now, before map[string]int64
}

func (a *activity) add(key string, tokens int64, at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.turn(at)
	if _, counted := a.now[key]; counted || len(a.now) < maxActive {
		a.now[key] += tokens
		return
	}
	if rand.N(sampled) != 0 {
		return
	}
	least := slices.Min(slices.Collect(maps.Values(a.now)))
	for other := range a.now {
		a.now[other] -= least
		if a.now[other] == 0 {
			delete(a.now, other)
		}
	}
}

// turn begins a window if the present one is over.
func (a *activity) turn(at time.Time) {
	switch since := at.Sub(a.start); {
	case since < activeWindow:
		return
	case since < 2*activeWindow:
		a.before = a.now
	default:
		a.before = nil
	}
	a.start, a.now = at, map[string]int64{}
}

// Active records a refill of a template's bucket.
func (t *Stats) Active(key string, tokens int64, at time.Time) {
	if tokens > 0 {
		t.active.add(key, tokens, at)
	}
}

// MostActive are up to n buckets that were refilled most of late, among those that match.
func (t *Stats) MostActive(n int, now time.Time, match func(key string) bool) []Active {
	a := &t.active
	a.mu.Lock()
	defer a.mu.Unlock()
	a.turn(now)
	over := max(now.Sub(a.start), time.Second)
	tokens := map[string]int64{}
	if a.before != nil {
		over += activeWindow
	}
	for _, window := range []map[string]int64{a.before, a.now} {
		for key, n := range window {
			tokens[key] += n
		}
	}
	var list []Active
	for key, n := range tokens {
		if match(key) {
			list = append(list, Active{Key: key, Rate: float64(n) / over.Seconds()})
		}
	}
	slices.SortFunc(list, func(a, b Active) int {
		return cmp.Or(cmp.Compare(b.Rate, a.Rate), cmp.Compare(a.Key, b.Key))
	})
	return list[:min(n, len(list))]
}

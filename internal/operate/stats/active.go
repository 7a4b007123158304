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
	// activeWindow is the length of a window in which the activity of templates' buckets is added up. The window before
	// the present one counts as well.
	activeWindow = 30 * time.Second
	// maxActive is the largest number of buckets that a window counts.
	maxActive = 512
	// sampled is a number of calls. Among so many calls about buckets that a full window doesn't count, one call lowers
	// the counts of the window to make room.
	sampled = 64
)

// Active is a bucket of a template with the rate at which it was refilled recently. Its tokens were taken at the same
// rate.
type Active struct {
	Key  string
	Rate float64 // tokens per second
}

// activity finds the buckets with the most refills among any number of buckets. It counts as many buckets as there is
// room for. To make room, it lowers all counts by the smallest one (after Misra and Gries). So the busiest buckets
// stay.
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

// turn begins a new window if the present one is over.
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

// MostActive returns up to n of the matching buckets. They are those that were refilled with the most tokens recently.
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

package dev

import (
	"slices"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

const (
	// lookEvery is the pause between two looks at a bucket: less than lies between two refills, half an interval at the
	// least, so that none is missed.
	lookEvery = 15 * time.Millisecond
	// keptRefills is how many refills of a bucket are remembered.
	keptRefills = 300
	// settledAfter is how many refills after an event its gap is known. It is in one of the first two; the third is for
	// a last refill of the killed replica that the store hadn't handled yet.
	settledAfter = 3
)

// refilled is one refill as the store tells it.
type refilled struct {
	version policy.Version
	at      int64 // µs on the store's clock
}

// refills remembers the refills of one bucket. It is safe for concurrent use.
type refills struct {
	mu      sync.Mutex
	seen    []refilled
	longest time.Duration
}

// observe takes in a look at the bucket.
func (r *refills) observe(now refilled) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := len(r.seen); n > 0 {
		if r.seen[n-1].version == now.version {
			return
		}
		if d, ok := between(r.seen[n-1], now); ok {
			r.longest = max(r.longest, d)
		}
	}
	if r.seen = append(r.seen, now); len(r.seen) > keptRefills {
		r.seen = slices.Delete(r.seen, 0, len(r.seen)-keptRefills)
	}
}

// longestGap is the longest time between two refills so far.
func (r *refills) longestGap() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.longest
}

// around is gapAround of what was seen.
func (r *refills) around(at int64) (gap time.Duration, known, settled bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return gapAround(r.seen, at)
}

// gapAround is the longest time between two refills from the one before the instant at, in µs on the store's clock, to
// the third after it. It is settled once that has come, and known if every refill in between was seen.
func gapAround(seen []refilled, at int64) (gap time.Duration, known, settled bool) {
	first := slices.IndexFunc(seen, func(r refilled) bool { return r.at > at })
	if first < 0 || len(seen) < first+settledAfter {
		return 0, false, false
	}
	for i := first; i < first+settledAfter; i++ {
		if i == 0 {
			return 0, false, true
		}
		d, ok := between(seen[i-1], seen[i])
		if !ok {
			return 0, false, true
		}
		gap = max(gap, d)
	}
	return gap, true, true
}

// between is the time between two refills that followed each other; not ok if they didn't.
func between(a, b refilled) (d time.Duration, ok bool) {
	if a.version.Era != b.version.Era || a.version.Index+1 != b.version.Index {
		return 0, false
	}
	return time.Duration(b.at-a.at) * time.Microsecond, true
}

// gaps are the gaps of failovers. It is safe for concurrent use.
type gaps struct {
	mu     sync.Mutex
	sorted []time.Duration
}

func (g *gaps) add(d time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	i, _ := slices.BinarySearch(g.sorted, d)
	g.sorted = slices.Insert(g.sorted, i, d)
}

// summary is the median (of an even number the higher one), the longest and the number of gaps.
func (g *gaps) summary() (p50, longest time.Duration, n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if n = len(g.sorted); n == 0 {
		return 0, 0, 0
	}
	return g.sorted[n/2], g.sorted[n-1], n
}

package dev

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

const (
	// gapPoll is the pause between two readings of a bucket. The time between two refills is at least half an interval.
	// That is longer, so no refill is missed.
	gapPoll = 15 * time.Millisecond
	// keptRefills is the number of refills of a bucket that are remembered.
	keptRefills = 300
	// settledAfter is the number of refills after an event that must have come before its gap is known. The gap ends with
	// the first or the second refill. The third is needed if the killed replica had already sent the first one.
	settledAfter = 3
)

// refilled is one refill, with the time in the store.
type refilled struct {
	version policy.Version
	at      int64         // µs on the store's clock
	gap     time.Duration // since the previous one; 0 if that was missed
}

// refills remembers the refills of one bucket. It is safe for concurrent use.
type refills struct {
	key     string
	mu      sync.Mutex
	seen    []refilled
	longest time.Duration
}

// observe applies a reading of the bucket.
func (r *refills) observe(version policy.Version, at int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := refilled{version: version, at: at}
	if n := len(r.seen); n > 0 {
		last := r.seen[n-1]
		if last.version == version {
			return
		}
		if last.version.Era == version.Era && last.version.Index+1 == version.Index {
			now.gap = time.Duration(at-last.at) * time.Microsecond
			r.longest = max(r.longest, now.gap)
		}
	}
	r.seen = append(r.seen, now)
	if len(r.seen) > keptRefills {
		r.seen = slices.Delete(r.seen, 0, len(r.seen)-keptRefills)
	}
}

// longestGap returns the longest time between two refills so far.
func (r *refills) longestGap() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.longest
}

// around returns the longest time between two refills near the instant at, in µs on the store's clock. It compares the
// refills from the last one before that instant to the third one after it. settled reports whether the third one has
// come. The gap is 0 if a reading missed one of these refills.
func (r *refills) around(at int64) (gap time.Duration, settled bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	first := slices.IndexFunc(r.seen, func(s refilled) bool { return s.at > at })
	if first < 0 || len(r.seen) < first+settledAfter {
		return 0, false
	}
	for _, s := range r.seen[first : first+settledAfter] {
		if s.gap == 0 {
			return 0, true
		}
		gap = max(gap, s.gap)
	}
	return gap, true
}

// gaps collects the gap that followed each kill of a replica that refilled. It is safe for concurrent use.
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

// String returns the median of the gaps, the longest gap and the number of kills. If two gaps are in the middle, the
// median is the longer one. String returns "" if there are no gaps.
func (g *gaps) String() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := len(g.sorted)
	if n == 0 {
		return ""
	}
	noun := "kills"
	if n == 1 {
		noun = "kill"
	}
	return fmt.Sprintf("p50 %s, max %s over %d %s", millis(g.sorted[n/2]), millis(g.sorted[n-1]), n, noun)
}

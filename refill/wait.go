package refill

import (
	"math/rand/v2"
	"time"

	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/policy"
)

// jitter delays the replicas that don't hold the index, so that they call after the
// one that does, and not all at once.
func jitter(interval time.Duration, rng *rand.Rand) time.Duration {
	return timing.Between(rng.Float64, interval/20, interval/20+interval/10)
}

// nextCall returns how long after a reply the next call for its bucket comes. This is
// the waiting rule.
func nextCall(o policy.Outcome, interval time.Duration, rng *rand.Rand) time.Duration {
	sinceLast := time.Duration(o.Now-o.Last) * time.Microsecond
	wait := interval - sinceLast
	if !o.Status.Wrote() {
		wait += jitter(interval, rng)
	}
	// A clock that stepped back leaves last in the future; the script ends that
	// within one call.
	return min(max(wait, interval/2), 2*interval)
}

// Bounds of the delay after a failure.
const (
	minBackoff = 20 * time.Millisecond
	maxBackoff = time.Second
	// maxBucketBackoff is for a bucket that fails by itself: nothing but an
	// operator mends it.
	maxBucketBackoff = 5 * time.Second
)

// backoff returns the delay after n failures in a row, n ≥ 1: doubling from
// minBackoff to most, of which the upper half is random.
func backoff(n int, most time.Duration, rng *rand.Rand) time.Duration {
	d := timing.Doubled(minBackoff, n-1, most)
	return timing.Between(rng.Float64, d/2, d)
}

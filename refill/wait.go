package refill

import (
	"math/rand/v2"
	"time"

	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/policy"
)

// jitter returns a delay for replicas that did not win the last refill. With it they call after the winner, and not all
// at once.
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
	// If the server's clock stepped back, the last refill is in the future. The script corrects that with the next call.
	return min(max(wait, interval/2), 2*interval)
}

// Bounds of the delay after a failure.
const (
	minBackoff = 20 * time.Millisecond
	// maxBackoff is for a server. It is short, because after an outage a replica that remembers a bucket has to call
	// before another replica creates the bucket (createAfter).
	maxBackoff = 100 * time.Millisecond
	// maxBucketBackoff is for a bucket that fails because of itself. Only an operator can repair it.
	maxBucketBackoff = 5 * time.Second
)

// createAfter returns how long a bucket is missing before a replica that doesn't remember it creates it. In that time,
// a replica that remembers the bucket restores it.
func createAfter(interval time.Duration) time.Duration { return 2 * max(interval, maxBackoff) }

// backoff returns the delay after n failures in a row, n ≥ 1. It doubles with each failure, from minBackoff up to most.
// Half of it is random.
func backoff(n int, most time.Duration, rng *rand.Rand) time.Duration {
	d := timing.Doubled(minBackoff, n-1, most)
	return timing.Between(rng.Float64, d/2, d)
}

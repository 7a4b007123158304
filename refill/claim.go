package refill

import (
	"math/rand/v2"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// A claim is a bucket without consumers, one for each master. The replica that refilled it last refills the active sets
// on that master. The other replicas only read the time of that refill. When the holder has stopped, they race for the
// claim as for any bucket. A replica with a later version of the configuration has the templates that are in force.
// Because its fence is newer, it takes the claim from a replica with an older version.
//
// A replica that takes a claim over makes five calls before it refills a bucket. So a claim has to stay with its
// holder, even if a call takes longer than an interval.
//
// If two replicas refill the active sets at once, some calls are wasted. No bucket is refilled twice, because each has
// an index.

const (
	// outdatedWaits is the number of intervals that a replica with an older configuration waits after the claim's last
	// refill, even if it made that refill itself. This gives a replica with a later configuration time to take the claim.
	outdatedWaits = 3
	// abandonedAfter is the time, in quarters of an interval, after which a claim that was not refilled counts as
	// abandoned. The time of two calls is added, because the holder calls an interval after it has received a reply.
	abandonedAfter = 5
)

// newClaim makes a claim that is refilled every interval.
func newClaim(key string, interval time.Duration, version int64) *bucket {
	b := newSignal(key, interval, version)
	b.claim = true
	return b
}

// abandoned returns how long after its last refill a claim counts as abandoned.
func (b *bucket) abandoned() time.Duration { return b.interval*abandonedAfter/4 + 2*b.took }

// applyClaim records whether this replica has the claim, and returns the time until the next call. took is the duration
// of the call. If the holder has abandoned the claim, this replica reads the active sets at once, and takes the claim
// with its next call. It reads them before it has the claim, because it first has to call once for each bucket.
func (b *bucket) applyClaim(o policy.Outcome, took time.Duration, rng *rand.Rand) time.Duration {
	b.took = max(took, b.took-b.took/8)
	since := time.Duration(o.Now-o.Last) * time.Microsecond
	if !o.Status.Wrote() && o.Status != policy.StatusEarly {
		b.held = since >= b.abandoned()
		if b.held {
			return jitter(b.interval, rng)
		}
	}
	b.held = b.held || o.Status.Wrote()
	wait := b.interval - since
	if !b.held {
		wait = b.abandoned() - since + jitter(b.interval, rng)
	}
	if b.terms.Fence.Epoch < o.FileVersion {
		wait = max(wait, outdatedWaits*b.interval-since)
	}
	return max(wait, b.interval/2)
}

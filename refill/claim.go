package refill

import (
	"math/rand/v2"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// A claim is a bucket without consumers, one for each master. The replica that refilled it last refills the active sets
// on that master. Replicas race for a claim as for any bucket: its holder keeps it, and the others' calls write
// nothing. When the holder stops, another replica takes the claim over. A replica with a later version of the
// configuration takes the claim from one with an older version, by its fence, because it has the templates that are in
// force.
//
// If two replicas refill the active sets at once, they only do work twice: each bucket has an index.

const (
	// outdatedWaits is how many intervals after the claim's last refill a replica with an older configuration calls
	// again, even if that refill was its own. This gives a replica with a later configuration time to take the claim.
	outdatedWaits = 3
	// abandonedAfter is how long after its last refill a claim is abandoned, in quarters of an interval.
	abandonedAfter = 5
)

// newClaim makes a claim that is refilled every interval.
func newClaim(key string, interval time.Duration, version int64) *bucket {
	b := newSignal(key, interval, version)
	b.claim = true
	return b
}

// applyClaim records whether this replica has the claim, and returns the time until the next call. Other replicas give
// the holder a fifth of an interval and more, because it may be busy. After each change of the holder, the new one has
// to call once for each bucket.
func (b *bucket) applyClaim(o policy.Outcome, rng *rand.Rand) time.Duration {
	since := time.Duration(o.Now-o.Last) * time.Microsecond
	switch {
	case o.Status.Wrote():
		b.held = true
	case o.Status != policy.StatusEarly: // it is ours, or its holder has left it: this replica has to read the sets
		b.held = since*4 >= b.interval*abandonedAfter
	}
	wait := b.interval - since
	switch {
	case b.terms.Fence.Epoch < o.FileVersion:
		wait += (outdatedWaits - 1) * b.interval
	case !o.Status.Wrote():
		wait += b.interval*3/20 + jitter(b.interval, rng)
	}
	return min(max(wait, b.interval/2), outdatedWaits*b.interval)
}

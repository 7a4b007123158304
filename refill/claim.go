package refill

import (
	"math/rand/v2"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// A claim is a bucket of which nobody needs the tokens: one for each master. Whoever refilled it last refills the
// active sets on that master. So the race for it is that of any bucket: its holder holds on to it, the others' calls
// write nothing, and one of them takes it over when the holder is gone. A later version of the configuration takes it
// from an older one, by its fence, since it knows the templates that are in force.
//
// Two who refill the active sets at once cost work and nothing else: the buckets have indexes of their own.

const (
	// outdatedWaits is how many intervals a replica with an older configuration lets pass since the claim's last
	// refill, even its own: one with a later configuration comes before it.
	outdatedWaits = 3
	// abandonedAfter is in quarters of an interval: a claim that wasn't refilled for as long is abandoned.
	abandonedAfter = 5
)

// newClaim makes a claim that is refilled every interval.
func newClaim(key string, interval time.Duration, version int64) *bucket {
	b := newSignal(key, interval, version)
	b.claim = true
	return b
}

// learnClaim takes in whether this replica has the claim, and returns how long until the next call. The others leave
// its holder a fifth of an interval and more: it may be busy, and a claim that changes hands costs a call for each
// bucket.
func (b *bucket) learnClaim(o policy.Outcome, rng *rand.Rand) time.Duration {
	since := time.Duration(o.Now-o.Last) * time.Microsecond
	switch {
	case o.Status.Wrote():
		b.held = true
	case o.Status != policy.StatusEarly: // it is ours, or its holder has left it: time to learn what is in the sets
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

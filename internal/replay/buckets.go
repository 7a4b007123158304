package replay

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/tokenrefill/refiller/policy"
)

// ErrPolicy is returned for a capacity or rate that is out of range.
var ErrPolicy = errors.New("replay: bad policy")

// maxUnits bounds a bucket's credit, in units of 1/per token. With this bound an int64 has room for a full bucket and
// one more refill.
const maxUnits = 1 << 61

// minSweep is the smallest number of buckets at which a search for full buckets is worth its cost.
const minSweep = 4096

// Buckets is a set of buckets in memory, one for each key. All have the same policy. Buckets stores only those that
// aren't full. It belongs to one goroutine.
type Buckets struct {
	terms policy.Terms
	held  map[string]*policy.Bucket // none of them was full at its last refill
	start int64                     // the time of the first take, Unix µs
	clock int64                     // µs from start to the highest time seen, plus 1; 0 before the first take
	sweep int                       // the number of buckets at which the next sweep starts
	least int                       // lower bound of sweep
}

// NewBuckets returns buckets that start full. The capacity is 1 to
// [policy.MaxTokens].
func NewBuckets(capacity int64, rate policy.Rate) (*Buckets, error) {
	if capacity < 1 || capacity > policy.MaxTokens {
		return nil, fmt.Errorf("%w: capacity %d: want a whole number from 1 to %d", ErrPolicy, capacity,
			int64(policy.MaxTokens))
	}
	if err := rate.Validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPolicy, err)
	}
	terms := policy.Policy{Capacity: capacity, Rate: rate}.Terms(policy.Fence{})
	high, units := bits.Mul64(uint64(capacity), uint64(terms.Per))
	if high > 0 || units >= maxUnits {
		return nil, fmt.Errorf(
			"%w: capacity %d at rate %s: capacity times %d must be below 2^61: lower the capacity, or use a coarser rate",
			ErrPolicy, capacity, rate, terms.Per)
	}
	// Every take refills first, even if it comes soon after the take before. One refill credits a gap of any length, but
	// never more tokens than fill an empty bucket.
	terms.Interval = 1
	terms.MaxElapsed = (int64(units) + terms.Tokens - 1) / terms.Tokens
	return &Buckets{terms: terms, held: map[string]*policy.Bucket{}, sweep: minSweep, least: minSweep}, nil
}

// Take takes one token from the key's bucket at time at, in Unix µs. A time before the highest one so far counts as the
// highest one.
func (b *Buckets) Take(key []byte, at int64) policy.Taking {
	// The policy expects a server's clock, which is after 1970. A log may have any time, so times count from the first
	// take.
	if b.clock == 0 {
		b.start = at
	}
	b.clock = max(b.clock, at-b.start+1)
	bucket, held := b.held[string(key)]
	if held && b.refill(bucket) {
		// A full bucket is the same as a new one: credit beyond the capacity is lost, including fractions of a token.
		delete(b.held, string(key))
		held = false
	}
	if !held {
		bucket = b.create()
		b.held[string(key)] = bucket
	}
	taking := bucket.Take(1, b.clock)
	if len(b.held) >= b.sweep {
		b.dropFull()
	}
	return taking
}

// create returns a full bucket.
func (b *Buckets) create() *policy.Bucket {
	bucket := &policy.Bucket{}
	bucket.Refill(policy.Call{Create: policy.CreateInitial, Terms: &b.terms}, b.clock)
	return bucket
}

// refill credits the due tokens and reports whether the bucket is full.
func (b *Buckets) refill(bucket *policy.Bucket) (full bool) {
	version := policy.Version{Era: bucket.Control.Era, Index: *bucket.Index}
	return bucket.Refill(policy.Call{Version: version}, b.clock).Tokens == b.terms.Capacity
}

// dropFull removes the buckets that are full now. The next sweep starts when there are twice as many buckets as remain.
// So the average cost of a take is constant.
func (b *Buckets) dropFull() {
	for key, bucket := range b.held {
		if b.refill(bucket) {
			delete(b.held, key)
		}
	}
	b.sweep = max(b.least, 2*len(b.held))
}

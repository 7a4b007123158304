package fetch

import (
	"math"
	"time"
)

// Never is the RetryAfter of tokens that no known refill will bring, and the ResetAfter of a bucket that none will
// fill. It is longer than any deadline, so that it compares as it should.
const Never time.Duration = math.MaxInt64

// Result is the answer of a bucket.
type Result struct {
	// OK reports whether tokens were taken; for Peek, whether there is one. A bucket whose policy is in shadow mode
	// denies nothing: see Shadow.
	OK bool
	// Taken is the number of tokens taken: all or none, for TakeUpTo any number up to what was asked for.
	Taken int64
	// Remaining is the number of tokens left in the bucket; with SourceLeased those that it had at the block's last
	// call, and those left in the block.
	Remaining int64
	// Outstanding is, of a Peek, the number of tokens that are taken from the bucket and held in reservations and in
	// the blocks of consumers (WithLease).
	Outstanding int64
	// Limit is the bucket's capacity, at most ten seconds old; 0 if the bucket has no policy, as one that only foreign
	// clients refill.
	Limit int64
	// RetryAfter is the time until the tokens asked for (TakeUpTo, Peek: one token), and those to be left (WithLeave),
	// are there if no other caller takes any, right to within one refill interval; half an interval if their refill is
	// overdue; Never if they are not due; 0 if OK.
	RetryAfter time.Duration
	// ResetAfter is the time until the bucket is full if no caller takes any, right to within one refill interval; 0 if it
	// is full; Never if it is not known to fill; with SourceLeased as it was at the block's last call.
	ResetAfter time.Duration
	// MoreAfter is, of a call that is OK, the time until there are more tokens than Remaining if no caller takes any,
	// right to within one refill interval; 0 if the bucket is full; Never if no refill is known to come; with SourceLeased
	// as it was at the block's last call. It is 0 of a denial, which has RetryAfter.
	MoreAfter time.Duration
	// OnFloor reports that the bucket is a pool's and its region has no grant in force, but the floor that is reserved
	// for it: it is cut off from the other regions, or new, or fenced. At most a second old.
	OnFloor bool
	// Source is what answered.
	Source Source
	// Shadow reports that a bucket in shadow mode would have denied the call, which is admitted: OK and Taken are as if
	// there were tokens. What the bucket lacked was not taken from it.
	Shadow bool
	// Era names the bucket's history from which the tokens were taken, or a limiter's window: Undo gives them back to
	// no other. 0 if it is not known; then Undo gives them back to any.
	Era int64

	// of Taken, what Undo must not give back: a bucket in shadow mode did not have it, or it is of another era
	lacked int64
	// what a flow paid for the tokens with its right, which Undo gives back; nil for nothing
	paid *payment
}

// with returns the result of a take that found some of its tokens in a block, and the others, if any, as in r.
func (r Result) with(leased Result) Result {
	switch {
	case !leased.OK:
		return r
	case !r.OK:
		return leased
	case leased.Era != r.Era || r.Source.Kind == SourceFallback:
		r.lacked += leased.Taken
	}
	r.Taken += leased.Taken
	return r
}

// Source is what answered a call. The zero Source is the shared bucket.
type Source struct {
	Kind SourceKind
	// Reason is why the bucket did not answer, with SourceFallback; ReasonNone otherwise.
	Reason Reason
}

// String names the source as logs do.
func (s Source) String() string {
	if s.Reason != ReasonNone {
		return s.Kind.String() + ": " + s.Reason.String()
	}
	return s.Kind.String()
}

// SourceKind is a way to answer a call.
type SourceKind uint8

// Ways to answer a call.
const (
	SourceShared   SourceKind = iota // the bucket in Redis
	SourceLeased                     // tokens of the bucket that this Client holds in memory: see WithLease
	SourceCached                     // a denial that is remembered
	SourceRescued                    // the bucket in Redis, after this Client has made a refill that was overdue
	SourceFallback                   // the policy's degraded mode
)

// String names the kind.
func (k SourceKind) String() string {
	names := [...]string{"shared", "leased", "cached", "rescued", "fallback"}
	if int(k) >= len(names) {
		return "invalid"
	}
	return names[k]
}

// shadow admits a call of n tokens that a bucket in shadow mode did not grant in full.
func (c *Client) shadow(r Result, k *info, n int64) Result {
	if !k.shadowed() || r.OK && r.Taken == n {
		return r
	}
	return c.admit(r, n)
}

// admit makes it as if a call of n tokens had been granted.
func (c *Client) admit(r Result, n int64) Result {
	c.stats.shadowed.Add(1)
	r.OK = true
	r.Shadow = true
	r.lacked = n - r.Taken
	r.Taken = n
	r.RetryAfter = 0
	return r
}

package fetch

import (
	"math"
	"time"
)

// Never is the RetryAfter if no known refill will bring the tokens. It is the ResetAfter if no known refill will fill
// the bucket. It is longer than any other duration, so comparisons need no special case for it.
const Never time.Duration = math.MaxInt64

// Result is the result of a call about one bucket.
type Result struct {
	// OK reports whether the tokens were taken. For Peek it reports whether the bucket has a token. A bucket whose policy
	// is in shadow mode denies nothing: see Shadow.
	OK bool
	// Taken is the number of tokens that were taken: all or none. For TakeUpTo it is any number up to n.
	Taken int64
	// Remaining is the number of tokens left in the bucket. With SourceLeased it is the number that the bucket had at the
	// block's last call, plus the number left in the block.
	Remaining int64
	// Outstanding is the number of the bucket's tokens that reservations and the blocks of consumers (WithLease) hold.
	// Only Peek sets it.
	Outstanding int64
	// Limit is the bucket's capacity, as it was at most ten seconds ago. After the bucket has lost its policy, the last
	// one that it had counts for another ten seconds. Limit is 0 if the bucket has no policy, for example because only
	// foreign clients refill it.
	Limit int64
	// RetryAfter is the time until a denied call can succeed, if no other caller takes tokens meanwhile. At the
	// end of that time the bucket has the tokens that the call wants (one token for TakeUpTo and Peek) and those that it
	// leaves (WithLeave). RetryAfter is exact to within one refill interval. It is half an interval if the refill is
	// overdue, Never if no known refill will bring the tokens, and 0 if OK.
	RetryAfter time.Duration
	// ResetAfter is the time until the bucket is full, if no caller takes tokens meanwhile. It is exact to within one
	// refill interval. It is 0 if the bucket is full, and Never if no known refill will fill it. With SourceLeased it is
	// the time as of the block's last call.
	ResetAfter time.Duration
	// MoreAfter is the time until the bucket has more tokens than Remaining, if no caller takes tokens meanwhile. It is
	// exact to within one refill interval. It is 0 if the bucket is full, and Never if no refill is known to come. With
	// SourceLeased it is the time as of the block's last call. It is 0 for a denial, which has RetryAfter instead.
	MoreAfter time.Duration
	// OnFloor reports that the bucket is a pool's, and that its region has no grant in force but only its floor. This
	// happens while the region is cut off from the other regions, or new, or fenced. OnFloor is at most a second old.
	OnFloor bool
	// Source is the origin of the result.
	Source Source
	// Shadow reports that a bucket in shadow mode had too few tokens and admitted the call nevertheless. OK and Taken are
	// as if it had enough. The tokens that it lacked were not taken from it.
	Shadow bool
	// Era is the era of the bucket, or the window of a limiter, from which the tokens were taken. Undo gives them back
	// only to that era. Most takes from a bucket don't read the era. Their Era is that of the last reply that had the
	// bucket's policy, which is at most ten seconds old, or one second for a pool's bucket. So for that time after a new
	// era has begun, Era may be the earlier one, and Undo then drops the tokens. Era is never a later one than that of the
	// tokens.
	//
	// Era is 0 if the bucket has lost its policy, and for a bucket of a lazy template, which has no eras. Undo then gives
	// the tokens back to any era. To a bucket of a refilled template it gives none back.
	Era int64

	// lacked is the part of Taken that Undo must not give back. A bucket in shadow mode did not have it, or it is of
	// another era.
	lacked int64
	// paid is the right that a flow paid for the tokens; nil: none. Undo gives it back.
	paid *payment
	// loan has the tokens if a share gave them (policy.DegradedLocal); nil: none did. Undo gives them back to the share.
	loan *loan
}

// with returns the result of a take that got tokens from a block and from the bucket. leased is the result of the
// block, and r is that of the bucket.
func (r Result) with(leased Result) Result {
	switch {
	case !leased.OK:
		return r
	case !r.OK:
		return leased
	case leased.Era != r.Era || r.Source.Kind == SourceFallback:
		r.lacked += leased.Taken
	default:
		r.lacked += leased.lacked
	}
	r.Taken += leased.Taken
	return r
}

// Source is the origin of a Result. The zero Source is the bucket in Redis.
type Source struct {
	Kind SourceKind
	// Reason is the reason for which the bucket did not answer, if Kind is SourceFallback. Otherwise it is ReasonNone.
	Reason Reason
}

// String names the source as logs do.
func (s Source) String() string {
	if s.Reason != ReasonNone {
		return s.Kind.String() + ": " + s.Reason.String()
	}
	return s.Kind.String()
}

// SourceKind is a kind of origin of a Result.
type SourceKind uint8

// The origins of a Result.
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
	c.stats.shadowed.Add(1)
	return r.admit(n)
}

// admit returns r as if the call of n tokens had been granted.
func (r Result) admit(n int64) Result {
	r.OK = true
	r.Shadow = true
	r.lacked = n - r.Taken
	r.Taken = n
	r.RetryAfter = 0
	return r
}

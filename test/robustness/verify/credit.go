package verify

import (
	"math"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// bounds are the smallest and the largest possible value.
type bounds struct{ low, high int64 }

var anything = bounds{0, math.MaxInt64}

// checkCredit checks the credit of each write. It doesn't know the carry, but computes the bounds of the carry after
// each write.
func (h *bucketHistory) checkCredit(r *Result) {
	carry := anything
	for i, w := range h.writes {
		switch o := w.outcome; {
		case o == nil || i == 0:
			carry = anything
		case o.Status == policy.StatusApplied || o.Status == policy.StatusSwitched:
			carry = h.checkCredited(r, i, carry)
		default: // these statuses credit nothing, and all but one drop the carry
			if o.Added != 0 || o.Clamped != 0 {
				r.violate(Credit, h.bucket.Key, "%s at index %d credited %d", o.Status, o.Version.Index,
					o.Added+o.Clamped)
			}
			carry = bounds{}
			if o.Status == policy.StatusClock {
				carry = anything // StatusClock doesn't drop the carry
			}
		}
	}
}

// checkCredited checks the credit of write i. carry has the bounds of the carry before the write, and checkCredited
// returns the bounds after it.
func (h *bucketHistory) checkCredited(r *Result, i int, carry bounds) bounds {
	prev, o := h.writes[i-1], h.writes[i].outcome
	fence := o.Fence
	if prev.outcome != nil {
		fence = prev.outcome.Fence // the policy in force before a switch
	}
	t, ok := h.policies[fence]
	if !ok {
		r.violate(Order, h.bucket.Key, "index %d is under the fence %v that no config has", o.Version.Index, fence)
		return carry
	}
	if t.Kind == policy.Stepped {
		return anything // see checkSteps
	}
	follows, switched := h.follows(i), prev.outcome == nil || fence != o.Fence
	since := int64(0)
	if prev.outcome != nil {
		since = max(0, o.Now-prev.outcome.Last)
	}
	if follows && prev.outcome != nil && o.Elapsed != since {
		if o.Elapsed > since || !h.mayBeginAnew(i, t) {
			r.violate(Credit, h.bucket.Key, "index %d credited %dµs, though the refill before was %dµs ago",
				o.Version.Index, o.Elapsed, o.Now-prev.outcome.Last)
		}
		carry = bounds{}
	}
	carry.high = min(carry.high, t.Per-1)
	if !follows || switched {
		carry = bounds{0, t.Per - 1}
	}
	due, got := min(o.Elapsed, t.MaxElapsed)*t.Tokens, o.Added+o.Clamped
	want := bounds{(due + carry.low) / t.Per, (due + carry.high) / t.Per}
	if !switched && (got < want.low || got > want.high) {
		r.violate(Credit, h.bucket.Key, "index %d credited %d tokens for %dµs at %d per %dµs: want %d to %d",
			o.Version.Index, got, o.Elapsed, t.Tokens, t.Per, want.low, want.high)
	}
	room := t.Capacity
	if t.Strict {
		room -= o.Outstanding
	}
	room += min(0, o.Tokens-o.Added) // plain clients are about to undo takes that left less than 0 tokens
	if o.Tokens >= room || switched {
		return anything // a full bucket drops its carry, and a switch rescales it
	}
	return bounds{max(0, due+carry.low-got*t.Per), min(t.Per-1, due+carry.high-got*t.Per)}
}

// mayBeginAnew reports whether a take between write i-1 and write i may have begun the credit of a template's bucket
// anew. Such a take finds the bucket full, or finds that it isn't in the active set. The bucket may have been full
// after write i-1, or after the SDK returned tokens. A server that lost or forgot its keys may have lost the entry in
// the active set.
func (h *bucketHistory) mayBeginAnew(i int, t policy.Terms) bool {
	return h.bucket.Kind == record.Refilled && (!h.bucket.Linear || h.writes[i-1].outcome.Tokens >= t.Capacity ||
		h.effect(0, h.writes[i].to, record.Lose, record.Rollback))
}

// checkShare checks that the bucket of a pool is not credited more than the pool's rate. The bucket's terms change all
// the time, so the exact credit is unknown.
func (h *bucketHistory) checkShare(r *Result) {
	_, perSecond, _ := h.limits()
	const e = 2 // upper bound, in seconds, for the longest time that a refill credits; this depends on the share
	for _, w := range h.writes {
		if o := w.outcome; o != nil {
			if most := perSecond*min(float64(o.Elapsed)/1e6, e) + 1; float64(o.Added+o.Clamped) > most {
				r.violate(Credit, h.bucket.Key, "index %d credited %d tokens for %dµs, more than the whole pool's %.1f",
					o.Version.Index, o.Added+o.Clamped, o.Elapsed, most)
			}
		}
	}
}

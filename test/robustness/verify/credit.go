package verify

import (
	"math"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// bounds are what a value is at least and at most.
type bounds struct{ low, high int64 }

var anything = bounds{0, math.MaxInt64}

// checkCredit follows the carry, of which it knows the bounds, from write to write.
func (h *bucketHistory) checkCredit(r *Result) {
	carry := anything
	for i, w := range h.writes {
		switch o := w.outcome; {
		case o == nil || i == 0:
			carry = anything
		case o.Status == policy.StatusApplied || o.Status == policy.StatusSwitched:
			carry = h.checkCredited(r, i, carry)
		default: // these drop the carry, or credit nothing
			if o.Added != 0 || o.Clamped != 0 {
				r.violate(Credit, h.bucket.Key, "%s at index %d credited %d", o.Status, o.Version.Index,
					o.Added+o.Clamped)
			}
			carry = bounds{}
			if o.Status == policy.StatusClock {
				carry = anything // the carry before it stays
			}
		}
	}
}

// checkCredited checks what write i credited to a bucket with the carry, and returns the carry after it.
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
	room += min(0, o.Tokens-o.Added) // what is below 0, plain clients are about to undo
	if o.Tokens >= room || switched {
		return anything // a full bucket drops its carry, and a switch rescales it
	}
	return bounds{max(0, due+carry.low-got*t.Per), min(t.Per-1, due+carry.high-got*t.Per)}
}

// mayBeginAnew reports whether the credit of a template's bucket may have begun after the write before write i: by a
// take that left it less than full, or found it missing from the active set, whose entry a server that forgot may have
// lost. Tokens that come back through the SDK may have filled it before.
func (h *bucketHistory) mayBeginAnew(i int, t policy.Terms) bool {
	return h.bucket.Kind == record.Refilled && (!h.bucket.Linear || h.writes[i-1].outcome.Tokens >= t.Capacity ||
		h.effect(0, h.writes[i].to, record.Lose, record.Rollback))
}

// checkShare bounds what a pool's bucket was credited: its terms change all the time, but the region never gets more
// than the pool's rate.
func (h *bucketHistory) checkShare(r *Result) {
	_, perSecond, _ := h.limits()
	const e = 2 // a share may be small, and the longest credited stretch is that of the share
	for _, w := range h.writes {
		if o := w.outcome; o != nil {
			if most := perSecond*min(float64(o.Elapsed)/1e6, e) + 1; float64(o.Added+o.Clamped) > most {
				r.violate(Credit, h.bucket.Key, "index %d credited %d tokens for %dµs, more than the whole pool's %.1f",
					o.Version.Index, o.Added+o.Clamped, o.Elapsed, most)
			}
		}
	}
}

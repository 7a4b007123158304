package verify

import (
	"math"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// checkCredit follows the carry, of which it knows the bounds, from write to write.
func (h *bucketHistory) checkCredit(r *Result) {
	low, high := int64(0), int64(0)
	for i, w := range h.writes {
		o := w.outcome
		if o == nil || i == 0 {
			low, high = 0, math.MaxInt64
			continue
		}
		prev := h.writes[i-1]
		if o.Status != policy.StatusApplied && o.Status != policy.StatusSwitched {
			low, high = 0, 0 // these drop the carry, or credit nothing
			if o.Added != 0 || o.Clamped != 0 {
				r.violate(Credit, h.bucket.Key, "%s at index %d credited %d", o.Status, o.Version.Index,
					o.Added+o.Clamped)
			}
			if o.Status == policy.StatusClock {
				high = math.MaxInt64 // the carry before it stays
			}
			continue
		}
		fence := o.Fence
		if prev.outcome != nil {
			fence = prev.outcome.Fence // the policy in force before a switch
		}
		t, ok := h.policies[fence]
		if !ok {
			r.violate(Order, h.bucket.Key, "index %d is under the fence %v that no config has", o.Version.Index, fence)
			continue
		}
		switched := prev.outcome == nil || fence != o.Fence
		if t.Kind == policy.Stepped {
			low, high = 0, math.MaxInt64
			continue // see checkSteps
		}
		follows := h.follows(i)
		since := int64(0)
		if prev.outcome != nil {
			since = max(0, o.Now-prev.outcome.Last)
		}
		// A take that leaves a template's bucket less than full begins its credit.
		if follows && prev.outcome != nil && o.Elapsed != since && (h.bucket.Kind != record.Refilled ||
			o.Elapsed > since || prev.outcome.Tokens < t.Capacity) {
			r.violate(Credit, h.bucket.Key, "index %d credited %dµs, though the refill before was %dµs ago",
				o.Version.Index, o.Elapsed, o.Now-prev.outcome.Last)
		}
		el := min(o.Elapsed, t.MaxElapsed)
		got := o.Added + o.Clamped
		most := min(high, t.Per-1)
		if !follows || switched {
			low, most = 0, t.Per-1
		}
		due := el * t.Tokens
		if !switched && (got < (due+low)/t.Per || got > (due+most)/t.Per) {
			r.violate(Credit, h.bucket.Key, "index %d credited %d tokens for %dµs at %d per %dµs: want %d to %d",
				o.Version.Index, got, o.Elapsed, t.Tokens, t.Per, (due+low)/t.Per, (due+most)/t.Per)
		}
		room := t.Capacity
		if t.Strict {
			room -= o.Outstanding
		}
		room += min(0, o.Tokens-o.Added) // what is below 0, plain clients are about to undo
		if o.Tokens >= room || switched {
			low, high = 0, math.MaxInt64 // a full bucket drops its carry, and a switch rescales it
			continue
		}
		low, high = max(0, due+low-got*t.Per), min(t.Per-1, due+most-got*t.Per)
	}
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

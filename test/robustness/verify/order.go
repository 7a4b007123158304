package verify

import (
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

func (h *bucketHistory) checkOrder(r *Result) {
	key := h.bucket.Key
	h.checkFences(r)
	for i, s := range h.samples {
		if i == 0 || s.Era == 0 || h.samples[i-1].Era == 0 {
			continue
		}
		before := h.samples[i-1]
		if h.effect(before.Sent, s.Got, record.Rollback) {
			continue
		}
		if s.Era < before.Era && !h.effect(before.Sent, s.Got, record.Lose) {
			r.violate(Order, key, "the era fell from %d to %d", before.Era, s.Era)
		}
		if s.Era == before.Era && s.Index < before.Index {
			r.violate(Order, key, "the index fell from %d to %d", before.Index, s.Index)
		}
		t, err := policy.DecodeTerms(s.Policy)
		if err != nil {
			r.violate(Order, key, "index %d: %v", s.Index, err)
			continue
		}
		if old, err := policy.DecodeTerms(before.Policy); err == nil && s.Era == before.Era &&
			t.Fence.Before(old.Fence) && !h.bucket.Overridden {
			r.violate(Order, key, "the fence fell from %v to %v", old.Fence, t.Fence)
		}
	}
}

// checkFences checks that the fence of a bucket's writes never falls. It skips buckets with an override: when an
// operator removes the override, the template's policy is in force again, and its fence may be lower.
func (h *bucketHistory) checkFences(r *Result) {
	key := h.bucket.Key
	if h.bucket.Overridden {
		return
	}
	for i := 1; i < len(h.writes); i++ {
		a, b := h.writes[i-1], h.writes[i]
		if a.outcome == nil || b.outcome == nil || a.version.Era != b.version.Era || a.history != b.history {
			continue
		}
		if b.outcome.Fence.Before(a.outcome.Fence) {
			r.violate(Order, key, "the fence fell from %v at index %d to %v at index %d", a.outcome.Fence,
				a.version.Index, b.outcome.Fence, b.version.Index)
		}
	}
	newest := policy.Fence{} // the latest fence; a new era doesn't change the policy
	for _, w := range h.writes {
		if w.outcome == nil {
			continue
		}
		if h.effect(0, w.to, record.Lose, record.Rollback) {
			break // the policy may be lost with the bucket
		}
		if w.outcome.Fence.Before(newest) {
			r.violate(Order, key, "the policy went back from fence %v to %v at index %d", newest, w.outcome.Fence,
				w.version.Index)
		}
		newest = w.outcome.Fence
	}
}

// checkStock checks that the number of tokens is at least 0 and at most the capacity. It skips buckets that programs
// use with plain commands: for moments, such programs take more tokens than there are, or add more than the capacity.
func (h *bucketHistory) checkStock(r *Result) {
	if h.bucket.Kind == record.Foreign || h.bucket.Plain {
		return
	}
	for _, s := range h.samples {
		if s.Tokens < 0 {
			r.violate(Stock, h.bucket.Key, "%d tokens", s.Tokens)
		}
		t, err := policy.DecodeTerms(s.Policy)
		if s.Era == 0 || err != nil {
			continue
		}
		held := int64(0)
		if t.Strict {
			held = s.Held
		}
		if s.Tokens+held > t.Capacity {
			r.violate(Stock, h.bucket.Key, "%d tokens and %d held tokens exceed the capacity %d", s.Tokens, held,
				t.Capacity)
		}
	}
}

// checkExpiry checks that buckets of templates have an expiry, and that other buckets have none.
func (h *bucketHistory) checkExpiry(r *Result) {
	for _, s := range h.samples {
		if want := h.bucket.Kind == record.Refilled; !s.Missing && s.Era > 0 && s.Expires != want {
			r.violate(Expiry, h.bucket.Key, "at index %d: expires is %t, want %t", s.Index, s.Expires, want)
		}
	}
}

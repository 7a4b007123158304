package verify

import (
	"slices"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// checkLoss checks the number of tokens that a bucket got after the server had lost it, or had lost its tokens.
func (h *bucketHistory) checkLoss(r *Result) {
	if h.bucket.Kind != record.Configured || h.bucket.Plain {
		// A take may create a template's bucket again, and a program with plain commands any bucket. The terms of a pool's
		// bucket change at run time.
		return
	}
	for _, w := range h.writes {
		o := w.outcome
		if o == nil || o.Status != policy.StatusInitialised || w.call.Version.Era == 0 || h.effect(0, w.to,
			record.Lose) && !h.lostWhole(w) {
			continue
		}
		want, t := int64(0), h.policies[o.Fence]
		if t.OnLoss == policy.LossFull {
			want = t.Capacity
		}
		if o.Tokens != want {
			r.violate(Loss, h.bucket.Key, "%d tokens at index %d, where era %d begins after a loss: want %d", o.Tokens,
				o.Version.Index, o.Version.Era, want)
		}
	}
	for _, f := range h.faults {
		if f.Effect == record.Lose && (len(f.Parts) == 0 || slices.Contains(f.Parts, "tokens")) {
			h.checkBack(r, f)
		}
	}
}

// lostWhole reports whether the last loss before a write removed all keys of the bucket.
func (h *bucketHistory) lostWhole(w write) bool {
	whole, latest := false, int64(0)
	for _, f := range h.faults {
		if f.Effect == record.Lose && f.Start <= w.to && f.Start > latest {
			whole, latest = len(f.Parts) == 0, f.Start
		}
	}
	return whole
}

// checkBack checks a bucket with "on_loss: full" after its tokens were lost. The tokens that are left and the tokens
// that were taken since then must add up to at least the capacity.
func (h *bucketHistory) checkBack(r *Result, f record.Fault) {
	capacity := int64(0)
	for _, t := range h.policies {
		capacity = t.Capacity
		if t.OnLoss != policy.LossFull || len(h.policies) > 1 {
			return
		}
	}
	refills, until := 0, int64(0)
	for _, w := range h.writes {
		if w.from >= f.End && refills < 2 {
			refills, until = refills+1, w.to
		}
	}
	if refills < 2 || until >= h.disturbed(f.End) {
		return
	}
	there := int64(-1)
	for _, s := range h.samples {
		if s.Sent >= until && s.Got < h.disturbed(f.End) {
			there, until = s.Tokens, s.Got
			break
		}
	}
	if there < 0 {
		return
	}
	for _, op := range h.ops {
		// A take that was sent before the loss may have been made after it.
		if op.Call <= until && (op.Return >= f.Start || op.Result == record.Unknown) {
			there += op.Taken
			if op.Result == record.Unknown && op.Kind != record.Return {
				there += op.N
			}
		}
	}
	if there < capacity {
		r.violate(Loss, h.bucket.Key, "the tokens were lost, and only %d came back: want %d", there, capacity)
	}
}

package verify

import (
	"strings"
	"time"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// checkAnswers checks the replies to single takes.
func (h *bucketHistory) checkAnswers(r *Result) {
	shadow := h.always(func(t policy.Terms) bool { return t.Shadow })
	granted := map[string]record.Op{}
	for _, op := range h.ops {
		if op.Result == record.Done && op.Leave > 0 && op.Left < op.Leave && !op.Leased && op.Fallback == 0 && !op.Shadow {
			r.violate(Leave, h.bucket.Key, "%s had to leave %d tokens, and left %d", op.Client, op.Leave, op.Left)
		}
		// After a loss, a plain client may create a key without a policy, until a refiller creates the bucket again.
		lost := h.bucket.Plain && h.effect(0, op.Return, record.Lose)
		if op.Result == record.Denied && shadow && !op.All && !plain(op) && !lost {
			r.violate(Shadow, h.bucket.Key, "%s of %s is denied", op.Kind, op.Client)
		}
		if op.Request == "" || op.Fallback > 0 || op.Shadow { // the bucket has no record of such a take
			continue
		}
		first, again := granted[op.Request]
		forgotten := h.effect(first.Call, op.Return, record.Lose, record.Rollback, record.Clock)
		if again && !forgotten && (op.Result == record.Denied || op.Result == record.Done && op.Taken != first.Taken) {
			r.violate(Once, h.bucket.Key, "request %s took %d, and its repetition is %s with %d", op.Request, first.Taken,
				op.Result, op.Taken)
		}
		if op.Taken > 0 {
			granted[op.Request] = op
		}
	}
}

// plain reports whether a program without the SDK made a call.
func plain(op record.Op) bool { return strings.HasSuffix(op.Client, "/plain") }

// always reports whether condition is true for every policy of the bucket.
func (h *bucketHistory) always(condition func(policy.Terms) bool) bool {
	for _, t := range h.policies {
		if !condition(t) {
			return false
		}
	}
	return true
}

// checkDegraded checks the replies to takes while the server didn't answer.
func (h *bucketHistory) checkDegraded(r *Result) {
	open := h.always(func(t policy.Terms) bool { return t.Degraded == policy.DegradedOpen })
	local := h.always(func(t policy.Terms) bool { return t.Degraded == policy.DegradedLocal })
	known := map[string]bool{} // clients that know the mode, from the bucket's first answer
	var admitted []record.Op
	for _, op := range h.ops {
		if op.Kind != record.Take && op.Kind != record.UpTo && op.Kind != record.Reserve || op.All || plain(op) {
			continue
		}
		if op.Fallback > 0 {
			admitted = append(admitted, op)
		}
		// A take may also be unavailable because its deadline left no time for another round trip after the bucket was
		// lost. That isn't an outage.
		outage := strings.Contains(op.Error, "unavailable") && !strings.Contains(op.Error, "too short for a round trip")
		if open && known[op.Client] && op.Result == record.Unknown && outage {
			r.violate(Degraded, h.bucket.Key, "mode open: %s of %s is an error: %s", op.Kind, op.Client, op.Error)
		}
		known[op.Client] = known[op.Client] || op.Result == record.Done
	}
	switch {
	case local:
		h.checkShares(r, admitted)
	case !open && len(admitted) > 0:
		r.violate(Degraded, h.bucket.Key, "mode closed: %d takes are granted while the server doesn't answer",
			len(admitted))
	}
}

// unseen is how long a new consumer may not be counted yet when the consumers share a bucket's rate.
const unseen = time.Second

// checkShares checks that in each outage all consumers together granted no more than the capacity and the rate allow.
func (h *bucketHistory) checkShares(r *Result, admitted []record.Op) {
	capacity, rate, _ := h.limits()
	for i := 0; i < len(admitted); {
		sum, first := 0.0, admitted[i].Call
		for last := first; i < len(admitted) && admitted[i].Call-last < int64(unseen); i++ {
			last = admitted[i].Call
			sum += float64(admitted[i].Fallback)
			if most := capacity + rate*(time.Duration(admitted[i].Return-first)+unseen).Seconds(); sum > most {
				r.violate(Degraded, h.bucket.Key, "mode local: %.0f tokens are granted in %s, want %.0f at most", sum,
					time.Duration(admitted[i].Return-first), most)
			}
		}
	}
}

// checkKeys checks that not more than max_keys keys of a template got a bucket. No bucket expires during a run.
func (h *bucketHistory) checkKeys(r *Result) {
	if h.bucket.MaxKeys == 0 {
		return
	}
	got := map[string]bool{}
	for _, op := range h.run.Ops {
		if strings.HasPrefix(op.Key, h.bucket.Prefix) && op.Taken > 0 &&
			!h.effect(0, op.Return, record.Lose, record.Rollback, record.Clock) {
			got[op.Key] = true
		}
	}
	if len(got) > h.bucket.MaxKeys {
		r.violate(Keys, h.bucket.Key, "%d keys of %s have buckets, want %d at most", len(got), h.bucket.Prefix,
			h.bucket.MaxKeys)
	}
}

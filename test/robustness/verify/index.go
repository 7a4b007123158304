package verify

import (
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

func (h *bucketHistory) checkIndex(r *Result) {
	for i := 1; i < len(h.writes); i++ {
		a, b := h.writes[i-1], h.writes[i]
		if a.version != b.version || a.history != b.history {
			continue
		}
		r.violate(Index, h.bucket.Key, "era %d, index %d was written by %s and by %s", a.version.Era, a.version.Index,
			a.replica, b.replica)
	}
	for i, w := range h.writes {
		if w.outcome == nil || w.outcome.Status != policy.StatusApplied || i == 0 ||
			h.writes[i-1].version.Era != w.version.Era {
			continue
		}
		if expected := w.call.Version; expected.Index != w.version.Index-1 || expected.Era != w.version.Era {
			r.violate(Index, h.bucket.Key, "%s won index %d from the older version of era %d, index %d", w.replica,
				w.version.Index, expected.Era, expected.Index)
		}
	}
}

// checkQuarantine checks the answers to refills. A server that forgot a version that its caller knows must begin a new
// era, and on_rollback decides about the tokens. Other servers must not begin a new era in this way.
func (h *bucketHistory) checkQuarantine(r *Result) {
	for _, f := range h.refills {
		o := f.Outcome
		if o == nil {
			continue
		}
		switch o.Status {
		case policy.StatusInitialised, policy.StatusUnknown, policy.StatusClock, policy.StatusMalformed:
		case policy.StatusRolledBack:
			if t, ok := h.policies[o.Fence]; ok && t.OnRollback == policy.RollbackEmpty && o.Tokens > 0 {
				r.violate(Quarantine, h.bucket.Key, "%d tokens at index %d, where era %d begins after a rollback",
					o.Tokens, o.Version.Index, o.Version.Era)
			}
			if !h.effect(0, f.Replied, record.Rollback, record.Lose) {
				r.violate(Quarantine, h.bucket.Key, "era %d begins at index %d as after a rollback, and there was none",
					o.Version.Era, o.Version.Index)
			}
		default:
			if seen := (policy.Version{Era: f.Era, Index: f.Index}); o.Version.Before(seen) {
				r.violate(Quarantine, h.bucket.Key,
					"%s knew era %d, index %d and got the answer %s from era %d, index %d",
					f.Replica, f.Era, f.Index, o.Status, o.Version.Era, o.Version.Index)
			}
			if o.Status.Wrote() && o.Status != policy.StatusForeign && o.Status != policy.StatusSwitched &&
				o.Version.Index != f.Index+1 {
				r.violate(Quarantine, h.bucket.Key, "%s knew index %d and wrote index %d", f.Replica, f.Index,
					o.Version.Index)
			}
		}
	}
}

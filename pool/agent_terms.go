package pool

import (
	"context"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// apply sends the newest terms to the buckets that don't have them, and reports whether a bucket was written.
func (a *Agent) apply(ctx context.Context) bool {
	var calls []lua.RefillCall
	for name, b := range a.known {
		if b.behind() {
			// The call credits the tokens that are due under the old terms and switches to the new ones. It does so even
			// if the index has grown since the last poll. If the index has fallen, the server has lost writes, and the
			// call detects that. The call doesn't create a missing bucket, since the refiller does.
			terms := b.terms
			calls = append(calls, lua.RefillCall{Key: name, Call: policy.Call{Version: b.version, Terms: &terms}})
		}
	}
	wrote := false
	if len(calls) > 0 {
		calling, cancel := context.WithTimeout(ctx, a.redisTimeout())
		for i, r := range a.buckets.refill(calling, calls) {
			if r.Err == nil && r.Status != policy.StatusUnknown {
				b := a.bucket(calls[i].Key)
				b.version = r.Version
				if r.Pool {
					b.fence = r.Fence
				}
				wrote = wrote || r.Status.Wrote()
			}
		}
		cancel()
	}
	return wrote
}

// void begins a new era of buckets whose clock is wrong, and reports whether a call succeeded. A clock counts as wrong
// until the call for its bucket has succeeded.
func (a *Agent) void(ctx context.Context, calls []lua.RefillCall) (changed bool, failed error) {
	if len(calls) == 0 {
		return false, nil
	}
	calling, cancel := context.WithTimeout(ctx, a.redisTimeout())
	defer cancel()
	for i, r := range a.buckets.refill(calling, calls) {
		if r.Err != nil {
			failed = fmt.Errorf("redis' clock doesn't agree with ours, and the bucket begins no new era: %w", r.Err)
			continue
		}
		changed = true
		a.bucket(calls[i].Key).watchdog = watchdog{}
		if r.Status.Wrote() {
			a.setState(func(s *AgentState) { s.Voids++ })
			a.log.Warn("redis' clock doesn't agree with ours: bucket begins a new era", "pool", calls[i].Key, "region",
				a.region, "era", r.Version.Era)
		}
	}
	return changed, failed
}

// pushTerms sends the newest terms to this replica's refiller, which ignores those that it has.
func (a *Agent) pushTerms() {
	if a.refiller == nil {
		return
	}
	for name, b := range a.known {
		if b.offered {
			_ = a.refiller.SetTerms(name, b.terms) // it fails if this replica doesn't refill the pool
		}
	}
}

// redisTimeout returns the time limit of a request to Redis.
func (a *Agent) redisTimeout() time.Duration { return a.timing.Report / 2 }

// behind reports whether the server lacks the newest terms.
func (b *bucket) behind() bool { return b.fence.Before(b.terms.Fence) }

// void returns a refill call that begins a new era. The call pretends to know a later version than the server has, as
// after a rollback. The grant belongs to the earlier era, so it ends.
func (b *bucket) void(pool string, t lua.Ticket) lua.RefillCall {
	call := policy.Call{Version: policy.Version{Era: t.Version.Era + 1, Index: t.Version.Index}}
	if b.offered {
		terms := b.terms
		call.Terms = &terms
	}
	return lua.RefillCall{Key: pool, Call: call}
}

package pool

import (
	"context"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// apply puts the newest terms in force, and reports whether that was news to the server.
func (a *Agent) apply(ctx context.Context) bool {
	var calls []lua.RefillCall
	for name, b := range a.known {
		if b.behind() {
			// The call settles under the old terms and switches, even if the index has moved on since our last look; if
			// it has gone back, the server has lost writes, and the call finds that out. A bucket that is missing is
			// left to the refiller.
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

// void has buckets begin a new era, and reports whether what was read of any is no longer so. The verdict on a clock
// stands until its bucket has answered.
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
			a.note(func(s *AgentState) { s.Voids++ })
			a.log.Warn("redis' clock doesn't agree with ours: bucket begins a new era", "pool", calls[i].Key, "region",
				a.region, "era", r.Version.Era)
		}
	}
	return changed, failed
}

// tell gives the newest terms to this replica's refiller.
func (a *Agent) tell() {
	if a.refiller == nil {
		return
	}
	for name, b := range a.known {
		if !b.offered {
			continue
		}
		if err := a.refiller.SetTerms(name, b.terms); err != nil {
			a.log.Debug("pool is not refilled here", "pool", name, "error", err)
		}
	}
}

// redisTimeout bounds a request to Redis.
func (a *Agent) redisTimeout() time.Duration { return a.timing.Report / 2 }

// behind reports whether the server hasn't the newest terms.
func (b *bucket) behind() bool { return b.fence.Before(b.terms.Fence) }

// void is the call that begins a new era: it claims to have seen more than the
// server has. The grant is of the era before, so it is over.
func (b *bucket) void(pool string, t lua.Ticket) lua.RefillCall {
	call := policy.Call{Version: policy.Version{Era: t.Version.Era + 1, Index: t.Version.Index}}
	if b.offered {
		terms := b.terms
		call.Terms = &terms
	}
	return lua.RefillCall{Key: pool, Call: call}
}

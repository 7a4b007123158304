package pool

import (
	"context"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// apply puts the newest terms in force, and reports whether that was news to the server.
func (a *Agent) apply(ctx context.Context) bool {
	var calls []lua.RefillCall
	for name, t := range a.terms {
		if a.fences[name].Before(t.Fence) {
			// The call settles under the old terms and switches, even if the index has moved on since our last look; if
			// it has gone back, the server has lost writes, and the call finds that out. A bucket that is missing is
			// left to the refiller.
			calls = append(calls, lua.RefillCall{Key: name, Call: policy.Call{Version: a.versions[name], Terms: &t}})
		}
	}
	wrote := false
	if len(calls) > 0 {
		calling, cancel := context.WithTimeout(ctx, a.redisTimeout())
		for i, r := range a.buckets.refill(calling, calls) {
			if r.Err == nil && r.Status != policy.StatusUnknown {
				a.versions[calls[i].Key] = r.Version
				if r.Pool {
					a.fences[calls[i].Key] = r.Fence
				}
				wrote = wrote || r.Status.Wrote()
			}
		}
		cancel()
	}
	return wrote
}

// tell gives the newest terms to this replica's refiller.
func (a *Agent) tell() {
	if a.refiller == nil {
		return
	}
	for name, t := range a.terms {
		if err := a.refiller.SetTerms(name, t); err != nil {
			a.log.Debug("pool is not refilled here", "pool", name, "error", err)
		}
	}
}

// redisTimeout bounds a request to Redis.
func (a *Agent) redisTimeout() time.Duration { return a.timing.Report / 2 }

// remember is the later of two versions: what a server has lost must not be forgotten before a refill has found out.
func (a *Agent) remember(pool string, v policy.Version) policy.Version {
	if known := a.versions[pool]; v.Before(known) {
		return known
	}
	return v
}

// behind reports whether the server hasn't the newest terms.
func (a *Agent) behind() bool {
	for name, t := range a.terms {
		if a.fences[name].Before(t.Fence) {
			return true
		}
	}
	return false
}

func (a *Agent) clockWrong(pool string, r reading, t lua.Ticket) bool {
	w := a.watch[pool]
	if w == nil {
		w = &watchdog{}
		a.watch[pool] = w
	}
	if !w.check(r, t.Version.Era, a.timing.Lease) {
		return false
	}
	a.log.Warn("redis' clock doesn't agree with ours: bucket begins a new era", "pool", pool, "region", a.region, "era",
		t.Version.Era)
	return true
}

// void is the call that begins a new era: it claims to have seen more than the
// server has. The grant is of the era before, so it is over.
func (a *Agent) void(pool string, t lua.Ticket) lua.RefillCall {
	call := policy.Call{Version: policy.Version{Era: t.Version.Era + 1, Index: t.Version.Index}}
	if terms, ok := a.terms[pool]; ok {
		call.Terms = &terms
	}
	return lua.RefillCall{Key: pool, Call: call}
}

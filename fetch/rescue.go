package fetch

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// rescueAfter is how many refill intervals a refill must be overdue by before this Client makes it, and
	// rescueSpread how much longer at most: each Client has its own part of that, so that they don't all come at once.
	rescueAfter  = 2
	rescueSpread = 0.25
	// maxRescues bounds the buckets whose rescues are remembered.
	maxRescues = 1 << 14
)

// rescues keeps this Client's refills apart: one per bucket and interval.
type rescues struct {
	spread float64 // intervals

	mu   sync.Mutex
	next map[string]time.Time // when the bucket may be rescued again
}

func newRescues() *rescues {
	return &rescues{spread: rescueSpread * rand.Float64(), next: make(map[string]time.Time)}
}

// claim reports whether the caller is to rescue a bucket, which nobody else then does for an interval.
func (r *rescues) claim(key string, interval time.Duration, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Before(r.next[key]) {
		return false
	}
	if len(r.next) >= maxRescues {
		for k, next := range r.next {
			if !now.Before(next) {
				delete(r.next, k)
			}
		}
		if len(r.next) >= maxRescues {
			return false
		}
	}
	r.next[key] = now.Add(interval)
	return true
}

// overdue reports whether a denial shows that refillers are silent. Only smooth refills are made up for: the instants
// of a schedule are the refillers' to know.
func (r *rescues) overdue(reply *lua.TakeReply) bool {
	t := reply.Terms
	return !reply.OK && t != nil && t.Kind == policy.Smooth &&
		float64(reply.Now-reply.Last) > (rescueAfter+r.spread)*float64(t.Interval)
}

// rescue refills a bucket that denied a take if its refillers are silent: with the same script, the (era, index) that
// the denial told, and no right to create or change anything. It reports whether to ask again, since the bucket has
// want tokens, and whether this Client made the refill.
func (t *task) rescue(want int64, reply *lua.TakeReply) (again, ours bool) {
	c := t.c
	if !c.config.rescue || !c.rescues.overdue(reply) || want > reply.Terms.Capacity ||
		!c.rescues.claim(t.key, micros(reply.Terms.Interval), time.Now()) {
		return false, false
	}
	out, err := attempt(t, false, func() (policy.Outcome, error) {
		return lua.Refill(t.ctx, t, t.key, policy.Call{Version: reply.Version})
	})
	if err != nil {
		return false, false // the denial stands
	}
	if ours = out.Status.Wrote(); ours {
		c.stats.rescues.Add(1)
	}
	c.cache.forgive(t.key)
	return out.Tokens >= want, ours
}

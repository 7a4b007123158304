package fetch

import (
	"context"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Take takes n tokens, all or none; n is 1 to policy.MaxTokens. A denial is a Result with OK false and a nil error. The
// options are WithTimeout, WithLeave, WithLeavePercent, WithRequestID and WithRequestMemory.
//
// After ErrUnavailable or the context's own error, tokens may have been taken; with WithRequestID it is safe to ask
// again.
func (c *Client) Take(ctx context.Context, key string, n int64, opts ...CallOption) (Result, error) {
	cfg, err := c.with(OpTake, opts)
	if err != nil {
		return Result{}, err
	}
	if len(c.config.hooks) == 0 {
		return c.take(ctx, key, n, cfg)
	}
	return c.observed(ctx, Call{Op: OpTake, Key: key, Tokens: n}, func(ctx context.Context) (Result, error) {
		return c.take(ctx, key, n, cfg)
	})
}

func (c *Client) take(ctx context.Context, key string, n int64, cfg *callConfig) (Result, error) {
	if err := c.check(ctx, key, n); err != nil {
		return Result{}, err
	}
	if cfg.request != "" {
		return c.takeOnce(ctx, key, policy.Run{N: n, Count: 1, Leave: cfg.leave}, cfg)
	}
	if r, ok := c.leases.take(key, n, cfg.leave); ok {
		return r, nil
	}
	t := c.begin(from(ctx, cfg), key)
	defer t.end()
	a, ok := t.remembered(n)
	if !ok {
		a = t.askRun(policy.Run{N: n, Count: 1, Leave: cfg.leave})
	}
	r, err := t.conclude(a, n, n)
	if err == nil && r.Source.Kind != SourceFallback && c.leases != nil {
		if !a.reply.OK {
			if both, ok := t.takeBoth(n, a); ok {
				return both, nil
			}
		}
		c.leases.missed(key, max(1, r.Taken)) // last, since the block's keeper then asks for the same tokens
	}
	if err != nil {
		return Result{}, err
	}
	return c.shadow(r, t.info, n), nil
}

// TakeUpTo takes as many tokens as there are, up to n; n is 1 to policy.MaxTokens and may exceed the capacity. The
// Result is a denial only if there is none. The options are Take's.
//
// After ErrUnavailable or the context's own error, tokens may have been taken.
func (c *Client) TakeUpTo(ctx context.Context, key string, n int64, opts ...CallOption) (Result, error) {
	cfg, err := c.with(OpTakeUpTo, opts)
	if err != nil {
		return Result{}, err
	}
	return c.observed(ctx, Call{Op: OpTakeUpTo, Key: key, Tokens: n}, func(ctx context.Context) (Result, error) {
		return c.takeUpTo(ctx, key, n, cfg)
	})
}

func (c *Client) takeUpTo(ctx context.Context, key string, n int64, cfg *callConfig) (Result, error) {
	if err := c.check(ctx, key, n); err != nil {
		return Result{}, err
	}
	if cfg.request != "" {
		return c.takeOnce(ctx, key, policy.Run{N: 1, Count: n, UpTo: true, Leave: cfg.leave}, cfg)
	}
	leased, low := c.leases.draw(key, 1, n, cfg.leave)
	defer low.signal()
	if leased.Taken == n {
		return leased, nil
	}
	r, err := c.takeUpToShared(ctx, key, n-leased.Taken, cfg)
	if got := leased.Taken + r.Taken; got < n { // a call about the block may have moved tokens to it
		more, _ := c.leases.draw(key, 1, n-got, cfg.leave)
		leased = more.with(leased)
	}
	if !leased.OK {
		return r, err
	}
	return r.with(leased), nil
}

// takeUpToShared is takeUpTo of the bucket itself.
func (c *Client) takeUpToShared(ctx context.Context, key string, n int64, cfg *callConfig) (Result, error) {
	t := c.begin(from(ctx, cfg), key)
	defer t.end()
	a, ok := t.remembered(1)
	if !ok {
		a = t.askRun(policy.Run{N: 1, Count: n, UpTo: true, Leave: cfg.leave})
	}
	if a.err != nil {
		n = c.degradedUpTo(t.info, n, cfg.leave)
	}
	r, err := t.conclude(a, n, 1)
	if err != nil {
		return Result{}, err
	}
	if r.Source.Kind != SourceFallback {
		c.leases.missed(key, max(1, r.Taken))
	}
	return c.shadow(r, t.info, n), nil
}

// remembered answers a take of n by the last denial, or by the line of those who wait for the bucket, behind which it
// stands: what the bucket has is theirs. A bucket in shadow mode is asked each time, since it counts its denials.
func (t *task) remembered(n int64) (*answer, bool) {
	c, now := t.c, t.began
	if t.info.shadowed() {
		return nil, false
	}
	if now.IsZero() {
		now = time.Now()
	}
	if due, yes := c.lines.behind(t.key, n, t.cfg.leave); yes {
		return t.answer(answer{reply: lua.TakeReply{Wait: due}, info: t.info, source: Source{Kind: SourceCached}}), true
	}
	d, leave := &t.info.denied, t.cfg.leave.Of(t.info.limit())
	if !c.config.denyCache || !d.holds(n, leave, now) {
		return nil, false
	}
	reply := lua.TakeReply{Remaining: d.left, Wait: t.info.deniedFor(n, leave, now)}
	return t.answer(answer{reply: reply, info: t.info, source: Source{Kind: SourceCached}}), true
}

// leave is what a take of n that has to be put to the bucket leaves there. A request's id stands for what it leaves,
// which can't differ.
func (t *task) leave(n int64) policy.Leave {
	if t.cfg.request != "" {
		return t.cfg.leave
	}
	t.c.lines.mu.Lock()
	defer t.c.lines.mu.Unlock()
	return t.c.lines.leaves(t.key, n, t.cfg.leave, false)
}

// conclude is the result of a take of n, of which need must be there at once: what the bucket answered, or its degraded
// mode.
func (t *task) conclude(a *answer, n, need int64) (Result, error) {
	if a.err != nil {
		*a = t.c.degraded(t.key, n, a.err, t.cfg.leave)
	}
	if a.err != nil {
		return Result{}, a.err
	}
	t.info = a.info
	if !a.reply.OK {
		if err := a.info.exceeded(t.key, need, t.cfg.leave); err != nil {
			return Result{}, err
		}
	}
	return t.result(a), nil
}

// result shows an answer in the light of what is known of its bucket.
func (t *task) result(a *answer) Result {
	reply, i := &a.reply, a.info
	r := Result{OK: reply.OK, Taken: reply.Taken, Remaining: reply.Remaining, Limit: i.limit(), ResetAfter: Never,
		Source: a.source}
	if !reply.OK {
		r.RetryAfter = wait(reply.Wait)
	}
	if a.source.Kind == SourceFallback {
		return r
	}
	now := time.Time{} // needed for schedules only
	if i.stepped() {
		if now = time.Now(); i.lacksSchedule(now) {
			i = t.c.learnSchedule(t, i)
			now = time.Now()
		}
	}
	r.ResetAfter, r.OnFloor, r.Era = i.resetAfter(reply.Remaining, now), i.onFloor(), i.era
	return r
}

// takeOnce puts a take with a request id to the bucket. Nothing is given back to callers who are gone: what was taken
// is the request's.
func (c *Client) takeOnce(ctx context.Context, key string, run policy.Run, cfg *callConfig) (Result, error) {
	n := run.N
	if run.UpTo {
		n = run.Count
	}
	t := c.begin(from(ctx, cfg), key)
	a := t.ask(run.N+run.Leave.Of(t.info.limit()), true, func() (*answer, error) {
		if err := t.kind.open(t, 0); err != nil {
			return nil, err
		}
		reply, err := lua.TakeOnce(t.ctx, t, key, cfg.request, run, cfg.memory)
		if err != nil {
			return nil, err
		}
		return t.answer(answer{reply: reply, info: c.learn(key, run.N, run.Leave, &reply)}), nil
	})
	if a.err != nil && run.UpTo {
		n = c.degradedUpTo(t.info, n, cfg.leave)
	}
	r, err := t.conclude(a, n, run.N)
	if err != nil {
		return Result{}, err
	}
	return c.shadow(r, t.info, n), nil
}

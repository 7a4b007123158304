package fetch

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Take takes n tokens, all or none; n is 1 to policy.MaxTokens. A denial is a Result with OK false and a nil error. The
// options are WithTimeout, WithLeave, WithLeavePercent, WithFlow, WithRequestID and WithRequestMemory.
//
// After ErrUnavailable or the context's own error, tokens may have been taken. With WithRequestID it is safe to repeat
// the take.
func (c *Client) Take(ctx context.Context, key string, n int64, opts ...CallOption) (Result, error) {
	return c.takeRun(ctx, OpTake, key, policy.Run{N: n, Count: 1}, opts)
}

// TakeUpTo takes as many tokens as there are, up to n; n is 1 to policy.MaxTokens and may exceed the capacity. The
// Result is a denial only if there is no token. The options are those of Take.
//
// After ErrUnavailable or the context's own error, tokens may have been taken.
func (c *Client) TakeUpTo(ctx context.Context, key string, n int64, opts ...CallOption) (Result, error) {
	return c.takeRun(ctx, OpTakeUpTo, key, policy.Run{N: 1, Count: n, UpTo: true}, opts)
}

// takeRun makes one take.
func (c *Client) takeRun(ctx context.Context, op Op, key string, run policy.Run, opts []CallOption) (Result, error) {
	n := run.N * run.Count
	if len(c.config.hooks) == 0 && len(opts) == 0 { // spares a take from a block a quarter of its time
		if err := c.check(ctx, key, n); err != nil {
			return Result{}, err
		}
		return c.take(ctx, key, run, &c.config.callConfig)
	}
	call := Call{Op: op, Key: key, Tokens: n}
	return c.call(ctx, call, n, opts, func(ctx context.Context, cfg *callConfig) (Result, error) {
		return c.take(ctx, key, run, cfg)
	})
}

// take makes one take. It doesn't contain takeLeased because the stacks of many waiting takes have to fit into a cache.
func (c *Client) take(ctx context.Context, key string, run policy.Run, cfg *callConfig) (Result, error) {
	run.Leave = cfg.leave
	if c.leases == nil || cfg.request != "" {
		return c.takeShared(ctx, key, run, cfg)
	}
	return c.takeLeased(ctx, key, run, cfg)
}

// takeLeased makes one take from the bucket's block. If the block has too few tokens, it also takes from the bucket.
func (c *Client) takeLeased(ctx context.Context, key string, run policy.Run, cfg *callConfig) (Result, error) {
	n := run.N * run.Count
	leased, low := c.buckets.find(key).takeLocal(cfg.flow, run.N, n, run.Leave)
	if leased.Taken == n {
		low.signal()
		return leased, nil
	}
	defer low.signal()
	if run.UpTo {
		run.Count -= leased.Taken
	}
	r, err := c.takeShared(ctx, key, run, cfg)
	if got := leased.Taken + r.Taken; run.UpTo && got < n { // a call may have moved tokens to the block
		more, _ := c.buckets.find(key).takeLocal(cfg.flow, 1, n-got, run.Leave)
		leased = more.with(leased)
	}
	if !leased.OK {
		return r, err
	}
	return r.with(leased), nil
}

// takeShared makes one take from the bucket itself.
func (c *Client) takeShared(ctx context.Context, key string, run policy.Run, cfg *callConfig) (Result, error) {
	t := c.begin(budgetOf(ctx, cfg), key)
	defer t.end()
	var a *answer
	if cfg.request != "" {
		a = t.askOnce(run)
	} else if known, ok := t.remembered(run); ok {
		a = known
	} else {
		a = t.askRun(run)
	}
	r, err := t.toResult(a, run)
	if err != nil {
		return Result{}, err
	}
	if c.leases != nil && cfg.request == "" && r.Source.Kind != SourceFallback {
		c.leases.missed(key, t.flow, r.Taken) // last, since then the block's keeper may ask for tokens
	}
	return c.shadow(r, t.info, run.N*run.Count), nil
}

// remembered denies a take without a call, if the last denial still applies or waiters are ahead of the take. The
// bucket's tokens are for these waiters, until it is the take's turn to pass them. A bucket in shadow mode is asked
// each time, since it counts its denials. While the server is unavailable, the degraded mode decides in place of the
// last denial.
func (t *task) remembered(run policy.Run) (*answer, bool) {
	c, now := t.c, t.began
	if t.info.shadowed() {
		return nil, false
	}
	if now.IsZero() {
		now = time.Now()
	}
	flow := t.info.flowOf(t.flow)
	d, leave := t.denial(), run.Leave.Of(t.info.limit())
	denied := c.config.denyCache && d.applies(run.N, leave, now) && t.node.available()
	if due, yes := t.bucket.behind(flow, run, !denied); yes {
		return t.answer(answer{reply: lua.TakeReply{Wait: due}, info: t.info, source: Source{Kind: SourceCached}}), true
	}
	if !denied {
		return nil, false
	}
	reply := lua.TakeReply{Remaining: d.left, Wait: t.info.deniedFor(d, run.N, leave, now)}
	return t.answer(answer{reply: reply, info: t.info, source: Source{Kind: SourceCached}}), true
}

// leave returns the number of tokens that a take of n must leave when the bucket is asked. A take with a request id
// always leaves the same number, since that number is part of the request.
func (t *task) leave(n int64) policy.Leave {
	if t.cfg.request != "" {
		return t.cfg.leave
	}
	ls := t.bucket.lines.Load()
	if ls == nil {
		return t.cfg.leave
	}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.leaves(t.info.flowOf(t.flow), n, t.cfg.leave, false)
}

// toResult returns the result of a take: the reply of the bucket, or the answer of its degraded mode.
func (t *task) toResult(a *answer, run policy.Run) (Result, error) {
	if a.err != nil {
		*a = t.c.degraded(t.key, run, a.err)
	}
	if a.err != nil {
		return Result{}, a.err
	}
	t.info = a.info
	if !a.reply.OK {
		if err := a.info.exceeded(t.key, run.N, run.Leave); err != nil {
			return Result{}, err
		}
	}
	return t.result(a), nil
}

// result converts an answer to a Result, using the cached policy for Limit, ResetAfter and OnFloor. It asks for the
// instants of a stepped bucket if they are unknown.
func (t *task) result(a *answer) Result {
	shown := *a
	now := time.Time{} // needed for schedules only
	if a.source.Kind != SourceFallback && a.info.stepped() {
		now = time.Now()
		if a.info.lacksSchedule(now) {
			known := *a.info // and not what the Client knows by now: that may be of a later era than the tokens
			known.steps = t.c.askSchedule(t, a.reply.Now)
			shown.info = &known
			now = time.Now()
		}
	}
	r := shown.result(t.kind, now)
	r.paid = shown.payment(t.flow)
	return r
}

// result converts the answer of a bucket of kind k to a Result. The answer of a degraded mode needs no kind.
func (a *answer) result(k kind, now time.Time) Result {
	reply, i := &a.reply, a.info
	r := Result{OK: reply.OK, Taken: reply.Taken, Remaining: max(0, reply.Remaining), Limit: i.limit(), ResetAfter: Never,
		Source: a.source} // below 0 a bucket holds none: plain clients have yet to undo their tries
	admitted := reply.OK || i.shadowed()
	if admitted {
		r.MoreAfter = Never
	}
	if !reply.OK {
		r.RetryAfter = wait(reply.Wait)
	}
	if a.source.Kind == SourceFallback {
		r.loan = a.loan
		return r
	}
	r.ResetAfter = i.resetAfter(reply.Remaining, now)
	if admitted {
		r.MoreAfter = i.moreAfter(reply.Remaining, now)
	}
	r.OnFloor = i.onFloor()
	if k.has(i.era) { // otherwise the info is of an earlier time
		r.Era = i.era
	}
	return r
}

// askOnce puts a take with a request id to the bucket. If the caller leaves, nothing is given back: the tokens belong
// to the request, which may be made again.
func (t *task) askOnce(run policy.Run) *answer {
	return t.ask(run.N+run.Leave.Of(t.info.limit()), true, func() error {
		if err := t.kind.open(t, 0); err != nil {
			return err
		}
		c, cfg := t.c, t.cfg // the task may serve another call when undo is called
		kind, key := t.kind, t.key
		flow := t.namedFlow()
		undo := func(ctx context.Context, _ lua.Client, cmd redis.Cmder) {
			if reply, err := lua.TakeOnceFor(ctx, replayed{cmd}, key, flow, cfg.request, run, cfg.memory); err == nil {
				c.reopen(kind, key, &reply)
			}
		}
		asked := time.Now()
		reply, err := lua.TakeOnceFor(t.ctx, &undoable{task: t, undo: undo}, key, flow, cfg.request, run, cfg.memory)
		if err != nil {
			return err
		}
		c.reopen(kind, key, &reply)
		t.got = answer{reply: reply, info: t.applyReply(run.N, run.Leave, &reply, asked)}
		return nil
	})
}

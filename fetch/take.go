package fetch

import (
	"context"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Take takes n tokens, all or none; n is 1 to policy.MaxTokens. A denial is a
// Result with OK false and a nil error.
//
// After ErrUnavailable or the context's own error, tokens may have been taken;
// with WithRequestID it is safe to ask again.
func (c *Client) Take(ctx context.Context, key string, n int64, opts ...TakeOption) (Result, error) {
	cfg, err := c.config.with(opts)
	if err != nil {
		return Result{}, err
	}
	if len(c.config.hooks) == 0 {
		return c.take(ctx, key, n, cfg)
	}
	return c.observed(ctx, Call{OpTake, key, n}, func(ctx context.Context) (Result, error) { return c.take(ctx, key, n, cfg) })
}

// TakeUpTo takes as many tokens as there are, up to n; n is 1 to
// policy.MaxTokens and may exceed the capacity. The Result is a denial only if
// there is none.
//
// After ErrUnavailable or the context's own error, tokens may have been taken.
func (c *Client) TakeUpTo(ctx context.Context, key string, n int64) (Result, error) {
	return c.observed(ctx, Call{OpTakeUpTo, key, n}, func(ctx context.Context) (Result, error) { return c.takeUpTo(ctx, key, n) })
}

func (c *Client) takeUpTo(ctx context.Context, key string, n int64) (Result, error) {
	if err := check(key, n); err != nil {
		return Result{}, err
	}
	if err := ctx.Err(); err != nil {
		return Result{}, fmt.Errorf("fetch: %w", err)
	}
	leased, low := c.leases.draw(key, 1, n)
	if low != nil {
		defer low.signal()
	}
	if leased.Taken == n {
		return leased, nil
	}
	r, err := c.takeUpToShared(ctx, key, n-leased.Taken)
	if leased.Taken += r.Taken; leased.Taken < n { // a call about the block may have moved tokens to it
		if more, _ := c.leases.draw(key, 1, n-leased.Taken); more.OK {
			more.Taken += leased.Taken
			leased = more
		}
	}
	if leased.Taken == r.Taken { // none of the block
		return r, err
	}
	if err != nil || !r.OK {
		return leased, nil
	}
	r.Taken = leased.Taken
	return r, nil
}

// takeUpToShared is takeUpTo of the bucket itself.
func (c *Client) takeUpToShared(ctx context.Context, key string, n int64) (Result, error) {
	a, ok := c.remembered(key, 1, time.Now())
	if !ok {
		a = c.askUpTo(ctx, key, n)
	}
	if err := a.err; err != nil {
		if a, ok = c.degradedUpTo(key, n, err); !ok {
			return Result{}, err
		}
	}
	c.missed(key, a)
	return c.shadow(c.result(ctx, key, a), a.known, n), nil
}

// missed notes a take of a bucket that its block was not enough for.
func (c *Client) missed(key string, a answer) {
	if c.leases != nil && a.source.Kind != SourceFallback {
		// Who is denied wants tokens as well: otherwise the block of another consumer that
		// asks more often gets all that a small bucket has.
		c.leases.missed(key, max(1, a.reply.Taken))
	}
}

// askUpTo is ask for as many tokens as there are.
func (c *Client) askUpTo(ctx context.Context, key string, n int64) answer {
	if why := c.breakers.of(key).open(); why != ReasonNone {
		return answer{err: shut(why)}
	}
	put := func() answer {
		reply, err := do(ctx, c, c.config.deadline, func(ctx context.Context) (lua.TakeReply, error) {
			reply, err := c.sendUpTo(ctx, key, n)
			c.unknownOutcome(n, err)
			return reply, err
		}, c.late(key))
		if err != nil {
			return answer{err: err}
		}
		k, _ := c.terms.get(key, time.Now())
		return answer{reply: reply, known: c.learn(key, k, 1, reply)}
	}
	began := time.Now()
	a := put()
	c.note(key, began, a.err)
	c.saw(a)
	if a.err == nil {
		if again, ours := c.rescue(ctx, key, 1, c.config.deadline, a.reply); again {
			a = put()
			if ours {
				a.source.Kind = SourceRescued
			}
		}
	}
	return a
}

func (c *Client) take(ctx context.Context, key string, n int64, cfg takeConfig) (Result, error) {
	if err := check(key, n); err != nil {
		return Result{}, err
	}
	if err := ctx.Err(); err != nil {
		return Result{}, fmt.Errorf("fetch: %w", err)
	}
	if cfg.request == "" {
		if r, ok := c.leases.take(key, n); ok {
			return r, nil
		}
	}
	now := time.Now()
	a, ok := c.remembered(key, n, now)
	if !ok || cfg.request != "" {
		a = c.ask(ctx, key, n, cfg, now)
	}
	if err := a.err; err != nil {
		if a, ok = c.degraded(key, n, err); !ok {
			return Result{}, err
		}
	}
	if err := a.known.exceeded(key, n); err != nil && !a.reply.OK {
		return Result{}, err
	}
	if c.leases != nil && cfg.request == "" {
		if !a.reply.OK {
			if r, ok := c.takeBoth(ctx, key, n, cfg, a); ok {
				return r, nil
			}
		}
		c.missed(key, a) // last, since the block's keeper then asks for the same tokens
	}
	return c.shadow(c.result(ctx, key, a), a.known, n), nil
}

// takeBoth takes n tokens of which the bucket, as it answered, has too few, and its block
// as well: those of the block, and the others of the bucket. If they have too few
// together, nothing is taken.
func (c *Client) takeBoth(ctx context.Context, key string, n int64, cfg takeConfig, denied answer) (Result, bool) {
	least := n - denied.reply.Remaining
	switch denied.source.Kind {
	case SourceFallback:
		return Result{}, false
	case SourceCached: // the bucket may have others by now
		least = 1
	}
	if c.workers.enter() != nil {
		return Result{}, false
	}
	defer c.workers.leave()
	leased, low := c.leases.draw(key, least, n)
	if low != nil {
		defer low.signal()
	}
	if !leased.OK || leased.Taken == n {
		return leased, leased.OK
	}
	a := c.ask(ctx, key, n-leased.Taken, cfg, time.Now())
	if a.err != nil || !a.reply.OK {
		c.giveBackLater(ctx, key, leased.Taken)
		return Result{}, false
	}
	r := c.result(ctx, key, a)
	r.Taken = n
	return r, true
}

// shadow admits a call of n tokens that a bucket in shadow mode did not grant in
// full.
func (c *Client) shadow(r Result, k *known, n int64) Result {
	if !k.shadowed() || r.OK && r.Taken == n {
		return r
	}
	c.stats.shadowed.Add(1)
	r.OK, r.Taken, r.RetryAfter, r.Source.Kind = true, n, 0, SourceShadow
	return r
}

// remembered answers a take by the last denial. One of a bucket in shadow mode is
// asked each time, since the bucket counts them.
func (c *Client) remembered(key string, n int64, now time.Time) (answer, bool) {
	if !c.config.denyCache {
		return answer{}, false
	}
	k, _ := c.terms.get(key, now)
	if k.shadowed() || !k.denied.holds(n, now) {
		return answer{}, false
	}
	reply := lua.TakeReply{Remaining: k.denied.left, Wait: -1}
	if !k.denied.due.IsZero() {
		reply.Wait = k.denied.due.Sub(now)
	}
	return answer{reply: reply, known: k, source: Source{Kind: SourceCached}}, true
}

// ask puts a take to the bucket, unless its server is known not to answer. If the
// bucket says no and its refills are overdue, they are made up for, and the take is
// put to it again.
func (c *Client) ask(ctx context.Context, key string, n int64, cfg takeConfig, began time.Time) answer {
	if why := c.breakers.of(key).open(); why != ReasonNone {
		return answer{err: shut(why)}
	}
	a := c.put(ctx, key, n, cfg, began)
	c.note(key, began, a.err)
	c.saw(a)
	if a.err != nil || a.reply.OK || !c.rescues.overdue(a.reply) {
		return a
	}
	again, ours := c.rescue(ctx, key, n, cfg.deadline, a.reply)
	if !again {
		return a
	}
	a = c.put(ctx, key, n, cfg, time.Now())
	if ours {
		a.source.Kind = SourceRescued
	}
	return a
}

// put makes the call of a take, or joins others in one.
func (c *Client) put(ctx context.Context, key string, n int64, cfg takeConfig, now time.Time) answer {
	if cfg.request != "" {
		return c.putOnce(ctx, key, n, cfg)
	}
	if c.coalescer != nil {
		if err := c.workers.enter(); err != nil {
			return answer{err: err}
		}
		defer c.workers.leave()
		return c.coalescer.take(ctx, key, n, cfg.deadline, now)
	}
	k, fresh := c.terms.get(key, now)
	reply, err := do(ctx, c, cfg.deadline, func(ctx context.Context) (lua.TakeReply, error) {
		reply, err := c.sendTake(ctx, key, n, !fresh)
		c.unknownOutcome(n, err)
		return reply, err
	}, c.late(key))
	if err != nil {
		return answer{err: err}
	}
	if !fresh || !reply.OK || reply.Terms != nil {
		k = c.learn(key, k, n, reply)
	}
	return answer{reply: reply, known: k}
}

// result shows an answer in the light of what is known of its bucket.
func (c *Client) result(ctx context.Context, key string, a answer) Result {
	reply, k := &a.reply, a.known
	if a.source.Kind == SourceFallback {
		r := Result{OK: reply.OK, Taken: reply.Taken, Remaining: reply.Remaining, Limit: k.limit(), ResetAfter: Never, Source: a.source}
		if !reply.OK {
			r.RetryAfter = wait(reply.Wait)
		}
		return r
	}
	now := time.Time{} // needed for schedules only
	if k.stepped() {
		now = time.Now()
		if k.lacksSchedule(now) {
			k = c.learnSchedule(ctx, key, k)
			now = time.Now()
		}
	}
	r := Result{
		OK: reply.OK, Taken: reply.Taken, Remaining: reply.Remaining, Limit: k.limit(),
		ResetAfter: k.resetAfter(reply.Remaining, now), OnFloor: k.onFloor(), Source: a.source,
	}
	if !reply.OK {
		r.RetryAfter = wait(reply.Wait)
	}
	return r
}

// learn remembers what the reply to a take of n tells: a bucket's terms, nil if it
// has none, and a denial. What is known of a schedule stays while it is the same.
func (c *Client) learn(key string, before *known, n int64, reply lua.TakeReply) *known {
	t, now, k := reply.Terms, time.Now(), new(known)
	if before.terms != nil && t != nil && *before.terms == *t {
		*k = *before
	}
	k.terms, k.learned = t, now
	if !reply.OK && !k.pooled() { // a pool's share grows by the denials that its bucket counts
		k.denied = newDenial(n, reply.Remaining, reply.Wait, now)
	}
	if t != nil && t.Degraded == policy.DegradedLocal {
		k.stand = c.standBy(key, *t)
	}
	c.terms.put(key, k)
	return k
}

// learnMany is learn for the takes of a call; the smallest that was denied counts.
func (c *Client) learnMany(key string, k *known, runs []policy.Run, reply lua.TakeManyReply) *known {
	one := lua.TakeReply{OK: true, Terms: reply.Terms, Remaining: reply.Remaining}
	n := int64(0)
	for i, r := range reply.Runs {
		if r.Taken < runs[i].Count && (one.OK || runs[i].N < n) {
			one.OK, n, one.Wait = false, runs[i].N, r.Wait
		}
	}
	return c.learn(key, k, n, one)
}

// learnSchedule asks for the instants of a stepped bucket, about once a step.
// Without an answer they stay unknown: the take that wants them is done.
func (c *Client) learnSchedule(ctx context.Context, key string, before *known) *known {
	reply, err := c.peek(ctx, key)
	k := new(known)
	*k = *before
	k.asked = time.Now()
	if err == nil && reply.Terms != nil && reply.Next > reply.Step {
		k.next = k.asked.Add(time.Duration(reply.Next-reply.Now) * time.Microsecond)
		k.step = time.Duration(reply.Next-reply.Step) * time.Microsecond
	}
	c.terms.put(key, k)
	return k
}

func (c *Client) peek(ctx context.Context, key string) (lua.PeekReply, error) {
	return do(ctx, c, c.config.deadline, func(ctx context.Context) (lua.PeekReply, error) {
		return c.sendPeek(ctx, key)
	}, nil)
}

// untilFull is the time until the bucket is full.
func untilFull(p lua.PeekReply) time.Duration {
	b := policy.Bucket{Tokens: &p.Tokens, Control: &policy.Control{
		Terms: *p.Terms, Era: p.Version.Era, Last: p.Last, Carry: p.Carry, Step: p.Step, Next: p.Next,
	}}
	return wait(time.Duration(b.Wait(p.Terms.Capacity, p.Now)) * time.Microsecond)
}

// late gives back the tokens of a take that nobody waits for any more.
func (c *Client) late(key string) func(context.Context, lua.TakeReply) {
	return func(ctx context.Context, reply lua.TakeReply) { c.giveBack(ctx, key, reply.Taken) }
}

// giveBack returns tokens that were taken for callers who are gone.
func (c *Client) giveBack(ctx context.Context, key string, tokens int64) {
	c.giveBackTo(ctx, key, tokens, 0)
}

// giveBackTo returns tokens to the era in which they were taken, 0 for any. It is
// tried once, since a second return could give back twice.
func (c *Client) giveBackTo(ctx context.Context, key string, tokens, era int64) {
	if tokens == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lateGrace)
	defer cancel()
	reply, err := c.sendReturn(ctx, key, tokens, era)
	c.terms.forgive(key)
	c.stats.clamped.Add(reply.Clamped)
	if err != nil {
		c.stats.lost.Add(tokens)
		return
	}
	c.stats.returned.Add(tokens)
}

// giveBackLater has a worker give tokens back. The caller is inside.
func (c *Client) giveBackLater(ctx context.Context, key string, tokens int64) {
	if tokens > 0 && !c.workers.offer(func() { c.giveBack(ctx, key, tokens) }) {
		c.stats.lost.Add(tokens)
	}
}

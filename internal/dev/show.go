package dev

import (
	"context"
	"errors"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func (p *playground) peek(ctx context.Context, key string) (lua.PeekReply, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return lua.Peek(ctx, p.store, key, 1)
}

// show shows how things stand, once a second.
func (p *playground) show(ctx context.Context) {
	ticker := time.NewTicker(showEvery)
	defer ticker.Stop()
	reports, before, at := ask(ctx, p.replicas), p.consumer.taken(), time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now := ask(ctx, p.replicas)
		a := compare(reports, now)
		reports = now
		p.active.Store(&a.active)
		v := p.view(ctx)
		v.who = a.describe(p.opts.Mode)
		v.rate = v.total.per(before, time.Since(at))
		before, at = v.total, time.Now()
		if ctx.Err() == nil {
			p.screen.show(at, v.lines(p.screen.style, p.screen.width()), v.short())
		}
	}
}

// view is how buckets and consumer stand.
func (p *playground) view(ctx context.Context) view {
	v := view{total: p.consumer.taken()}
	v.elapsed = time.Since(p.consumer.started) // after the count: the bound is for no less time than it took
	v.p50, v.longest, v.kills = p.gaps.summary()
	for _, b := range p.cfg.Buckets {
		r, err := p.peek(ctx, b.Key)
		if err != nil && !errors.Is(err, lua.ErrUnknownBucket) {
			v.store = err
		}
		v.levels = append(v.levels, level{key: b.Key, tokens: r.Tokens, capacity: b.Policy.Capacity})
		if b.Key == watched {
			v.index = r.Version.Index
			v.bound = bound(b.Policy, v.elapsed, p.longestGap())
		}
	}
	return v
}

// bound is the most tokens that a bucket which is refilled with such gaps can admit within elapsed.
func bound(p policy.Policy, elapsed, gap time.Duration) int64 {
	return p.Capacity + p.Rate.Over(elapsed) + 1 + p.Rate.Over(max(gap, p.Interval))
}

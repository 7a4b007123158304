package fetch

import (
	"context"
	"fmt"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// WithTemplates makes every key that a template matches a bucket of the
// template's policy: for programs that need no refiller. The templates' Enforce is
// policy.EnforceLazy: their buckets are credited when they are asked, exactly, and
// a full one is no key in Redis. Of two templates that match a key the more
// specific one counts; templates between which that would be a guess are refused.
//
// All programs that share the keys should have the same templates. Take, TakeUpTo,
// Wait, Peek and Return work on such buckets; to TakeAll, Reserve and
// takes with a request id they are unknown.
func WithTemplates(list ...policy.Template) Option { return templatesOption(list) }

type templatesOption []policy.Template

func (list templatesOption) applyClient(c *config) error {
	set, err := policy.NewTemplates(0, list, nil)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	for _, t := range set.All() {
		if t.Enforce != policy.EnforceLazy {
			return fmt.Errorf("%w: template %q: enforce is %s; without a refiller it must be %s", ErrInvalidOption, t.Prefix, t.Enforce, policy.EnforceLazy)
		}
	}
	c.templates = set
	return nil
}

// sendTake makes the call of one take.
func (c *Client) sendTake(ctx context.Context, key string, n int64, withTerms bool) (lua.TakeReply, error) {
	t := c.config.templates.Of(key)
	if t == nil {
		return lua.Take(ctx, c.store, key, n, withTerms)
	}
	r, err := c.sendLazy(ctx, key, t, []policy.Run{{N: n, Count: 1}}, false)
	if err != nil {
		return lua.TakeReply{}, err
	}
	reply := lua.TakeReply{OK: r.OK, Remaining: r.Remaining, Terms: r.Terms, Refilled: r.Refilled}
	if r.OK {
		reply.Taken = n
	} else {
		reply.Wait = r.Runs[0].Wait
	}
	return reply, nil
}

// sendUpTo makes the call of a take of up to n tokens.
func (c *Client) sendUpTo(ctx context.Context, key string, n int64) (lua.TakeReply, error) {
	t := c.config.templates.Of(key)
	if t == nil {
		return lua.TakeUpTo(ctx, c.store, key, n)
	}
	r, err := c.sendLazy(ctx, key, t, []policy.Run{{N: 1, Count: n}}, false)
	if err != nil {
		return lua.TakeReply{}, err
	}
	reply := lua.TakeReply{OK: true, Taken: n, Remaining: r.Remaining, Terms: r.Terms, Refilled: r.Refilled}
	if !r.OK {
		reply.Taken, reply.Wait = r.Runs[0].Taken, r.Runs[0].Wait
		reply.OK = reply.Taken > 0
	}
	return reply, nil
}

// sendMany makes the call of several takes.
func (c *Client) sendMany(ctx context.Context, key string, runs []policy.Run, withTerms, inLine bool) (lua.TakeManyReply, error) {
	if t := c.config.templates.Of(key); t != nil {
		return c.sendLazy(ctx, key, t, runs, inLine)
	}
	if inLine {
		return lua.TakeInLine(ctx, c.store, key, runs, withTerms)
	}
	return lua.TakeMany(ctx, c.store, key, runs, withTerms)
}

func (c *Client) sendLazy(ctx context.Context, key string, t *policy.Ruled, runs []policy.Run, inLine bool) (lua.TakeManyReply, error) {
	r, err := lua.LazyTake(ctx, c.store, key, &t.Terms, runs, inLine)
	if err == nil && r.Terms == nil {
		r.Terms = &t.Terms
	}
	return r.TakeManyReply, err
}

// sendReturn makes the call of a return. A lazy bucket has no eras.
func (c *Client) sendReturn(ctx context.Context, key string, n, era int64) (lua.ReturnReply, error) {
	if t := c.config.templates.Of(key); t != nil {
		return lua.ReturnReply{}, lua.LazyReturn(ctx, c.store, key, &t.Terms, n)
	}
	return lua.Return(ctx, c.store, key, n, era)
}

// sendPeek makes the call of a look at a bucket.
func (c *Client) sendPeek(ctx context.Context, key string) (lua.PeekReply, error) {
	t := c.config.templates.Of(key)
	if t == nil {
		return lua.Peek(ctx, c.store, key, 1)
	}
	r, err := lua.LazyPeek(ctx, c.store, key, &t.Terms, 1)
	if err != nil {
		return lua.PeekReply{}, err
	}
	if r.Terms == nil {
		r.Terms = &t.Terms
	}
	// What it lacks, less whole tokens, is the credit of the next one.
	carry := (r.Terms.Capacity-r.Remaining)*r.Terms.Per - r.Reset.Microseconds()*r.Terms.Tokens
	return lua.PeekReply{
		Tokens: r.Remaining, Wait: r.Runs[0].Wait, Terms: r.Terms, Carry: min(max(carry, 0), r.Terms.Per-1), Refilled: r.Refilled,
	}, nil
}

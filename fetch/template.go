package fetch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// WithTemplates makes every key that a template matches a bucket of the
// template's policy: for programs that need no refiller. The templates' Enforce is
// policy.EnforceLazy: their buckets are credited when they are asked, exactly, and
// a full one is no key in Redis. Of two templates that match a key the more
// specific one counts; templates between which that would be a guess are refused.
//
// The Client then doesn't look at the templates that refillers publish. All
// programs that share the keys should have the same templates. Take, TakeUpTo,
// TakeAll, Wait, Peek and Return work on such buckets; Reserve and takes with a
// request id are ErrLazyBucket.
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

// WithPublishedTemplates turns the templates that refillers publish on, which is the
// default, or off.
//
// On, the Client reads them from Redis when it is first used, looks whether they
// have changed some twice a second while it is used, and makes a bucket of every key
// that one of them matches. A key that none matches costs no more than one look in a
// tenth of a second, whatever the number of such keys, and leaves nothing.
//
// Off, nothing is read, and the keys of templates are unknown.
func WithPublishedTemplates(on bool) Option { return publishedOption(on) }

type publishedOption bool

func (on publishedOption) applyClient(c *config) error {
	c.published = bool(on)
	return nil
}

// sendTake makes the call of one take.
func (c *Client) sendTake(ctx context.Context, key string, n int64, withTerms bool) (lua.TakeReply, error) {
	t := c.templates.of(ctx, key)
	if t == nil {
		reply, err := lua.Take(ctx, c.store, key, n, withTerms)
		if t = c.templates.unknown(ctx, key, err); t == nil {
			return reply, err
		}
	}
	r, err := c.sendTemplate(ctx, key, t, []policy.Run{{N: n, Count: 1}}, withTerms, false)
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
	t := c.templates.of(ctx, key)
	if t == nil {
		reply, err := lua.TakeUpTo(ctx, c.store, key, n)
		if t = c.templates.unknown(ctx, key, err); t == nil {
			return reply, err
		}
	}
	r, err := c.sendTemplate(ctx, key, t, []policy.Run{{N: 1, Count: n}}, true, false)
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
	t := c.templates.of(ctx, key)
	if t == nil {
		many := lua.TakeMany
		if inLine {
			many = lua.TakeInLine
		}
		reply, err := many(ctx, c.store, key, runs, withTerms)
		if t = c.templates.unknown(ctx, key, err); t == nil {
			return reply, err
		}
	}
	return c.sendTemplate(ctx, key, t, runs, withTerms, inLine)
}

// sendTemplate makes the call of takes of a template's bucket. Its terms come with
// the answer if they were asked for, and whenever the script learned them.
func (c *Client) sendTemplate(ctx context.Context, key string, t *policy.Ruled, runs []policy.Run, withTerms, inLine bool) (lua.TakeManyReply, error) {
	if t.Enforce == policy.EnforceLazy {
		r, err := lua.LazyTake(ctx, c.store, key, &t.Terms, runs, inLine)
		if r.Terms == nil && (withTerms || !r.OK) {
			r.Terms = &t.Terms
		}
		return r.TakeManyReply, err
	}
	r, err := c.sendRefilled(ctx, key, t, runs, withTerms, inLine, 0)
	c.templates.heard(r.Terms)
	return r, err
}

// sendRefilled makes the call of takes of a refilled template's bucket, which
// creates it; without runs it is opened for another script, which may hold tokens for
// as long as hold.
func (c *Client) sendRefilled(ctx context.Context, key string, t *policy.Ruled, runs []policy.Run, withTerms, inLine bool, hold time.Duration) (lua.TakeManyReply, error) {
	call := lua.TemplateCall{Prefix: t.Prefix, Terms: t.Text, MaxKeys: t.MaxKeys, Hold: hold, Apart: c.apart}
	if !withTerms {
		k, _ := c.terms.get(key, time.Now())
		call.Capacity = k.limit()
	}
	if c.apart && t.MaxKeys > 0 {
		call.Terms = "" // it is created once it is known to be allowed
	}
	r, err := lua.TakeTemplate(ctx, c.store, key, call, runs, withTerms, inLine)
	if call.Terms == "" && errors.Is(err, lua.ErrUnknownBucket) {
		alive, countErr := lua.Alive(ctx, c.store, t.Prefix)
		if countErr != nil {
			return lua.TakeManyReply{}, countErr
		}
		if alive >= t.MaxKeys {
			return lua.TakeManyReply{}, lua.TooManyBuckets(t.Prefix, key, alive, t.MaxKeys)
		}
		call.Terms = t.Text
		r, err = lua.TakeTemplate(ctx, c.store, key, call, runs, withTerms, inLine)
	}
	if err == nil && r.Till != 0 {
		c.enter(ctx, key, lua.NewTemplate(t, c.apart), r.Till)
	}
	return r.TakeManyReply, err
}

// enter puts a bucket in the sets of its template, where these are apart from it.
// Should it fail, the bucket's next take that asks for its policy, or that is denied,
// enters it again.
func (c *Client) enter(ctx context.Context, key string, t *lua.Template, till int64) {
	ctx = context.WithoutCancel(ctx)
	job := func() {
		ctx, cancel := context.WithTimeout(ctx, lateGrace)
		defer cancel()
		_ = t.Enter(ctx, c.store, key, till)
	}
	if !c.workers.offer(job) {
		job()
	}
}

// open makes a refilled template's bucket exist, for a script that works on
// existing ones only and may hold tokens of it for as long as hold. The error is
// ErrLazyBucket for a lazy template's.
func (c *Client) open(ctx context.Context, key string, hold time.Duration) error {
	t := c.templates.of(ctx, key)
	if t == nil {
		return nil
	}
	if t.Enforce == policy.EnforceLazy {
		return lazyBucket(key, t)
	}
	_, err := c.sendRefilled(ctx, key, t, nil, true, false, hold)
	return err
}

func lazyBucket(key string, t *policy.Ruled) error {
	return fmt.Errorf("%w: bucket %q is of the template %q; with enforce: refilled it has them", ErrLazyBucket, key, t.Prefix)
}

// isLazy reports whether a key is a lazy template's.
func (c *Client) isLazy(ctx context.Context, key string) bool {
	t := c.templates.of(ctx, key)
	return t != nil && t.Enforce == policy.EnforceLazy
}

// sendReturn makes the call of a return. A lazy bucket has no eras, and a refilled
// one that doesn't exist is full.
func (c *Client) sendReturn(ctx context.Context, key string, n, era int64) (lua.ReturnReply, error) {
	t := c.templates.of(ctx, key)
	if t != nil && t.Enforce == policy.EnforceLazy {
		return lua.ReturnReply{}, lua.LazyReturn(ctx, c.store, key, &t.Terms, n)
	}
	reply, err := lua.Return(ctx, c.store, key, n, era)
	if t != nil && errors.Is(err, lua.ErrUnknownBucket) {
		return lua.ReturnReply{Clamped: n}, nil
	}
	return reply, err
}

// sendPeek makes the call of a look at a bucket.
func (c *Client) sendPeek(ctx context.Context, key string) (lua.PeekReply, error) {
	t := c.templates.of(ctx, key)
	if t == nil || t.Enforce == policy.EnforceRefilled {
		reply, err := lua.Peek(ctx, c.store, key, 1)
		if t == nil {
			t = c.templates.unknown(ctx, key, err)
		}
		switch {
		case t == nil || !errors.Is(err, lua.ErrUnknownBucket):
			return reply, err
		case t.Enforce == policy.EnforceRefilled: // as its first take finds it
			own, err := lua.Limit(ctx, c.store, key)
			if own == nil {
				own = &t.Terms
			}
			return lua.PeekReply{Tokens: own.Initial, Terms: own}, err
		}
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

// isApart reports whether the active sets are on other servers than the buckets.
func isApart(rdb redis.UniversalClient) bool {
	_, single := rdb.(*redis.Client)
	return !single
}

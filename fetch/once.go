package fetch

import (
	"context"
	"errors"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// putOnce puts a take with a request id to the bucket. Nothing is given back to
// callers who are gone: what was taken is the request's.
func (c *Client) putOnce(ctx context.Context, key string, n int64, cfg takeConfig) answer {
	k, _ := c.terms.get(key, time.Now())
	reply, err := twice(ctx, c, cfg.deadline, func(ctx context.Context) (lua.TakeReply, error) {
		if err := c.open(ctx, key, 0); err != nil {
			return lua.TakeReply{}, err
		}
		return lua.TakeOnce(ctx, c.store, key, cfg.request, policy.Run{N: n, Count: 1}, cfg.memory)
	}, nil)
	if err != nil {
		return answer{err: err}
	}
	return answer{reply: reply, known: c.learn(key, k, n, reply)}
}

// twice is do for a call that has its effect once, however often it is made,
// because the bucket knows its id. If the connection fails before the deadline it is
// made once more: its reply was lost, or it never arrived.
func twice[T any](ctx context.Context, c *Client, limit time.Duration,
	run func(context.Context) (T, error), late func(context.Context, T)) (T, error) {
	deadline := deadlineOf(ctx, limit, time.Now())
	for again := false; ; again = true {
		reply, err := do(ctx, c, limit, run, late)
		if err == nil || again || !errors.Is(err, ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			return reply, err
		}
		if !deadline.IsZero() {
			if limit = time.Until(deadline); limit <= 0 {
				return reply, err
			}
		}
	}
}

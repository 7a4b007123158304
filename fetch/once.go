package fetch

import (
	"context"
	"errors"
	"time"

	"github.com/tokenrefill/refiller/lua"
)

// putOnce puts a take with a request id to the bucket. If the connection fails
// before the deadline it asks once more, since the bucket knows the request
// whether its reply was lost or it never arrived. Nothing is given back to
// callers who are gone: what was taken is the request's.
func (c *Client) putOnce(ctx context.Context, key string, n int64, cfg takeConfig) answer {
	deadline := deadlineOf(ctx, cfg.deadline, time.Now())
	limit := cfg.deadline
	for again := false; ; again = true {
		k, _ := c.terms.get(key, time.Now())
		reply, err := do(ctx, c, limit, func(ctx context.Context) (lua.TakeReply, error) {
			return lua.TakeOnce(ctx, c.store, key, cfg.request, n, cfg.memory)
		}, nil)
		if err == nil {
			return answer{reply: reply, known: c.learn(key, k, n, reply)}
		}
		if again || !errors.Is(err, ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			return answer{err: err}
		}
		if !deadline.IsZero() {
			if limit = time.Until(deadline); limit <= 0 {
				return answer{err: err}
			}
		}
	}
}

// Package limitcall makes the calls of the middlewares and of the sidecar to limiters of any kind. It takes tokens
// without waiting, and returns tokens. The limiters themselves are in package limit.
package limitcall

import (
	"context"
	"time"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/limit/pacing"
)

// decider is a limiter of several limits: a limit.Many, or another type with these methods.
type decider interface {
	Decide(ctx context.Context, n int64, keys ...string) (limit.Decision, error)
	Undo(ctx context.Context, d limit.Decision, keys ...string) error
}

var _ decider = (*limit.Many)(nil)

// Take takes n tokens of a key, all or nothing, and returns at once. With a pacing.Limiter, the caller must wait for
// the decision's Wait before it uses the tokens. A limit.Many also sets DeniedBy and Limits; other limiters have no
// names for them.
func Take(ctx context.Context, l limit.Limiter, key string, n int64, opts ...fetch.CallOption) (limit.Decision, error) {
	switch l := l.(type) { // the Take of these two would wait
	case decider:
		return l.Decide(ctx, n, key)
	case *pacing.Limiter:
		p, err := l.Reserve(ctx, key, n, opts...)
		return limit.Decision{Result: p.Result, Wait: p.Wait}, err
	}
	r, err := l.Take(ctx, key, n, opts...)
	return limit.Decision{Result: r}, err
}

// giveBackTime is the least time for returning tokens: a fetch.Client may need it for a distant server.
const giveBackTime = time.Second

// Returns reports whether GiveBack can return tokens to a limiter. The tokens of a pacing.Limiter can't be returned.
func Returns(l limit.Limiter) bool {
	switch l.(type) {
	case decider, limit.Undoer:
		return true
	}
	return false
}

// GiveBack returns the tokens of a decision of Take to the limiter, if Returns is true for it. It does not stop when
// ctx ends, because the call for which the tokens were taken may be over. Its time limit is timeout, or a second if
// that is longer.
func GiveBack(ctx context.Context, l limit.Limiter, key string, d limit.Decision, timeout time.Duration) error {
	if d.Taken == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(timeout, giveBackTime))
	defer cancel()
	switch l := l.(type) {
	case decider:
		return l.Undo(ctx, d, key)
	case limit.Undoer:
		return l.Undo(ctx, key, d.Result)
	}
	return nil
}

// Bound returns a context and options for a call of a limiter about a key. A timeout above 0 is the time limit of the
// call. If timeout is 0, a limiter with a method Timeout, such as a fetch.Client, applies its own time limit. So it can
// still answer by the bucket's degraded mode. Any other limiter gets the time limit fallback.
func Bound(ctx context.Context, l limit.Limiter, key string, timeout, fallback time.Duration) (
	context.Context, context.CancelFunc, []fetch.CallOption,
) {
	measured, ok := l.(interface {
		Timeout(key string) time.Duration
	})
	if timeout == 0 && ok {
		return ctx, func() {}, []fetch.CallOption{fetch.WithTimeout(measured.Timeout(key))}
	}
	if timeout == 0 {
		timeout = fallback
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	return ctx, cancel, nil
}

// Package limitcall bounds the time of the middlewares' calls to a limiter.
package limitcall

import (
	"context"
	"time"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit"
)

// Bound returns a context and options for a call of a limiter about a key. A timeout above 0 bounds the call. With 0, a
// limiter that measures the distance of its server keeps the time itself, as a fetch.Client does, so that it answers as
// a bucket's degraded mode says; any other limiter gets fallback.
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

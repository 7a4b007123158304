package limit

import (
	"context"

	"github.com/tokenrefill/refiller/fetch"
)

// Limiter is what takes tokens: any limiter below this package, Many, and, by
// way of Buckets, a fetch.Client.
type Limiter interface {
	// Take takes n tokens, all or nothing. A denial is a result.
	Take(ctx context.Context, key string, n int64) (fetch.Result, error)
}

// Returner is a Limiter that takes tokens back.
type Returner interface {
	// Return gives n tokens back.
	Return(ctx context.Context, key string, n int64) error
}

// Buckets makes a Limiter, and a Returner, of a client of refilled buckets; the
// options apply to each take.
func Buckets(c *fetch.Client, opts ...fetch.TakeOption) Limiter { return buckets{c, opts} }

type buckets struct {
	client *fetch.Client
	opts   []fetch.TakeOption
}

func (b buckets) Take(ctx context.Context, key string, n int64) (fetch.Result, error) {
	return b.client.Take(ctx, key, n, b.opts...)
}

func (b buckets) Return(ctx context.Context, key string, n int64) error {
	return b.client.Return(ctx, key, n)
}

var _ Returner = buckets{}

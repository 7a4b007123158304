package envoy

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/window"
)

// taker is what a descriptor takes from: a fetch.Client, a window, or nothing.
type taker interface {
	Take(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error)
	TakeUpTo(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error)
	Peek(ctx context.Context, key string, opts ...fetch.CallOption) (fetch.Result, error)
	Undo(ctx context.Context, key string, r fetch.Result) error
	Return(ctx context.Context, key string, n int64, opts ...fetch.CallOption) error
}

// unit is a length of time that limits are given for.
type unit struct {
	name   string
	length time.Duration
}

var units = func() map[string]unit {
	const day = 24 * time.Hour
	m := make(map[string]unit)
	for _, u := range []unit{
		{"second", time.Second}, {"minute", time.Minute}, {"hour", time.Hour}, {"day", day},
		{"week", 7 * day}, {"month", 30 * day}, {"year", 365 * day},
	} {
		m[u.name] = u
	}
	return m
}()

// quota is so many requests in a unit of time.
type quota struct {
	unit     unit
	requests uint32
}

// Windows keeps the windows of rate limits in Redis. It is safe for concurrent use.
type Windows struct {
	rdb      redis.UniversalClient
	deadline func() time.Duration

	mu   sync.Mutex
	made map[quota]taker
}

// NewWindows makes Windows whose calls have a deadline, more than 0. It is asked for each call.
func NewWindows(rdb redis.UniversalClient, deadline func() time.Duration) *Windows {
	return &Windows{rdb: rdb, deadline: deadline, made: make(map[quota]taker)}
}

// mostMade bounds the limiters that are kept: Envoy may send limits of its own.
const mostMade = 1024

// taker is the limiter of a quota, which is made once.
func (w *Windows) taker(q quota) (taker, error) {
	if q.requests == 0 {
		return blocked{}, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if t := w.made[q]; t != nil {
		return t, nil
	}
	l, err := window.New(w.rdb, window.Config{Name: q.unit.name, Limit: int64(q.requests), Window: q.unit.length})
	if err != nil {
		return nil, err
	}
	if len(w.made) >= mostMade {
		clear(w.made)
	}
	t := &timed{l, w.deadline}
	w.made[q] = t
	return t, nil
}

// timed is a window whose calls have a deadline.
type timed struct {
	window   *window.Limiter
	deadline func() time.Duration
}

// Take implements taker.
func (t *timed) Take(ctx context.Context, key string, n int64, _ ...fetch.CallOption) (fetch.Result, error) {
	return t.window.Take(ctx, key, n, fetch.WithTimeout(t.deadline()))
}

// TakeUpTo implements taker: it takes what is left where n is more than that.
func (t *timed) TakeUpTo(ctx context.Context, key string, n int64, _ ...fetch.CallOption) (fetch.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, t.deadline())
	defer cancel()
	for {
		r, err := t.window.Take(ctx, key, n)
		if errors.Is(err, fetch.ErrExceedsCapacity) {
			r, err = t.window.Peek(ctx, key)
		}
		if err != nil || r.Taken > 0 || r.Remaining == 0 {
			return r, err
		}
		n = r.Remaining
	}
}

// Peek implements taker.
func (t *timed) Peek(ctx context.Context, key string, _ ...fetch.CallOption) (fetch.Result, error) {
	return t.window.Peek(ctx, key, fetch.WithTimeout(t.deadline()))
}

// Undo implements taker.
func (t *timed) Undo(ctx context.Context, key string, r fetch.Result) error {
	ctx, cancel := context.WithTimeout(ctx, t.deadline())
	defer cancel()
	return t.window.Undo(ctx, key, r)
}

// Return implements taker.
func (t *timed) Return(ctx context.Context, key string, n int64, _ ...fetch.CallOption) error {
	return t.window.Return(ctx, key, n, fetch.WithTimeout(t.deadline()))
}

// blocked has no tokens, ever.
type blocked struct{}

// Take implements taker.
func (blocked) Take(context.Context, string, int64, ...fetch.CallOption) (fetch.Result, error) {
	return fetch.Result{RetryAfter: fetch.Never, ResetAfter: fetch.Never}, nil
}

// TakeUpTo implements taker.
func (b blocked) TakeUpTo(ctx context.Context, key string, n int64, _ ...fetch.CallOption) (fetch.Result, error) {
	return b.Take(ctx, key, n)
}

// Peek implements taker.
func (b blocked) Peek(ctx context.Context, key string, _ ...fetch.CallOption) (fetch.Result, error) {
	return b.Take(ctx, key, 1)
}

// Undo implements taker.
func (blocked) Undo(context.Context, string, fetch.Result) error { return nil }

// Return implements taker.
func (blocked) Return(context.Context, string, int64, ...fetch.CallOption) error { return nil }

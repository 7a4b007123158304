package envoy

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/window"
)

// taker is the source of a descriptor's tokens. It is a fetch.Client, a window, or blocked, which has no tokens.
type taker interface {
	Take(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error)
	TakeUpTo(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error)
	Peek(ctx context.Context, key string, opts ...fetch.CallOption) (fetch.Result, error)
	Undo(ctx context.Context, key string, r fetch.Result) error
	Return(ctx context.Context, key string, n int64, opts ...fetch.CallOption) error
}

// unit is a length of time for which limits are given.
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

// quota is a number of requests in a unit of time.
type quota struct {
	unit     unit
	requests uint32
}

// Windows keeps the windows of rate limits in Redis. It is safe for concurrent use.
type Windows struct {
	rdb       redis.UniversalClient
	deadline  func() time.Duration
	prefix    string
	exhausted *exhausted

	mu   sync.Mutex
	made map[quota]taker
}

// WindowOptions are the options of Windows.
type WindowOptions struct {
	// Prefix is the beginning of the windows' keys in Redis: up to MaxPrefix bytes without braces.
	Prefix string
	// Remembered is the largest number of windows without tokens that are denied from memory; 0 means none.
	Remembered int
}

// MaxPrefix bounds the bytes of a prefix.
const MaxPrefix = 64

const mostRemembered = 1 << 20

// DefaultWindowOptions returns the default options, which remember 16,384 windows.
func DefaultWindowOptions() WindowOptions { return WindowOptions{Remembered: 1 << 14} }

// Validate returns an error for the first option that is out of range. The error names the option's flag of "consumer
// serve".
func (o WindowOptions) Validate() error {
	if len(o.Prefix) > MaxPrefix || strings.ContainsAny(o.Prefix, "{}") {
		return fmt.Errorf("--envoy-key-prefix %q: want up to %d bytes without braces", o.Prefix, MaxPrefix)
	}
	if o.Remembered < 0 || o.Remembered > mostRemembered {
		return fmt.Errorf("--envoy-local-cache %d: want 0 to %d", o.Remembered, mostRemembered)
	}
	return nil
}

// NewWindows makes Windows. Each call may take the time that deadline returns, which must be more than 0.
func NewWindows(rdb redis.UniversalClient, deadline func() time.Duration, o WindowOptions) *Windows {
	return &Windows{
		rdb: rdb, deadline: deadline, prefix: o.Prefix, exhausted: newExhausted(o.Remembered, time.Now),
		made: make(map[quota]taker),
	}
}

// mostMade is the largest number of limiters that are kept. Nothing else bounds their number, because Envoy may send
// limits that are not in the file.
const mostMade = 1024

// taker returns the limiter of a quota, and makes it if it doesn't exist yet.
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
	t := &timed{window: l, quota: q, deadline: w.deadline, exhausted: w.exhausted}
	w.made[q] = t
	return t, nil
}

// timed is a window whose calls have a deadline. It denies from memory while it is known to be exhausted.
type timed struct {
	window    *window.Limiter
	quota     quota
	deadline  func() time.Duration
	exhausted *exhausted
}

// Take implements taker.
func (t *timed) Take(ctx context.Context, key string, n int64, _ ...fetch.CallOption) (fetch.Result, error) {
	if r, ok := t.exhausted.denial(windowID{t.quota, key}); ok {
		return r, nil
	}
	r, err := t.window.Take(ctx, key, n, fetch.WithTimeout(t.deadline()))
	if err == nil {
		t.exhausted.remember(windowID{t.quota, key}, r)
	}
	return r, err
}

// TakeUpTo implements taker: if fewer than n tokens are left, it takes all of them.
func (t *timed) TakeUpTo(ctx context.Context, key string, n int64, _ ...fetch.CallOption) (fetch.Result, error) {
	if r, ok := t.exhausted.denial(windowID{t.quota, key}); ok {
		return r, nil
	}
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
	defer t.exhausted.forget(windowID{t.quota, key})
	return t.window.Undo(ctx, key, r)
}

// Return implements taker.
func (t *timed) Return(ctx context.Context, key string, n int64, _ ...fetch.CallOption) error {
	defer t.exhausted.forget(windowID{t.quota, key})
	return t.window.Return(ctx, key, n, fetch.WithTimeout(t.deadline()))
}

// blocked is a taker that never has tokens.
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

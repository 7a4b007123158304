package fetch

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/internal/prompt"
)

const (
	// lateGrace is how long the reply of a call is still awaited after its caller
	// stopped waiting, and how long the return of its tokens may take.
	lateGrace = time.Second
	// minSocketWait is the shortest deadline that a caller may set on a socket: a
	// socket that times out is closed, with whatever its reply would have said.
	minSocketWait = 10 * time.Millisecond
	// maxSocketWait is how long a caller who can be cancelled may wait on a socket,
	// which doesn't notice.
	maxSocketWait = prompt.MaxSocketWait
)

// direct reports whether a caller may make a call itself.
func (c *Client) direct(ctx context.Context, deadline, now time.Time) bool {
	if deadline.IsZero() {
		return ctx.Done() == nil
	}
	left := deadline.Sub(now)
	return c.prompt && left >= minSocketWait && (ctx.Done() == nil || left <= maxSocketWait)
}

// do makes one call and waits for it, but no longer than ctx and limit (0: none)
// allow. If the caller stops waiting before the call is sent, it is not sent; if
// later, and the call succeeds after all, its reply goes to late unless that is
// nil.
func do[T any](ctx context.Context, c *Client, limit time.Duration,
	run func(context.Context) (T, error), late func(context.Context, T)) (T, error) {
	var none T
	if err := ctx.Err(); err != nil {
		return none, fmt.Errorf("fetch: %w", err)
	}
	if err := c.workers.enter(); err != nil {
		return none, err
	}
	defer c.workers.leave()

	now := time.Now()
	deadline := deadlineOf(ctx, limit, now)
	if c.direct(ctx, deadline, now) {
		socket := newSocketContext(ctx, deadline, &c.alarms)
		defer socket.release()
		reply, err := run(socket)
		return reply, c.directFailure(ctx, failure(err))
	}

	patience := c.newLimitTimer(limit, now)
	defer c.endLimitTimer(patience)
	type outcome struct {
		reply T
		err   error
	}
	var (
		claimed atomic.Bool // by who comes first: the reply, or the caller's end of patience
		done    = make(chan outcome, 1)
	)
	callCtx, cancel := newCallContext(ctx, deadline)
	defer cancel()
	job := func() {
		reply, err := run(callCtx) // go-redis sends nothing once callCtx has ended
		if claimed.CompareAndSwap(false, true) {
			done <- outcome{reply, failure(err)}
			return
		}
		if err == nil && late != nil {
			late(callCtx, reply)
		}
	}
	if !c.workers.hand(ctx, patience.over, job) {
		return none, c.unheard(ctx, limit)
	}
	select {
	case o := <-done:
		return o.reply, o.err
	case <-ctx.Done():
	case <-patience.over:
	}
	if !claimed.CompareAndSwap(false, true) {
		o := <-done
		return o.reply, o.err
	}
	c.stats.abandoned.Add(1)
	return none, impatience(ctx, limit)
}

// unheard is the error of a caller for whom no worker was found.
func (c *Client) unheard(ctx context.Context, limit time.Duration) error {
	select {
	case <-c.workers.quit:
		return ErrClosed
	default:
		return impatience(ctx, limit)
	}
}

// impatience is the error of a caller who stopped waiting.
func impatience(ctx context.Context, limit time.Duration) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("fetch: %w", err)
	}
	return fmt.Errorf("%w: no answer within %s: %w", ErrUnavailable, limit, context.DeadlineExceeded)
}

// directFailure is the failure of a call that its caller made.
func (c *Client) directFailure(ctx context.Context, err error) error {
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	c.stats.abandoned.Add(1)
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("fetch: %w", err)
	}
	// The socket may be a little ahead of the context's own timer.
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= 0 {
		return fmt.Errorf("fetch: %w", context.DeadlineExceeded)
	}
	return err
}

// unknownOutcome counts the tokens of a call that failed but may have taken them.
func (c *Client) unknownOutcome(tokens int64, err error) {
	if err != nil && !answered(err) && !notRun(err) {
		c.stats.lost.Add(tokens)
	}
}

// limitTimer is a timer that is used again.
type limitTimer struct {
	over  <-chan time.Time // nil: never
	timer *time.Timer
}

// newLimitTimer is for a call that began at the instant.
func (c *Client) newLimitTimer(limit time.Duration, began time.Time) limitTimer {
	if limit == 0 {
		return limitTimer{}
	}
	left := limit - time.Since(began)
	timer, ok := c.timers.Get().(*time.Timer)
	if !ok {
		timer = time.NewTimer(left)
	} else {
		timer.Reset(left)
	}
	return limitTimer{over: timer.C, timer: timer}
}

func (c *Client) endLimitTimer(t limitTimer) {
	if t.timer != nil {
		t.timer.Stop()
		c.timers.Put(t.timer)
	}
}

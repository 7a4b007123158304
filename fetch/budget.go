package fetch

import (
	"context"
	"time"

	"github.com/tokenrefill/refiller/internal/engine"
)

// budget is how long a call may take: until the caller's context ends or the timeout is over, whichever is earlier.
type budget struct {
	ctx      context.Context
	cfg      *callConfig
	began    time.Time
	deadline time.Time // the earlier of the context's and the timeout's; zero: none
	latest   time.Time // the deadline may be postponed to this instant while connections are opened; zero: it may not
	distance distance  // of the server when the call began
}

// budgetOf returns the budget of a call that begins now. A default timeout depends on the server, so toNode adds it
// later.
func budgetOf(ctx context.Context, cfg *callConfig) budget {
	b := budget{ctx: ctx, cfg: cfg, began: time.Now()}
	b.deadline, _ = ctx.Deadline()
	if cfg.timeout > 0 {
		b.deadline = b.within(cfg.timeout)
	}
	return b
}

// within returns the deadline, or the instant d after the call began, whichever is earlier.
func (b *budget) within(d time.Duration) time.Time {
	if end := b.began.Add(d); b.deadline.IsZero() || end.Before(b.deadline) {
		return end
	}
	return b.deadline
}

// toNode completes the budget for calls to a server: a default timeout depends on the server's distance.
func (b *budget) toNode(s *node) {
	b.distance = s.distance()
	if b.cfg.timed {
		return
	}
	latest := b.within(maxDefaultTimeout)
	if end := b.within(b.distance.timeout()); end != b.deadline {
		b.deadline = end
		b.latest = latest
	}
}

// affords reports whether at least this much time is left.
func (b *budget) affords(d time.Duration) bool {
	return b.deadline.IsZero() || time.Until(b.deadline) >= d
}

// wait waits until done is closed, at most for the remaining time divided by part. If done isn't closed by then, wait
// returns the reason.
func (b *budget) wait(done <-chan struct{}, part time.Duration) error {
	var over <-chan time.Time
	if !b.deadline.IsZero() {
		timer := time.NewTimer(time.Until(b.deadline) / part)
		defer timer.Stop()
		over = timer.C
	}
	select {
	case <-done:
		return nil
	case <-over:
		return context.DeadlineExceeded
	case <-b.ctx.Done():
		return b.ctx.Err()
	}
}

// internalBudget returns the budget of a call that the Client makes for itself. Its time is the Client's timeout, but
// at least Grace.
func (c *Client) internalBudget(ctx context.Context) budget {
	cfg := c.config.callConfig
	cfg.timeout = max(cfg.timeout, engine.Grace)
	cfg.timed = true
	return budgetOf(ctx, &cfg)
}

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
}

// budgetOf is the budget of a call that begins now.
func budgetOf(ctx context.Context, cfg *callConfig) budget {
	b := budget{ctx: ctx, cfg: cfg, began: time.Now()}
	b.deadline, _ = ctx.Deadline()
	if cfg.timeout > 0 {
		if end := b.began.Add(cfg.timeout); b.deadline.IsZero() || end.Before(b.deadline) {
			b.deadline = end
		}
	}
	return b
}

// wait waits until something is done, for a part of the time. The error is why it was not done.
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

// own is the budget of a call that the Client makes for itself: it has as long as the timeout says, at least Grace.
func (c *Client) own(ctx context.Context) budget {
	cfg := c.config.callConfig
	cfg.timeout = max(cfg.timeout, engine.Grace)
	return budgetOf(ctx, &cfg)
}

package dev

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
)

const (
	takeDeadline  = time.Second // a busy laptop is not a silent store
	closeDeadline = 2 * time.Second
)

// consumer is the demo consumer.
type consumer struct {
	client  *fetch.Client
	started time.Time
	counts  counters
}

// counters count what the consumer was told of the watched bucket.
type counters struct{ admitted, denied, failed atomic.Int64 }

// taken is a snapshot of them.
type taken struct {
	admitted, denied int64 // tokens
	failed           int64 // takes without an answer
}

func newConsumer(rdb redis.UniversalClient) (*consumer, error) {
	// What the demonstration shows are the replicas' refills.
	client, err := fetch.New(rdb, fetch.WithTimeout(takeDeadline), fetch.WithRescue(false))
	if err != nil {
		return nil, fmt.Errorf("dev: demo consumer: %w", err)
	}
	return &consumer{client: client, started: time.Now()}, nil
}

// run takes as the demands say until ctx ends.
func (c *consumer) run(ctx context.Context) {
	var all sync.WaitGroup
	for _, d := range demands {
		all.Go(func() { c.take(ctx, d) })
	}
	all.Wait()
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeDeadline)
	defer cancel()
	_ = c.client.Close(closing) // what still hangs has no owner but the process, which ends
}

// take makes one take after the other. Those that fall due while one is under way are left out.
func (c *consumer) take(ctx context.Context, d demand) {
	ticker := time.NewTicker(d.every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		// A take that has begun is finished, so that its tokens are counted.
		r, err := c.client.Take(context.WithoutCancel(ctx), d.key, d.tokens)
		switch {
		case d.key != watched:
		case err != nil:
			c.counts.failed.Add(1)
		case r.OK:
			c.counts.admitted.Add(r.Taken)
		default:
			c.counts.denied.Add(d.tokens)
		}
	}
}

func (c *consumer) taken() taken {
	return taken{admitted: c.counts.admitted.Load(), denied: c.counts.denied.Load(), failed: c.counts.failed.Load()}
}

// per is the counts since before, per second.
func (t taken) per(before taken, d time.Duration) taken {
	rate := func(n int64) int64 { return int64(float64(n)/d.Seconds() + 0.5) }
	return taken{admitted: rate(t.admitted - before.admitted), denied: rate(t.denied - before.denied), failed: t.failed - before.failed}
}

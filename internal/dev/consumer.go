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
	takeEvery     = 5 * time.Millisecond
	maxBehind     = 100 * time.Millisecond
	takeDeadline  = time.Second // longer than the default, since a busy laptop is slow
	closeDeadline = 2 * time.Second
)

// demand is the demand of a consumer for the tokens of a bucket: tokens per take, and tokens per second.
type demand struct {
	key    string
	tokens int64
	flow   string // the flow that it takes for; empty for none
	wanted func() float64
}

// consumer is a demo consumer. It counts the results of the takes of its first demand.
type consumer struct {
	client                   *fetch.Client
	demands                  []demand
	got                      []atomic.Int64 // tokens of each demand
	admitted, denied, failed atomic.Int64
}

// taken counts the results of a consumer's takes.
type taken struct {
	admitted, denied int64 // tokens
	failed           int64 // takes without an answer
}

func newConsumer(rdb redis.UniversalClient, demands []demand) (*consumer, error) {
	// The playground shows the refills of replicas, so its consumer makes none.
	client, err := fetch.New(rdb, fetch.WithTimeout(takeDeadline), fetch.WithRescue(false))
	if err != nil {
		return nil, fmt.Errorf("dev: demo consumer: %w", err)
	}
	return &consumer{client: client, demands: demands, got: make([]atomic.Int64, len(demands))}, nil
}

// run takes tokens according to the demands, until ctx ends.
func (c *consumer) run(ctx context.Context) {
	var all sync.WaitGroup
	for i, d := range c.demands {
		all.Go(func() { c.take(ctx, d, i) })
	}
	all.Wait()
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeDeadline)
	defer cancel()
	_ = c.client.Close(closing) // calls that still hang end with the process
}

// take makes one take after the other. If a take lasts longer than maxBehind, it leaves out the takes for the time
// beyond maxBehind.
func (c *consumer) take(ctx context.Context, d demand, i int) {
	var opts []fetch.CallOption
	if d.flow != "" {
		opts = append(opts, fetch.WithFlow(d.flow))
	}
	ticker := time.NewTicker(takeEvery)
	defer ticker.Stop()
	last, due := time.Now(), 0.0
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now := time.Now()
		due += d.wanted() * min(now.Sub(last), maxBehind).Seconds()
		for last = now; due >= float64(d.tokens); due -= float64(d.tokens) {
			// The end of ctx doesn't end a take, so that its tokens are counted.
			r, err := c.client.Take(context.WithoutCancel(ctx), d.key, d.tokens, opts...)
			c.got[i].Add(r.Taken)
			switch {
			case i > 0:
			case err != nil:
				c.failed.Add(1)
			case r.OK:
				c.admitted.Add(r.Taken)
			default:
				c.denied.Add(d.tokens)
			}
		}
	}
}

func (c *consumer) taken() taken {
	return taken{admitted: c.admitted.Load(), denied: c.denied.Load(), failed: c.failed.Load()}
}

// per returns the counts since before, per second. Failed takes are not divided by the time.
func (t taken) per(before taken, d time.Duration) taken {
	rate := func(n int64) int64 { return int64(float64(n)/d.Seconds() + 0.5) }
	return taken{admitted: rate(t.admitted - before.admitted), denied: rate(t.denied - before.denied),
		failed: t.failed - before.failed}
}

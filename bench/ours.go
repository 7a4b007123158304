package main

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// ours are the ways of package fetch.
func ours() []contender {
	return []contender{
		{name: "fetch", open: openFetch(), skip: onlyDenied},
		{name: "fetch, coalesced", open: openFetch(fetch.WithDenyCache(false))},
		{name: "fetch, leased", open: inMemory(openFetch(fetch.WithLease(1_000_000, time.Second))), skip: neverDenied},
		{name: "fetch, plain", open: openFetch(fetch.WithDenyCache(false))},
	}
}

// deadline is the longest that a caller may wait on a socket itself. The other
// libraries have no deadline, and a machine that does other things as well stops a
// process for longer than fetch's own.
const deadline = 100 * time.Millisecond

func openFetch(opts ...fetch.Option) opener {
	return func(ctx context.Context, s *server, w workload, names []string) (*session, error) {
		rdb := redis.NewClient(s.clientOptions())
		for _, name := range names {
			if err := createBucket(ctx, rdb, name, w); err != nil {
				return nil, err
			}
		}
		client, err := fetch.New(rdb, append([]fetch.Option{fetch.WithTimeout(deadline)}, opts...)...)
		if err != nil {
			return nil, err
		}
		take := func(ctx context.Context, key int) (bool, error) {
			r, err := client.Take(ctx, names[key], 1)
			return r.OK, err
		}
		closeClient := func() error { return client.Close(context.Background()) }
		return &session{take: take, close: closeAll(closeClient, rdb.Close)}, nil
	}
}

// inMemory marks the sessions of a contender that mostly takes without a call.
func inMemory(open opener) opener {
	return func(ctx context.Context, s *server, w workload, names []string) (*session, error) {
		out, err := open(ctx, s, w, names)
		if err != nil {
			return nil, err
		}
		out.fast = true
		return out, nil
	}
}

// createBucket makes a bucket that nobody refills.
func createBucket(ctx context.Context, rdb lua.Client, name string, w workload) error {
	p := policy.Policy{Capacity: plenty, Rate: policy.Rate{Tokens: 1, Per: hour}, Interval: policy.MaxInterval}
	if w.denied {
		p.Initial = new(int64)
	}
	if err := p.Validate(); err != nil {
		return err
	}
	terms := p.Terms(policy.Fence{})
	out, err := lua.Refill(ctx, rdb, name, policy.Call{Create: policy.CreateInitial, Terms: &terms})
	if err == nil && out.Status != policy.StatusInitialised {
		err = fmt.Errorf("status %v", out.Status)
	}
	if err != nil {
		return fmt.Errorf("create bucket %q: %w", name, err)
	}
	return nil
}

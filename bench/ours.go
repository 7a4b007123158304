package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Names of the contenders that use package fetch.
const (
	template = "fetch, of a template"  // takes from buckets of a template
	asGiven  = "fetch, default client" // a go-redis client with its default options
)

// ours returns the contenders that use package fetch, all with its default timeout.
func ours() []contender {
	every := []fetch.Option{fetch.WithDenyCache(false)}
	return []contender{
		{name: "fetch", open: openFetch(keeps, createBucket), skip: onlyDenied},
		{name: "fetch, coalesced", open: openFetch(keeps, createBucket, every...)},
		{name: asGiven, open: openFetch(ignores, createBucket, every...)},
		{name: template, open: openFetch(keeps, publishTemplate, every...), skip: neverDenied},
		{name: "fetch, leased", open: inMemory(openFetch(keeps, createBucket, fetch.WithLease(1_000_000, time.Second))),
			skip: neverDenied},
	}
}

// keeps is for go-redis clients whose sockets observe the deadlines of contexts. It changes nothing.
func keeps(*redis.Options) {}

// ignores is for go-redis clients whose sockets ignore the deadlines of contexts, which is the default of go-redis.
func ignores(o *redis.Options) { o.ContextTimeoutEnabled = false }

func openFetch(change func(*redis.Options), create func(ctx context.Context, rdb *redis.Client, name string,
	w workload) error, opts ...fetch.Option) opener {
	return func(ctx context.Context, s *server, w workload, names []string) (*session, error) {
		o := s.clientOptions()
		change(o)
		rdb := redis.NewClient(o)
		for _, name := range names {
			if err := create(ctx, s.rdb, name, w); err != nil {
				return nil, err
			}
		}
		client, err := fetch.New(rdb, opts...)
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

// inMemory marks the sessions of a contender as fast, because most of its takes make no call.
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

// createBucket creates a bucket. No replica refills it.
func createBucket(ctx context.Context, rdb *redis.Client, name string, w workload) error {
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

// publishTemplate publishes a template, so that the first take of each bucket creates it.
func publishTemplate(ctx context.Context, rdb *redis.Client, name string, _ workload) error {
	prefix, _, _ := strings.Cut(name, ":bench:")
	if !strings.HasSuffix(name, ":0") {
		return nil // the template was published before
	}
	set, err := policy.NewTemplates(1, []policy.Template{{Prefix: prefix + ":", Policy: policy.Policy{
		Capacity: plenty, Rate: policy.Rate{Tokens: 1, Per: hour}, Interval: policy.MaxInterval,
	}}}, nil)
	if err == nil {
		_, err = lua.PublishTemplates(ctx, rdb, set)
	}
	return err
}

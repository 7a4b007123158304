package fetch

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/tokenrefill/refiller/lua"
)

const (
	// readyTime bounds Ready, even if its context has no deadline or a later one.
	readyTime = time.Minute
	// readyTrips is how many round trips measure a distance: the first one may open a connection.
	readyTrips = 3
	// keysTried is how many keys are tried to find one for each master of a Cluster. A master with a single slot is
	// missed only once in 10^5 times.
	keysTried = 12 * lua.Slots
)

// Ready opens a connection to each server, reads the published templates and measures the round trips. After that, even
// the first take needs only one round trip, and the default timeout suits the distance. Call it before a program
// accepts work. A readiness probe may call it again. It takes no tokens.
//
// It returns nil when takes can succeed. Otherwise it returns ErrClosed, the context's error if that was cancelled, or
// ErrUnavailable, which wraps the cause. An open breaker is such a failure. Ready returns at the first failure, and at
// the latest when ctx ends or after a minute.
func (c *Client) Ready(ctx context.Context) error {
	if !c.life.enter() {
		return ErrClosed
	}
	defer c.life.leave()
	ctx, cancel := context.WithTimeout(ctx, readyTime)
	defer cancel()
	for _, step := range []func(context.Context) error{c.nodes.connect, c.measure, c.readTemplates} {
		if err := step(ctx); err != nil {
			return fmt.Errorf("fetch: not ready: %w", failure(ctx, err))
		}
	}
	return nil
}

// connect opens a connection of each go-redis client that the Client made, except for the one for lone calls, which can
// do without. measure opens the connections of the others.
func (ns *nodes) connect(ctx context.Context) error {
	var pings errgroup.Group
	for _, own := range ns.own {
		switch own := own.(type) {
		case *redis.Client:
			if own == ns.express {
				continue
			}
			pings.Go(func() error { return unlessRefused(own.Ping(ctx).Err()) })
		case *redis.ClusterClient:
			pings.Go(func() error {
				return own.ForEachMaster(ctx, func(ctx context.Context, master *redis.Client) error {
					return unlessRefused(master.Ping(ctx).Err())
				})
			})
		}
	}
	return pings.Wait()
}

// measure makes round trips through each queue. It also fails while a breaker is open.
func (c *Client) measure(ctx context.Context) error {
	var pings errgroup.Group
	for s, key := range c.nodes.withKeys(ctx) {
		pings.Go(func() error {
			for range readyTrips {
				t := &task{c: c, node: s, budget: budgetOf(ctx, &callConfig{timed: true})}
				err := t.Process(ctx, redis.NewIntCmd(ctx, "exists", key))
				if unlessRefused(err) != nil {
					return err
				}
			}
			return s.refuses()
		})
	}
	return pings.Wait()
}

// withKeys returns the servers that hold keys, each with a key that belongs to it.
func (ns *nodes) withKeys(ctx context.Context) map[*node]string {
	found := make(map[*node]string)
	var mu sync.Mutex
	add := func(_ context.Context, node *redis.Client) error {
		s := ns.nodeOf(node)
		mu.Lock()
		defer mu.Unlock()
		found[s] = lua.ProbeKey(0)
		return nil
	}
	switch {
	case ns.ring != nil:
		_ = ns.ring.ForEachShard(ctx, add)
	case ns.cluster != nil:
		_ = ns.cluster.ForEachMaster(ctx, add)
		missing := maps.Clone(found)
		for n := 0; len(missing) > 0 && n < keysTried; n++ {
			key := lua.ProbeKey(n)
			s := ns.of(key)
			found[s] = key
			delete(missing, s)
		}
	default:
		found[ns.single] = lua.ProbeKey(0)
	}
	return found
}

// readTemplates reads the published templates unless the Client has its own.
func (c *Client) readTemplates(ctx context.Context) error {
	if c.templates.fixed {
		return nil
	}
	t := c.plain(budgetOf(ctx, &callConfig{timed: true}), lua.TemplatesKey)
	defer t.end()
	if t.node.lost != nil {
		return t.node.lost
	}
	if err := c.templates.refresh(t, 1); err != nil {
		return fmt.Errorf("templates: %w", err)
	}
	return nil
}

// unlessRefused drops the error of a server that answers but does not allow this command.
func unlessRefused(err error) error {
	if redis.HasErrorPrefix(err, "NOPERM ") {
		return nil
	}
	return err
}

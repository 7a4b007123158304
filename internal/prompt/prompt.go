package prompt

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// Most bounds the goroutines of a Client.
	Most = 256
	// MaxSocketWait is how long a caller who can be cancelled may wait on a socket
	// that keeps deadlines, but doesn't notice a cancellation.
	MaxSocketWait = 100 * time.Millisecond
)

// HonoursDeadlines reports whether a Redis client sets a context's deadline on its
// sockets.
func HonoursDeadlines(rdb redis.UniversalClient) bool {
	switch rdb := rdb.(type) {
	case *redis.Client:
		return rdb.Options().ContextTimeoutEnabled
	case *redis.ClusterClient:
		return rdb.Options().ContextTimeoutEnabled
	case *redis.Ring:
		return rdb.Options().ContextTimeoutEnabled
	}
	return false
}

// Client sends commands. It is safe for concurrent use, and a lua.Client.
type Client struct {
	rdb     redis.UniversalClient
	honours bool
	slots   chan struct{}
}

// New makes a Client of a Redis client, which stays the caller's to close.
func New(rdb redis.UniversalClient) *Client {
	return &Client{rdb: rdb, honours: HonoursDeadlines(rdb), slots: make(chan struct{}, Most)}
}

// Process sends a command and waits for its answer, or for the end of ctx, whose
// error it then returns: the command may have been sent, and must not be looked at
// any more.
func (c *Client) Process(ctx context.Context, cmd redis.Cmder) error {
	if c.direct(ctx) {
		return c.rdb.Process(ctx, cmd)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	select {
	case c.slots <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	done := make(chan error, 1)
	go func() {
		defer func() { <-c.slots }()
		done <- c.rdb.Process(ctx, cmd) // sends nothing once ctx has ended
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// direct reports whether a caller of ctx may wait on a socket.
func (c *Client) direct(ctx context.Context) bool {
	if ctx.Done() == nil {
		return true
	}
	deadline, ok := ctx.Deadline()
	return ok && c.honours && time.Until(deadline) <= MaxSocketWait
}

package main

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
)

const (
	// callDeadline bounds a call. It is far longer than the SDK's default, because a command starts with a new connection.
	// A user at a terminal would rather wait than not know whether tokens were taken.
	callDeadline = 5 * time.Second
	// closeDeadline bounds the wait for calls under way when a command ends.
	closeDeadline = 3 * time.Second
)

// connection has the settings with which a command connects to Redis. Flags replace the environment.
type connection struct {
	environ   fields.Environment
	fromFlags []fields.Override
}

// addFlags adds a flag for each setting of the connection.
func (c *connection) addFlags(cmd *cobra.Command) {
	cli.VariableFlags(cmd, redisconn.Variables(), &c.fromFlags)
}

// open returns a client, which connects when it is first used. If poolSize is 0, it has the default pool size.
func (c *connection) open(poolSize int) (redis.UniversalClient, error) {
	o, err := redisconn.FromCommandLine(c.environ, c.fromFlags...)
	if err != nil {
		return nil, cli.Usage(err)
	}
	if poolSize > 0 {
		o.PoolSize = poolSize
	}
	return redisconn.Open(o)
}

// with opens a client of the SDK, passes it to do, and closes it when do has returned.
func (c *connection) with(do func(*fetch.Client) error) error {
	rdb, err := c.open(0)
	if err != nil {
		return err
	}
	defer rdb.Close()
	client, err := fetch.New(rdb, fetch.WithTimeout(callDeadline))
	if err != nil {
		return err
	}
	defer closeClient(client)
	return do(client)
}

// closeClient waits for the client's calls, even if the command was interrupted. A call that is still under way after
// closeDeadline does not change the command's result.
func closeClient(client *fetch.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), closeDeadline)
	defer cancel()
	_ = client.Close(ctx)
}

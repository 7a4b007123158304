package main

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/redisconn"
)

const (
	redisEnv     = "REFILLER_REDIS_URL"
	defaultRedis = "redis://127.0.0.1:6379/0"

	// callDeadline bounds a call. It is far above the SDK's, since a command
	// starts with a new connection, and someone at a terminal would rather wait
	// than guess whether tokens were taken.
	callDeadline = 5 * time.Second
	// closeDeadline bounds the wait for calls under way when a command ends.
	closeDeadline = 3 * time.Second
)

// connection is where a command finds Redis.
type connection struct {
	getenv func(string) string
	url    string
}

func (c *connection) addFlags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&c.url, "redis", "",
		"address of Redis: "+redisconn.Forms+" (default $"+redisEnv+", then "+defaultRedis+")")
}

// open returns a client, which connects when it is first used. The flag beats the environment.
func (c *connection) open(poolSize int) (redis.UniversalClient, error) {
	address := defaultRedis
	if v := c.getenv(redisEnv); v != "" {
		address = v
	}
	if c.url != "" {
		address = c.url
	}
	url, err := redisconn.ParseURL(address)
	if err != nil {
		return nil, err
	}
	return redisconn.Open(redisconn.Options{URL: url, PoolSize: poolSize})
}

// with runs do with a client of the SDK and closes what it opened.
func (c *connection) with(do func(*fetch.Client) error) error {
	rdb, err := c.open(0)
	if err != nil {
		return err
	}
	defer rdb.Close()
	client, err := fetch.New(rdb, fetch.WithDeadline(callDeadline))
	if err != nil {
		return err
	}
	defer closeClient(client)
	return do(client)
}

// closeClient waits for the client's calls, also when the command was interrupted. A call that hangs is none of the
// command's result any more.
func closeClient(client *fetch.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), closeDeadline)
	defer cancel()
	_ = client.Close(ctx)
}

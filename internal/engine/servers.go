package engine

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"
)

// ended is a cancelled context. With it, go-redis returns what it already knows and sends nothing.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// OwnerOf returns the client of the server of a Cluster or Ring that has a key. It returns an error if no such server
// is known, and nil for clients of another kind. It sends nothing.
func OwnerOf(rdb redis.UniversalClient, key string) (*redis.Client, error) {
	switch rdb := rdb.(type) {
	case *redis.ClusterClient:
		return rdb.MasterForKey(ended, key)
	case *redis.Ring:
		return rdb.GetShardClientForKey(key)
	}
	return nil, nil
}

// HasLeft reports whether go-redis has closed the client of a server, because the server has left its Cluster or Ring.
// It sends nothing.
func HasLeft(server *redis.Client) bool { return errors.Is(server.Ping(ended).Err(), redis.ErrClosed) }

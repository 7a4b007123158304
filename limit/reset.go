package limit

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/redisclient"
	"github.com/tokenrefill/refiller/lua"
)

// resetBatch is about how many keys one SCAN of Reset visits. Redis serves takes between the scans.
const resetBatch = 500

// suffixes are the suffixes of the keys in which limiters keep state. Keys of refilled buckets have other suffixes.
var suffixes = []string{":lazy", ":win", ":sld", ":pace", ":sched"}

// Reset drops the state that limiters keep in Redis for all keys with the prefix: lazy buckets become full, windows
// start anew, and reservations are deleted. It returns the number of Redis keys that it deleted. It changes neither
// refilled buckets with the same prefix nor the state of limiters made by NewLocal. Reset such limiters key by key, or
// make new ones. The prefix must not be empty. Otherwise all keys could be reset by mistake.
//
// Reset is meant for operators, because it scans all keys of the server, or of every master of a Cluster. It scans a
// bounded number at a time, so takes go on meanwhile. A key that is used meanwhile may or may not be reset. After an
// error some keys may have been deleted; it is safe to call Reset again.
func Reset(ctx context.Context, rdb redis.UniversalClient, prefix string) (int64, error) {
	if err := lua.CheckKey(prefix); err != nil {
		return 0, fmt.Errorf("limit: reset: prefix: %w", err)
	}
	if redisclient.IsNil(rdb) {
		return 0, fmt.Errorf("limit: reset: %w: the redis client is nil; to reset a limiter made by NewLocal, call "+
			"its Reset for each key, or make a new one", ErrConfig)
	}
	var (
		mu    sync.Mutex
		total int64
	)
	server := func(ctx context.Context, c redis.Cmdable) error {
		n, err := resetServer(ctx, c, prefix)
		mu.Lock()
		defer mu.Unlock()
		total += n
		return err
	}
	var err error
	switch c := rdb.(type) {
	case *redis.ClusterClient:
		err = c.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error { return server(ctx, c) })
	case *redis.Ring:
		err = c.ForEachShard(ctx, func(ctx context.Context, c *redis.Client) error { return server(ctx, c) })
	default:
		err = server(ctx, c)
	}
	if err != nil {
		err = fmt.Errorf("limit: reset: %w", err)
	}
	return total, err
}

// resetServer resets the keys of one server.
func resetServer(ctx context.Context, c redis.Cmdable, prefix string) (total int64, err error) {
	pattern := "{" + globLiteral.Replace(prefix) + "*}:*"
	for cursor := uint64(0); ; {
		keys, next, err := c.Scan(ctx, cursor, pattern, resetBatch).Result()
		if err != nil {
			return total, err
		}
		// One command for each key: keys of a Cluster's master are in many slots.
		pipe := c.Pipeline()
		var drops []*redis.IntCmd
		for _, k := range keys {
			if isState(k) {
				drops = append(drops, pipe.Unlink(ctx, k))
			}
		}
		if len(drops) > 0 {
			if _, err := pipe.Exec(ctx); err != nil {
				return total, err
			}
		}
		for _, d := range drops {
			total += d.Val()
		}
		cursor = next
		if cursor == 0 {
			return total, nil
		}
	}
}

// isState reports whether a Redis key is a limiter's: {K}:suffix or {K}:suffix:name.
func isState(key string) bool {
	_, rest, _ := strings.Cut(key, "}")
	for _, s := range suffixes {
		if rest == s || strings.HasPrefix(rest, s+":") {
			return true
		}
	}
	return false
}

// globLiteral makes a pattern that matches the text itself.
var globLiteral = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`)

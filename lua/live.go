package lua

import (
	"context"
	"time"
)

// Live is a heartbeat: it counts the consumer among those of the bucket for ttl, at
// least a millisecond, by the server's clock, and returns how many are counted. It
// neither changes the bucket nor checks that it exists.
func Live(ctx context.Context, c Client, key, consumer string, ttl time.Duration) (int64, error) {
	r, _, err := liveScript.ask(ctx, c, []string{LiveKey(key)}, []any{consumer, max(1, ttl.Milliseconds())}, codeDone)
	if err != nil {
		return 0, err
	}
	n := r.int()
	return n, r.end()
}

package lua

import (
	"context"
	"time"
)

// Live is a heartbeat: it makes the consumer count among those of the bucket for
// ttl, at least a millisecond, by the server's clock, and returns how many count. It
// doesn't touch the bucket, nor look whether there is one.
func Live(ctx context.Context, c Client, key, consumer string, ttl time.Duration) (int64, error) {
	r, _, err := liveScript.ask(ctx, c, []string{LiveKey(key)}, []any{consumer, max(1, ttl.Milliseconds())}, codeDone)
	if err != nil {
		return 0, err
	}
	n := r.int()
	return n, r.end()
}

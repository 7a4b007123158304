package lua

import (
	"context"
	"time"
)

// Heartbeat records that the consumer is alive, for the time ttl. It returns the number of the bucket's consumers that
// are alive. A ttl below a millisecond counts as a millisecond. The server's clock measures it. Heartbeat neither
// changes the bucket nor checks that it exists.
func Heartbeat(ctx context.Context, c Client, key, consumer string, ttl time.Duration) (int64, error) {
	args := []any{consumer, max(1, ttl.Milliseconds())}
	r, _, err := heartbeatScript.ask(ctx, c, []string{LiveKey(key)}, args, codeDone)
	if err != nil {
		return 0, err
	}
	n := r.Int()
	return n, r.End()
}

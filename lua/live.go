package lua

import (
	"context"
	"fmt"
	"time"
)

// LiveKey is the key of the bucket's live consumers.
func LiveKey(key string) string { return "{" + key + "}:live" }

// Live is a heartbeat: it makes the consumer count among those of the bucket for
// ttl, at least a millisecond, by the server's clock, and returns how many count. It
// doesn't touch the bucket, nor look whether there is one.
func Live(ctx context.Context, c Client, key, consumer string, ttl time.Duration) (int64, error) {
	v, err := liveScript.run(ctx, c, []string{LiveKey(key)}, consumer, max(1, ttl.Milliseconds()))
	if err != nil {
		return 0, err
	}
	r, code, err := open(v, key, codeDone, codeMalformed)
	if err != nil {
		return 0, err
	}
	n := r.int()
	if err := r.end(); err != nil {
		return 0, err
	}
	if code == codeMalformed {
		return 0, fmt.Errorf("%w %q: the key %q does not hold its consumers", ErrMalformedBucket, key, LiveKey(key))
	}
	return n, nil
}

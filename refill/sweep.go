package refill

import (
	"context"

	"github.com/tokenrefill/refiller/lua"
)

const (
	// sweptOfBucket is the most records of a bucket that one script call ends, so
	// that no call holds the server up for long.
	sweptOfBucket = 100
	// sweptAtOnce is the most records that one round trip ends, if no more buckets
	// have any: a server runs a pipeline in one go.
	sweptAtOnce = 1000
)

// sweep ends the reservations and leases whose time is over, in those buckets of a
// batch that this replica has refilled, so that they end with no consumer alive.
// What it leaves behind, or fails to end, is swept after the next refill.
func (l *lane) sweep(ctx context.Context, batch []*bucket, results []lua.RefillResult) {
	var due []*bucket
	var keys []string
	for i, b := range batch {
		if o := results[i].Outcome; results[i].Err == nil && o.Status.Wrote() && o.Due != 0 && o.Due <= o.Now {
			due, keys = append(due, b), append(keys, b.key)
		}
	}
	if len(keys) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, l.r.cfg.Timeout)
	defer cancel()
	swept := l.r.store.sweep(ctx, keys, max(1, min(sweptOfBucket, sweptAtOnce/len(keys))))
	for i, b := range due {
		failed := swept[i].Err != nil
		if failed && !b.unswept {
			l.r.log.Warn("reservations can't be ended", "bucket", b.key, "error", swept[i].Err)
		}
		b.unswept = failed
	}
}

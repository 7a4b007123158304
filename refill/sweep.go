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
// What it leaves behind, or fails to end, is swept after the next refill. ended is
// told of each of those buckets, by its place in the batch, and of its error.
func (l *lane) sweep(ctx context.Context, calls []lua.RefillCall, results []lua.RefillResult, ended func(i int, err error)) {
	var due []int
	var keys []string
	for i := range results {
		if o := &results[i]; o.Err == nil && o.Due != 0 && o.Due <= o.Now && o.Status.Wrote() {
			due, keys = append(due, i), append(keys, calls[i].Key)
		}
	}
	if len(keys) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, l.r.cfg.Timeout)
	defer cancel()
	swept := l.r.store.sweep(ctx, keys, max(1, min(sweptOfBucket, sweptAtOnce/len(keys))))
	for k, i := range due {
		ended(i, swept[k].Err)
	}
}

// warnUnswept tells of reservations that can't be ended, once; before is whether that was
// so before. It returns whether it is so.
func (l *lane) warnUnswept(key string, before bool, err error) bool {
	if err != nil && !before {
		l.r.log.Warn("reservations can't be ended", "bucket", key, "error", err)
	}
	return err != nil
}

package refill

import (
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// After a roll-back to an older file, no replica has the later file any more, but the later policies stay in force. If
// the server reported a later version for a bucket and then lost it, the bucket is not created again until the version
// is raised. Other buckets are created again.
func TestAfterARollBackToAnOlderFileTheVersionHasToBeRaised(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	bucket := func(key string, capacity int64) Bucket {
		b := checkout(capacity)
		b.Key = key
		return b
	}
	inForce := func(key string) int64 {
		p, err := lua.Peek(ctx, rdb, key, 1)
		require.NoError(t, err)
		return p.Terms.FileVersion()
	}
	w := newWatch()
	_, stopLater := runningWith(t, Config{Redis: rdb, Buckets: []Bucket{bucket("a", 100)}, Version: 8, Observe: w.observe,
		Logger: hclog.NewNullLogger()})
	w.until(t, "a refill", appliedTo([]Bucket{{Key: "a"}}))
	stopLater()

	var log lockedBuffer
	old := []Bucket{bucket("a", 1000), bucket("b", 1000)}
	w = newWatch()
	r, stop := runningWith(t, Config{Redis: rdb, Buckets: old, Version: 7, Observe: w.observe,
		Logger: hclog.New(&hclog.LoggerOptions{Output: &log})})
	w.until(t, "refills of a and of the new bucket b", appliedTo(old))
	require.EqualValues(t, 8, inForce("a"))
	require.EqualValues(t, 7, inForce("b"))
	require.Contains(t, log.String(), "bucket has a policy of a later version: this replica's config is old: bucket=a")

	require.NoError(t, rdb.FlushAll(ctx).Err())
	w.forget()
	w.until(t, "b is created again and refilled thirty times", func(events map[string][]Event) bool {
		return len(events["b"]) > 30
	})
	require.Zero(t, rdb.Exists(ctx, lua.ControlKey("a")).Val(), "the old replica leaves a to replicas with the later file")

	require.NoError(t, r.Update(old, nil, 9))
	w.forget()
	w.until(t, "refills of both", appliedTo(old))
	require.EqualValues(t, 9, inForce("a"))
	stop()
}

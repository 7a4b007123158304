package refill

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// allowed has an access list let everybody touch the keys of the buckets, and those of the refillers' own, and no
// others.
func allowed(t *testing.T, rdb *redis.Client, keys ...string) {
	t.Helper()
	rules := []any{"acl", "setuser", "default", "resetkeys", "~refiller:*", "~{refiller:*"}
	for _, key := range keys {
		rules = append(rules, "~"+key, "~{"+key+"}*")
	}
	require.NoError(t, rdb.Do(t.Context(), rules...).Err())
}

// gaps are the times between a bucket's refills that wrote, in order of length.
func (w *watch) gaps(key string) (gaps []time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := int64(0)
	for _, e := range w.events[key] {
		if o := e.Outcome; e.Err == nil && o.Status.Wrote() {
			if last > 0 {
				gaps = append(gaps, time.Duration(o.Now-last)*time.Microsecond)
			}
			last = o.Now
		}
	}
	slices.Sort(gaps)
	return gaps
}

func TestAForbiddenBucketHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	buckets := manyBuckets(10)
	var keys []string
	for _, b := range buckets[1:] {
		keys = append(keys, b.Key)
	}
	allowed(t, rdb, keys...)
	var log bytes.Buffer
	w := newWatch()
	began := time.Now()
	_, stop := runningWith(t, Config{Redis: rdb, Buckets: buckets, Observe: w.observe,
		Logger: hclog.New(&hclog.LoggerOptions{Output: &log})})
	w.until(t, "the others are created and refilled", appliedTo(buckets[1:]))
	require.Less(t, time.Since(began), 2*time.Second, "new ones as soon as ever")
	w.until(t, "refills go on", func(events map[string][]Event) bool { return len(events[buckets[1].Key]) > 40 })
	for _, b := range buckets[1:] {
		gaps := w.gaps(b.Key)
		require.Less(t, gaps[len(gaps)/2], interval*5/4, "%s is refilled every interval", b.Key)
	}
	w.forget()
	allowed(t, rdb, append(keys, buckets[0].Key)...)
	w.until(t, "it is refilled once that is allowed", appliedTo(buckets[:1]))
	stop()
	require.Equal(t, 1, strings.Count(log.String(), "bucket can't be refilled"), log.String())
	require.Contains(t, log.String(), "bucket="+buckets[0].Key)
	require.Equal(t, 1, strings.Count(log.String(), "bucket is refilled again"), log.String())
	require.NotContains(t, log.String(), "redis is away")
}

func TestAForbiddenBucketOfATemplateHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	set, err := policy.NewTemplates(1, []policy.Template{{
		Prefix: "user:", Policy: policy.Policy{Capacity: 1000, Rate: policy.PerSecond(100), Interval: interval},
	}}, nil)
	require.NoError(t, err)
	var keys []string // of one shard, so that they share script calls
	for i := 0; len(keys) < 10; i++ {
		if key := fmt.Sprintf("user:%d", i); lua.ActiveShard(key) == 0 {
			keys = append(keys, key)
		}
	}
	for _, key := range keys {
		ok, err := newConsumer(rdb).take(t.Context(), set.Of(key), key, 900, false)
		require.NoError(t, err)
		require.True(t, ok)
	}
	allowed(t, rdb, keys[1:]...)
	var log bytes.Buffer
	w := newWatch()
	_, stop := runningWith(t, Config{Redis: rdb, Templates: set, ObserveActive: w.observe,
		Logger: hclog.New(&hclog.LoggerOptions{Output: &log})})
	w.until(t, "the others are refilled", func(events map[string][]Event) bool { return len(events[keys[1]]) > 30 })
	stop()
	for _, key := range keys[1:] {
		gaps := w.gaps(key)
		require.Less(t, gaps[len(gaps)/2], interval*5/4, "%s is refilled every interval", key)
	}
	require.Less(t, len(w.events[keys[0]]), 10, "it is tried ever more seldom")
	require.Equal(t, 1, strings.Count(log.String(), "bucket can't be refilled"), log.String())
	require.Contains(t, log.String(), "bucket="+keys[0])
	require.NotContains(t, log.String(), "redis is away")
}

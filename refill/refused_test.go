package refill

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// allowed sets an access list that permits the keys of the buckets and the refillers' own keys, and no others.
func allowed(t *testing.T, rdb *redis.Client, keys ...string) {
	t.Helper()
	rules := []any{"acl", "setuser", "default", "resetkeys", "~refiller:*", "~{refiller:*"}
	for _, key := range keys {
		rules = append(rules, "~"+key, "~{"+key+"}*")
	}
	require.NoError(t, rdb.Do(t.Context(), rules...).Err())
}

// refilledInTime reports whether the median of the last 30 gaps between refills of each bucket is less than 5/4 of the
// interval. A test that waits for this passes even if the machine is busy for a moment.
func refilledInTime(events map[string][]Event, keys []string, interval time.Duration) bool {
	for _, key := range keys {
		var gaps []time.Duration
		last := int64(0)
		for _, e := range events[key] {
			if o := e.Outcome; e.Err == nil && o.Status.Wrote() {
				gaps, last = append(gaps, time.Duration(o.Now-last)*time.Microsecond), o.Now
			}
		}
		if len(gaps) < 31 {
			return false
		}
		gaps = gaps[len(gaps)-30:]
		slices.Sort(gaps)
		if gaps[len(gaps)/2] >= interval*5/4 {
			return false
		}
	}
	return true
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
	w.until(t, "the other buckets are created and refilled", appliedTo(buckets[1:]))
	require.Less(t, time.Since(began), 2*time.Second, "permitted buckets are created without delay")
	w.until(t, "the other buckets are refilled every interval", func(events map[string][]Event) bool {
		return refilledInTime(events, keys, interval)
	})
	w.forget()
	allowed(t, rdb, append(keys, buckets[0].Key)...)
	w.until(t, "the bucket is refilled once the ACL allows it", appliedTo(buckets[:1]))
	stop()
	require.Equal(t, 1, strings.Count(log.String(), "bucket can't be refilled"), log.String())
	require.Contains(t, log.String(), "bucket="+buckets[0].Key)
	require.Equal(t, 1, strings.Count(log.String(), "bucket is refilled again"), log.String())
	require.NotContains(t, log.String(), "refills pause")
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
	r, stop := runningWith(t, Config{Redis: rdb, Templates: set, ObserveActive: w.observe,
		Logger: hclog.New(&hclog.LoggerOptions{Output: &log})})
	w.until(t, "the other buckets are refilled every interval", func(events map[string][]Event) bool {
		return refilledInTime(events, keys[1:], interval)
	})
	stop()
	require.Less(t, len(w.events[keys[0]]), len(w.events[keys[1]])/3, "the forbidden bucket is tried less and less often")
	var faults, unanswered int64
	for _, e := range slices.Concat(slices.Collect(maps.Values(w.events))...) {
		switch {
		case e.OwnFault():
			faults++
		case e.Err != nil:
			unanswered++
		}
	}
	stats := r.Stats().Templates[0]
	require.Positive(t, faults)
	require.Equal(t, []int64{faults, unanswered}, []int64{stats.Faults, stats.Errors})
	require.Equal(t, 1, strings.Count(log.String(), "bucket can't be refilled"), log.String())
	require.Contains(t, log.String(), "bucket="+keys[0])
	require.NotContains(t, log.String(), "refills pause")
}

func TestAnUnreadableSetIsLoggedOnce(t *testing.T) {
	t.Parallel()
	set, err := policy.NewTemplates(1, []policy.Template{{
		Prefix: "user:", Policy: policy.Policy{Capacity: 1000, Rate: policy.PerSecond(1), Interval: interval},
	}}, nil)
	require.NoError(t, err)
	for _, command := range []string{"sscan", "srem"} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			rdb := testenv.Redis(t).Client()
			ok, err := newConsumer(rdb).take(t.Context(), set.Of("user:1"), "user:1", 900, false)
			require.NoError(t, err)
			require.True(t, ok)
			active := lua.ActiveKey("user:", lua.ActiveShard("user:1"))
			require.NoError(t, rdb.SAdd(t.Context(), active, "stray").Err())
			require.NoError(t, rdb.Do(t.Context(), "acl", "setuser", "default", "-"+command).Err())
			refused := func() int64 {
				stats, err := rdb.InfoMap(t.Context(), "errorstats").Result()
				require.NoError(t, err)
				n := int64(0)
				_, err = fmt.Sscanf(stats["Errorstats"]["errorstat_NOPERM"], "count=%d", &n)
				require.True(t, err == nil || n == 0)
				return n
			}
			var log lockedBuffer
			w := newWatch()
			_, stop := runningWith(t, Config{Redis: rdb, Templates: set, ObserveActive: w.observe,
				Logger: hclog.New(&hclog.LoggerOptions{Output: &log})})
			require.Eventually(t, func() bool { return refused() >= 5 }, time.Minute, time.Millisecond)
			require.Equal(t, 1, strings.Count(log.String(), "buckets of a template can't be refilled"), log.String())
			require.NotContains(t, log.String(), "removed")
			require.NoError(t, rdb.Do(t.Context(), "acl", "setuser", "default", "+"+command).Err())
			w.until(t, "refills", appliedTo([]Bucket{{Key: "user:1"}}))
			require.NoError(t, rdb.Do(t.Context(), "acl", "setuser", "default", "-sscan").Err())
			require.NoError(t, rdb.SAdd(t.Context(), active, "another").Err())
			require.Eventually(t, func() bool {
				return strings.Count(log.String(), "buckets of a template can't be refilled") == 2
			}, time.Minute, time.Millisecond, "the next fault is logged, too")
			stop()
			require.Equal(t, 1, strings.Count(log.String(), "removed"), log.String())
		})
	}
}

// A server that is out of memory still answers reads, such as those of the active sets and of the pulse. Such a read
// does not end the outage. The outage is logged once, and Stats reports it until refills go on.
func TestAnAnsweredReadIsNotTheEndOfAnOutageOfWrites(t *testing.T) {
	t.Parallel()
	set, err := policy.NewTemplates(1, []policy.Template{{
		Prefix: "user:", Policy: policy.Policy{Capacity: 1000, Rate: policy.PerSecond(1), Interval: interval},
	}}, nil)
	require.NoError(t, err)
	for _, elected := range []bool{false, true} {
		t.Run(fmt.Sprintf("elected %t", elected), func(t *testing.T) {
			t.Parallel()
			rdb := testenv.Redis(t).Client()
			ok, err := newConsumer(rdb).take(t.Context(), set.Of("user:1"), "user:1", 900, false)
			require.NoError(t, err)
			require.True(t, ok)
			var log bytes.Buffer
			w := newWatch()
			buckets := manyBuckets(3)
			r, stop := runningWith(t, Config{Redis: rdb, Buckets: buckets, Templates: set, Elected: elected, Observe: w.observe,
				Logger: hclog.New(&hclog.LoggerOptions{Output: &log})})
			w.until(t, "refills", appliedTo(buckets)) // by a standby that races: there is no leader
			require.NoError(t, rdb.ConfigSet(t.Context(), "maxmemory", "1mb").Err())
			w.forget()
			for i := range 3 {
				w.until(t, "refills to fail", func(events map[string][]Event) bool {
					e := events[buckets[0].Key]
					return len(e) > 0 && e[len(e)-1].Err != nil
				})
				require.True(t, i == 0 || r.Stats().Away != nil) // Stats reports it just after the first is observed
				w.forget()
			}
			require.NoError(t, rdb.ConfigSet(t.Context(), "maxmemory", "0").Err())
			w.until(t, "refills again", appliedTo(buckets))
			stop()
			require.Equal(t, 1, strings.Count(log.String(), "refills pause"), log.String())
			require.Equal(t, 1, strings.Count(log.String(), "refills go on"), log.String())
		})
	}
}

// A server that refuses writes still answers a call that only finds that a bucket is missing. That reply does not end
// the outage, because the bucket can't be created.
func TestAServerThatNeverTookAWriteIsNotBackBeforeItDoes(t *testing.T) {
	t.Parallel()
	for name, settings := range map[string]struct{ refuse, allow []any }{
		"read-only": {[]any{"replicaof", "127.0.0.1", "1"}, []any{"replicaof", "no", "one"}},
		"full":      {[]any{"config", "set", "maxmemory", "1"}, []any{"config", "set", "maxmemory", "0"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rdb := testenv.Redis(t).Client()
			require.NoError(t, rdb.Do(t.Context(), settings.refuse...).Err())
			var log lockedBuffer
			w := newWatch()
			buckets := manyBuckets(3)
			_, stop := runningWith(t, Config{Redis: rdb, Buckets: buckets, Observe: w.observe,
				Logger: hclog.New(&hclog.LoggerOptions{Output: &log})})
			for range 5 {
				w.until(t, "creations to fail", func(events map[string][]Event) bool {
					e := events[buckets[0].Key]
					return len(e) > 0 && e[len(e)-1].Err != nil
				})
				w.forget()
			}
			require.Equal(t, 1, strings.Count(log.String(), "redis refuses calls: refills pause"), log.String())
			require.NotContains(t, log.String(), "refills go on")
			require.NoError(t, rdb.Do(t.Context(), settings.allow...).Err())
			w.until(t, "refills", appliedTo(buckets))
			stop()
			require.Equal(t, 1, strings.Count(log.String(), "refills go on"), log.String())
		})
	}
}

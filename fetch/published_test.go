package fetch_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// refilledTemplate is a template whose buckets hold capacity tokens and gain one token an hour.
func refilledTemplate(prefix string, capacity int64) policy.Template {
	return policy.Template{Prefix: prefix, Policy: policy.Policy{Capacity: capacity,
		Rate: policy.Rate{Tokens: 1, Per: time.Hour}, Interval: time.Second}}
}

func publish(t *testing.T, rdb redis.UniversalClient, version int64, list ...policy.Template) {
	t.Helper()
	set, err := policy.NewTemplates(version, list, nil)
	require.NoError(t, err)
	p, err := lua.PublishTemplates(t.Context(), rdb, set)
	require.NoError(t, err)
	require.True(t, p.OK)
}

// client makes a Client that is closed when the test ends.
func client(t *testing.T, rdb redis.UniversalClient, opts ...fetch.Option) *fetch.Client {
	t.Helper()
	c, err := fetch.New(rdb, append([]fetch.Option{fetch.WithTimeout(20 * time.Second)}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		require.NoError(t, c.Close(ctx))
	})
	return c
}

func onBoth(t *testing.T, test func(t *testing.T, rdb redis.UniversalClient)) {
	t.Run("Redis", func(t *testing.T) {
		t.Parallel()
		test(t, testenv.Redis(t).Client())
	})
	t.Run("Cluster", func(t *testing.T) {
		t.Parallel()
		test(t, testenv.Cluster(t).Client())
	})
}

func size(t *testing.T, rdb redis.UniversalClient) int64 {
	t.Helper()
	cluster, ok := rdb.(*redis.ClusterClient)
	if !ok {
		return rdb.DBSize(t.Context()).Val()
	}
	var n atomic.Int64
	require.NoError(t, cluster.ForEachMaster(t.Context(), func(ctx context.Context, master *redis.Client) error {
		size, err := master.DBSize(ctx).Result()
		n.Add(size)
		return err
	}))
	return n.Load()
}

func TestAConsumerNeedsNoPolicy(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		publish(t, rdb, 7, lazyTemplate("lazy:", 60, policy.Rate{Tokens: 1, Per: time.Hour}), refilledTemplate("user:", 60))
		for _, remembers := range []bool{true, false} {
			c := client(t, rdb, fetch.WithDenyCache(remembers))
			for _, prefix := range []string{"lazy:", "user:"} {
				key := fmt.Sprintf("%s%t", prefix, remembers)
				r, err := c.Peek(ctx, key)
				require.NoError(t, err)
				require.True(t, r.OK)
				require.EqualValues(t, 60, r.Remaining)
				require.NoError(t, c.Return(ctx, key, 5), "a return to a full bucket succeeds")
				r, err = c.Take(ctx, key, 20)
				require.NoError(t, err)
				require.True(t, r.OK)
				require.EqualValues(t, 40, r.Remaining)
				require.EqualValues(t, 60, r.Limit)
				r, err = c.Take(ctx, key, 41)
				require.NoError(t, err)
				require.False(t, r.OK)
				require.NoError(t, c.Return(ctx, key, 1))
				_, err = c.Wait(ctx, key, 30)
				require.NoError(t, err)
				r, err = c.TakeUpTo(ctx, key, 100)
				require.NoError(t, err)
				require.EqualValues(t, 11, r.Taken)
				_, err = c.Take(ctx, key+"else", 61)
				require.ErrorIs(t, err, fetch.ErrExceedsCapacity)
			}
		}
	})
}

// every makes each kind of call for a key, and returns the errors.
func every(ctx context.Context, c *fetch.Client, key string) map[string]error {
	errs := map[string]error{}
	_, errs["take"] = c.Take(ctx, key, 1)
	_, errs["take once"] = c.Take(ctx, key, 1, fetch.WithRequestID("a"))
	_, errs["take up to"] = c.TakeUpTo(ctx, key, 5)
	_, errs["take all"] = c.TakeAll(ctx, []fetch.Request{{Key: key, N: 1}, {Key: key + "2", N: 1}})
	_, errs["wait"] = c.Wait(ctx, key, 1)
	_, errs["peek"] = c.Peek(ctx, key)
	errs["return"] = c.Return(ctx, key, 1)
	_, errs["reserve"] = c.Reserve(ctx, key, 1, time.Minute)
	_, errs["settle"] = c.Settle(ctx, key, "a", 1)
	return errs
}

func TestKeysThatNoTemplateMatchesLeaveNothing(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		junk := func(what string, keys int, c *fetch.Client) {
			before := size(t, rdb)
			for i := range keys {
				key := fmt.Sprintf("%s:%x:*:{%d", what, rand.Text(), i)
				for call, err := range every(ctx, c, key) {
					require.ErrorIs(t, err, fetch.ErrUnknownBucket, "%s %s", call, key)
				}
			}
			require.Equal(t, before, size(t, rdb), what)
		}
		junk("nothing is published", 20, client(t, rdb))
		junk("nothing is read", 20, client(t, rdb, fetch.WithPublishedTemplates(false)))
		lazy := lazyTemplate("lazy:", 60, policy.PerSecond(1))
		junk("templates of its own", 20, client(t, rdb, fetch.WithTemplates(lazy)))
		publish(t, rdb, 7, lazy, refilledTemplate("user:", 60))
		junk("nothing is remembered", 20, client(t, rdb, fetch.WithDenyCache(false)))
		junk("in blocks", 20, client(t, rdb, fetch.WithLease(10, time.Minute)))

		var before map[string]int
		if single, ok := rdb.(*redis.Client); ok {
			before = calls(t, single)
		}
		began := time.Now()
		junk("templates are published", 100, client(t, rdb))
		if before != nil {
			reads := calls(t, rdb.(*redis.Client))["hget"] - before["hget"]
			require.LessOrEqual(t, reads, 3+2*int(time.Since(began)/(100*time.Millisecond)), "all keys share the reads")
		}
		require.EqualValues(t, 1, size(t, rdb), "Redis has only the key of the templates")
	})
}

func TestAFullBucketOfALazyTemplateAndWhatItCannotDoLeaveNothing(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	publish(t, rdb, 7, lazyTemplate("lazy:", 60, policy.PerSecond(1)), refilledTemplate("user:", 60))
	for _, c := range []*fetch.Client{client(t, rdb),
		client(t, rdb, fetch.WithTemplates(lazyTemplate("lazy:", 60, policy.PerSecond(1))))} {
		_, err := c.Take(ctx, "lazy:1", 1, fetch.WithRequestID("a"))
		require.ErrorIs(t, err, fetch.ErrLazyBucket)
		require.ErrorContains(t, err, `bucket "lazy:1" is of the template "lazy:"`)
		for _, all := range [][]fetch.Request{{{Key: "lazy:1", N: 1}}, {{Key: "lazy:1", N: 1}, {Key: "lazy:2", N: 1}}} {
			_, err = c.TakeAll(ctx, all, fetch.WithRequestID("a"))
			require.ErrorIs(t, err, fetch.ErrLazyBucket)
		}
		_, err = c.Reserve(ctx, "lazy:1", 1, time.Minute)
		require.ErrorIs(t, err, fetch.ErrLazyBucket)
		_, err = c.Settle(ctx, "lazy:1", "a", 1)
		require.ErrorIs(t, err, fetch.ErrLazyBucket)
		_, err = c.Take(ctx, "lazy:1", 61)
		require.ErrorIs(t, err, fetch.ErrExceedsCapacity)
		_, err = c.Peek(ctx, "lazy:1")
		require.NoError(t, err)
		require.NoError(t, c.Return(ctx, "lazy:1", 5))
	}
	c := client(t, rdb)
	_, err := c.Take(ctx, "user:1", 61)
	require.ErrorIs(t, err, fetch.ErrExceedsCapacity)
	_, err = c.Peek(ctx, "user:1")
	require.NoError(t, err)
	require.NoError(t, c.Return(ctx, "user:1", 5))
	require.EqualValues(t, 1, size(t, rdb), "Redis has only the key of the templates")
}

// calls counts the commands of a server.
func calls(t *testing.T, rdb *redis.Client) map[string]int {
	t.Helper()
	info := rdb.InfoMap(t.Context(), "commandstats")
	require.NoError(t, info.Err())
	counts := map[string]int{}
	for name, stats := range info.Val()["Commandstats"] {
		n := 0
		_, err := fmt.Sscanf(stats, "calls=%d,", &n)
		require.NoError(t, err)
		counts[name[len("cmdstat_"):]] = n
	}
	return counts
}

func TestAConsumerFollowsWhatIsPublished(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	hourly := policy.Rate{Tokens: 1, Per: time.Hour}
	c := client(t, rdb)
	none := client(t, rdb, fetch.WithPublishedTemplates(false))
	limit := func() int64 {
		r, err := c.Peek(ctx, "user:1")
		if err != nil {
			require.ErrorIs(t, err, fetch.ErrUnknownBucket)
		}
		return r.Limit
	}
	becomes := func(want int64) {
		t.Helper()
		require.Eventually(t, func() bool { return limit() == want }, 20*time.Second, time.Millisecond)
	}
	require.Zero(t, limit(), "no templates are published yet")
	publish(t, rdb, 7, lazyTemplate("user:", 60, hourly))
	becomes(60)
	publish(t, rdb, 8, lazyTemplate("user:", 6, hourly))
	becomes(6)

	// The Client continues to use templates that Redis has lost. It does not apply an earlier version at once, because a
	// failover may have restored it.
	require.NoError(t, rdb.Del(ctx, lua.TemplatesKey).Err())
	publish(t, rdb, 7, lazyTemplate("user:", 60, hourly))
	for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		require.EqualValues(t, 6, limit())
	}
	becomes(60)
	publish(t, rdb, 9)
	becomes(0)
	_, err := none.Take(ctx, "user:1", 1)
	require.ErrorIs(t, err, fetch.ErrUnknownBucket)
}

func TestALaterPolicyIsNoticedByItsFence(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	publish(t, rdb, 7, refilledTemplate("user:", 60), lazyTemplate("lazy:", 60, policy.PerSecond(1)))
	c := client(t, rdb)
	_, err := c.Take(ctx, "user:1", 1)
	require.NoError(t, err)
	publish(t, rdb, 8, refilledTemplate("user:", 60), lazyTemplate("lazy:", 6, policy.PerSecond(1)))
	later := refilledTemplate("user:", 60).Policy.Terms(policy.Fence{Epoch: 8})
	_, err = lua.Refill(ctx, rdb, "user:1", policy.Call{Terms: &later})
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		_, err := c.Take(ctx, "user:1", 60) // denials have the policy
		require.NoError(t, err)
		r, err := c.Peek(ctx, "lazy:1")
		require.NoError(t, err)
		return r.Limit == 6
	}, 20*time.Second, time.Millisecond)
}

// TakeAll, reservations and request ids create the template's bucket that they need.
func TestEveryCallWorksOnARefilledTemplatesBucket(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		publish(t, rdb, 7, refilledTemplate("user:", 60), lazyTemplate("lazy:", 60, policy.Rate{Tokens: 1, Per: time.Hour}))
		c := client(t, rdb)
		r, err := c.Take(ctx, "user:once", 10, fetch.WithRequestID("a"))
		require.NoError(t, err)
		require.True(t, r.OK)
		r, err = c.Take(ctx, "user:once", 10, fetch.WithRequestID("a"))
		require.NoError(t, err)
		require.EqualValues(t, 50, r.Remaining)

		held, err := c.Reserve(ctx, "user:held", 30, time.Minute)
		require.NoError(t, err)
		require.True(t, held.OK)
		settled, err := held.Settle(ctx, 10)
		require.NoError(t, err)
		require.EqualValues(t, 50, settled.Remaining)

		all, err := c.TakeAll(ctx, []fetch.Request{{Key: "user:1", N: 20}, {Key: "lazy:1", N: 30}, {Key: "user:2", N: 60}})
		require.NoError(t, err)
		require.True(t, all.OK)
		all, err = c.TakeAll(ctx, []fetch.Request{{Key: "user:1", N: 20}, {Key: "lazy:1", N: 31}})
		require.NoError(t, err)
		require.False(t, all.OK)
		require.Equal(t, "lazy:1", all.Denied)
		all, err = c.TakeAll(ctx, []fetch.Request{{Key: "lazy:1", N: 30}, {Key: "user:2", N: 1}})
		require.NoError(t, err)
		require.False(t, all.OK)
		require.Equal(t, "user:2", all.Denied)
		for key, want := range map[string]int64{"user:1": 40, "lazy:1": 30, "user:2": 0} {
			require.Eventually(t, func() bool {
				r, err := c.Peek(ctx, key)
				require.NoError(t, err)
				return r.Remaining == want
			}, 20*time.Second, time.Millisecond, key)
		}

		// Whatever call opened a bucket, the bucket is in the active set and expires.
		for _, key := range []string{"user:once", "user:held", "user:1", "user:2"} {
			require.Eventually(t, func() bool {
				return rdb.SIsMember(ctx, lua.ActiveKey("user:", lua.ActiveShard(key)), key).Val()
			}, 20*time.Second, time.Millisecond, key)
			require.Positive(t, rdb.PTTL(ctx, lua.ControlKey(key)).Val(), key)
		}
	})
}

// If the template's enforce changes, the bucket begins anew and is full. If enforce is changed back, the first bucket
// is used again.
func TestATemplateIsEnforcedInTheOtherWayFromOneVersionToTheNext(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx, hourly := t.Context(), policy.Rate{Tokens: 1, Per: time.Hour}
		c := client(t, rdb)
		awaitTokens := func(want int64, why string) {
			t.Helper()
			require.Eventually(t, func() bool {
				r, err := c.Peek(ctx, "user:1")
				return err == nil && r.Remaining == want
			}, 20*time.Second, time.Millisecond, why)
		}
		take := func(n, left int64) {
			t.Helper()
			r, err := c.Take(ctx, "user:1", n)
			require.NoError(t, err)
			require.True(t, r.OK)
			require.Equal(t, left, r.Remaining)
		}
		publish(t, rdb, 1, refilledTemplate("user:", 60))
		take(40, 20)
		held, err := c.Reserve(ctx, "user:1", 5, time.Minute)
		require.NoError(t, err)
		require.True(t, held.OK)
		publish(t, rdb, 2, lazyTemplate("user:", 60, hourly))
		awaitTokens(60, "the lazy bucket is a separate one")
		take(50, 10)
		_, err = c.Reserve(ctx, "user:1", 1, time.Minute)
		require.ErrorIs(t, err, fetch.ErrLazyBucket)
		_, err = held.Settle(ctx, 1)
		require.NoError(t, err, "the reservation ends in the refilled bucket")
		publish(t, rdb, 3, refilledTemplate("user:", 60))
		awaitTokens(19, "the refilled bucket has kept its tokens")
		publish(t, rdb, 4, lazyTemplate("user:", 60, hourly))
		awaitTokens(10, "the lazy bucket has kept its tokens")
	})
}

func TestNoMoreBucketsThanATemplateAllows(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		bounded := refilledTemplate("user:", 60)
		bounded.MaxKeys = 10
		publish(t, rdb, 7, bounded)
		c := client(t, rdb)
		made := 0
		for i := range 30 {
			_, err := c.Take(ctx, fmt.Sprintf("user:%d", i), 1)
			if made < 10 {
				require.NoError(t, err)
				made++
				continue
			}
			require.ErrorIs(t, err, fetch.ErrTooManyBuckets)
			require.ErrorContains(t, err, `"user:": 10 are alive, at most 10 may be`)
		}
		_, err := c.Take(ctx, "user:0", 1)
		require.NoError(t, err, "the bucket exists")
		_, err = c.Take(ctx, "user:new", 1, fetch.WithRequestID("a"))
		require.ErrorIs(t, err, fetch.ErrTooManyBuckets)
	})
}

// Many consumers use new keys at the same moment. No bucket is created before it is counted.
func TestBucketsMadeAtOnceKeepToTheirNumber(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		bounded := refilledTemplate("user:", 60)
		bounded.MaxKeys = 3
		publish(t, rdb, 7, bounded)
		var made atomic.Int64
		var wg sync.WaitGroup
		for i := range 8 {
			c := client(t, rdb)
			wg.Go(func() {
				for n := range 5 {
					_, err := c.Take(ctx, fmt.Sprintf("user:%d-%d", i, n), 1)
					if err == nil {
						made.Add(1)
					} else if !errors.Is(err, fetch.ErrTooManyBuckets) {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		require.EqualValues(t, 3, made.Load())
	})
}

func TestConcurrentFirstTakesAdmitTheBucketsCapacities(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		publish(t, rdb, 7, refilledTemplate("user:", 50))
		c := client(t, rdb, fetch.WithDenyCache(false))
		const keys = 8
		var admitted [keys]atomic.Int64
		var wg sync.WaitGroup
		for w := range 40 {
			wg.Go(func() {
				for i := range 20 {
					k := (w + i) % keys
					r, err := c.Take(ctx, fmt.Sprintf("user:%d", k), 1)
					if err != nil {
						t.Error(err)
					} else if r.OK {
						admitted[k].Add(1)
					}
				}
			})
		}
		wg.Wait()
		for k := range keys {
			require.EqualValues(t, 50, admitted[k].Load())
			key := fmt.Sprintf("user:%d", k)
			require.Eventually(t, func() bool {
				return rdb.SIsMember(ctx, lua.ActiveKey("user:", lua.ActiveShard(key)), key).Val()
			}, 20*time.Second, time.Millisecond)
		}
	})
}

// If a server forbids reading the templates, takes from configured buckets still work. For other keys it is unknown
// whether a template matches them, so calls fail.
func TestTemplatesThatCannotBeReadMatterToUnknownKeysAlone(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	require.NoError(t, rdb.Set(ctx, lua.TemplatesKey, "x", 0).Err())
	terms := policy.Policy{Capacity: 5, Rate: policy.PerSecond(1)}.Terms(policy.Fence{})
	_, err := lua.Refill(ctx, rdb, "checkout", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	c := client(t, rdb)
	r, err := c.Take(ctx, "checkout", 1)
	require.NoError(t, err)
	require.True(t, r.OK)
	for range 2 {
		_, err = c.Take(ctx, "user:1", 1)
		require.ErrorIs(t, err, fetch.ErrMalformedBucket)
		require.NotErrorIs(t, err, fetch.ErrUnknownBucket)
	}
	require.NoError(t, rdb.Del(ctx, lua.TemplatesKey).Err())
	publish(t, rdb, 7, lazyTemplate("user:", 60, policy.PerSecond(1)))
	require.Eventually(t, func() bool {
		_, err := c.Take(ctx, "user:1", 1)
		return err == nil
	}, 20*time.Second, time.Millisecond)
}

// If a block takes tokens from a full bucket of a template, the bucket is refilled, as after a take.
func TestABlockTakenFromAFullBucketPutsItIntoTheActiveSet(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		const key, capacity = "user:1", 10_000
		ctx, set := t.Context(), lua.ActiveKey("user:", lua.ActiveShard(key))
		publish(t, rdb, 1, refilledTemplate("user:", capacity))
		c := client(t, rdb, fetch.WithLease(64, time.Minute))
		leased := func() bool {
			r, err := c.Take(ctx, key, 1)
			require.NoError(t, err)
			return r.Source.Kind == fetch.SourceLeased
		}
		require.Eventually(t, leased, 20*time.Second, time.Millisecond)
		// The bucket is full again, and is no longer in the active set.
		require.NoError(t, rdb.SRem(ctx, set, key).Err())
		require.NoError(t, rdb.Set(ctx, lua.TokensKey(key), capacity, redis.KeepTTL).Err())
		require.Eventually(t, func() bool {
			return leased() && rdb.SIsMember(ctx, set, key).Val()
		}, 20*time.Second, time.Millisecond)
	})
}

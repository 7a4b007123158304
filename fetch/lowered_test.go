package fetch_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// takers are the ways in which a caller can take n tokens from a bucket. Each returns how many tokens it got.
var takers = map[string]func(ctx context.Context, c *fetch.Client, key string, n int64) (int64, error){
	"Take": func(ctx context.Context, c *fetch.Client, key string, n int64) (int64, error) {
		r, err := c.Take(ctx, key, n)
		return r.Taken, err
	},
	"TakeUpTo": func(ctx context.Context, c *fetch.Client, key string, n int64) (int64, error) {
		r, err := c.TakeUpTo(ctx, key, n)
		return r.Taken, err
	},
	"Take with a request id": func(ctx context.Context, c *fetch.Client, key string, n int64) (int64, error) {
		r, err := c.Take(ctx, key, n, fetch.WithRequestID("one"))
		return r.Taken, err
	},
	"TakeAll": func(ctx context.Context, c *fetch.Client, key string, n int64) (int64, error) {
		r, err := c.TakeAll(ctx, []fetch.Request{{Key: key, N: n}})
		if !r.OK {
			return 0, err
		}
		return n, err
	},
	"Reserve": func(ctx context.Context, c *fetch.Client, key string, n int64) (int64, error) {
		r, err := c.Reserve(ctx, key, n, time.Minute)
		if err != nil || !r.OK {
			return 0, err
		}
		return n, nil
	},
}

// followed waits until a Client has read version 8 of the templates. It requires that this happens within a second.
func followed(ctx context.Context, t *testing.T, c *fetch.Client, limit int64) {
	t.Helper()
	began := time.Now()
	for n := 0; ; n++ {
		r, err := c.Take(ctx, fmt.Sprintf("user:other-%d", n), 1)
		require.NoError(t, err)
		if r.Limit == limit {
			require.Less(t, time.Since(began), time.Second)
			return
		}
		require.Less(t, time.Since(began), 20*time.Second)
	}
}

// A full and idle bucket is in no active set, so no refill lowers its limit. Its next take does.
func TestALowerLimitReachesFullIdleBuckets(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		publish(t, rdb, 7, refilledTemplate("user:", 1000))
		known := client(t, rdb)
		for name := range takers {
			for _, key := range []string{"user:known " + name, "user:unknown " + name} {
				_, err := known.Take(ctx, key, 1)
				require.NoError(t, err)
				require.NoError(t, known.Return(ctx, key, 1))
			}
		}
		publish(t, rdb, 8, refilledTemplate("user:", 3))
		followed(ctx, t, known, 3)
		unknown := client(t, rdb)
		for name, take := range takers {
			for key, c := range map[string]*fetch.Client{"user:known " + name: known, "user:unknown " + name: unknown} {
				total := int64(0)
				for _, n := range []int64{900, 4, 3, 1} {
					taken, err := take(ctx, c, key, n)
					if err != nil && n > 3 {
						require.ErrorIs(t, err, fetch.ErrExceedsCapacity, "%s of %q", name, key)
					}
					total += taken
				}
				require.LessOrEqual(t, total, int64(3), "%s of %q", name, key)
				p, err := lua.Peek(ctx, rdb, key, 1)
				require.NoError(t, err)
				require.EqualValues(t, 8, p.Terms.FileVersion(), "%s of %q", name, key)
			}
		}
	})
}

// If a Client has a template of an earlier version, its takes don't change buckets that have a policy of a later
// version.
func TestAnEarlierTemplateReplacesNoLaterPolicy(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		publish(t, rdb, 7, refilledTemplate("user:", 1000))
		early := client(t, rdb)
		_, err := early.Take(ctx, "user:1", 1)
		require.NoError(t, err)
		publish(t, rdb, 8, refilledTemplate("user:", 3))
		late := client(t, rdb)
		r, err := late.Take(ctx, "user:1", 1)
		require.NoError(t, err)
		require.EqualValues(t, 3, r.Limit)
		require.EqualValues(t, 2, r.Remaining)
		for range 10 { // before it reads the templates again
			r, err = early.Take(ctx, "user:1", 3)
			require.NoError(t, err)
			require.False(t, r.OK)
		}
		r, err = late.Take(ctx, "user:1", 2)
		require.NoError(t, err)
		require.True(t, r.OK)
	})
}

// A configured bucket is removed from the file, and a template matches its name. With the next take it becomes the
// template's bucket: it is refilled, and it expires.
func TestABucketThatLeavesTheFileBecomesTheTemplates(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		own := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(1), Interval: time.Second}
		for name := range takers {
			terms := own.Terms(policy.Fence{Epoch: 7})
			_, err := lua.Refill(ctx, rdb, "user:"+name, policy.Call{Create: policy.CreateInitial, Terms: &terms})
			require.NoError(t, err)
		}
		publish(t, rdb, 8, refilledTemplate("user:", 3))
		c := client(t, rdb)
		for name, take := range takers {
			key := "user:" + name
			taken, err := take(ctx, c, key, 2)
			require.NoError(t, err, name)
			require.EqualValues(t, 2, taken, name)
			p, err := lua.Peek(ctx, rdb, key, 1)
			require.NoError(t, err, name)
			require.True(t, p.Terms.Template, name)
			require.EqualValues(t, 1, p.Tokens, name)
			require.Eventually(t, func() bool { // on a Cluster it is added after the reply
				return rdb.SIsMember(ctx, lua.ActiveKey("user:", lua.ActiveShard(key)), key).Val()
			}, 20*time.Second, time.Millisecond, name)
			for _, k := range []string{lua.TokensKey(key), lua.IndexKey(key), lua.ControlKey(key)} {
				require.Positive(t, rdb.PTTL(ctx, k).Val(), "%s: %s", name, k)
			}
		}
	})
}

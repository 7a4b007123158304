package fetch_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// dividedTemplate is a template of 100 tokens whose buckets have flows.
func dividedTemplate(prefix string) policy.Template {
	t := refilledTemplate(prefix, 100)
	t.Policy.Flows = &policy.Flows{Headroom: policy.DefaultHeadroom, Most: policy.DefaultFlows}
	return t
}

// plan writes a plan for a bucket that lasts: its floor is 40 tokens, and the flow loud has a right to none of them.
func plan(t *testing.T, rdb redis.UniversalClient, key string) {
	t.Helper()
	peeked, err := lua.Peek(t.Context(), rdb, key, 1)
	require.NoError(t, err)
	r := lua.PlanBatch(t.Context(), rdb, []lua.PlanCall{{Key: key, Plan: policy.Plan{
		Version: peeked.Version, Whole: true, Floor: 40, Unlisted: 3, Most: 1000, Span: 1_000_000,
		Lasts: time.Hour.Microseconds(), Teams: []policy.PlannedTeam{{Name: policy.RootTeam, Price: 1e9}},
		Listed: []policy.PlannedFlow{{Name: "loud", Weight: 1, Took: 5}},
	}}})[0]
	require.NoError(t, r.Err)
	require.False(t, r.Stale)
}

func TestTheBucketsOfATemplateAreDivided(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		publish(t, rdb, 1, dividedTemplate("user:"))
		c := client(t, rdb, fetch.WithDenyCache(false))
		const key = "user:1"
		active := lua.ActiveKey("user:", lua.ActiveShard(key))
		entered := func() { // on a Cluster this happens after the take was answered
			t.Helper()
			require.Eventually(t, func() bool { return rdb.SIsMember(ctx, active, key).Val() }, time.Minute, time.Millisecond)
		}
		take := func(c *fetch.Client, flow string, n int64) bool {
			r, err := c.Take(ctx, key, n, fetch.WithFlow(flow))
			require.NoError(t, err)
			require.EqualValues(t, 100, r.Limit)
			return r.OK
		}
		require.True(t, take(c, "loud", 1), "the first take creates the bucket, which has no plan yet")
		entered()
		plan(t, rdb, key)
		for range 3 { // a full bucket with a plan, which therefore is in no active set
			require.NoError(t, rdb.Set(ctx, key, 100, redis.KeepTTL).Err())
			require.NoError(t, rdb.SRem(ctx, active, key).Err())
			require.False(t, take(c, "loud", 61))
			require.True(t, take(c, "loud", 60))
			entered()
			require.False(t, take(c, "loud", 1))
			require.True(t, take(c, "quiet", 1))
			c = client(t, rdb, fetch.WithDenyCache(false)) // it knows nothing of the bucket
			require.False(t, take(c, "loud", 1))
			require.NoError(t, rdb.Del(ctx, lua.UseKey(key)).Err())
		}
		r, err := c.Reserve(ctx, key, 1, time.Minute, fetch.WithFlow("loud"))
		require.NoError(t, err)
		require.False(t, r.OK)
		all, err := c.TakeAll(ctx, []fetch.Request{{Key: key, N: 1, Flow: "loud"}})
		require.NoError(t, err)
		require.False(t, all.OK)

		require.NoError(t, rdb.Del(ctx, key, lua.IndexKey(key), lua.ControlKey(key)).Err())
		require.False(t, take(c, "loud", 61), "a lost bucket comes back full and keeps its plan")
		require.True(t, take(c, "loud", 60))
	})
}

func TestAnEarlierVersionOfATemplateWithoutFlowsIsReplaced(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		publish(t, rdb, 1, refilledTemplate("user:", 100))
		old := client(t, rdb)
		_, err := old.Take(ctx, "user:1", 1, fetch.WithFlow("loud"))
		require.NoError(t, err)
		publish(t, rdb, 2, dividedTemplate("user:"))
		c := client(t, rdb)
		r, err := c.Take(ctx, "user:1", 1, fetch.WithFlow("loud"))
		require.NoError(t, err)
		require.True(t, r.OK)
		peeked, err := lua.Peek(ctx, rdb, "user:1", 1)
		require.NoError(t, err)
		require.True(t, peeked.Terms.Divided)
		require.EqualValues(t, 2, peeked.Terms.Fence.Epoch)
	})
}

package devserver_test

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/dev/devserver"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestTheStoreDividesABucketAmongFlows(t *testing.T) {
	t.Parallel()
	s, err := devserver.StartRedis(0)
	require.NoError(t, err)
	t.Cleanup(s.Close)
	rdb := redis.NewClient(&redis.Options{Addr: s.Addr()})
	t.Cleanup(func() { _ = rdb.Close() })
	p := policy.Policy{Capacity: 100, Rate: policy.Rate{Tokens: 1, Per: time.Hour},
		Flows: &policy.Flows{Headroom: policy.DefaultHeadroom, Most: policy.DefaultFlows}}
	require.NoError(t, p.Validate())
	terms := p.Terms(policy.Fence{})
	o, err := lua.Refill(t.Context(), rdb, "acme", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	plan := func(p policy.Plan, base policy.Version) lua.PlanResult {
		p.Version = o.Version
		p.Floor, p.Unlisted = 40, 3
		p.Most, p.Span = 1000, 1_000_000
		p.Lasts = time.Hour.Microseconds()
		p.Teams = []policy.PlannedTeam{{Name: policy.RootTeam, Price: 1e9}}
		r := lua.PlanBatch(t.Context(), rdb, []lua.PlanCall{{Key: "acme", Plan: p, Base: base}})[0]
		require.NoError(t, r.Err)
		require.False(t, r.Stale)
		return r
	}
	plan(policy.Plan{Whole: true, Listed: []policy.PlannedFlow{{Name: "loud", Weight: 1, Took: 5}}}, policy.Version{})
	c, err := fetch.New(rdb, fetch.WithTimeout(10*time.Second))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close(context.Background())) })
	take := func(flow string, n int64) bool {
		r, err := c.Take(t.Context(), "acme", n, fetch.WithFlow(flow))
		require.NoError(t, err)
		return r.OK
	}
	require.False(t, take("loud", 61), "the loud flow leaves the floor to the other flows")
	require.True(t, take("loud", 60))
	require.True(t, take("quiet", 3))

	base := o.Version
	o, err = lua.Refill(t.Context(), rdb, "acme", policy.Call{Version: o.Version, Terms: &terms})
	require.NoError(t, err)
	if o.Version == base { // too early for another refill
		o.Version.Index++
	}
	r := plan(policy.Plan{Read: true, Dropped: []string{"loud"}}, base)
	require.Equal(t, map[string]int64{"loud": 121, "quiet": 3}, r.Use.Asked)
	require.Equal(t, map[string]int64{"loud": 61}, r.Use.Denied)
}

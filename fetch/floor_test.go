package fetch

import (
	"crypto/rand"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestAResultReportsThatItsRegionIsOnItsFloor(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	rdb := testenv.Redis(t).Client()
	// The bucket earns one token an hour, or one a minute with a grant.
	terms := policy.Terms{
		Fence: policy.Fence{Epoch: 1, Seq: 1}, Capacity: 100, Tokens: 1, Per: 3_600_000_000, Interval: 100_000,
		MaxElapsed: 2_000_000, Initial: 50, Pool: true,
	}
	out, err := lua.Refill(ctx, rdb, "payments", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	createBucket(t, rdb, "own", hourly(10))

	// check makes every kind of call, with a client that has no cached policy.
	check := func(key string, want bool) {
		t.Helper()
		for name, isolated := range map[string]bool{"merged": false, "separate": true} {
			for i, ask := range []func(*Client) (Result, error){
				func(c *Client) (Result, error) { return c.Take(ctx, key, 1) },
				func(c *Client) (Result, error) { return c.Take(ctx, key, 99) },
				func(c *Client) (Result, error) { return c.TakeUpTo(ctx, key, 1) },
				func(c *Client) (Result, error) { return c.Take(ctx, key, 1, WithRequestID(rand.Text())) },
				func(c *Client) (Result, error) { return c.Peek(ctx, key) },
			} {
				if key == "own" && i == 1 {
					continue // more than the bucket can ever hold
				}
				c := newClient(t, rdb, slow())
				if isolated {
					c.buckets.obtain(key).refused.claim(time.Hour, time.Now())
				}
				for range 2 { // the second answer comes with a cached policy
					r, err := ask(c)
					require.NoError(t, err)
					require.Equal(t, want, r.OnFloor, "%s, call %d: %+v", name, i, r)
				}
			}
		}
	}
	check("own", false)
	check("payments", true)

	terms.Fence.Seq = 2
	terms.GrantTokens = 60
	terms.GrantEra = out.Version.Era
	terms.GrantEnd = out.Now + 3_600_000_000
	_, err = lua.Refill(ctx, rdb, "payments", policy.Call{Version: out.Version, Terms: &terms})
	require.NoError(t, err)
	check("payments", false)
	full := newClient(t, rdb, slow())
	before := lua.Tickets(ctx, rdb, []string{"payments"})[0].Denied
	for range 3 {
		denied, err := full.Take(ctx, "payments", 99)
		require.NoError(t, err)
		require.Equal(t, SourceShared, denied.Source.Kind)
	}
	require.Equal(t, before+3*99, lua.Tickets(ctx, rdb, []string{"payments"})[0].Denied, "denials are counted")
	granted, err := full.Take(ctx, "payments", 1)
	require.NoError(t, err)

	terms.Fence.Seq, terms.GrantEnd = 3, out.Now
	_, err = lua.Refill(ctx, rdb, "payments", policy.Call{Version: out.Version, Terms: &terms})
	require.NoError(t, err)
	check("payments", true)
	floor, err := newClient(t, rdb, slow()).Take(ctx, "payments", 1)
	require.NoError(t, err)
	require.Greater(t, floor.ResetAfter, 30*granted.ResetAfter, "the bucket fills at the floor's rate")
}

package fetch

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// A bucket in shadow mode denies nothing and never goes below zero. It counts the tokens that it would have denied.
func TestShadowModeAdmitsAndCountsWhatItWouldDeny(t *testing.T) {
	{
		rdb := testenv.Redis(t).Client()
		p := hourly(10)
		p.Shadow = true
		createBucket(t, rdb, "trial", p)
		c := newClient(t, rdb, slow())
		take := func(n int64) Result {
			r, err := c.Take(t.Context(), "trial", n)
			require.NoError(t, err)
			return r
		}
		require.False(t, take(8).Shadow)
		denied := int64(0)
		for range 3 { // none of these takes is answered from memory
			r := take(5)
			require.True(t, r.OK)
			require.EqualValues(t, 5, r.Taken)
			require.EqualValues(t, 2, r.Remaining)
			require.Zero(t, r.RetryAfter)
			require.Equal(t, time.Hour, r.MoreAfter, "the bucket is not full")
			require.True(t, r.Shadow)
			require.Equal(t, SourceShared, r.Source.Kind)
			denied += 5
			require.Equal(t, denied, lua.Tickets(t.Context(), rdb, []string{"trial"})[0].Denied)
		}
		require.False(t, take(2).Shadow, "the bucket has enough tokens")
		require.True(t, take(11).Shadow, "the take exceeds the bucket's capacity")
		r, err := c.TakeUpTo(t.Context(), "trial", 4)
		require.NoError(t, err)
		require.True(t, r.OK)
		require.EqualValues(t, 4, r.Taken)
		require.EqualValues(t, 0, tokens(t, rdb, "trial"))
		require.EqualValues(t, 5, c.Stats().Shadowed)

		p.Shadow = false
		createUnder(t, rdb, "trial", p, 1)
		eventually(t, func() bool { return !take(1).OK }, "the policy is enforced")
	}
}

func TestWaitDoesNotWaitForABucketInShadowMode(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	p := hourly(2)
	p.Shadow = true
	createBucket(t, rdb, "trial", p)
	c := newClient(t, rdb, slow())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // the tokens are due in an hour
	defer cancel()
	for range 5 {
		require.NoError(t, errOf(c.Wait(ctx, "trial", 1)))
	}
	require.EqualValues(t, 0, tokens(t, rdb, "trial"))
	require.EqualValues(t, 3, c.Stats().Shadowed)
}

func TestTakeAllLeavesOutShadowsThatDeny(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	p := hourly(2)
	p.Shadow = true
	createBucket(t, rdb, "trial", p)
	createBucket(t, rdb, "real", hourly(5))
	c := newClient(t, rdb, slow())
	for i, want := range []bool{false, true} {
		r, err := c.TakeAll(t.Context(), []Request{{Key: "real", N: 2}, {Key: "trial", N: 2}})
		require.NoError(t, err)
		require.True(t, r.OK, i)
		require.Empty(t, r.Denied)
		require.Zero(t, r.RetryAfter)
		require.False(t, r.Results[0].Shadow)
		require.Equal(t, want, r.Results[1].Shadow)
		require.EqualValues(t, 2, r.Results[1].Taken)
	}
	r, err := c.TakeAll(t.Context(), []Request{{Key: "real", N: 2}, {Key: "trial", N: 2}})
	require.NoError(t, err)
	require.False(t, r.OK)
	require.Equal(t, "real", r.Denied)
	require.EqualValues(t, 1, tokens(t, rdb, "real"), "the denied call charges no bucket")
	r, err = c.TakeAll(t.Context(), []Request{{Key: "trial", N: 2}, {Key: "trial", N: 1}})
	require.NoError(t, err)
	require.True(t, r.OK)
	require.EqualValues(t, 0, tokens(t, rdb, "trial"))
	require.EqualValues(t, 2, c.Stats().Shadowed, "calls, and not requests")
}

func TestARequestOfAShadowAndAnotherIsChargedOnce(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	p := hourly(2)
	p.Shadow, p.Initial = true, new(int64)
	for name, keys := range map[string][2]string{"shadow first": {"trial", "real"}, "shadow last": {"real", "trial"}} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, rdb.FlushAll(t.Context()).Err())
			createBucket(t, rdb, "trial", p)
			createBucket(t, rdb, "real", hourly(5))
			c := newClient(t, rdb, slow(), WithRescue(false))
			take := func() (r AllResult) {
				r, err := c.TakeAll(t.Context(), []Request{{Key: keys[0], N: 1}, {Key: keys[1], N: 1}}, WithRequestID("r1"))
				require.NoError(t, err)
				require.True(t, r.OK)
				require.EqualValues(t, 4, tokens(t, rdb, "real"), "the bucket is charged once")
				return r
			}
			first := take()
			_, err := lua.Grant(t.Context(), rdb, "trial", 2)
			require.NoError(t, err)
			again := take()
			for i, key := range keys {
				require.Equal(t, key == "trial", first.Results[i].Shadow)
				require.Equal(t, key == "trial", again.Results[i].Shadow)
				require.EqualValues(t, 1, again.Results[i].Taken)
			}
			require.EqualValues(t, 2, tokens(t, rdb, "trial"), "both calls have the first call's answer")
			enforced := p
			enforced.Shadow = false
			createUnder(t, rdb, "trial", enforced, 1)
			take()
		})
	}
}

// While its server is unavailable, a bucket in shadow mode denies nothing either, not even some of the tokens.
func TestADegradedModeAdmitsAllThatIsAskedOfAShadow(t *testing.T) {
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, slow())
	f.warm(t, c)
	modes := map[string]policy.Degraded{"open": policy.DegradedOpen, "local": policy.DegradedLocal}
	for key, mode := range modes {
		p := hourly(10)
		p.Shadow, p.Degraded = true, mode
		createBucket(t, f.direct, key, p)
		_, err := c.Take(t.Context(), key, 4)
		require.NoError(t, err)
	}
	countsConsumers(t, c, "local", 1)
	f.proxy.Cut()
	for key := range modes {
		for _, opts := range [][]CallOption{nil, {WithRequestID("r1")}} {
			r, err := c.TakeUpTo(t.Context(), key, 25, opts...)
			require.NoError(t, err)
			require.Equal(t, SourceFallback, r.Source.Kind)
			require.EqualValues(t, 25, r.Taken, key)
			require.Equal(t, Never, r.MoreAfter, key)
		}
	}
}

package fetch

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// A bucket in shadow mode denies nothing, never goes below zero, and counts what
// it would have denied.
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
		for range 3 { // none of them is answered from memory
			r := take(5)
			require.True(t, r.OK)
			require.EqualValues(t, 5, r.Taken)
			require.EqualValues(t, 2, r.Remaining)
			require.Zero(t, r.RetryAfter)
			require.True(t, r.Shadow)
			require.Equal(t, SourceShared, r.Source.Kind)
			denied += 5
			require.Equal(t, denied, lua.Tickets(t.Context(), rdb, []string{"trial"})[0].Denied)
		}
		require.False(t, take(2).Shadow, "what there is, is taken")
		require.True(t, take(11).Shadow, "more than it ever holds")
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
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // an hour before the tokens
	defer cancel()
	for range 5 {
		require.NoError(t, c.Wait(ctx, "trial", 1))
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
		r, err := c.TakeAll(t.Context(), []Request{{"real", 2}, {"trial", 2}})
		require.NoError(t, err)
		require.True(t, r.OK, i)
		require.Empty(t, r.Denied)
		require.Zero(t, r.RetryAfter)
		require.False(t, r.Results[0].Shadow)
		require.Equal(t, want, r.Results[1].Shadow)
		require.EqualValues(t, 2, r.Results[1].Taken)
	}
	r, err := c.TakeAll(t.Context(), []Request{{"real", 2}, {"trial", 2}})
	require.NoError(t, err)
	require.False(t, r.OK)
	require.Equal(t, "real", r.Denied)
	require.EqualValues(t, 1, tokens(t, rdb, "real"), "nobody is charged")
	r, err = c.TakeAll(t.Context(), []Request{{"trial", 2}})
	require.NoError(t, err)
	require.True(t, r.OK)
	require.EqualValues(t, 0, tokens(t, rdb, "trial"))
}

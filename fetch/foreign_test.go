package fetch

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// A plain client that finds the bucket empty undoes its try. Until then K is -1. No result shows this number, because
// RateLimit headers have no numbers below 0.
func TestNoResultRemainsBelowZeroDuringAPlainClientsTry(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	terms := policy.Policy{Rate: policy.PerSecond(10), Capacity: 100}.Terms(policy.Fence{Epoch: 1})
	_, err := lua.Refill(ctx, rdb, "b", policy.Call{Terms: &terms, Create: policy.CreateInitial})
	require.NoError(t, err)
	c := newClient(t, rdb, WithRescue(false), slow())
	held, err := c.Reserve(ctx, "b", 1, time.Minute)
	require.NoError(t, err)
	require.NoError(t, rdb.Set(ctx, "b", 0, 0).Err())
	require.EqualValues(t, -1, rdb.Decr(ctx, "b").Val())

	results := map[string]func() (Result, error){
		"take":       func() (Result, error) { return c.Take(ctx, "b", 1) },
		"take up to": func() (Result, error) { return c.TakeUpTo(ctx, "b", 5) },
		"with an id": func() (Result, error) { return c.Take(ctx, "b", 1, WithRequestID("x")) },
		"peek":       func() (Result, error) { return c.Peek(ctx, "b") },
		"all": func() (Result, error) {
			all, err := c.TakeAll(ctx, []Request{{Key: "b", N: 1}})
			if err != nil {
				return Result{}, err
			}
			return all.Results[0], nil
		},
		"reserve": func() (Result, error) {
			r, err := c.Reserve(ctx, "b", 1, time.Second)
			if err != nil {
				return Result{}, err
			}
			return r.Result, nil
		},
		"settle": func() (Result, error) {
			s, err := held.Settle(ctx, 1)
			return Result{Remaining: s.Remaining}, err
		},
	}
	for name, call := range results {
		r, err := call()
		require.NoError(t, err, name)
		require.False(t, r.OK, name)
		require.Zero(t, r.Remaining, name)
	}
	require.Zero(t, rdb.Incr(ctx, "b").Val())
}

// The index of a bucket may outlive its tokens and its policy.
func TestABucketWithAnIndexAloneIsUnknown(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	c := newClient(t, rdb)
	for _, index := range []int{0, 5} {
		require.NoError(t, rdb.Set(ctx, "{b}", index, 0).Err())
		for name, call := range map[string]func() (Result, error){
			"take": func() (Result, error) { return c.Take(ctx, "b", 1) },
			"peek": func() (Result, error) { return c.Peek(ctx, "b") },
		} {
			_, err := call()
			require.ErrorIs(t, err, ErrUnknownBucket, "%s, index %d", name, index)
		}
	}
}

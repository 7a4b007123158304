package lua_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// usecOf measures the server's time for calls of scripts, in µs per call.
func usecOf(ctx context.Context, t testing.TB, rdb *redis.Client, n int, call func(i int)) float64 {
	t.Helper()
	least := 1e18
	for range 5 {
		require.NoError(t, rdb.ConfigResetStat(ctx).Err())
		for i := range n {
			call(i)
		}
		info, err := rdb.Info(ctx, "commandstats").Result()
		require.NoError(t, err)
		_, rest, found := strings.Cut(info, "cmdstat_evalsha:calls=")
		require.True(t, found, info)
		_, rest, _ = strings.Cut(rest, "usec_per_call=")
		text, _, _ := strings.Cut(rest, ",")
		usec, err := strconv.ParseFloat(text, 64)
		require.NoError(t, err)
		least = min(least, usec)
	}
	return least
}

// flowNames returns the names of n flows.
func flowNames(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("user-%d", i)
	}
	return names
}

// divided stores a bucket with a plan that lists as many of the named flows as listed. Each of them has a right.
func divided(ctx context.Context, t testing.TB, rdb *redis.Client, key string, names []string, listed int) policy.Plan {
	t.Helper()
	b := busy(serverTime(ctx, t, rdb))
	tokens := int64(1 << 40)
	b.Tokens = &tokens
	store(ctx, t, rdb, key, b)
	plan := policy.Plan{
		Version: policy.Version{Era: buckettest.Era, Index: 2}, Whole: true, Floor: 150, Unlisted: 75, Most: 20_000,
		Span: 1_000_000, Lasts: 3_600_000_000, Teams: []policy.PlannedTeam{{Name: policy.RootTeam, Price: .001}},
	}
	for _, name := range names[:listed] {
		plan.Listed = append(plan.Listed, policy.PlannedFlow{Name: name, Weight: 1})
	}
	results := lua.PlanBatch(ctx, rdb, []lua.PlanCall{{Key: key, Plan: plan}})
	require.NoError(t, results[0].Err)
	require.False(t, results[0].Stale)
	return plan
}

func TestCostOfTakesOfFlows(t *testing.T) {
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	require.NoError(t, lua.Load(ctx, rdb))
	names := flowNames(1000)
	divided(ctx, t, rdb, "listed", names, 1000)
	divided(ctx, t, rdb, "unlisted", names, 0)
	var takes lua.TakesCall
	var flows lua.FlowTakesCall
	run := policy.Run{N: 1, Count: 1}
	of := func(key string) func(i int) {
		return func(i int) {
			r, err := flows.Do(ctx, rdb, []lua.FlowTakes{{Key: key, Runs: []policy.FlowRun{{Flow: names[i%1000], Run: run}}}})
			require.NoError(t, err)
			require.True(t, r[0].OK)
		}
	}
	const n = 4000
	plain := usecOf(ctx, t, rdb, n, func(int) {
		r, err := takes.Do(ctx, rdb, []lua.Takes{{Key: "listed", Runs: []policy.Run{run}}})
		require.NoError(t, err)
		require.True(t, r[0].OK)
	})
	listed := usecOf(ctx, t, rdb, n, of("listed"))
	unlisted := usecOf(ctx, t, rdb, n, of("unlisted"))
	merged := func(key string) float64 {
		return usecOf(ctx, t, rdb, n/10, func(i int) {
			runs := make([]policy.FlowRun, 100)
			for k := range runs {
				runs[k] = policy.FlowRun{Flow: names[(100*i+k)%1000], Run: run}
			}
			r, err := flows.Do(ctx, rdb, []lua.FlowTakes{{Key: key, Runs: runs}})
			require.NoError(t, err)
			require.True(t, r[0].OK)
		})
	}
	hundred, hundredUnlisted := merged("listed"), merged("unlisted")
	t.Logf("take %.2f µs; of a listed flow %.2f (%.2f times), of an unlisted one %.2f (%.2f times); of a hundred flows "+
		"in one call %.2f and %.2f each", plain, listed, listed/plain, unlisted, unlisted/plain, hundred/100,
		hundredUnlisted/100)
}

package lua_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestManyTakesInOneCallAreAnsweredAsTheModelSays(t *testing.T) {
	withEmbedded(t, manyAgree)
}

func manyAgree(t *testing.T, rdb *redis.Client) {
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	all, some, none := 0, 0, 0
	for i := range 300 {
		key := fmt.Sprintf("bucket%d", i)
		model := storeCase(ctx, t, rdb, key, rng.Int64N(600))
		runs := make([]policy.Run, 1+rng.IntN(6))
		takes := int64(0)
		for i := range runs {
			runs[i] = policy.Run{N: 1 + rng.Int64N(1+rng.Int64N(300)), Count: 1 + rng.Int64N(4)}
			takes += runs[i].Count
		}
		where := fmt.Sprintf("bucket %d of %d tokens, %v", i, *model.Tokens, runs)
		withTerms := rng.IntN(2) == 0
		got, err := lua.TakeMany(ctx, rdb, key, runs, withTerms)
		require.NoError(t, err, where)
		results, left, known := model.TakeMany(runs, got.Now)
		require.True(t, known)
		require.Equal(t, left, got.Remaining, where)
		require.Equal(t, model, load(ctx, t, rdb, key), where)
		taken := int64(0)
		for i, want := range results {
			taken += want.Taken
			if got.OK {
				require.Equal(t, policy.RunTaking{Taken: runs[i].Count}, want, where)
				continue
			}
			require.Equal(t, want, policy.RunTaking{Taken: got.Runs[i].Taken, Wait: got.Runs[i].Wait.Microseconds()}, where)
		}
		require.Equal(t, !got.OK || withTerms, got.Terms != nil, where)
		switch taken {
		case takes:
			all++
		case 0:
			none++
		default:
			some++
		}
	}
	require.NotZero(t, all)
	require.NotZero(t, some)
	require.NotZero(t, none)
}

func TestATakeThatDoesNotFitLeavesTheTokensToThoseBehindIt(t *testing.T) {
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	storeCase(ctx, t, rdb, "b", 10)
	r, err := lua.TakeMany(ctx, rdb, "b", []policy.Run{{N: 4, Count: 1}, {N: 900, Count: 1}, {N: 2, Count: 5}}, false)
	require.NoError(t, err)
	require.Equal(t, []int64{1, 0, 3}, []int64{r.Runs[0].Taken, r.Runs[1].Taken, r.Runs[2].Taken})
	require.Zero(t, r.Remaining)
	require.Zero(t, r.Runs[0].Wait)
	require.Positive(t, r.Runs[2].Wait)
}

func TestManyTakesThatFitCostOneCommand(t *testing.T) {
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	require.NoError(t, lua.Load(ctx, rdb))
	storeCase(ctx, t, rdb, "b", 100)
	require.NoError(t, rdb.ConfigResetStat(ctx).Err())
	_, err := lua.TakeMany(ctx, rdb, "b", []policy.Run{{N: 1, Count: 20}, {N: 5, Count: 2}}, false)
	require.NoError(t, err)
	require.Equal(t, "calls=1", calls(ctx, t, rdb, "decrby"))
	for _, other := range []string{"incrby", "get", "hmget", "time"} {
		require.Empty(t, calls(ctx, t, rdb, other), other)
	}
}

func TestManyTakesOfNoBucketOrAnotherKindLeaveItAlone(t *testing.T) {
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	runs := []policy.Run{{N: 1, Count: 3}}
	for _, withTerms := range []bool{false, true} {
		_, err := lua.TakeMany(ctx, rdb, "typo", runs, withTerms)
		require.ErrorIs(t, err, lua.ErrUnknownBucket)
		require.Empty(t, dump(ctx, t, rdb))
	}
	spoil := map[string]func(ctx context.Context, key string) error{
		"tokens": func(ctx context.Context, key string) error { return rdb.Set(ctx, key, "many", 0).Err() },
		"index":  func(ctx context.Context, key string) error { return rdb.Set(ctx, lua.IndexKey(key), "many", 0).Err() },
		"state": func(ctx context.Context, key string) error {
			return rdb.HSet(ctx, lua.ControlKey(key), "st", "1 2").Err()
		},
	}
	for name, set := range spoil {
		storeCase(ctx, t, rdb, name, 2)
		require.NoError(t, set(ctx, name))
		before := dump(ctx, t, rdb)
		_, err := lua.TakeMany(ctx, rdb, name, runs, true)
		require.ErrorIs(t, err, lua.ErrMalformedBucket, name)
		require.Equal(t, before, dump(ctx, t, rdb), name)
	}
	for _, runs := range [][]policy.Run{nil, {{N: 0, Count: 1}}, {{N: 1, Count: 0}}, {{N: -1, Count: 1}}, {{N: policy.MaxTokens, Count: 1}, {N: 1, Count: 1}}} {
		_, err := lua.TakeMany(ctx, rdb, "typo", runs, true)
		require.ErrorIs(t, err, lua.ErrInvalidAmount)
	}
}

func TestDenialsOfAPoolsBucketAreCountedPerTake(t *testing.T) {
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	b := storeCase(ctx, t, rdb, "b", 10)
	b.Control.Terms.GrantTokens, b.Control.Terms.GrantEnd, b.Control.Terms.GrantEra = 1, serverTime(ctx, t, rdb), b.Control.Era
	store(ctx, t, rdb, "b", b)
	// 2 of the 4 takes of 5 fit; the one of more than the capacity could never.
	_, err := lua.TakeMany(ctx, rdb, "b", []policy.Run{{N: 5, Count: 4}, {N: 1001, Count: 1}, {N: 990, Count: 2}}, false)
	require.NoError(t, err)
	require.Equal(t, "1990", rdb.HGet(ctx, lua.ControlKey("b"), "denied").Val())
}

func TestTakesInLineAreNotMadeBehindOneThatDoesNotFit(t *testing.T) {
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	storeCase(ctx, t, rdb, "b", 11)
	r, err := lua.TakeInLine(ctx, rdb, "b", []policy.Run{{N: 4, Count: 1}, {N: 3, Count: 3}, {N: 1, Count: 5}}, false)
	require.NoError(t, err)
	require.Equal(t, []int64{1, 2, 0}, []int64{r.Runs[0].Taken, r.Runs[1].Taken, r.Runs[2].Taken})
	require.EqualValues(t, 1, r.Remaining, "it is there, and not for those behind")
	require.Positive(t, r.Runs[1].Wait)
	r, err = lua.TakeInLine(ctx, rdb, "b", []policy.Run{{N: 4, Count: 1}}, false)
	require.NoError(t, err)
	require.False(t, r.OK)
}

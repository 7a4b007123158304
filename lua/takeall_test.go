package lua_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestTakesOfSeveralBucketsAreAnsweredAsTheModelSays(t *testing.T) {
	withEmbedded(t, allAgree)
}

func allAgree(t *testing.T, rdb *redis.Client) {
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	reached, h := map[string]int{}, buckettest.NewHistory(rng)
	for round := range 200 {
		models := make([]policy.Bucket, 1+rng.IntN(4))
		demands, wanted := make([]lua.Demand, len(models)), make([]oracle.Demand, len(models))
		for i := range models {
			key := fmt.Sprintf("bucket%d-%d", round, i)
			models[i] = storeCase(ctx, t, rdb, key, rng.Int64N(200))
			if rng.IntN(20) == 0 { // lost tokens, a foreign bucket, or no bucket
				models[i] = []policy.Bucket{{Index: models[i].Index, Control: models[i].Control},
					{Tokens: models[i].Tokens, Index: models[i].Index}, {}}[rng.IntN(3)]
				store(ctx, t, rdb, key, models[i])
			}
			if models[i].Control != nil && rng.IntN(2) == 0 {
				models[i].Control.Terms.Shadow = true
				store(ctx, t, rdb, key, models[i])
			}
			n := 1 + rng.Int64N(1+rng.Int64N(100))
			demands[i], wanted[i] = lua.Demand{Key: key, N: n, Leave: h.Leave()}, oracle.Demand{Bucket: &models[i], N: n}
			wanted[i].Leave = demands[i].Leave
		}
		where := fmt.Sprintf("round %d: %v", round, demands)
		ok, replies, err := lua.TakeAll(ctx, rdb, demands)
		now := int64(1)
		if err == nil {
			now = replies[0].Now
		}
		wantOK, want := oracle.TakeAll(wanted, now)
		unknown := false
		for _, w := range want {
			unknown = unknown || !w.Known
		}
		switch {
		case unknown:
			reached["unknown"]++
			require.ErrorIs(t, err, lua.ErrUnknownBucket, where)
		default:
			require.NoError(t, err, where)
			require.Equal(t, wantOK, ok, where)
			for i, w := range want {
				require.Equal(t, w.OK, replies[i].OK, where)
				require.Equal(t, w.Taken, replies[i].Taken, where)
				require.Equal(t, w.Tokens, replies[i].Remaining, where)
				require.Equal(t, models[i].Control.Era, replies[i].Version.Era, where)
				require.Equal(t, models[i].Control.Terms, *replies[i].Terms, where)
				require.Equal(t, w.Wait, micros(replies[i].Wait), where)
				if ok && !w.OK {
					reached["shadow"]++
				}
			}
			reached[fmt.Sprintf("ok %t of %d", ok, len(models))]++
		}
		for i, m := range models {
			require.Equal(t, m, load(ctx, t, rdb, demands[i].Key), where)
		}
	}
	require.Len(t, reached, 10, "%v", reached)
}

func TestTakesOfSeveralBucketsForARequestAreMadeOnce(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		demands := []lua.Demand{{Key: "a", N: 30}, {Key: "b", N: 5}}
		storeCase(ctx, t, rdb, "a", 100)
		storeCase(ctx, t, rdb, "b", 4)
		ok, _, err := lua.TakeAllOnce(ctx, rdb, "r", time.Minute, demands)
		require.NoError(t, err)
		require.False(t, ok, "a denial is not remembered")
		_, err = lua.Return(ctx, rdb, "b", 6, 0)
		require.NoError(t, err)
		for range 3 {
			ok, replies, err := lua.TakeAllOnce(ctx, rdb, "r", time.Minute, demands)
			require.NoError(t, err)
			require.True(t, ok)
			require.EqualValues(t, []int64{70, 5}, []int64{replies[0].Remaining, replies[1].Remaining})
			for _, r := range replies {
				require.EqualValues(t, buckettest.Era, r.Version.Era)
				require.Equal(t, buckettest.Terms(), *r.Terms)
			}
		}
		require.Equal(t, "70", rdb.Get(ctx, "a").Val())
		require.Equal(t, "5", rdb.Get(ctx, "b").Val())
		for _, other := range [][]lua.Demand{{{Key: "a", N: 30}, {Key: "b", N: 4}}, {{Key: "a", N: 30}},
			{{Key: "a", N: 30}, {Key: "c", N: 5}}} {
			_, _, err := lua.TakeAllOnce(ctx, rdb, "r", time.Minute, other)
			require.ErrorIs(t, err, lua.ErrRequestReused)
		}
		require.NoError(t, rdb.Del(ctx, "{b}:ctl").Err())
		ok, replies, err := lua.TakeAllOnce(ctx, rdb, "r", time.Minute, demands)
		require.NoError(t, err)
		require.True(t, ok, "a repetition gets the same reply although a bucket lost its state")
		require.Nil(t, replies[1].Terms)
		require.NoError(t, rdb.Set(ctx, lua.RequestKey("a", "bad"), "many", 0).Err())
		_, _, err = lua.TakeAllOnce(ctx, rdb, "bad", time.Minute, demands)
		require.ErrorIs(t, err, lua.ErrMalformedBucket)
		require.ErrorContains(t, err, "{a}:req:bad")
		for _, id := range []string{"", "two words"} {
			_, _, err := lua.TakeAllOnce(ctx, rdb, id, time.Minute, demands)
			require.ErrorIs(t, err, lua.ErrInvalidRequest)
		}
	})
}

func TestTakeAllNamesTheMalformedBucketAndTakesNothing(t *testing.T) {
	t.Parallel()
	withEmbedded(t, takeAllNamesTheMalformedBucketAndTakesNothing)
}

func takeAllNamesTheMalformedBucketAndTakesNothing(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	for _, spoil := range []func(string) string{lua.TokensKey, lua.ControlKey} {
		storeCase(ctx, t, rdb, "good", 100)
		storeCase(ctx, t, rdb, "bad", 100)
		require.NoError(t, rdb.Del(ctx, spoil("bad")).Err())
		require.NoError(t, rdb.LPush(ctx, spoil("bad"), 1).Err())
		before := dump(ctx, t, rdb)
		_, _, err := lua.TakeAll(ctx, rdb, []lua.Demand{{Key: "good", N: 1}, {Key: "bad", N: 1}})
		require.ErrorIs(t, err, lua.ErrMalformedBucket)
		require.ErrorContains(t, err, fmt.Sprintf("the key %q does not hold", spoil("bad")))
		require.Equal(t, before, dump(ctx, t, rdb))
	}
	for _, demands := range [][]lua.Demand{nil, make([]lua.Demand, lua.MaxAll+1), {{Key: "good", N: 0}},
		{{Key: "good", N: policy.MaxTokens + 1}}} {
		_, _, err := lua.TakeAll(ctx, rdb, demands)
		require.ErrorIs(t, err, lua.ErrInvalidAmount)
	}
}

// TestARequestOfSeveralBucketsIsChargedOnceInAnyOrder makes one request three times. The order of its demands is
// different each time, as if they came from a map.
func TestARequestOfSeveralBucketsIsChargedOnceInAnyOrder(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aRequestOfSeveralBucketsIsChargedOnceInAnyOrder)
}

func aRequestOfSeveralBucketsIsChargedOnceInAnyOrder(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	left := map[string]int64{"a": 99, "b": 98, "c": 97}
	for key := range left {
		storeCase(ctx, t, rdb, key, 100)
	}
	a := lua.Demand{Key: "a", N: 1}
	b := lua.Demand{Key: "b", N: 2}
	c := lua.Demand{Key: "c", N: 3}
	for i, demands := range [][]lua.Demand{{b, c, a}, {a, b, c}, {c, b, a}} {
		ok, replies, err := lua.TakeAllOnce(ctx, rdb, "id", time.Minute, demands)
		require.NoError(t, err, "time %d", i)
		require.True(t, ok)
		require.Len(t, replies, 3)
		for j, d := range demands {
			require.Equal(t, i > 0, replies[j].Repeated, "time %d", i)
			require.Equal(t, d.N, replies[j].Taken, "the reply to %q, time %d", d.Key, i)
			require.Equal(t, left[d.Key], replies[j].Remaining, "the reply to %q, time %d", d.Key, i)
		}
	}
	for key, tokens := range left {
		require.Equal(t, tokens, *load(ctx, t, rdb, key).Tokens, "%s is charged once", key)
	}
	_, _, err := lua.TakeAllOnce(ctx, rdb, "id", time.Minute, []lua.Demand{{Key: "b", N: 2}, {Key: "a", N: 2}})
	require.ErrorIs(t, err, lua.ErrRequestReused, "the ID was used for other demands")
	_, _, err = lua.TakeAllOnce(ctx, rdb, "id", time.Minute, []lua.Demand{{Key: "c", N: 3}, {Key: "typo", N: 1}})
	require.ErrorContains(t, err, `"typo"`, "the error names the caller's bucket")
}

// A request id of a take from one bucket can't be used for a take from several buckets, and the reverse.
func TestARequestIDIsForOneKindOfTake(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		for name, leave := range map[string]policy.Leave{"none": {}, "tokens": {Tokens: 5}, "percent": {Percent: 20}} {
			storeCase(ctx, t, rdb, "b", 1000)
			run := policy.Run{N: 10, Count: 1, Leave: leave}
			demands := []lua.Demand{{Key: "b", N: 10, Leave: leave}}
			_, err := lua.TakeOnce(ctx, rdb, "b", name+"-once", run, time.Minute)
			require.NoError(t, err)
			_, _, err = lua.TakeAllOnce(ctx, rdb, name+"-once", time.Minute, demands)
			require.ErrorIs(t, err, lua.ErrRequestReused, name)
			_, _, err = lua.TakeAllOnce(ctx, rdb, name+"-all", time.Minute, demands)
			require.NoError(t, err)
			_, err = lua.TakeOnce(ctx, rdb, "b", name+"-all", run, time.Minute)
			require.ErrorIs(t, err, lua.ErrRequestReused, name)
			require.Equal(t, "980", rdb.Get(ctx, "b").Val(), name)
		}
	})
}

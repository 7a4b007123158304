package lua_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestManyTakesInOneCallAreAnsweredAsByTheModel(t *testing.T) {
	withEmbedded(t, manyAgree)
}

func manyAgree(t *testing.T, rdb *redis.Client) {
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	all := 0
	some := 0
	none := 0
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
		got, err := takeWhole(ctx, rdb, lua.Takes{Key: key, Runs: runs, Terms: withTerms})
		require.NoError(t, err, where)
		results, left, known := oracle.TakeMany(&model, runs, got.Now)
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

// A call takes from many buckets, and either reads only their tokens or is Whole. The reply for each bucket is the same
// as if the call were for this bucket only.
func TestTakesOfManyBucketsInOneCallAgreeWithTheModel(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
		h, reached := buckettest.NewHistory(rng), map[string]int{}
		var call lua.TakesCall
		for round := range 150 {
			models, takes := make([]policy.Bucket, 1+rng.IntN(12)), []lua.Takes{}
			readWhole := rng.IntN(2) == 0
			for i := range models {
				key := fmt.Sprintf("bucket%d-%d", round, i)
				models[i] = storeCase(ctx, t, rdb, key, rng.Int64N(300))
				if h.Chance(15) { // lost tokens, a foreign bucket, or no bucket
					models[i] = []policy.Bucket{{Index: models[i].Index, Control: models[i].Control}, {Tokens: models[i].Tokens},
						{}}[rng.IntN(3)]
					store(ctx, t, rdb, key, models[i])
				}
				b := lua.Takes{Key: key, Whole: readWhole, Terms: rng.IntN(2) == 0, Below: rng.Int64N(2) * rng.Int64N(400)}
				for range 1 + rng.IntN(3) {
					run := policy.Run{N: 1 + rng.Int64N(1+rng.Int64N(150)), Count: 1 + rng.Int64N(4), Leave: h.Leave()}
					run.UpTo = rng.IntN(8) == 0
					if run.UpTo {
						run.N, run.Count = 1, 1+rng.Int64N(400)
					}
					if !b.Whole {
						run.Leave.Percent = 0
					}
					b.Runs = append(b.Runs, run)
				}
				takes = append(takes, b)
			}
			replies, err := call.Do(ctx, rdb, takes)
			require.NoError(t, err)
			require.Len(t, replies, len(takes))
			for i, got := range replies {
				where := fmt.Sprintf("round %d: %+v of %+v", round, takes[i], models[i])
				if !takes[i].Whole {
					reached[alone(t, where, &models[i], takes[i], got)]++
				} else {
					reached[whole(t, where, &models[i], takes[i], got)]++
				}
				require.Equal(t, models[i], load(ctx, t, rdb, takes[i].Key), where)
			}
		}
		for _, answer := range []string{"alone", "missed", "all", "some", "none", "unknown"} {
			require.NotZero(t, reached[answer], answer)
		}
	})
}

// alone checks the reply for a bucket of a call that reads only tokens.
func alone(t *testing.T, where string, b *policy.Bucket, takes lua.Takes, got lua.TakesReply) string {
	total, leave := int64(0), int64(0)
	for _, r := range takes.Runs {
		total, leave = total+r.N*r.Count, max(leave, r.Leave.Tokens)
	}
	fits := b.Tokens != nil && *b.Tokens-total >= leave && (takes.Below == 0 || *b.Tokens < takes.Below)
	require.Equal(t, !fits, got.Missed, where)
	require.Equal(t, fits, got.OK, where)
	if !fits {
		return "missed"
	}
	require.EqualValues(t, total, b.Take(total, 0).Taken)
	require.Equal(t, *b.Tokens, got.Remaining, where)
	return "alone"
}

// whole checks the reply for a bucket of a Whole call.
func whole(t *testing.T, where string, b *policy.Bucket, takes lua.Takes, got lua.TakesReply) string {
	require.False(t, got.Missed, where)
	results, left, known := oracle.TakeMany(b, takes.Runs, got.Now)
	if !known {
		require.ErrorIs(t, got.Err, lua.ErrUnknownBucket, where)
		return "unknown"
	}
	require.NoError(t, got.Err, where)
	require.Equal(t, left, got.Remaining, where)
	made, wanted := int64(0), int64(0)
	for i, want := range results {
		made, wanted = made+want.Taken, wanted+takes.Runs[i].Count
		if got.OK {
			require.Equal(t, policy.RunTaking{Taken: takes.Runs[i].Count}, want, where)
		} else {
			require.Equal(t, want, policy.RunTaking{Taken: got.Runs[i].Taken, Wait: micros(got.Runs[i].Wait)}, where)
		}
	}
	if b.Control != nil {
		require.Equal(t, policy.Version{Era: b.Control.Era, Index: b.Control.Index}, got.Version, where)
		require.Equal(t, b.Control.Last, got.Last, where)
		require.Equal(t, !got.OK || takes.Terms, got.Terms != nil, where)
	}
	switch made {
	case wanted:
		return "all"
	case 0:
		return "none"
	}
	return "some"
}

func TestABucketsFaultIsItsOwnAmongTakesOfMany(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		for _, key := range []string{"first", "list", "text", "least", "state", "last"} {
			storeCase(ctx, t, rdb, key, 10)
		}
		require.NoError(t, rdb.Del(ctx, "list", "{state}:ctl").Err())
		require.NoError(t, rdb.LPush(ctx, "list", 1).Err())
		require.NoError(t, rdb.Set(ctx, "text", "many", 0).Err())
		require.NoError(t, rdb.Set(ctx, "least", int64(math.MinInt64), 0).Err())
		require.NoError(t, rdb.Set(ctx, "{state}:ctl", "none", 0).Err())
		for _, whole := range []bool{false, true} {
			var takes []lua.Takes
			for _, key := range []string{"first", "list", "typo", "text", "least", "state", "last"} {
				takes = append(takes, lua.Takes{Key: key, Runs: one(2), Whole: whole})
			}
			replies, err := new(lua.TakesCall).Do(ctx, rdb, takes)
			require.NoError(t, err)
			for i, r := range replies {
				switch key := takes[i].Key; {
				case key == "first" || key == "last" || key == "state" && !whole:
					require.True(t, r.OK, key)
				case !whole:
					require.True(t, r.Missed, key)
				case key == "typo":
					require.ErrorIs(t, r.Err, lua.ErrUnknownBucket)
				default:
					require.ErrorIs(t, r.Err, lua.ErrMalformedBucket, key)
					require.ErrorContains(t, r.Err, key)
				}
			}
		}
		require.Equal(t, "6", rdb.Get(ctx, "first").Val())
		require.Equal(t, "6", rdb.Get(ctx, "last").Val())
		require.Zero(t, rdb.Exists(ctx, "typo").Val())
	})
}

func TestAnActiveSetOfAnotherTypeFailsNoTake(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx, set := t.Context(), lua.ActiveKey("user:", lua.ActiveShard("user:1"))
		storeCase(ctx, t, rdb, "first", 10)
		require.NoError(t, rdb.Set(ctx, set, "text", 0).Err())
		replies, err := new(lua.TakesCall).Do(ctx, rdb, []lua.Takes{
			{Key: "first", Runs: one(2), Whole: true},
			{Key: "user:1", Runs: one(2), Template: users, Whole: true},
		})
		require.NoError(t, err)
		for i, left := range []int64{8, 58} {
			require.True(t, replies[i].OK)
			require.Equal(t, left, replies[i].Remaining)
		}
		require.Equal(t, "text", rdb.Get(ctx, set).Val())
		require.EqualValues(t, -1, rdb.PTTL(ctx, set).Val(), "Redis sets no expiry")
	})
}

// A bucket that lost its tokens gets those of its policy's on_loss. A take that is denied before that makes no
// difference.
func TestADeniedTakeMakesNoTokensWhereTheyWereLost(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		b := storeCase(ctx, t, rdb, "b", 400)
		b.Tokens, b.Control.Terms.OnLoss = nil, policy.LossFull
		store(ctx, t, rdb, "b", b)
		for _, withTerms := range []bool{false, true} {
			r, err := takeOne(ctx, rdb, "b", 1, withTerms)
			require.NoError(t, err)
			require.False(t, r.OK)
			require.Zero(t, rdb.Exists(ctx, "b").Val())
		}
		out, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: policy.Version{Era: b.Control.Era,
			Index: b.Control.Index}})
		require.NoError(t, err)
		require.EqualValues(t, 1000, out.Tokens, "a lost bucket is full under on_loss: full")
	})
}

func TestATakeLeavesTheRequestedRemainder(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aTakeLeavesTheRequestedRemainder)
}

func aTakeLeavesTheRequestedRemainder(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 300) // of 1000
	take := func(whole bool, runs ...policy.Run) lua.TakesReply {
		replies, err := new(lua.TakesCall).Do(ctx, rdb, []lua.Takes{{Key: "b", Runs: runs, Whole: whole}})
		require.NoError(t, err)
		return replies[0]
	}
	fifth := policy.Leave{Percent: 20}
	require.EqualValues(t, 200, take(true, policy.Run{N: 50, Count: 3, Leave: fifth}).Remaining)
	r := take(true, policy.Run{N: 50, Count: 1, Leave: fifth},
		policy.Run{N: 40, Count: 1, Leave: policy.Leave{Tokens: 150}}, policy.Run{N: 10, Count: 1})
	require.Equal(t, []int64{0, 1, 1}, []int64{r.Runs[0].Taken, r.Runs[1].Taken, r.Runs[2].Taken})
	require.EqualValues(t, 150, r.Remaining)
	// The take of 50 has to leave 200, so 100 tokens are missing. At 500/s they take 200 ms.
	require.InDelta(t, 100*time.Millisecond, r.Runs[0].Wait, float64(101*time.Millisecond))
	require.Positive(t, r.Runs[0].Wait)

	require.True(t, take(false, policy.Run{N: 1, Count: 1, Leave: policy.Leave{Tokens: 150}}).Missed)
	require.True(t, take(false, policy.Run{N: 1, Count: 1, Leave: policy.Leave{Tokens: 149}}).OK)
	require.EqualValues(t, 149, *load(ctx, t, rdb, "b").Tokens)
	r = take(true, policy.Run{N: 900, Count: 1, Leave: policy.Leave{Tokens: 101}})
	require.Negative(t, r.Runs[0].Wait, "the bucket never holds as many")

	for _, bad := range []policy.Leave{{Tokens: -1}, {Tokens: policy.MaxTokens + 1}, {Percent: -1}, {Percent: 101},
		{Tokens: 1, Percent: 1}} {
		_, err := new(lua.TakesCall).Do(ctx, rdb, []lua.Takes{{Key: "b", Runs: []policy.Run{{N: 1, Count: 1, Leave: bad}},
			Whole: true}})
		require.ErrorIs(t, err, lua.ErrInvalidAmount)
		require.ErrorContains(t, err, "leave")
	}
	_, err := new(lua.TakesCall).Do(ctx, rdb, []lua.Takes{{Key: "b", Runs: []policy.Run{{N: 1, Count: 1, Leave: fifth}}}})
	require.ErrorContains(t, err, "leave 20% of an unknown capacity")
}

func TestATakeThatDoesNotFitLeavesTheTokensToThoseBehindIt(t *testing.T) {
	withEmbedded(t, aTakeThatDoesNotFitLeavesTheTokensToThoseBehindIt)
}

func aTakeThatDoesNotFitLeavesTheTokensToThoseBehindIt(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 10)
	r, err := takeWhole(ctx, rdb, lua.Takes{Key: "b",
		Runs: []policy.Run{{N: 4, Count: 1}, {N: 900, Count: 1}, {N: 2, Count: 5}}, Terms: false})
	require.NoError(t, err)
	require.Equal(t, []int64{1, 0, 3}, []int64{r.Runs[0].Taken, r.Runs[1].Taken, r.Runs[2].Taken})
	require.Zero(t, r.Remaining)
	require.Zero(t, r.Runs[0].Wait)
	require.Positive(t, r.Runs[2].Wait)
}

func TestTakesThatFitCostOneCommandForEachBucketAndOneForAll(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	require.NoError(t, lua.Load(ctx, rdb))
	var takes []lua.Takes
	for i := range 20 {
		takes = append(takes, lua.Takes{Key: fmt.Sprintf("b%d", i), Runs: []policy.Run{{N: 2, Count: 3}, {N: 1, Count: 4}}})
		storeCase(ctx, t, rdb, takes[i].Key, 100)
	}
	require.NoError(t, rdb.ConfigResetStat(ctx).Err())
	replies, err := new(lua.TakesCall).Do(ctx, rdb, takes)
	require.NoError(t, err)
	for _, r := range replies {
		require.True(t, r.OK)
		require.EqualValues(t, 90, r.Remaining)
	}
	counts := sent(ctx, t, rdb)
	delete(counts, "config|resetstat")
	require.Equal(t, map[string]int{"evalsha": 1, "exists": 1, "decrby": 20}, counts)
}

func TestManyTakesOfNoBucketOrAnotherKindLeaveItAlone(t *testing.T) {
	withEmbedded(t, manyTakesOfNoBucketOrAnotherKindLeaveItAlone)
}

func manyTakesOfNoBucketOrAnotherKindLeaveItAlone(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	runs := []policy.Run{{N: 1, Count: 3}}
	for _, withTerms := range []bool{false, true} {
		_, err := takeWhole(ctx, rdb, lua.Takes{Key: "typo", Runs: runs, Terms: withTerms})
		require.ErrorIs(t, err, lua.ErrUnknownBucket)
		require.Empty(t, dump(ctx, t, rdb))
	}
	spoil := map[string]func(ctx context.Context, key string) error{
		"tokens": func(ctx context.Context, key string) error { return rdb.Set(ctx, key, "many", 0).Err() },
		"state": func(ctx context.Context, key string) error {
			return rdb.HSet(ctx, lua.ControlKey(key), "st", "1 2").Err()
		},
	}
	for name, set := range spoil {
		storeCase(ctx, t, rdb, name, 2)
		require.NoError(t, set(ctx, name))
		before := dump(ctx, t, rdb)
		_, err := takeWhole(ctx, rdb, lua.Takes{Key: name, Runs: runs, Terms: true})
		require.ErrorIs(t, err, lua.ErrMalformedBucket, name)
		require.Equal(t, before, dump(ctx, t, rdb), name)
	}
	for _, runs := range [][]policy.Run{nil, {{N: 0, Count: 1}}, {{N: 1, Count: 0}}, {{N: -1, Count: 1}},
		{{N: policy.MaxTokens, Count: 1}, {N: 1, Count: 1}}} {
		_, err := takeWhole(ctx, rdb, lua.Takes{Key: "typo", Runs: runs, Terms: true})
		require.ErrorIs(t, err, lua.ErrInvalidAmount)
	}
}

func TestDenialsOfAPoolsBucketAreCountedPerTake(t *testing.T) {
	withEmbedded(t, denialsOfAPoolsBucketAreCountedPerTake)
}

func denialsOfAPoolsBucketAreCountedPerTake(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	b := storeCase(ctx, t, rdb, "b", 10)
	b.Control.Terms.Pool = true
	b.Control.Terms.GrantTokens = 1
	b.Control.Terms.GrantEnd = serverTime(ctx, t, rdb)
	b.Control.Terms.GrantEra = b.Control.Era
	store(ctx, t, rdb, "b", b)
	// Two of the four takes of 5 fit. The take of more than the capacity can never fit, so it isn't counted.
	_, err := takeWhole(ctx, rdb, lua.Takes{Key: "b",
		Runs: []policy.Run{{N: 5, Count: 4}, {N: 1001, Count: 1}, {N: 990, Count: 2}}, Terms: false})
	require.NoError(t, err)
	require.Equal(t, "1990", rdb.HGet(ctx, lua.ControlKey("b"), "denied").Val())
}

func TestTakesQueueBehindOneThatDoesNotFit(t *testing.T) {
	withEmbedded(t, takesQueueBehindOneThatDoesNotFit)
}

func takesQueueBehindOneThatDoesNotFit(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 11)
	r, err := takeWhole(ctx, rdb, lua.Takes{Key: "b",
		Runs: []policy.Run{{N: 4, Count: 1}, {N: 3, Count: 3}, {N: 1, Count: 5}}, Terms: false, InLine: true})
	require.NoError(t, err)
	require.Equal(t, []int64{1, 2, 0}, []int64{r.Runs[0].Taken, r.Runs[1].Taken, r.Runs[2].Taken})
	require.EqualValues(t, 1, r.Remaining, "the last token is not given to later runs")
	require.Positive(t, r.Runs[1].Wait)
	r, err = takeWhole(ctx, rdb, lua.Takes{Key: "b", Runs: []policy.Run{{N: 4, Count: 1}}, Terms: false, InLine: true})
	require.NoError(t, err)
	require.False(t, r.OK)
}

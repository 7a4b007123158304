package lua_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
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

func TestTakesWithARequestIDAreAnsweredAsTheModelSays(t *testing.T) {
	withEmbedded(t, onceAgree)
}

func onceAgree(t *testing.T, rdb *redis.Client) {
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	reached, leaves := map[string]int{}, []policy.Leave{{}, {}, {Tokens: 15}, {Percent: 1}}
	for history := range 30 {
		key := fmt.Sprintf("bucket%d", history)
		model := storeCase(ctx, t, rdb, key, rng.Int64N(60))
		charges := map[string]*oracle.Charge{}
		for step := range 20 {
			id := fmt.Sprintf("request-%d", rng.IntN(4))
			n := 10 * (1 + rng.Int64N(2))
			where := fmt.Sprintf("history %d step %d: %d tokens for %s of %d", history, step, n, id, *model.Tokens)
			if rng.IntN(10) == 0 { // it is forgotten
				require.NoError(t, rdb.Del(ctx, lua.RequestKey(key, id)).Err())
				delete(charges, id)
			}
			if rng.IntN(5) == 0 {
				_, err := lua.Return(ctx, rdb, key, 10, 0)
				require.NoError(t, err)
				model.Return(10)
			}
			run := policy.Run{N: n, Count: 1, Leave: leaves[rng.IntN(len(leaves))]}
			if rng.IntN(3) == 0 {
				run.N = 1
				run.Count = n
				run.UpTo = true
			}
			got, err := lua.TakeOnce(ctx, rdb, key, id, run, time.Hour)
			before := charges[id]
			want, after, reused := oracle.TakeOnce(&model, before, run, time.Hour.Microseconds(), max(got.Now, 1))
			if reused {
				reached["reused"]++
				require.ErrorIs(t, err, lua.ErrRequestReused, where)
				require.ErrorContains(t, err, fmt.Sprintf("%q of bucket %q asked for something else", id, key), where)
				require.Equal(t, model, load(ctx, t, rdb, key), where)
				continue
			}
			require.NoError(t, err, where)
			require.Equal(t, want.OK, got.OK, where)
			require.Equal(t, want.Taken, got.Taken, where)
			require.Equal(t, want.Tokens, got.Remaining, where)
			require.Equal(t, want.Wait, micros(got.Wait), where)
			if got.OK {
				require.Equal(t, after.Era, got.Version.Era, where)
			}
			require.NotNil(t, got.Terms, where)
			require.Equal(t, model, load(ctx, t, rdb, key), where)
			switch {
			case !got.OK:
				reached["denied"]++
			case before != nil:
				reached["repeated"]++
			default:
				reached["taken"]++
			}
			charges[id] = after
		}
	}
	require.Len(t, reached, 4, "%v", reached)
}

func TestARequestIsForgottenAfterItsMemory(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aRequestIsForgottenAfterItsMemory)
}

func aRequestIsForgottenAfterItsMemory(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 100)
	_, err := lua.TakeOnce(ctx, rdb, "b", "r1", policy.Run{N: 10, Count: 1}, time.Hour)
	require.NoError(t, err)
	left, err := rdb.PTTL(ctx, lua.RequestKey("b", "r1")).Result()
	require.NoError(t, err)
	require.Greater(t, left, 59*time.Minute)
	_, err = lua.TakeOnce(ctx, rdb, "b", "r1", policy.Run{N: 10, Count: 1}, lua.MinRequestMemory)
	require.NoError(t, err)
	again, err := rdb.PTTL(ctx, lua.RequestKey("b", "r1")).Result()
	require.NoError(t, err)
	require.Greater(t, again, 59*time.Minute, "a repetition doesn't shorten the memory of the first charge")
}

func TestATakeWithARequestIDRefusesWhatItCanNotTake(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aTakeWithARequestIDRefusesWhatItCanNotTake)
}

func aTakeWithARequestIDRefusesWhatItCanNotTake(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 100)
	before := dump(ctx, t, rdb)
	for _, id := range []string{"", strings.Repeat("x", lua.MaxRequestIDLen+1), "a b", "a\n", "ü"} {
		_, err := lua.TakeOnce(ctx, rdb, "b", id, policy.Run{N: 1, Count: 1}, time.Minute)
		require.ErrorIs(t, err, lua.ErrInvalidRequest, id)
	}
	for _, memory := range []time.Duration{0, -time.Second, lua.MaxRequestMemory + 1} {
		_, err := lua.TakeOnce(ctx, rdb, "b", "r", policy.Run{N: 1, Count: 1}, memory)
		require.ErrorIs(t, err, lua.ErrInvalidRequest)
	}
	_, err := lua.TakeOnce(ctx, rdb, "b", "r", policy.Run{N: 0, Count: 1}, time.Minute)
	require.ErrorIs(t, err, lua.ErrInvalidAmount)
	_, err = lua.TakeOnce(ctx, rdb, "typo", "r", policy.Run{N: 1, Count: 1}, time.Minute)
	require.ErrorIs(t, err, lua.ErrUnknownBucket)
	require.Equal(t, before, dump(ctx, t, rdb))

	// The ids are the longest one, and one with unusual characters and a brace that could end a hash tag.
	for _, id := range []string{strings.Repeat("x", lua.MaxRequestIDLen), "}!~{"} {
		_, err = lua.TakeOnce(ctx, rdb, "b", id, policy.Run{N: 1, Count: 1}, time.Minute)
		require.NoError(t, err)
	}

	for name, spoil := range map[string]func(key string) error{
		"list": func(key string) error { return rdb.LPush(ctx, key, 1).Err() },
		"text": func(key string) error { return rdb.Set(ctx, key, "many", 0).Err() },
	} {
		require.NoError(t, rdb.Del(ctx, lua.RequestKey("b", "spoilt")).Err())
		require.NoError(t, spoil(lua.RequestKey("b", "spoilt")))
		before := dump(ctx, t, rdb)
		_, err := lua.TakeOnce(ctx, rdb, "b", "spoilt", policy.Run{N: 1, Count: 1}, time.Minute)
		require.ErrorIs(t, err, lua.ErrMalformedBucket, name)
		require.ErrorContains(t, err, lua.RequestKey("b", "spoilt"), name)
		require.Equal(t, before, dump(ctx, t, rdb), name)
	}
}

func TestARequestIsInItsBucketsSlot(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Cluster(t).Client()
	terms := buckettest.Terms()
	for i := range 20 {
		key := fmt.Sprintf("{bucket%d", i) // an opening brace is allowed
		_, err := lua.Refill(ctx, rdb, key, policy.Call{Create: policy.CreateInitial, Terms: &terms})
		require.NoError(t, err)
		for range 2 {
			reply, err := lua.TakeOnce(ctx, rdb, key, "}id{", policy.Run{N: 5, Count: 1}, time.Minute)
			require.NoError(t, err)
			require.EqualValues(t, 995, reply.Remaining)
		}
	}
}

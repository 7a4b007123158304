package lua_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/lua"
)

// The records of reservations and leases, and what the scripts do if some of them were lost. The numbers wanted are
// worked out by hand.

// withoutPlan answers calls that have the keys of a plan as a Cluster does that moves the bucket's slot.
func withoutPlan(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
	if args := cmd.Args(); len(args) > 2 && args[2] == keysWithPlan {
		cmd.SetErr(tryAgain{})
		return tryAgain{}
	}
	return next(ctx, cmd)
}

// keysWithPlan is the number of keys of a settlement that has those of the plan.
const keysWithPlan = 7

// tryAgain is the error of a Cluster for a call with several keys of a slot that it moves.
type tryAgain struct{}

func (tryAgain) Error() string { return "TRYAGAIN Multiple keys request during rehashing of slot" }

func (tryAgain) RedisError() {}

// While a slot moves, a flow's reservation is settled without the plan, and the right with which the flow paid is kept.
func TestASettlementWithoutThePlanLeavesTheRightAsItIs(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeDivided(ctx, t, rdb, "b")
		reserved, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "r", N: 5, TTL: time.Minute, Flow: divide("a")})
		require.NoError(t, err)
		require.True(t, reserved.OK)
		before, err := rdb.HGet(ctx, lua.FlowsKey("b"), "a").Result()
		require.NoError(t, err)
		moving := redis.NewClient(rdb.Options())
		defer moving.Close()
		moving.AddHook(onCommand(withoutPlan))
		settled, err := lua.SettleDivided(ctx, moving, "b", "r", 2)
		require.NoError(t, err)
		require.EqualValues(t, 3, settled.Returned)
		require.Equal(t, before, rdb.HGet(ctx, lua.FlowsKey("b"), "a").Val())
	})
}

// withBucket starts an embedded store with a bucket b that holds so many tokens. Keys expire by the clock of the store.
func withBucket(t *testing.T, tokens int64) (context.Context, *miniredis.Miniredis, *redis.Client) {
	t.Helper()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	store(t.Context(), t, rdb, "b", buckettest.Bucket(tokens, embeddedNow, 0))
	return t.Context(), m, rdb
}

// A call that isn't a sweep ends 16 reservations whose time is over.
func TestAReservationEndsSixteenOthers(t *testing.T) {
	t.Parallel()
	ctx, m, rdb := withBucket(t, 100)
	reserve := func(id string) int64 {
		reply, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: id, N: 1, TTL: time.Second})
		require.NoError(t, err)
		require.True(t, reply.OK)
		return reply.Remaining
	}
	for i := range 20 {
		require.EqualValues(t, 99-i, reserve(fmt.Sprint(i)))
	}
	m.SetTime(time.UnixMicro(embeddedNow).Add(2 * time.Second))
	require.EqualValues(t, 80+16-1, reserve("later"))
}

// The set of the ends was lost, and the keys of the bucket expire before the reservation does. A reservation is
// remembered for a minute after its end.
func TestABucketWhoseEndsWereLostOutlivesItsLastReservation(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	call := user()
	call.Hold = 1000 * time.Second
	_, err := takeTemplate(ctx, rdb, "user:1", call, one(5), false, false)
	require.NoError(t, err)
	for i, ttl := range []time.Duration{500 * time.Second, 1000 * time.Second, 10 * time.Second} {
		reply, err := lua.Reserve(ctx, rdb, "user:1", lua.ReserveCall{ID: fmt.Sprint(i), N: 1, TTL: ttl})
		require.NoError(t, err)
		require.True(t, reply.OK)
	}
	require.NoError(t, rdb.Del(ctx, lua.DueKey("user:1")).Err())
	for _, key := range []string{"user:1", "{user:1}", "{user:1}:ctl"} {
		require.NoError(t, rdb.PExpire(ctx, key, 120*time.Second).Err())
	}
	err = lua.SweepOne(ctx, rdb, "user:1", 10)
	require.NoError(t, err)
	for _, key := range []string{"user:1", "{user:1}", "{user:1}:ctl", "{user:1}:due", "{user:1}:outstanding"} {
		require.Equal(t, 1060*time.Second, rdb.PTTL(ctx, key).Val(), key)
	}
}

// The state counts more than the records hold, and one record can't be read. When the last end has passed, nothing is
// outstanding, and the records are removed.
func TestABucketWithoutEndsHasNothingOutstanding(t *testing.T) {
	t.Parallel()
	ctx, m, rdb := withBucket(t, 100)
	reply, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "r", N: 1, TTL: time.Second})
	require.NoError(t, err)
	require.NoError(t, rdb.HSet(ctx, "{b}:ctl", "out", fmt.Sprintf("5 %d 0", reply.Until)).Err())
	require.NoError(t, rdb.HSet(ctx, lua.OutstandingKey("b"), "junk", "text").Err())
	for _, after := range []time.Duration{2 * time.Second, 63 * time.Second} { // it is remembered for a minute
		m.SetTime(time.UnixMicro(embeddedNow).Add(after))
		require.NoError(t, lua.SweepOne(ctx, rdb, "b", 10))
	}
	require.Zero(t, rdb.Exists(ctx, lua.OutstandingKey("b")).Val())
	peek, err := lua.Peek(ctx, rdb, "b", 1)
	require.NoError(t, err)
	require.Zero(t, peek.Outstanding)
	require.Zero(t, peek.Due)
}

func TestAMalformedRecordIsNamed(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeCase(ctx, t, rdb, "b", 100)
		require.NoError(t, rdb.HSet(ctx, lua.OutstandingKey("b"), "r", "text").Err())
		_, err := lua.Settle(ctx, rdb, "b", "r", 1)
		require.ErrorIs(t, err, lua.ErrMalformedBucket)
		require.ErrorContains(t, err, lua.OutstandingKey("b"))
	})
}

// Five reservations end. The bucket has room for the first one and for a part of the second; the last two are of an era
// that ended.
func TestASweepAddsUpWhatItEnds(t *testing.T) {
	t.Parallel()
	ctx, m, rdb := withBucket(t, 1000)
	for i, n := range []int64{2, 4, 8, 16, 32} {
		id := fmt.Sprint(i)
		ttl := time.Second + time.Duration(i)*time.Millisecond
		reply, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: id, N: n, TTL: ttl})
		require.NoError(t, err)
		if i >= 3 {
			record := fmt.Sprintf("2 %d %d %d 0", n, reply.Until, buckettest.Era-1)
			require.NoError(t, rdb.HSet(ctx, lua.OutstandingKey("b"), id, record).Err())
		}
	}
	require.NoError(t, rdb.Set(ctx, "b", 995, 0).Err())
	m.SetTime(time.UnixMicro(embeddedNow).Add(2 * time.Second))
	swept := lua.Sweep(ctx, rdb, []string{"b"}, 10)[0]
	require.NoError(t, swept.Err)
	require.EqualValues(t, 2+3, swept.Returned)
	require.EqualValues(t, 1+8, swept.Clamped)
	require.EqualValues(t, 16+32, swept.Void)
	require.Zero(t, swept.Outstanding)
}

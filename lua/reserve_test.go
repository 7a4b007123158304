package lua_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
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

func TestReservationsAndLeasesAgreeWithTheModelOnRandomHistories(t *testing.T) {
	withEmbedded(t, holdsAgree)
}

func holdsAgree(t *testing.T, rdb *redis.Client) {
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	reached := map[string]int{}
	missed := func(name string) bool { return reached[name] == 0 }
	outcomes := []string{
		"reserved", "in use", "unknown", "settled", "settled again", "charged", "not held", "granted", "ended", "dropped",
		"nothing swept",
	}
	for history := 0; history < 20 || history < 200 && slices.ContainsFunc(outcomes, missed); history++ {
		key := fmt.Sprintf("bucket%d", history)
		h := buckettest.NewHistory(rng)
		store(ctx, t, rdb, key, buckettest.Bucket(rng.Int64N(1000), serverTime(ctx, t, rdb), 100_000))
		for step := range 50 {
			model := loadHeld(ctx, t, rdb, key)
			if h.Chance(15) {
				h.DisturbKeys(&model.Bucket)
			}
			h.DisturbHeld(&model, serverTime(ctx, t, rdb))
			if h.Chance(30) && model.Control != nil {
				full := model.Control.Terms.Capacity
				model.Tokens = &full
			}
			storeHeld(ctx, t, rdb, key, model)
			where := fmt.Sprintf("history %d step %d", history, step)

			if h.Chance(30) {
				call := h.Call(serverTime(ctx, t, rdb))
				out, err := lua.Refill(ctx, rdb, key, call)
				require.NoError(t, err, where)
				require.Equal(t, model.Refill(call, out.Now), out, where)
				require.Equal(t, model, loadHeld(ctx, t, rdb, key), where)
				h.Remember(out.Version)
			}
			if model.Tokens == nil {
				continue // the model records that there are none; a script does so only on a change
			}
			c := h.HoldCall(model)
			where = fmt.Sprintf("%s: %+v of %+v", where, c, model.Held)
			reached[hold(ctx, t, rdb, key, &model, c, where)]++
			require.Equal(t, model, loadHeld(ctx, t, rdb, key), where)
		}
	}
	require.False(t, slices.ContainsFunc(outcomes, missed), "some of %q never occurred: %v", outcomes, reached)
}

// hold makes a call on the server and on the model, and compares the replies. It returns a name for what happened.
func hold(ctx context.Context, t *testing.T, rdb *redis.Client, key string, model *oracle.Bucket, c buckettest.HoldCall,
	where string) string {
	t.Helper()
	ttl := time.Duration(c.TTL) * time.Microsecond
	answer := func(err error, held oracle.Held) string {
		want := map[oracle.Held]error{
			oracle.HeldUnknown: lua.ErrUnknownBucket, oracle.HeldInUse: lua.ErrIDInUse, oracle.HeldNot: lua.ErrNotHeld,
			oracle.HeldOther: lua.ErrOtherEra,
		}[held]
		require.ErrorIs(t, err, want, where)
		return map[oracle.Held]string{oracle.HeldUnknown: "unknown", oracle.HeldInUse: "in use", oracle.HeldNot: "not held",
			oracle.HeldOther: "other era"}[held]
	}
	switch c.Op {
	case buckettest.Reserve:
		got, err := lua.Reserve(ctx, rdb, key, lua.ReserveCall{ID: c.ID, N: c.N, TTL: ttl, Overrun: c.Overrun,
			Leave: c.Leave})
		now := got.Now
		if err != nil { // later than the call, so records that were over are still over
			now = serverTime(ctx, t, rdb)
		}
		want, held := model.Reserve(c.ID, c.N, c.TTL, c.Overrun, c.Leave, now)
		if held != oracle.HeldDone {
			return answer(err, held)
		}
		require.NoError(t, err, where)
		require.Equal(t, want, policy.Taking{OK: got.OK, Known: true, Taken: got.Taken, Tokens: got.Remaining,
			Wait: micros(got.Wait)}, where)
		if !want.OK {
			return "denied"
		}
		require.Equal(t, model.Held[c.ID].Until, got.Until, where)
		return "reserved"
	case buckettest.Settle:
		before := model.Held[c.ID].Kind
		got, err := lua.Settle(ctx, rdb, key, c.ID, c.N)
		want, again, held := model.Settle(c.ID, c.N, got.Now)
		if held != oracle.HeldDone {
			return answer(err, held)
		}
		require.NoError(t, err, where)
		require.Equal(t, want, got.Settlement, where)
		require.Equal(t, again, got.Again, where)
		require.Equal(t, *model.Tokens, got.Remaining, where)
		switch {
		case again:
			return "settled again"
		case want.Owed > 0:
			return "owed"
		case want.Forgiven > 0:
			return "forgiven"
		case want.Void > 0:
			return "void"
		case before == oracle.HoldingRunOut:
			return "settled late"
		case want.Charged > 0:
			return "charged"
		}
		return "settled"
	case buckettest.Lease:
		got, err := lua.Lease(ctx, rdb, key, lua.LeaseCall{ID: c.ID, Seq: c.Seq, Keep: c.Keep, Back: c.Back, Want: c.Want,
			TTL: ttl})
		granted, clamped, held := model.Lease(c.ID, c.Seq, c.Keep, c.Back, c.Want, c.TTL, got.Now)
		if held != oracle.HeldDone {
			return answer(err, held)
		}
		require.NoError(t, err, where)
		require.Equal(t, []int64{granted, clamped, *model.Tokens}, []int64{got.Granted, got.Clamped, got.Remaining}, where)
		if model.Held[c.ID].N == 0 {
			return "ended"
		}
		return "granted"
	default:
		got := lua.Sweep(ctx, rdb, []string{key}, c.Most)[0]
		if model.Control == nil {
			return answer(got.Err, oracle.HeldUnknown)
		}
		require.NoError(t, got.Err, where)
		want := model.Sweep(c.Most, got.Now)
		s := model.Control
		require.Equal(t, want, got.Swept, where)
		require.Equal(t, []int64{*model.Tokens, s.Outstanding, s.Due, s.Debt},
			[]int64{got.Tokens, got.Outstanding, got.Due, got.Debt}, where)
		switch {
		case want.Returned > 0:
			return "swept back"
		case want.Dropped > 0:
			return "dropped"
		}
		return "nothing swept"
	}
}

// A late settlement charges the used tokens, which had been returned to the bucket.
func TestALateSettlementChargesAReservationThatRanOut(t *testing.T) {
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	expire := func(ids ...string) {
		model := loadHeld(ctx, t, rdb, "b")
		for _, id := range ids {
			h := model.Held[id]
			h.Until = serverTime(ctx, t, rdb) - 1
			model.Held[id], model.Ends[id] = h, h.Until
			model.Control.Due = h.Until
		}
		storeHeld(ctx, t, rdb, "b", model)
	}
	storeCase(ctx, t, rdb, "b", 900)
	for _, id := range []string{"x", "y", "of another era"} {
		_, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: id, N: 100, TTL: time.Minute})
		require.NoError(t, err)
	}
	model := loadHeld(ctx, t, rdb, "b")
	h := model.Held["of another era"]
	h.Era--
	model.Held["of another era"] = h
	*model.Tokens = 850
	storeHeld(ctx, t, rdb, "b", model)
	expire("x", "y", "of another era")
	r := lua.Sweep(ctx, rdb, []string{"b"}, 2)[0]
	require.NoError(t, r.Err)
	require.Equal(t, policy.Swept{Returned: 150, Clamped: 50}, r.Swept, "the sweep ends the first two")
	r = lua.Sweep(ctx, rdb, []string{"b"}, 2)[0]
	require.Equal(t, policy.Swept{Void: 100}, r.Swept)
	require.EqualValues(t, 1000, r.Tokens)
	require.Zero(t, r.Outstanding)
	require.Greater(t, r.Due, r.Now, "the swept records are kept")

	late, err := lua.Settle(ctx, rdb, "b", "x", 30)
	require.NoError(t, err)
	require.Equal(t, policy.Settlement{Charged: 30}, late.Settlement)
	require.EqualValues(t, 970, late.Remaining)
	late, err = lua.Settle(ctx, rdb, "b", "of another era", 130)
	require.NoError(t, err)
	require.Equal(t, policy.Settlement{Charged: 30}, late.Settlement, "100 of the tokens were never returned")
	require.EqualValues(t, 940, late.Remaining)
	expire("x", "y", "of another era")
	r = lua.Sweep(ctx, rdb, []string{"b"}, 10)[0]
	require.Zero(t, r.Due, "no records are left")
	_, err = lua.Settle(ctx, rdb, "b", "x", 30)
	require.ErrorIs(t, err, lua.ErrNotHeld)
}

// A consumer that has died may have spent the tokens of its block, so they aren't returned.
func TestALeaseThatRunsOutIsSpent(t *testing.T) {
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	storeCase(ctx, t, rdb, "b", 100)
	_, err := lua.Lease(ctx, rdb, "b", lua.LeaseCall{ID: "x", Seq: 1, Want: 40, TTL: time.Millisecond})
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		r := lua.Sweep(ctx, rdb, []string{"b"}, 10)[0]
		return r.Dropped == 40 && r.Outstanding == 0 && r.Tokens == 60
	}, 20*time.Second, time.Millisecond)
	_, err = lua.Lease(ctx, rdb, "b", lua.LeaseCall{ID: "x", Seq: 2, Back: 40, TTL: time.Minute})
	require.ErrorIs(t, err, lua.ErrNotHeld)
	require.EqualValues(t, 60, *loadHeld(ctx, t, rdb, "b").Tokens)
}

func TestReturnsToAnotherEraAreDropped(t *testing.T) {
	withEmbedded(t, returnsToAnotherEraAreDropped)
}

func returnsToAnotherEraAreDropped(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 400)
	_, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "r", N: 100, TTL: time.Minute})
	require.NoError(t, err)
	_, err = lua.Lease(ctx, rdb, "b", lua.LeaseCall{ID: "l", Seq: 1, Want: 100, TTL: time.Minute})
	require.NoError(t, err)
	out, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: policy.Version{Era: buckettest.Era,
		Index: buckettest.Index + 5}})
	require.NoError(t, err)
	require.Equal(t, policy.StatusRolledBack, out.Status)
	require.Zero(t, out.Tokens)
	require.EqualValues(t, 200, out.Outstanding, "holders may still spend the 200 tokens")
	s, err := lua.Settle(ctx, rdb, "b", "r", 10)
	require.NoError(t, err)
	require.Equal(t, policy.Settlement{Void: 90}, s.Settlement)
	_, err = lua.Lease(ctx, rdb, "b", lua.LeaseCall{ID: "l", Seq: 2, Back: 100, TTL: time.Minute})
	require.ErrorIs(t, err, lua.ErrOtherEra)
	b := loadHeld(ctx, t, rdb, "b")
	require.Zero(t, *b.Tokens)
	require.Zero(t, b.Control.Outstanding)
}

func TestALeaseIsGivenAtMostHalfOfWhatTheBucketHolds(t *testing.T) {
	withEmbedded(t, aLeaseIsGivenAtMostHalfOfWhatTheBucketHolds)
}

func aLeaseIsGivenAtMostHalfOfWhatTheBucketHolds(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 101)
	lease := lua.LeaseCall{ID: "x", Seq: 1, Want: 1000, TTL: time.Minute}
	r, err := lua.Lease(ctx, rdb, "b", lease)
	require.NoError(t, err)
	require.EqualValues(t, 50, r.Granted)
	again, err := lua.Lease(ctx, rdb, "b", lease)
	require.NoError(t, err)
	r.Now = again.Now
	require.Equal(t, r, again, "a repeated call gets the same reply")
	p, err := lua.Peek(ctx, rdb, "b", 1)
	require.NoError(t, err)
	require.Equal(t, []int64{51, 50}, []int64{p.Tokens, p.Outstanding})
}

// The reply to a settlement is lost. The next attempt changes nothing, and neither does one from another process that
// only knows the id.
func TestASettlementIsMadeOnce(t *testing.T) {
	withEmbedded(t, aSettlementIsMadeOnce)
}

func aSettlementIsMadeOnce(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 100)
	call := lua.ReserveCall{ID: "job 7", N: 60, TTL: time.Minute}
	for range 3 {
		r, err := lua.Reserve(ctx, rdb, "b", call)
		require.NoError(t, err)
		require.True(t, r.OK)
		require.EqualValues(t, 40, r.Remaining, "the reservation is charged once")
	}
	for i := range 3 {
		r, err := lua.Settle(ctx, rdb, "b", "job 7", 25+int64(i))
		require.NoError(t, err)
		require.Equal(t, i > 0, r.Again)
		require.Equal(t, policy.Settlement{Returned: 35}, r.Settlement)
		require.EqualValues(t, 75, r.Remaining)
	}
	_, err := lua.Reserve(ctx, rdb, "b", call)
	require.ErrorIs(t, err, lua.ErrIDInUse, "the reservation was settled")
}

func TestDebtIsPaidBeforeTokensAndIsAtMostTheCapacity(t *testing.T) {
	withEmbedded(t, debtIsPaidBeforeTokensAndIsAtMostTheCapacity)
}

func debtIsPaidBeforeTokensAndIsAtMostTheCapacity(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 100)
	_, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "x", N: 90, TTL: time.Minute, Overrun: policy.OverrunDebt})
	require.NoError(t, err)
	r, err := lua.Settle(ctx, rdb, "b", "x", 1200)
	require.NoError(t, err)
	require.Equal(t, policy.Settlement{Charged: 10, Owed: 1000, Forgiven: 100}, r.Settlement)

	model := loadHeld(ctx, t, rdb, "b")
	require.EqualValues(t, 1000, model.Control.Debt)
	model.Control.Debt = 70
	model.Control.Last = serverTime(ctx, t, rdb) - 200_000 // 100 tokens
	storeHeld(ctx, t, rdb, "b", model)
	p, err := lua.Peek(ctx, rdb, "b", 31)
	require.NoError(t, err)
	require.EqualValues(t, 70, p.Debt)
	out, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: policy.Version{Era: buckettest.Era,
		Index: buckettest.Index}})
	require.NoError(t, err)
	require.GreaterOrEqual(t, out.Added, int64(100))
	require.Equal(t, out.Added-70, out.Tokens)
	require.Zero(t, out.Debt)
}

func TestAStrictBucketKeepsRoomForWhatIsOutstanding(t *testing.T) {
	withEmbedded(t, aStrictBucketKeepsRoomForWhatIsOutstanding)
}

func aStrictBucketKeepsRoomForWhatIsOutstanding(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	for _, strict := range []bool{false, true} {
		b := buckettest.Bucket(1000, serverTime(ctx, t, rdb), 1)
		b.Control.Terms.Strict = strict
		store(ctx, t, rdb, "b", b)
		r, err := lua.Lease(ctx, rdb, "b", lua.LeaseCall{ID: "x", Seq: 1, Want: 400, TTL: time.Minute})
		require.NoError(t, err)
		require.EqualValues(t, 400, r.Granted)
		model := loadHeld(ctx, t, rdb, "b")
		model.Control.Last -= 10_000_000
		storeHeld(ctx, t, rdb, "b", model)
		out, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: policy.Version{Era: buckettest.Era,
			Index: buckettest.Index}})
		require.NoError(t, err)
		require.EqualValues(t, 400, out.Outstanding)
		if !strict {
			require.EqualValues(t, 1000, out.Tokens, "a loose bucket is full in spite of the lease")
			continue
		}
		require.EqualValues(t, 600, out.Tokens)
		op, err := lua.Grant(ctx, rdb, "b", 5)
		require.NoError(t, err)
		require.EqualValues(t, 5, op.Clamped)
		op, err = lua.Reset(ctx, rdb, "b", -1)
		require.NoError(t, err)
		require.EqualValues(t, 600, op.Tokens)
		back, err := lua.Return(ctx, rdb, "b", 5, 0)
		require.NoError(t, err)
		require.EqualValues(t, 5, back.Clamped, "a strict bucket has no room for other returned tokens")
		r, err = lua.Lease(ctx, rdb, "b", lua.LeaseCall{ID: "x", Seq: 2, Back: 400, TTL: time.Minute})
		require.NoError(t, err)
		require.Zero(t, r.Clamped)
		require.EqualValues(t, 1000, r.Remaining)
	}
}

// A block of 400 tokens is outstanding when the capacity falls to 300, so there is no room. Then 150 tokens are given
// back and 250 kept, so that 50 of the 150 fit.
func TestWhatABlockKeepsIsNoRoomForWhatItGivesBack(t *testing.T) {
	withEmbedded(t, whatABlockKeepsIsNoRoomForWhatItGivesBack)
}

func whatABlockKeepsIsNoRoomForWhatItGivesBack(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	b := buckettest.Bucket(1000, serverTime(ctx, t, rdb), 1)
	b.Control.Terms.Strict = true
	store(ctx, t, rdb, "b", b)
	_, err := lua.Lease(ctx, rdb, "b", lua.LeaseCall{ID: "x", Seq: 1, Want: 400, TTL: time.Minute})
	require.NoError(t, err)
	smaller := b.Control.Terms
	smaller.Capacity, smaller.Initial = 300, 300
	smaller.Fence.Epoch++
	o, err := lua.Refill(ctx, rdb, "b", policy.Call{Terms: &smaller, Version: policy.Version{Era: buckettest.Era,
		Index: buckettest.Index}})
	require.NoError(t, err)
	require.Equal(t, []int64{0, 400}, []int64{o.Tokens, o.Outstanding})
	r, err := lua.Lease(ctx, rdb, "b", lua.LeaseCall{ID: "x", Seq: 2, Keep: 250, Back: 150, TTL: time.Minute})
	require.NoError(t, err)
	require.Equal(t, []int64{50, 100}, []int64{r.Remaining, r.Clamped})
	require.EqualValues(t, 250, loadHeld(ctx, t, rdb, "b").Control.Outstanding)
}

func TestARefillOfABucketThatHoldsNothingCostsNoCommandMore(t *testing.T) {
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	require.NoError(t, lua.Load(ctx, rdb))
	storeCase(ctx, t, rdb, "b", 100)
	require.NoError(t, rdb.ConfigResetStat(ctx).Err())
	_, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index}})
	require.NoError(t, err)
	for command, want := range map[string]string{"time": "calls=1", "mget": "calls=1", "hget": "calls=1",
		"hmget": "calls=1", "get": "calls=2", "incrby": "calls=2", "hset": "calls=1"} {
		require.Equal(t, want, calls(ctx, t, rdb, command), command)
	}
	for _, other := range []string{"incr", "zcard", "zrange", "zrangebyscore", "hdel", "pttl"} {
		require.Empty(t, calls(ctx, t, rdb, other), other)
	}
}

// A bucket whose keys expire lives longer than its reservations and leases, and their records expire with it.
func TestABucketThatExpiresOutlivesItsReservations(t *testing.T) {
	withEmbedded(t, aBucketThatExpiresOutlivesItsReservations)
}

func aBucketThatExpiresOutlivesItsReservations(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 100)
	keys := []string{"b", lua.IndexKey("b"), lua.ControlKey("b"), lua.OutstandingKey("b"), lua.DueKey("b")}
	for _, key := range keys[:3] {
		require.NoError(t, rdb.PExpire(ctx, key, 5*time.Second).Err())
	}
	_, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "x", N: 10, TTL: time.Hour})
	require.NoError(t, err)
	for _, key := range keys {
		left, err := rdb.PTTL(ctx, key).Result()
		require.NoError(t, err)
		require.Greater(t, left, time.Hour+30*time.Second, key)
		require.LessOrEqual(t, left, time.Hour+time.Minute, key)
	}
	_, err = lua.Settle(ctx, rdb, "b", "x", 10)
	require.NoError(t, err)
	left, err := rdb.PTTL(ctx, "b").Result()
	require.NoError(t, err)
	require.Greater(t, left, time.Hour, "the expiry is not shortened")

	storeCase(ctx, t, rdb, "forever", 100)
	_, err = lua.Reserve(ctx, rdb, "forever", lua.ReserveCall{ID: "x", N: 10, TTL: time.Hour})
	require.NoError(t, err)
	for _, key := range []string{"forever", lua.OutstandingKey("forever"), lua.DueKey("forever")} {
		require.EqualValues(t, -1, rdb.PTTL(ctx, key).Val(), key)
	}
}

// A sweep remembers a reservation for a minute, and the bucket lives for another minute.
func TestABucketOutlivesWhatASweepRemembers(t *testing.T) {
	withEmbedded(t, aBucketOutlivesWhatASweepRemembers)
}

func aBucketOutlivesWhatASweepRemembers(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 100)
	_, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "x", N: 10, TTL: time.Minute})
	require.NoError(t, err)
	model := loadHeld(ctx, t, rdb, "b")
	over := serverTime(ctx, t, rdb) - 1
	h := model.Held["x"]
	h.Until = over
	model.Held["x"] = h
	model.Ends["x"] = over
	model.Control.Due = over
	storeHeld(ctx, t, rdb, "b", model)
	keys := []string{"b", lua.IndexKey("b"), lua.ControlKey("b"), lua.OutstandingKey("b"), lua.DueKey("b")}
	for _, key := range keys {
		require.NoError(t, rdb.PExpire(ctx, key, 30*time.Second).Err())
	}
	swept := lua.Sweep(ctx, rdb, []string{"b"}, 10)[0]
	require.NoError(t, swept.Err)
	require.EqualValues(t, 10, swept.Returned)
	for _, key := range keys {
		left := rdb.PTTL(ctx, key).Val()
		require.Greater(t, left, 90*time.Second, key)
		require.LessOrEqual(t, left, 120*time.Second, key)
	}
}

// A template's bucket becomes a configured bucket, which doesn't expire. Records that are made from then on don't
// expire either.
func TestRecordsOfATemplatesKeyThatIsConfiguredDoNotExpire(t *testing.T) {
	withEmbedded(t, recordsOfATemplatesKeyThatIsConfiguredDoNotExpire)
}

func recordsOfATemplatesKeyThatIsConfiguredDoNotExpire(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	_, err := takeTemplate(ctx, rdb, "user:1", user(), one(5), false, false)
	require.NoError(t, err)
	_, err = lua.Reserve(ctx, rdb, "user:1", lua.ReserveCall{ID: "x", N: 10, TTL: time.Minute})
	require.NoError(t, err)
	configured := policy.Policy{Capacity: 60, Rate: policy.PerSecond(1)}.Terms(policy.Fence{Epoch: 8})
	_, err = lua.Refill(ctx, rdb, "user:1", policy.Call{Terms: &configured})
	require.NoError(t, err)
	_, err = lua.Reserve(ctx, rdb, "user:1", lua.ReserveCall{ID: "y", N: 10, TTL: time.Hour})
	require.NoError(t, err)
	for _, key := range []string{"user:1", lua.OutstandingKey("user:1"), lua.DueKey("user:1")} {
		require.EqualValues(t, -1, rdb.PTTL(ctx, key).Val(), key)
	}
}

func TestRecordsOfAnotherKindAreMalformedAndStay(t *testing.T) {
	t.Parallel()
	withEmbedded(t, recordsOfAnotherKindAreMalformedAndStay)
}

func recordsOfAnotherKindAreMalformedAndStay(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	for _, name := range []string{lua.OutstandingKey("b"), lua.DueKey("b")} {
		for _, op := range []string{"Reserve", "Settle", "Lease", "Sweep"} {
			storeCase(ctx, t, rdb, "b", 100)
			require.NoError(t, rdb.Set(ctx, name, "something else", 0).Err())
			before := dump(ctx, t, rdb)
			err := operations[op](ctx, rdb, "b")
			require.ErrorIs(t, err, lua.ErrMalformedBucket, op)
			require.ErrorContains(t, err, fmt.Sprintf("the key %q does not hold", name), op)
			require.Equal(t, before, dump(ctx, t, rdb), op)
		}
	}
	storeCase(ctx, t, rdb, "b", 100)
	require.NoError(t, rdb.HSet(ctx, lua.OutstandingKey("b"), "x", "a record").Err())
	for _, op := range []string{"Reserve", "Settle", "Lease"} {
		require.ErrorIs(t, operations[op](ctx, rdb, "b"), lua.ErrMalformedBucket, op)
	}
	storeCase(ctx, t, rdb, "b", 100)
	require.NoError(t, rdb.HSet(ctx, lua.ControlKey("b"), "out", "1 2").Err())
	for _, op := range []string{"Reserve", "Refill", "Peek", "TakeDenied"} {
		require.ErrorIs(t, operations[op](ctx, rdb, "b"), lua.ErrMalformedBucket, op)
	}
}

func TestCallsAboutReservationsRefuseWhatIsOutOfRange(t *testing.T) {
	t.Parallel()
	withEmbedded(t, callsAboutReservationsRefuseWhatIsOutOfRange)
}

func callsAboutReservationsRefuseWhatIsOutOfRange(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	storeCase(ctx, t, rdb, "b", 100)
	before := dump(ctx, t, rdb)
	long := string(make([]byte, lua.MaxIDLen+1))
	for _, c := range []struct {
		want error
		call lua.ReserveCall
	}{
		{lua.ErrInvalidAmount, lua.ReserveCall{ID: "x", TTL: time.Second}},
		{lua.ErrInvalidAmount, lua.ReserveCall{ID: "x", N: policy.MaxTokens + 1, TTL: time.Second}},
		{lua.ErrInvalidID, lua.ReserveCall{N: 1, TTL: time.Second}},
		{lua.ErrInvalidID, lua.ReserveCall{ID: long, N: 1, TTL: time.Second}},
		{lua.ErrInvalidTTL, lua.ReserveCall{ID: "x", N: 1, TTL: policy.MinHold - 1}},
		{lua.ErrInvalidTTL, lua.ReserveCall{ID: "x", N: 1, TTL: policy.MaxHold + 1}},
	} {
		_, err := lua.Reserve(ctx, rdb, "b", c.call)
		require.ErrorIs(t, err, c.want, "%+v", c.call)
	}
	_, err := lua.Settle(ctx, rdb, "b", "x", -1)
	require.ErrorIs(t, err, lua.ErrInvalidAmount)
	_, err = lua.Settle(ctx, rdb, "b", "", 1)
	require.ErrorIs(t, err, lua.ErrInvalidID)
	for _, call := range []lua.LeaseCall{{ID: "x", Seq: 1, Keep: -1, TTL: time.Second},
		{ID: "x", Seq: 1, Back: -1, TTL: time.Second}, {ID: "x", Seq: 1, Want: policy.MaxTokens + 1, TTL: time.Second}} {
		_, err = lua.Lease(ctx, rdb, "b", call)
		require.ErrorIs(t, err, lua.ErrInvalidAmount)
	}
	for want, call := range map[error]lua.LeaseCall{lua.ErrInvalidID: {Seq: 1, TTL: time.Second},
		lua.ErrInvalidTTL: {ID: "x", Seq: 1}} {
		_, err = lua.Lease(ctx, rdb, "b", call)
		require.ErrorIs(t, err, want)
	}
	require.ErrorContains(t, lua.Sweep(ctx, rdb, []string{"b"}, 0)[0].Err, "want at least 1")
	require.Equal(t, before, dump(ctx, t, rdb))
	require.Empty(t, lua.Sweep(ctx, rdb, nil, 1))
}

func TestASweepReturnsEachBucketsOwnError(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aSweepReportsTheErrorOfEachBucket)
}

func aSweepReportsTheErrorOfEachBucket(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	require.NoError(t, rdb.ScriptFlush(ctx).Err())
	storeCase(ctx, t, rdb, "b", 100)
	require.NoError(t, rdb.Set(ctx, "text", "x", 0).Err())
	results := lua.Sweep(ctx, rdb, []string{"typo", "b", "text"}, 1)
	require.ErrorIs(t, results[0].Err, lua.ErrUnknownBucket)
	require.NoError(t, results[1].Err)
	require.EqualValues(t, 100, results[1].Tokens)
	require.ErrorIs(t, results[2].Err, lua.ErrUnknownBucket, "the bucket has no state")
	ended, cancel := context.WithCancel(ctx)
	cancel()
	require.True(t, errors.Is(lua.Sweep(ended, rdb, []string{"b"}, 1)[0].Err, context.Canceled))
}

// While a slot moves, its old server creates no key anew. A script that drops the last record of a bucket still does
// all of its work.
func TestTheLastRecordIsDroppedWhileTheSlotMoves(t *testing.T) {
	t.Parallel()
	ctx, cluster := t.Context(), testenv.Cluster(t)
	rdb := cluster.Client()
	// leased makes a bucket of 100 tokens, 40 of which are in a block, and begins to move its slot.
	leased := func(key string, ttl time.Duration) lua.LeaseCall {
		store(ctx, t, rdb, key, buckettest.Bucket(100, serverTime(ctx, t, rdb), 100_000))
		call := lua.LeaseCall{ID: "a", Seq: 1, Want: 40, TTL: ttl}
		r, err := lua.Lease(ctx, rdb, key, call)
		require.NoError(t, err)
		require.EqualValues(t, 40, r.Granted)
		until := time.UnixMicro(r.Now).Add(ttl)
		for time.UnixMicro(serverTime(ctx, t, rdb)).Before(until) && ttl == policy.MinHold {
			continue
		}
		slot := cluster.Slot(key)
		to := cluster.Nodes()[0]
		if to == cluster.Owner(slot) {
			to = cluster.Nodes()[1]
		}
		_, err = cluster.StartMove(slot, to)
		require.NoError(t, err)
		return lua.LeaseCall{ID: "a", Seq: 2, Back: 40, TTL: time.Minute}
	}

	back := leased("back", time.Minute)
	r, err := lua.Lease(ctx, rdb, "back", back)
	require.NoError(t, err)
	require.EqualValues(t, 100, r.Remaining)

	leased("swept", policy.MinHold)
	swept := lua.Sweep(ctx, rdb, []string{"swept"}, 10)[0]
	require.NoError(t, swept.Err)
	require.EqualValues(t, 40, swept.Dropped)

	leased("reserved", policy.MinHold)
	reserved, err := lua.Reserve(ctx, rdb, "reserved", lua.ReserveCall{ID: "b", N: 10, TTL: time.Minute})
	require.NoError(t, err)
	require.EqualValues(t, 50, reserved.Remaining)
	for key, want := range map[string][2]int64{"back": {100, 0}, "swept": {60, 0}, "reserved": {50, 10}} {
		peek, err := lua.Peek(ctx, rdb, key, 1)
		require.NoError(t, err)
		require.Equal(t, want, [2]int64{peek.Tokens, peek.Outstanding}, key)
	}
}

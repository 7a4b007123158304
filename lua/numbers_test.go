package lua_test

import (
	"fmt"
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

// The expected numbers of these tests are worked out by hand. Random histories only compare the scripts with the model,
// which may have the same error.

const second = 1_000_000 // µs

// scheduled returns the terms of a bucket that holds 1000 tokens and gets 300 each hour.
func scheduled(version int64) policy.Terms {
	hourly := policy.Policy{Capacity: 1000, Steps: policy.Every(time.Hour), StepTokens: 300}
	return hourly.Terms(policy.Fence{Epoch: version})
}

// ofSchedule returns such a bucket with 10 tokens. Its next step has been due for two seconds.
func ofSchedule(now int64) policy.Bucket {
	b := buckettest.Bucket(10, now, 100_000)
	b.Control.Terms = scheduled(3)
	b.Control.Next = now - 2*second
	b.Control.Step = b.Control.Next - 3600*second
	return b
}

func TestASwitchCreditsTheDueStepOfTheOldSchedule(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		for name, terms := range map[string]policy.Terms{
			"a smooth policy": policy.Policy{Capacity: 1000, Rate: policy.PerSecond(1), Interval: time.Minute}.
				Terms(policy.Fence{Epoch: 4}),
			"a different schedule": policy.Policy{Capacity: 1000, Steps: policy.Every(time.Minute), StepTokens: 7}.
				Terms(policy.Fence{Epoch: 4}),
		} {
			now := serverTime(ctx, t, rdb)
			store(ctx, t, rdb, "b", ofSchedule(now))
			call := policy.Call{Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index}, Terms: &terms}
			out, err := lua.Refill(ctx, rdb, "b", call)
			require.NoError(t, err, name)
			require.Equal(t, policy.StatusApplied, out.Status, name)
			require.Equal(t, []int64{310, 300, 4}, []int64{out.Tokens, out.Added, out.Fence.Epoch}, name)
			require.Equal(t, "310", rdb.Get(ctx, "b").Val(), name)
		}
	})
}

// A foreign client has added the tokens that were due, so the step counts as credited.
func TestAStepThatAForeignClientPaidIsNotCreditedAgain(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		now := serverTime(ctx, t, rdb)
		b := ofSchedule(now)
		due := b.Control.Next
		*b.Index++ // a foreign refill of 40
		*b.Tokens += 40
		store(ctx, t, rdb, "b", b)
		terms := scheduled(3)
		call := policy.Call{Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index}, Terms: &terms, Step: due,
			Next: due + 3600*second}
		out, err := lua.Refill(ctx, rdb, "b", call)
		require.NoError(t, err)
		require.Equal(t, policy.StatusForeign, out.Status)
		require.Equal(t, []int64{50, due}, []int64{out.Tokens, out.Step})
		call.Version = out.Version
		for range 2 {
			b = load(ctx, t, rdb, "b")
			b.Control.Last -= 60 * second
			store(ctx, t, rdb, "b", b)
			out, err = lua.Refill(ctx, rdb, "b", call)
			require.NoError(t, err)
			call.Version = out.Version
		}
		require.Equal(t, "50", rdb.Get(ctx, "b").Val())
	})
}

func TestADeniedReservationReturnsWhatHasRunOut(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		now := serverTime(ctx, t, rdb)
		b := oracle.Bucket{Bucket: buckettest.Bucket(100, now, 0)}
		b.Control.Outstanding = 40
		b.Control.Due = now - second
		b.Held = map[string]oracle.Holding{
			"over": {Kind: oracle.HoldingReservation, N: 40, Until: now - second, Era: buckettest.Era},
		}
		b.Ends = map[string]int64{"over": now - second}
		storeHeld(ctx, t, rdb, "b", b)
		r, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "new", N: 141, TTL: time.Minute})
		require.NoError(t, err)
		require.False(t, r.OK)
		require.EqualValues(t, 140, r.Remaining)
		require.Equal(t, "140", rdb.Get(ctx, "b").Val())
		held := loadHeld(ctx, t, rdb, "b")
		require.Zero(t, held.Control.Outstanding)
		require.Equal(t, oracle.HoldingRunOut, held.Held["over"].Kind)
	})
}

func TestWhatOperatorsSetRestoresALostIndex(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		for name, call := range map[string]func() (lua.OperatorReply, error){
			"grant": func() (lua.OperatorReply, error) { return lua.Grant(ctx, rdb, "b", 5) },
			"reset": func() (lua.OperatorReply, error) { return lua.Reset(ctx, rdb, "b", 105) },
		} {
			for _, index := range []string{"", "0", "7"} {
				where := fmt.Sprintf("%s at %q", name, index)
				storeCase(ctx, t, rdb, "b", 100)
				require.NoError(t, rdb.Set(ctx, "{b}", index, 0).Err())
				if index == "" {
					require.NoError(t, rdb.Del(ctx, "{b}").Err())
				}
				got, err := call()
				require.NoError(t, err, where)
				require.Equal(t, lua.OperatorReply{Tokens: 105, Version: policy.Version{Era: buckettest.Era, Index: 8}}, got, where)
				require.Equal(t, "8", rdb.Get(ctx, "{b}").Val(), where)
				require.EqualValues(t, 8, load(ctx, t, rdb, "b").Control.Index, where)
			}
		}
	})
}

func TestAResetForgivesDebtAndDropsCarryAndDueSteps(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		b := storeCase(ctx, t, rdb, "b", 100)
		b.Control.Debt = 30
		b.Control.Carry = 1999
		store(ctx, t, rdb, "b", b)
		_, err := lua.Reset(ctx, rdb, "b", 25)
		require.NoError(t, err)
		require.False(t, rdb.HExists(ctx, "{b}:ctl", "out").Val())
		after := load(ctx, t, rdb, "b").Control
		require.Equal(t, []int64{0, 0}, []int64{after.Debt, after.Carry})

		for _, next := range []int64{-2 * second, 0, 3600 * second} {
			now := serverTime(ctx, t, rdb)
			b = ofSchedule(now)
			b.Control.Next = now + next
			store(ctx, t, rdb, "b", b)
			_, err = lua.Reset(ctx, rdb, "b", 25)
			require.NoError(t, err)
			after = load(ctx, t, rdb, "b").Control
			require.GreaterOrEqual(t, after.Step, now)
			require.GreaterOrEqual(t, after.Last, now)
			want := int64(0) // no longer known
			if next > 0 {
				want = b.Control.Next
			}
			require.Equal(t, want, after.Next, "%d from now", next)
		}
	})
}

// A bucket that has not changed since its caller last read it is refilled with fewer commands. Such a refill also
// counts the tokens that it adds to a pool's bucket.
func TestEveryRefillOfAPoolsBucketCountsWhatItAdded(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		b := buckettest.Bucket(500, serverTime(ctx, t, rdb), 100_000)
		terms := &b.Control.Terms
		terms.Pool = true
		terms.Version = 3
		terms.PoolsVersion = 3
		terms.Fence = policy.Fence{Epoch: 5, Seq: 1}
		terms.Tokens = 50 // a second
		terms.Per = second
		store(ctx, t, rdb, "b", b)
		version := policy.Version{Era: buckettest.Era, Index: buckettest.Index}
		total := int64(0)
		for i, as := range []lua.Seen{{}, {Terms: terms}} {
			b := load(ctx, t, rdb, "b")
			b.Control.Last = serverTime(ctx, t, rdb) - second
			b.Control.Carry = 0
			store(ctx, t, rdb, "b", b)
			require.NoError(t, rdb.HSet(ctx, "{b}:ctl", "added", total).Err()) // store has created the bucket anew
			if as.Terms != nil {
				as.Last = b.Control.Last
			}
			r := lua.RefillBatch(ctx, rdb, []lua.RefillCall{{Key: "b", Call: policy.Call{Version: version, Terms: terms},
				Seen: as}}, 1)[0]
			require.NoError(t, r.Err)
			require.Equal(t, policy.StatusApplied, r.Status)
			require.GreaterOrEqual(t, r.Added, int64(50))
			total += r.Added
			require.Equal(t, fmt.Sprint(total), rdb.HGet(ctx, "{b}:ctl", "added").Val(), "call %d", i)
			version = r.Version
		}
	})
}

// A strict bucket has room for its capacity less the outstanding tokens.
func TestAWaitForRoomLastsUntilTheFirstRecordEnds(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		now := serverTime(ctx, t, rdb)
		b := buckettest.Bucket(50, now, 0)
		b.Control.Terms.Strict = true
		b.Control.Outstanding = 900
		b.Control.Due = now + 5*second
		store(ctx, t, rdb, "b", b)
		for n, want := range map[int64]int64{
			100: now + 100_000,  // what there is room for: 50 in one interval
			101: now + 5*second, // one more than that
		} {
			peek, err := lua.Peek(ctx, rdb, "b", n)
			require.NoError(t, err)
			require.Equal(t, want, peek.Now+micros(peek.Wait), "%d tokens", n)
		}
	})
}

func TestADeniedTakeLeavesTheTokensAsTheyWere(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeCase(ctx, t, rdb, "b", 100)
		r, err := lua.Take(ctx, rdb, "b", 101, false)
		require.NoError(t, err)
		require.False(t, r.OK)
		require.Equal(t, "100", rdb.Get(ctx, "b").Val())
		r, err = lua.Take(ctx, rdb, "b", 100, false)
		require.NoError(t, err)
		require.True(t, r.OK)
		require.Equal(t, "0", rdb.Get(ctx, "b").Val())
	})
}

func TestTokensOfAnotherEraDoNotComeBack(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeCase(ctx, t, rdb, "b", 100)
		for _, era := range []int64{buckettest.Era - 1, buckettest.Era + 1} {
			_, err := lua.Return(ctx, rdb, "b", 5, era)
			require.ErrorIs(t, err, lua.ErrOtherEra)
			require.Equal(t, "100", rdb.Get(ctx, "b").Val())
		}
		r, err := lua.Return(ctx, rdb, "b", 5, buckettest.Era)
		require.NoError(t, err)
		require.Equal(t, []int64{105, 0}, []int64{r.Remaining, r.Clamped})
	})
}

func TestALeaseThatIsNotKnownIsNeitherRenewedNorPaid(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeCase(ctx, t, rdb, "b", 100)
		for _, c := range []struct {
			call lua.LeaseCall
			want error
		}{
			{lua.LeaseCall{ID: "x", Seq: 2, Want: 5}, lua.ErrNotHeld},
			{lua.LeaseCall{ID: "x", Seq: 2, Keep: 5}, lua.ErrNotHeld},
			{lua.LeaseCall{ID: "x", Seq: 1, Keep: 1, Want: 5}, lua.ErrIDInUse},
			{lua.LeaseCall{ID: "x", Seq: 1, Back: 1}, lua.ErrIDInUse},
		} {
			c.call.TTL = time.Minute
			_, err := lua.Lease(ctx, rdb, "b", c.call)
			require.ErrorIs(t, err, c.want, "%+v", c.call)
			require.Equal(t, "100", rdb.Get(ctx, "b").Val())
			require.EqualValues(t, 3, rdb.DBSize(ctx).Val(), "no holdings are stored")
		}
		for want, left := range map[int64]string{1: "99", 60: "50"} { // at most half
			storeCase(ctx, t, rdb, "b", 100)
			r, err := lua.Lease(ctx, rdb, "b", lua.LeaseCall{ID: "x", Seq: 1, Want: want, TTL: time.Minute})
			require.NoError(t, err)
			require.EqualValues(t, min(want, 50), r.Granted)
			require.Equal(t, left, rdb.Get(ctx, "b").Val())
		}
		for _, tokens := range []int64{1, 0, -1} { // half of it is none
			storeCase(ctx, t, rdb, "b", tokens)
			r, err := lua.Lease(ctx, rdb, "b", lua.LeaseCall{ID: "x", Seq: 1, Want: 60, TTL: time.Minute})
			require.NoError(t, err)
			require.Zero(t, r.Granted)
			require.Equal(t, fmt.Sprint(tokens), rdb.Get(ctx, "b").Val())
		}
	})
}

func TestAReservationOfAllTokensThatMayBeTakenIsMade(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		for n, ok := range map[int64]bool{80: true, 81: false} {
			storeCase(ctx, t, rdb, "b", 100)
			r, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "x", N: n, TTL: time.Minute,
				Leave: policy.Leave{Tokens: 20}})
			require.NoError(t, err)
			require.Equal(t, ok, r.OK, "%d", n)
		}
	})
}

func TestAPeekShowsTheChangesOfAnotherProgram(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeCase(ctx, t, rdb, "b", 100)
		peek := func() lua.PeekReply {
			r, err := lua.Peek(ctx, rdb, "b", 1)
			require.NoError(t, err)
			return r
		}
		r := peek()
		require.False(t, r.Lost)
		require.Zero(t, r.Moved)
		require.NoError(t, rdb.IncrBy(ctx, "{b}", 3).Err())
		require.EqualValues(t, 3, peek().Moved)
		require.NoError(t, rdb.Set(ctx, "{b}", 0, 0).Err())
		require.Zero(t, peek().Moved, "an index of 0 counts as lost")
		require.NoError(t, rdb.Del(ctx, "b", "{b}").Err())
		r = peek()
		require.True(t, r.Lost)
		require.Zero(t, r.Moved)
		require.Zero(t, r.Tokens)

		require.NoError(t, rdb.FlushAll(ctx).Err())
		require.NoError(t, rdb.Set(ctx, "b", 5, 0).Err())
		r = peek()
		require.Equal(t, lua.PeekReply{Tokens: 5, Refilled: lua.Refilled{Now: r.Now}}, r, "the bucket has only its tokens")
		require.NoError(t, rdb.Set(ctx, "{b}", 4, 0).Err())
		require.EqualValues(t, 4, peek().Moved)
	})
}

func TestTheBucketOfALeaseThatExpiresOutlivesIt(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeCase(ctx, t, rdb, "b", 100)
		for _, key := range []string{"b", "{b}", "{b}:ctl"} {
			require.NoError(t, rdb.PExpire(ctx, key, 5*time.Second).Err())
		}
		_, err := lua.Lease(ctx, rdb, "b", lua.LeaseCall{ID: "x", Seq: 1, Want: 10, TTL: time.Hour})
		require.NoError(t, err)
		for _, key := range []string{"b", "{b}", "{b}:ctl", lua.OutstandingKey("b"), lua.DueKey("b")} {
			left := rdb.PTTL(ctx, key).Val()
			require.Greater(t, left, time.Hour+30*time.Second, key)
			require.LessOrEqual(t, left, time.Hour+time.Minute, key)
		}
	})
}

// If the server denies a command, the key does not count as malformed.
func TestAMissingRightIsReported(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	run := policy.Run{N: 1, Count: 1}
	for name, c := range map[string]struct {
		command string
		call    func() error
	}{
		"heartbeat": {"zremrangebyscore", func() error {
			_, err := lua.Heartbeat(ctx, rdb, "b", "c", time.Minute)
			return err
		}},
		"override": {"get", func() error {
			_, err := lua.SetOverride(ctx, rdb, "user:1", userTerms, userTerms, policy.EnforceRefilled)
			return err
		}},
		"publish": {"hmget", func() error {
			_, err := lua.PublishTemplates(ctx, rdb, templateSet(t, 7, 60))
			return err
		}},
		"takes, active set": {"sadd", func() error {
			_, err := takeTemplate(ctx, rdb, "user:active", user(), one(1), false, false)
			return err
		}},
		"takeonce": {"get", func() error {
			_, err := lua.TakeOnce(ctx, rdb, "b", "r", run, time.Minute)
			return err
		}},
		"takeall": {"get", func() error {
			_, _, err := lua.TakeAllOnce(ctx, rdb, "r", time.Minute, []lua.Demand{{Key: "b", N: 1}})
			return err
		}},
		"takes for flows, plan": {"hmget", func() error {
			_, err := takeFor(ctx, rdb, "b", "a", 5)
			return err
		}},
		"takes for flows, counts": {"hincrby", func() error {
			_, err := takeFor(ctx, rdb, "b", "a", 5)
			return err
		}},
		"plan": {"hget", func() error { return planned(ctx, rdb, "b", listing(2)) }},
		"reserve, records": {"hget", func() error {
			_, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "x", N: 1, TTL: time.Minute})
			return err
		}},
		"lease, ends": {"zrem", func() error {
			call := lua.LeaseCall{ID: "block", Seq: 1, Want: 5, TTL: time.Minute}
			_, err := lua.Lease(ctx, rdb, "b", call)
			require.NoError(t, err)
			call.Seq = 2
			call.Want = 0
			_, err = lua.Lease(ctx, rdb, "b", call)
			return err
		}},
		"reserve, ends": {"zrange", func() error {
			_, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "x", N: 1, TTL: time.Minute})
			return err
		}},
	} {
		storeDivided(ctx, t, rdb, "b")
		require.NoError(t, rdb.Do(ctx, "ACL", "SETUSER", "default", "-"+c.command).Err())
		err := c.call()
		require.NoError(t, rdb.Do(ctx, "ACL", "SETUSER", "default", "+@all").Err())
		require.Error(t, err, name)
		require.NotErrorIs(t, err, lua.ErrMalformedBucket, name)
		require.Regexp(t, "NOPERM|executing the script", err.Error(), name)
		require.True(t, lua.Refuses(err), "%s: %v", name, err)
	}
}

func TestAHeartbeatCountsForItsTime(t *testing.T) {
	ctx := t.Context()
	_, rdb := embedded(t)
	_, err := lua.Heartbeat(ctx, rdb, "b", "c", 1500*time.Millisecond)
	require.NoError(t, err)
	require.EqualValues(t, embeddedNow+1_500_000, rdb.ZScore(ctx, lua.LiveKey("b"), "c").Val())
}

func TestAnOverrideCountsOnFromThePolicyInForce(t *testing.T) {
	ctx := t.Context()
	_, rdb := embedded(t)
	_, err := takeTemplate(ctx, rdb, "user:1", user(), one(5), false, false)
	require.NoError(t, err)
	own := userTerms
	for seq := int64(1); seq <= 3; seq++ {
		own.Capacity--
		own.Initial = own.Capacity
		reply, err := lua.SetOverride(ctx, rdb, "user:1", own, userTerms, policy.EnforceRefilled)
		require.NoError(t, err)
		require.Equal(t, policy.Fence{Epoch: policy.OwnEpoch, Seq: seq}, reply.Terms.Fence)
		require.Equal(t, fmt.Sprint(embeddedNow), rdb.HGet(ctx, "{user:1}:ctl", "lowered").Val(), "the instant is stored")
		require.NoError(t, rdb.Del(ctx, lua.OverrideKey("user:1")).Err())
		require.NoError(t, rdb.HDel(ctx, "{user:1}:ctl", "lowered").Err())
	}
}

// After a template has lowered the capacity, other consumers may use the former one for a while. So a take that brings
// the later template stores the instant.
func TestATakeThatBringsALowerCapacityStoresTheInstant(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	_, err := takeTemplate(ctx, rdb, "user:1", user(), one(5), false, false)
	require.NoError(t, err)
	m.SetTime(time.UnixMicro(embeddedNow + second))
	later := userTerms
	later.Fence.Epoch++
	later.Capacity--
	later.Initial = later.Capacity
	call := user()
	call.Terms = later.Encode()
	_, err = takeTemplate(ctx, rdb, "user:1", call, one(1), false, false)
	require.NoError(t, err)
	require.Equal(t, fmt.Sprint(embeddedNow+second), rdb.HGet(ctx, "{user:1}:ctl", "lowered").Val())
}

func TestAnOverrideLeavesALongerLife(t *testing.T) {
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	m.SetTime(time.UnixMicro(embeddedNow))
	_, err := takeTemplate(ctx, rdb, "user:1", user(), one(5), false, false)
	require.NoError(t, err)
	life := int64(userTerms.Lifetime().Seconds())
	for _, c := range []struct{ left, want int64 }{{life / 2, life}, {life * 3 / 2, life * 3 / 2}} {
		for _, key := range []string{"user:1", "{user:1}", "{user:1}:ctl"} {
			require.NoError(t, rdb.PExpireAt(ctx, key, time.Unix(embeddedNow/second+c.left, 0)).Err())
		}
		reply, err := lua.SetOverride(ctx, rdb, "user:1", userTerms, userTerms, policy.EnforceRefilled)
		require.NoError(t, err)
		require.Equal(t, embeddedNow/second+c.want, reply.Till)
	}
}

// The capacity was lowered after the debt was made.
func TestDebtAboveTheCapacityDoesNotGrow(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		b := storeCase(ctx, t, rdb, "b", 100)
		_, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "x", N: 10, TTL: time.Hour, Overrun: policy.OverrunDebt})
		require.NoError(t, err)
		held := loadHeld(ctx, t, rdb, "b")
		held.Control.Debt = b.Control.Terms.Capacity + 200
		storeHeld(ctx, t, rdb, "b", held)
		for _, key := range []string{"b", "{b}", "{b}:ctl", lua.OutstandingKey("b"), lua.DueKey("b")} {
			require.NoError(t, rdb.PExpire(ctx, key, 90*time.Second).Err())
		}
		r, err := lua.Settle(ctx, rdb, "b", "x", 300)
		require.NoError(t, err)
		require.Equal(t, policy.Settlement{Charged: 90, Forgiven: 200}, r.Settlement)
		require.EqualValues(t, 1200, loadHeld(ctx, t, rdb, "b").Control.Debt)
		for _, key := range []string{"b", "{b}", "{b}:ctl", lua.OutstandingKey("b"), lua.DueKey("b")} {
			require.Greater(t, rdb.PTTL(ctx, key).Val(), 100*time.Second, "%s outlives the settlement", key)
		}
	})
}

func TestAReservationIsOverAtTheInstantOfItsEnd(t *testing.T) {
	ctx := t.Context()
	_, rdb := embedded(t)
	for left, want := range map[int64]error{0: lua.ErrIDInUse, 1: nil} {
		b := oracle.Bucket{Bucket: buckettest.Bucket(100, embeddedNow, 0)}
		until := embeddedNow + left
		b.Control.Outstanding = 40
		b.Control.Due = until
		b.Held = map[string]oracle.Holding{
			"x": {Kind: oracle.HoldingReservation, N: 40, Until: until, Era: buckettest.Era},
		}
		b.Ends = map[string]int64{"x": until}
		storeHeld(ctx, t, rdb, "b", b)
		_, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "x", N: 40, TTL: time.Minute})
		require.ErrorIs(t, err, want, "%d µs before the reservation ends", left)
	}
}

// An index has at most 14 digits, also after the refill that adds one to it.
func TestAnIndexHasAtMost14Digits(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeCase(ctx, t, rdb, "b", 100)
		for index, want := range map[string]error{"99999999999998": nil, "99999999999999": lua.ErrMalformedBucket} {
			require.NoError(t, rdb.Set(ctx, lua.IndexKey("b"), index, 0).Err())
			_, err := lua.Refill(ctx, rdb, "b", policy.Call{})
			require.ErrorIs(t, err, want, index)
		}
	})
}

// No step is credited twice after the clock was set back or the bucket was rolled back.
func TestTheNextStepAfterAClockWasSetBack(t *testing.T) {
	t.Parallel()
	const hour = 3600 * second
	terms := scheduled(3)
	forgotten := policy.Version{Era: buckettest.Era, Index: buckettest.Index + 1}
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		for _, c := range []struct {
			name             string
			last, step, next int64 // of the bucket, after the present; next 0: unknown
			call             policy.Call
			wantStep         int64 // after the present
			wantNext         int64
		}{
			{"the state has the period", 10 * hour, 10 * hour, 11 * hour, policy.Call{}, hour, 2 * hour},
			{"the call has the period", 10 * hour, 10 * hour, 0, policy.Call{Step: -1, Next: hour - 1}, hour, 2 * hour},
			{"the period is unknown", 10 * hour, 10 * hour, 0, policy.Call{}, 10 * hour, 0},
			{"rolled back", 0, -hour / 2, 0, policy.Call{Next: hour / 2, Version: forgotten}, 0, hour},
		} {
			now := serverTime(ctx, t, rdb)
			b := ofSchedule(now)
			b.Control.Last = now + c.last
			b.Control.Step = now + c.step
			b.Control.Next = instant(now, c.next)
			store(ctx, t, rdb, "b", b)
			call := policy.Call{Version: c.call.Version, Terms: &terms, Step: instant(now, c.call.Step),
				Next: instant(now, c.call.Next)}
			_, err := lua.Refill(ctx, rdb, "b", call)
			require.NoError(t, err)
			after := load(ctx, t, rdb, "b").Control
			require.InDelta(t, now+c.wantStep, after.Step, 10*second, c.name)
			if c.wantNext > 0 {
				require.EqualValues(t, c.wantNext-c.wantStep, after.Next-after.Step, c.name)
			}
		}
	})
}

// instant returns the instant that is after µs later than now. If after is 0, it returns 0.
func instant(now, after int64) int64 {
	if after == 0 {
		return 0
	}
	return now + after
}

// A key with one token and without a state is a bucket of a plain client, so it is adopted.
func TestABucketOfOneTokenIsAdopted(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		for key, terms := range map[string]policy.Terms{"b": scheduled(3), "user:1": userTerms} {
			require.NoError(t, rdb.Set(ctx, key, 1, 0).Err())
			out, err := lua.Refill(ctx, rdb, key, policy.Call{Create: policy.CreateInitial, Terms: &terms})
			require.NoError(t, err)
			require.Equal(t, policy.StatusInitialised, out.Status)
			require.EqualValues(t, 1, out.Tokens)
		}
		require.True(t, rdb.HExists(ctx, lua.ControlKey("user:1"), "lowered").Val(),
			"the capacity may have been higher before")
	})
}

func TestAMalformedBucketKeepsItsPolicy(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		b := storeCase(ctx, t, rdb, "b", 100)
		require.NoError(t, rdb.Del(ctx, "b").Err())
		require.NoError(t, rdb.HSet(ctx, "b", "field", "text").Err())
		out, err := lua.Refill(ctx, rdb, "b", policy.Call{Terms: &b.Control.Terms})
		require.ErrorIs(t, err, lua.ErrMalformedBucket)
		require.Equal(t, b.Control.Terms.Fence, out.Fence)
	})
}

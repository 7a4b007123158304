package lua_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// What the scripts read from the keys of a bucket that other programs, other releases or other clocks have written. The
// numbers wanted are worked out by hand.

func TestEachStateThatCanNotBeReadIsMalformed(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		const instants = "1700000000000000 1700000000000000"
		smooth := "1 0 100 0 1 1000000"
		stepped := scheduled(3)
		for _, c := range []struct{ name, st, pol, out string }{
			{"the era is shorter than 16 characters", "170000000000000 1700000000000000 1 0", smooth, ""},
			{"the last refill is shorter", "1700000000000000 170000000000000 1 0", smooth, ""},
			{"a smooth bucket has steps", instants + " 1 0 " + instants, smooth, ""},
			{"a smooth bucket with a mark and no field out", instants + " 1 0+", smooth, ""},
			{"a smooth bucket with a field out and no mark", instants + " 1 0", smooth, "1 0 0"},
			{"a stepped bucket has no steps", instants + " 1 0", stepped.Encode(), ""},
			{"a stepped bucket has one step", instants + " 1 0 1700000000000000", stepped.Encode(), ""},
			{"the field out has two numbers", instants + " 1 0+", smooth, "1 0"},
			{"there is no policy", instants + " 1 0", "", ""},
			{"the capacity is 0", instants + " 1 0", "1 0 0 0 1 1000000", ""},
			{"per is 0", instants + " 1 0", "1 0 100 0 0 1000000", ""},
			{"the interval is 0", instants + " 1 0", "1 0 100 0 1 0", ""},
			{"the policy has 19 numbers", instants + " 1 0", smooth + " 0 0 0 0 0 0 0 0 0 0 0 0 1", ""},
		} {
			require.NoError(t, rdb.Del(ctx, "b", "{b}", "{b}:ctl").Err())
			require.NoError(t, rdb.Set(ctx, "b", 10, 0).Err())
			for field, text := range map[string]string{"st": c.st, "pol": c.pol, "out": c.out} {
				if text != "" {
					require.NoError(t, rdb.HSet(ctx, "{b}:ctl", field, text).Err())
				}
			}
			_, err := lua.Peek(ctx, rdb, "b", 1)
			require.ErrorIs(t, err, lua.ErrMalformedBucket, c.name)
		}
	})
}

func TestABucketWithARateHasNoSteps(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeCase(ctx, t, rdb, "b", 10)
		peek, err := lua.Peek(ctx, rdb, "b", 1)
		require.NoError(t, err)
		require.Zero(t, peek.Step)
		require.Zero(t, peek.Next)
	})
}

// Servers whose clocks differ by up to 50 ms may take turns without an era's end.
func TestAClockThatIsBehindByMoreThanTheToleranceBeginsAnEra(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	for ahead, want := range map[int64]policy.Status{50_000: policy.StatusEarly, 50_001: policy.StatusClock} {
		b := buckettest.Bucket(10, embeddedNow, -ahead)
		store(ctx, t, rdb, "b", b)
		out, err := lua.Refill(ctx, rdb, "b", policy.Call{Terms: &b.Control.Terms,
			Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index}})
		require.NoError(t, err)
		require.Equal(t, want, out.Status, "%d µs", ahead)
	}
}

func TestOneTokenThatAPoolsBucketGetsIsCounted(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	b := buckettest.Bucket(999, embeddedNow, second)
	b.Control.Terms.Pool = true
	b.Control.Terms.PoolsVersion = 3
	b.Control.Terms.Capacity = 1000
	b.Control.Terms.Tokens = 50 // a second
	b.Control.Terms.Per = second
	store(ctx, t, rdb, "b", b)
	out, err := lua.Refill(ctx, rdb, "b", policy.Call{Terms: &b.Control.Terms,
		Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index}})
	require.NoError(t, err)
	require.EqualValues(t, 1, out.Added)
	require.Equal(t, "1", rdb.HGet(ctx, "{b}:ctl", "added").Val())
}

// withoutPlan answers calls that have the keys of a plan as a Cluster does that moves the bucket's slot.
type withoutPlan struct{ keys int }

func (withoutPlan) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h withoutPlan) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		args := cmd.Args()
		if len(args) > 2 && args[2] == h.keys {
			cmd.SetErr(tryAgain{})
			return tryAgain{}
		}
		return next(ctx, cmd)
	}
}

func (withoutPlan) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// tryAgain is the error of a Cluster for a call with several keys of a slot that it moves.
type tryAgain struct{}

func (tryAgain) Error() string { return "TRYAGAIN Multiple keys request during rehashing of slot" }
func (tryAgain) RedisError()   {}

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
		moving.AddHook(withoutPlan{keys: 7})
		settled, err := lua.SettleDivided(ctx, moving, "b", "r", 2)
		require.NoError(t, err)
		require.EqualValues(t, 3, settled.Returned)
		require.Equal(t, before, rdb.HGet(ctx, lua.FlowsKey("b"), "a").Val())
	})
}

// The value of a lazy bucket's key is how much earlier than the key's end the bucket is full, in units of 1/tokens of a
// microsecond. The rate is 3 tokens in 2 seconds in the cases whose rate isn't given.
func TestWhatALazyKeyHolds(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	const rate, high = 3, 999_999
	for _, c := range []struct {
		name      string
		tokens    int64
		value     any
		expires   time.Duration // 0: never
		want      time.Duration // until the bucket is full
		malformed bool
	}{
		{"no units", rate, 0, time.Second, time.Second, false},
		{"one unit, so a third of a microsecond", rate, 1, time.Second, time.Second, false},
		{"three units, so a microsecond", rate, 3, time.Second, time.Second - time.Microsecond, false},
		{"more than a millisecond, stored under another rate", rate, 9_000_000, time.Second,
			time.Second - time.Millisecond, false},
		{"below 0", rate, -1, time.Second, 0, true},
		{"without an end", rate, 1, 0, 0, true},
		{"2 hours of 999,999 units a microsecond, which are more than half of 2^53", high, 0, 2 * time.Hour,
			4_503_604_131 * time.Microsecond, false},
	} {
		p := policy.Policy{Capacity: 10, Rate: policy.Rate{Tokens: c.tokens, Per: 2 * time.Second}, Interval: time.Second}
		terms := policy.Template{Policy: p}.Terms(policy.Fence{Epoch: 7})
		key := lua.LazyKey("user:1")
		require.NoError(t, rdb.Del(ctx, key).Err())
		require.NoError(t, rdb.Set(ctx, key, c.value, 0).Err())
		if c.expires > 0 {
			require.NoError(t, rdb.PExpireAt(ctx, key, time.UnixMicro(embeddedNow).Add(c.expires)).Err())
		}
		peek, err := lua.LazyPeek(ctx, rdb, "user:1", &terms, 1)
		if c.malformed {
			require.ErrorIs(t, err, lua.ErrMalformedBucket, c.name)
			continue
		}
		require.NoError(t, err, c.name)
		require.Equal(t, c.want, peek.Reset, c.name)
	}
}

func TestALazyBucketToWhichAllComesBackIsFull(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	require.NoError(t, lua.Load(ctx, rdb))
	call := func(what, n int64) []any {
		reply, err := rdb.Do(ctx, "EVALSHA", lua.LazySHA(), 1, lua.LazyKey("user:1"), what, 0, 1, second, 10, n, 1, 0).Slice()
		require.NoError(t, err)
		return reply
	}
	require.Equal(t, []any{int64(1), int64(4), int64(6 * second), embeddedNow, ""}, call(1, 6))
	require.Equal(t, []any{int64(1), int64(10), int64(0), embeddedNow, ""}, call(-1, 6))
	require.Zero(t, rdb.Exists(ctx, lua.LazyKey("user:1")).Val())
}

// 1/49*49 is less than 1 in floating point.
func TestALastTokenStaysIfTheCapacityDoes(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	terms := policy.Policy{Capacity: 49, Rate: policy.PerSecond(1), Interval: time.Second,
		CarryOver: policy.CarryProportional}.Terms(policy.Fence{Epoch: 3})
	b := buckettest.Bucket(1, embeddedNow, 0)
	b.Control.Terms = terms
	store(ctx, t, rdb, "b", b)
	terms.Tokens = 2
	terms.Fence.Epoch = 4
	out, err := lua.Refill(ctx, rdb, "b", policy.Call{Terms: &terms, Version: policy.Version{Era: buckettest.Era,
		Index: buckettest.Index}})
	require.NoError(t, err)
	require.Equal(t, terms.Fence, out.Fence)
	require.EqualValues(t, 1, out.Tokens)
}

// Zeros at the end of a policy are left out, so that equal policies are equal texts.
func TestAPolicyWithoutATemplateKeepsItsShortText(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	own := policy.Policy{Capacity: 60, Rate: policy.PerSecond(1), Interval: time.Second}
	require.True(t, takeUser(ctx, t, rdb, "user:1", user(), 5))
	_, err := lua.SetOverride(ctx, rdb, "user:1", policy.Template{Policy: own}.Terms(policy.Fence{}), userTerms,
		policy.EnforceRefilled)
	require.NoError(t, err)
	_, err = lua.UnsetOverride(ctx, rdb, "user:1", nil, policy.EnforceRefilled)
	require.NoError(t, err)
	require.Equal(t, "0 2 60 1 1000000 1000000", rdb.HGet(ctx, "{user:1}:ctl", "pol").Val())
}

// The bucket has 9 tokens, so in most cases 1 more is due. It was last refilled at the present, which is 0 here, and gets
// a token a second, with a refill each 100 ms.
func TestTheTimeUntilTokensAreDue(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	const us = time.Microsecond
	stepped := func(step, next int64) func(*policy.Control) {
		return func(c *policy.Control) {
			c.Terms = scheduled(3)
			c.Step = embeddedNow + step
			c.Next = embeddedNow + next
		}
	}
	granted := func(tokens, grantTokens, grantEnd int64) func(*policy.Control) {
		return func(c *policy.Control) {
			c.Terms.Pool = true
			c.Terms.PoolsVersion = 3
			c.Terms.Tokens = tokens
			c.Terms.GrantTokens = grantTokens
			c.Terms.GrantEnd = embeddedNow + grantEnd
			c.Terms.GrantEra = buckettest.Era
		}
	}
	last := func(after int64) func(*policy.Control) {
		return func(c *policy.Control) { c.Last = embeddedNow + after }
	}
	for _, c := range []struct {
		name   string
		change func(*policy.Control)
		n      int64
		want   time.Duration
	}{
		{"it has them", last(0), 9, 0},
		{"one is due in a second", last(0), 10, time.Second},
		{"beyond the capacity", last(0), 1001, -us},
		{"due in a microsecond", last(-second + 1), 10, us},
		{"due now, so overdue", last(-second), 10, 50 * time.Millisecond},
		{"the clock went back within the tolerance", last(50_000), 10, 1050 * time.Millisecond},
		{"the clock went back further", last(50_001), 10, time.Second},
		{"the next step is known", stepped(-5, second), 10, time.Second},
		{"the next step isn't known", stepped(second, second), 10, -us},
		{"a grant has just enough, and there is no rate", granted(0, 2, second/2), 10, time.Second / 2},
		{"a grant has too little, and there is no rate", granted(0, 2, second/2), 11, -us},
		{"a grant of half a token, then the rate", granted(1, 2, second/4), 10, 800 * time.Millisecond},
		{"a grant ended before the last refill", func(c *policy.Control) {
			granted(1, 1000, -1)(c)
			c.Terms.Per = second + 3
		}, 10, 1100 * time.Millisecond},
		{"a refill each millisecond, and a grant that ended", func(c *policy.Control) {
			granted(1, 1000, -1)(c)
			c.Terms.Per = second + 3
			c.Terms.Interval = 1000
		}, 10, 1001 * time.Millisecond},
	} {
		b := buckettest.Bucket(9, embeddedNow, 0)
		b.Control.Terms.Tokens = 1
		b.Control.Terms.Per = second
		c.change(b.Control)
		store(ctx, t, rdb, "b", b)
		peek, err := lua.Peek(ctx, rdb, "b", c.n)
		require.NoError(t, err, c.name)
		require.Equal(t, c.want, peek.Wait, c.name)
	}
}

func TestATakeFromABucketWithoutStateIsDenied(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		require.NoError(t, rdb.Set(ctx, "b", 2, 0).Err())
		reply, err := lua.TakeOnce(ctx, rdb, "b", "request", policy.Run{N: 3, Count: 1}, time.Minute)
		require.NoError(t, err)
		require.Equal(t, lua.TakeReply{Remaining: 2, Wait: -time.Microsecond, Refilled: reply.Refilled}, reply)
		require.Zero(t, reply.Version)
		require.Zero(t, reply.Last)
	})
}

// A pool's bucket and one in shadow mode count the tokens that they deny, also if they have flows. Other buckets don't.
// A take that is made creates no count.
func TestWhichBucketsCountWhatTheyDeny(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		for _, c := range []struct {
			name   string
			change func(*policy.Terms)
			want   string
		}{
			{"plain", func(*policy.Terms) {}, ""},
			{"with flows", func(t *policy.Terms) { t.Divided = true }, ""},
			{"in shadow mode", func(t *policy.Terms) { t.Shadow = true }, "1000"},
			{"in shadow mode, with flows", func(t *policy.Terms) { t.Shadow, t.Divided = true, true }, "1000"},
			{"a pool's", func(t *policy.Terms) { t.Pool, t.PoolsVersion = true, 3 }, "1000"},
		} {
			b := buckettest.Bucket(10, serverTime(ctx, t, rdb), 0)
			c.change(&b.Control.Terms)
			store(ctx, t, rdb, "b", b)
			_, replies, err := lua.TakeAll(ctx, rdb, []lua.Demand{{Key: "b", N: 1}})
			require.NoError(t, err)
			require.EqualValues(t, 9, replies[0].Remaining, c.name)
			_, err = takeFor(ctx, rdb, "b", "", 1)
			require.NoError(t, err)
			require.False(t, rdb.HExists(ctx, "{b}:ctl", "denied").Val(), c.name)
			for _, n := range []int64{1000, 1001} { // the second is more than the capacity
				ok, _, err := lua.TakeAll(ctx, rdb, []lua.Demand{{Key: "b", N: n}})
				require.NoError(t, err)
				require.Equal(t, b.Control.Terms.Shadow, ok, c.name)
			}
			require.Equal(t, c.want, rdb.HGet(ctx, "{b}:ctl", "denied").Val(), c.name)
		}
	})
}

// A grant is in force before its end, in its era.
func TestAGrantIsNotInForceAtItsEnd(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	for after, want := range map[int64]int64{0: 0, 1: buckettest.Era} {
		b := buckettest.Bucket(10, embeddedNow, 0)
		b.Control.Terms.Pool = true
		b.Control.Terms.PoolsVersion = 3
		b.Control.Terms.GrantTokens = 600
		b.Control.Terms.GrantEnd = embeddedNow + after
		b.Control.Terms.GrantEra = buckettest.Era
		store(ctx, t, rdb, "b", b)
		reply, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "r", N: 1, TTL: time.Minute})
		require.NoError(t, err)
		require.Equal(t, want, reply.Terms.GrantEra)
	}
}

// The bucket's life is 120 s. A take renews its expiry unless more than 90 s are left.
func TestWhenATakeRenewsTheExpiryOfABucket(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	begin := time.UnixMicro(embeddedNow)
	for _, c := range []struct {
		name    string
		at      time.Duration // of the take, after the beginning
		persist string        // loses its expiry before the take
		hold    time.Duration
		want    time.Duration // the expiry, after the beginning
	}{
		{"more than 90 s are left", 29_999 * time.Millisecond, "", 0, 120 * time.Second},
		{"90 s are left", 30 * time.Second, "", 0, 150 * time.Second},
		{"K has no expiry", time.Second, "user:1", 0, 121 * time.Second},
		{"the index has no expiry", time.Second, "{user:1}", 0, 121 * time.Second},
		{"the state has no expiry", time.Second, "{user:1}:ctl", 0, 121 * time.Second},
		{"a quarter more than the 1,150 s of a reservation of 1,000 s", 0, "", 1000 * time.Second, 1438 * time.Second},
		{"a quarter more than the 151 s of a reservation of a second", 0, "", time.Second, 189 * time.Second},
	} {
		m.FlushAll()
		m.SetTime(begin)
		_, err := takeTemplate(ctx, rdb, "user:1", user(), one(5), false, false)
		require.NoError(t, err)
		m.SetTime(begin.Add(c.at))
		if c.persist != "" {
			require.NoError(t, rdb.Persist(ctx, c.persist).Err())
		}
		call := user()
		call.Hold = c.hold
		_, err = takeTemplate(ctx, rdb, "user:1", call, one(1), false, false)
		require.NoError(t, err)
		for _, key := range []string{"user:1", "{user:1}", "{user:1}:ctl"} {
			at, err := rdb.PExpireTime(ctx, key).Result()
			require.NoError(t, err)
			require.Equal(t, time.Duration(begin.UnixMilli())*time.Millisecond+c.want, at, "%s: %s", c.name, key)
		}
	}
}

// A template bounded to one bucket, whose set of the buckets alive can't be read.
func TestATakeThatCanNotCountTheBucketsAliveIsMade(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		require.NoError(t, rdb.Set(ctx, lua.AliveKey("user:"), "text", 0).Err())
		call := user()
		call.MaxKeys = 1
		reply, err := takeTemplate(ctx, rdb, "user:1", call, one(5), false, false)
		require.NoError(t, err)
		require.True(t, reply.OK)
	})
}

func TestTheSetOfTheBucketsAliveLivesAsLongAsTheLastOne(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	call := user()
	call.MaxKeys = 5
	for i, after := range []time.Duration{0, 50 * time.Second} {
		m.SetTime(time.UnixMicro(embeddedNow).Add(after))
		_, err := takeTemplate(ctx, rdb, fmt.Sprint("user:", i), call, one(5), false, false)
		require.NoError(t, err)
		at, err := rdb.PExpireTime(ctx, lua.AliveKey("user:")).Result()
		require.NoError(t, err)
		require.Equal(t, time.Duration(embeddedNow)*time.Microsecond+after+120*time.Second, at)
	}
}

// 87% of 146 are 127.02, so 128 tokens stay.
func TestAPercentageThatATakeLeavesIsRoundedUp(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		b := buckettest.Bucket(146, serverTime(ctx, t, rdb), 0)
		b.Control.Terms.Capacity = 146
		b.Control.Terms.Initial = 146
		store(ctx, t, rdb, "b", b)
		for n, want := range map[int64]bool{19: false, 18: true} {
			ok, _, err := lua.TakeAll(ctx, rdb, []lua.Demand{{Key: "b", N: n, Leave: policy.Leave{Percent: 87}}})
			require.NoError(t, err)
			require.Equal(t, want, ok, "%d tokens", n)
			store(ctx, t, rdb, "b", b)
		}
	})
}

// A call that isn't a sweep ends 16 reservations whose time is over.
func TestAReservationEndsSixteenOthers(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	store(ctx, t, rdb, "b", buckettest.Bucket(100, embeddedNow, 0))
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
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	store(ctx, t, rdb, "b", buckettest.Bucket(100, embeddedNow, 0))
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
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	store(ctx, t, rdb, "b", buckettest.Bucket(1000, embeddedNow, 0))
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

func TestTokensOfUpTo53BitsAreRead(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeCase(ctx, t, rdb, "b", 100)
		for _, n := range []int64{1<<53 - 1, -(1<<53 - 1)} {
			require.NoError(t, rdb.Set(ctx, "b", n, 0).Err())
			peek, err := lua.Peek(ctx, rdb, "b", 1)
			require.NoError(t, err)
			require.Equal(t, n, peek.Tokens)
		}
		for _, n := range []int64{1 << 53, -(1 << 53)} {
			require.NoError(t, rdb.Set(ctx, "b", n, 0).Err())
			_, err := lua.Peek(ctx, rdb, "b", 1)
			require.ErrorIs(t, err, lua.ErrMalformedBucket)
		}
	})
}

// Each refill is the first one for ten seconds.
func TestARefillCreditsTheLastFiveIntervalsOrTwoSeconds(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	for interval, want := range map[int64]int64{second: 5, second / 2: 2, second / 10: 2} {
		b := buckettest.Bucket(0, embeddedNow, 10*second)
		b.Control.Terms.Tokens = 1
		b.Control.Terms.Per = second
		b.Control.Terms.Interval = interval
		store(ctx, t, rdb, "b", b)
		out, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: policy.Version{Era: buckettest.Era,
			Index: buckettest.Index}})
		require.NoError(t, err)
		require.Equal(t, want, out.Added, "interval %d µs", interval)
	}
}

func TestABucketThatIsFullAfterASecondLivesForAMinute(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	p := policy.Policy{Capacity: 60, Rate: policy.PerSecond(60), Interval: time.Second}
	call := user()
	call.Terms = policy.Template{Policy: p}.Terms(policy.Fence{Epoch: 7}).Encode()
	_, err := takeTemplate(ctx, rdb, "user:1", call, one(5), false, false)
	require.NoError(t, err)
	require.Equal(t, time.Minute, rdb.PTTL(ctx, "user:1").Val())
}

// hourlyBudget returns a template whose buckets hold 100 tokens and get 30 at each hour, and its policy.
func hourlyBudget(t *testing.T) (*lua.Template, policy.Terms) {
	t.Helper()
	p := policy.Policy{Capacity: 100, Steps: policy.Every(time.Hour), StepTokens: 30}
	set, err := policy.NewTemplates(1, []policy.Template{{Prefix: "t:", Policy: p}}, nil)
	require.NoError(t, err)
	return lua.NewTemplate(set.Of("t:"), false), set.Of("t:").Terms
}

// The override needs more steps to fill the budget than the template, so the instants of a first call don't suffice.
func TestABudgetWithALargerOverrideIsCreditedAllOfItsSteps(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template, terms := hourlyBudget(t)
	require.True(t, w.take(template, "t:a", 100).OK)
	own := terms
	own.Capacity = 1000
	own.Initial = 1000
	_, err := lua.SetOverride(t.Context(), w.rdb, "t:a", own, terms, policy.EnforceRefilled)
	require.NoError(t, err)
	w.at("2026-01-01T20:00:00Z")
	require.True(t, w.take(template, "t:b", 1).OK, "the template now has the instants around the present")
	require.EqualValues(t, 20*30-1, w.take(template, "t:a", 1).Remaining)
}

// The script of an override doesn't know the schedule. It credits the step in the bucket's state, once.
func TestAnOverrideCreditsTheStepOfABudgetOnce(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		at   string
		want int64
	}{
		{"2026-01-01T00:59:59.999999Z", 0},
		{"2026-01-01T01:00:00Z", 30},
		{"2026-01-01T01:00:10Z", 30},
	} {
		w := newWorld(t, "2026-01-01T00:00:30Z")
		template, terms := hourlyBudget(t)
		require.True(t, w.take(template, "t:a", 100).OK)
		w.at(c.at)
		own := terms
		own.Capacity = 200
		own.Initial = 200
		reply, err := lua.SetOverride(t.Context(), w.rdb, "t:a", own, terms, policy.EnforceRefilled)
		require.NoError(t, err)
		require.Equal(t, c.want, reply.Tokens, c.at)
		w.at("2026-01-01T01:00:20Z")
		require.EqualValues(t, 30-1, w.take(template, "t:a", 1).Remaining, c.at)
	}
}

func TestAnOverrideCreditsNoStepThatTheStateDoesNotName(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template, terms := hourlyBudget(t)
	require.True(t, w.take(template, "t:a", 100).OK)
	step := w.now.UnixMicro()
	st := fmt.Sprintf("%16d %16d 1 0 %16d %16d", step, step, step, step)
	require.NoError(t, w.rdb.HSet(t.Context(), "{t:a}:ctl", "st", st).Err())
	w.at("2026-01-01T00:00:40Z")
	reply, err := lua.SetOverride(t.Context(), w.rdb, "t:a", terms, terms, policy.EnforceRefilled)
	require.NoError(t, err)
	require.Zero(t, reply.Tokens)
}

// A take with another schedule doesn't know how many steps of the old one have come. It credits the one in the state.
func TestATakeUnderAnotherScheduleCreditsTheStepOfTheOldOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template, _ := hourlyBudget(t)
	require.True(t, w.take(template, "t:a", 100).OK)
	w.at("2026-01-01T01:00:10Z")
	later := budgets(t, 2, policy.Policy{Capacity: 100, Steps: policy.Every(20 * time.Minute), StepTokens: 7}, 0)
	require.EqualValues(t, 30-1, w.take(later, "t:a", 1).Remaining)
	w.at("2026-01-01T01:20:00Z")
	require.EqualValues(t, 30-1+7-1, w.take(later, "t:a", 1).Remaining)
}

func TestWhatTheScriptOfOneCommandTakes(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		require.NoError(t, lua.Load(ctx, rdb))
		require.NoError(t, rdb.RPush(ctx, "list", "element").Err())
		sha := lua.TakesWords(lua.Takes{Key: "b", Runs: one(1)})[1]
		for _, c := range []struct {
			name    string
			numbers []any // tokens to take of each bucket, and bounds
			want    []any
		}{
			{"the last token", []any{10, 1, 1}, []any{int64(0), int64(-1), int64(-1)}},
			{"one more than there is", []any{11, 1, 1}, []any{int64(-1), int64(-1), int64(-1)}},
			{"below the bound", []any{4, 1, 1, 1, 0, 11}, []any{int64(6), int64(-1), int64(-1)}},
			{"at the bound", []any{4, 1, 1, 1, 0, 10}, []any{int64(-1), int64(-1), int64(-1)}},
			{"what must be left stays", []any{4, 1, 1, 1, 6, -1}, []any{int64(6), int64(-1), int64(-1)}},
			{"it does not stay", []any{4, 1, 1, 1, 7, -1}, []any{int64(-1), int64(-1), int64(-1)}},
		} {
			require.NoError(t, rdb.Set(ctx, "b", 10, 0).Err())
			words := append([]any{"evalsha", sha, 3, "b", "missing", "list"}, c.numbers...)
			left, err := rdb.Do(ctx, words...).Slice()
			require.NoError(t, err)
			require.Equal(t, c.want, left, c.name)
		}
	})
}

func TestARequestOfSeveralBucketsIsRememberedForItsTime(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	storeCase(ctx, t, rdb, "b", 10)
	demands := []lua.Demand{{Key: "b", N: 4}}
	for _, repeated := range []bool{false, true} {
		ok, replies, err := lua.TakeAllOnce(ctx, rdb, "request", time.Minute, demands)
		require.NoError(t, err)
		require.True(t, ok)
		reply := replies[0]
		require.EqualValues(t, 6, reply.Remaining)
		require.Zero(t, reply.Wait)
		if repeated {
			require.Zero(t, reply.Version.Index)
			require.Zero(t, reply.Last)
		}
		require.Equal(t, time.Minute, rdb.PTTL(ctx, lua.RequestKey("b", "request")).Val())
	}
	require.NoError(t, rdb.Del(ctx, lua.RequestKey("b", "request")).Err())
	require.NoError(t, rdb.RPush(ctx, lua.RequestKey("b", "request"), "element").Err())
	_, _, err := lua.TakeAllOnce(ctx, rdb, "request", time.Minute, demands)
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
	require.ErrorContains(t, err, lua.RequestKey("b", "request"))
}

func TestARequestOfABucketWithoutStateOrTokens(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	take := func(key, id string, run policy.Run) lua.TakeReply {
		reply, err := lua.TakeOnce(ctx, rdb, key, id, run, time.Minute)
		require.NoError(t, err)
		return reply
	}
	half := policy.Leave{Percent: 50}

	require.NoError(t, rdb.Set(ctx, "plain", 1, 0).Err())
	plain := take("plain", "1", policy.Run{N: 1, Count: 1, Leave: half})
	require.True(t, plain.OK, "half of an unknown capacity is 0")
	require.False(t, plain.Repeated)
	require.Zero(t, plain.Version)

	b := storeCase(ctx, t, rdb, "b", 10)
	require.NoError(t, rdb.Del(ctx, "b").Err())
	lost := take("b", "2", policy.Run{N: 1, Count: 1})
	require.False(t, lost.OK)
	require.Zero(t, lost.Remaining)

	b.Control.Terms.Tokens = 1
	b.Control.Terms.Per = second
	b.Control.Last = embeddedNow
	b.Tokens = new(int64)
	store(ctx, t, rdb, "b", b)
	empty := take("b", "3", policy.Run{N: 1, Count: 5, UpTo: true})
	require.False(t, empty.OK)
	require.Equal(t, time.Second, empty.Wait, "for one token")
}

func TestATakeFromOneTokenOfAForeignClient(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		require.NoError(t, rdb.Set(ctx, "plain", 1, 0).Err())
		runs := []policy.Run{{N: 1, Count: 1, Leave: policy.Leave{Percent: 50}}}
		plain, err := takeWhole(ctx, rdb, lua.Takes{Key: "plain", Runs: runs})
		require.NoError(t, err)
		require.True(t, plain.OK, "half of an unknown capacity is 0")
		require.Zero(t, plain.Version)
		require.Zero(t, plain.Last)
		plain, err = takeWhole(ctx, rdb, lua.Takes{Key: "plain", Runs: runs})
		require.NoError(t, err)
		require.Equal(t, -time.Microsecond, plain.Runs[0].Wait)

		require.NoError(t, rdb.Set(ctx, "user:1", 1, 0).Err())
		adopted, err := takeTemplate(ctx, rdb, "user:1", user(), one(1), false, false)
		require.NoError(t, err)
		require.True(t, adopted.OK)
		require.Zero(t, adopted.Remaining, "the bucket is adopted, and not created")
	})
}

// An override has the schedule of its template, also after the template got another one.
func TestABudgetWithAnOverrideFollowsTheNewSchedule(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template, terms := hourlyBudget(t)
	require.True(t, w.take(template, "t:a", 100).OK)
	own := terms
	own.Capacity = 1000
	own.Initial = 1000
	_, err := lua.SetOverride(t.Context(), w.rdb, "t:a", own, terms, policy.EnforceRefilled)
	require.NoError(t, err)
	w.at("2026-01-01T01:00:10Z")
	later := budgets(t, 2, policy.Policy{Capacity: 100, Steps: policy.Every(20 * time.Minute), StepTokens: 7}, 0)
	require.EqualValues(t, 2*30-1, w.take(later, "t:a", 1).Remaining, "of 00:40 and 01:00")
}

func TestAnIndexThatIsNoNumberIsNamed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template, _ := hourlyBudget(t)
	require.True(t, w.take(template, "t:a", 100).OK)
	require.NoError(t, w.rdb.Set(t.Context(), "{t:a}", "text", 0).Err())
	w.at("2026-01-01T01:00:10Z")
	_, err := lua.TakeWhole(t.Context(), w.rdb, lua.Takes{Key: "t:a", Runs: one(1), Template: template})
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
	require.ErrorContains(t, err, `"{t:a}"`)

	require.NoError(t, w.rdb.Set(t.Context(), "{user:1}", "text", 0).Err())
	_, err = takeTemplate(t.Context(), w.rdb, "user:1", user(), one(1), false, false)
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
	require.ErrorContains(t, err, `"{user:1}"`)
}

// callRecorder counts calls, and has the length of their longest argument.
type callRecorder struct{ count, longest int }

func (*callRecorder) DialHook(next redis.DialHook) redis.DialHook { return next }

func (c *callRecorder) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.count++
		for _, arg := range cmd.Args()[1:] {
			c.longest = max(c.longest, len(fmt.Sprint(arg)))
		}
		return next(ctx, cmd)
	}
}

func (*callRecorder) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// The clocks of the caller and the server differ by months, so the first call has the wrong instants. The second call
// has the instants around the present, and not all of them since 1970.
func TestACallWithTheWrongInstantsIsRepeatedWithAFew(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template, _ := hourlyBudget(t)
	require.NoError(t, lua.Load(t.Context(), w.rdb))
	calls := &callRecorder{}
	w.rdb.AddHook(calls)
	require.True(t, w.take(template, "t:a", 100).OK)
	w.at("2026-01-01T01:00:10Z")
	later := budgets(t, 2, policy.Policy{Capacity: 100, Steps: policy.Every(20 * time.Minute), StepTokens: 7}, 0)
	require.EqualValues(t, 30-1, w.take(later, "t:a", 1).Remaining)
	require.Less(t, calls.longest, 1000)
	calls.count = 0
	require.False(t, w.take(later, "t:a", 50).OK)
	require.Equal(t, 1, calls.count, "nothing is to be swept")
}

// The reservation's 90 tokens come back, and are needed for the second take. The first take is made once.
func TestATakeThatNeedsASweepIsMadeOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template, _ := hourlyBudget(t)
	require.EqualValues(t, 99, w.take(template, "t:a", 1).Remaining)
	call := lua.ReserveCall{ID: "r", N: 89, TTL: time.Second}
	_, err := lua.Reserve(t.Context(), w.rdb, "t:a", call)
	require.NoError(t, err)
	w.at("2026-01-01T00:00:40Z")
	runs := []policy.Run{{N: 5, Count: 1}, {N: 20, Count: 1}}
	reply, err := lua.TakeWhole(t.Context(), w.rdb, lua.Takes{Key: "t:a", Runs: runs, Template: template})
	require.NoError(t, err)
	require.EqualValues(t, 99-5-20, reply.Remaining)
}

// The caller enters a bucket's expiry in the sets of its template if they are in other slots.
func TestWhichTakesReturnTheExpiryOfTheBucket(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	for crossSlot, want := range map[bool]int64{false: 0, true: embeddedNow/second + 120} {
		call := user()
		call.CrossSlot = crossSlot
		reply, err := takeTemplate(ctx, rdb, fmt.Sprint("user:", crossSlot), call, one(5), false, false)
		require.NoError(t, err)
		require.Equal(t, want, reply.Till)
	}
	storeCase(ctx, t, rdb, "b", 10)
	reply, err := takeWhole(ctx, rdb, lua.Takes{Key: "b", Runs: one(1)})
	require.NoError(t, err)
	require.Zero(t, reply.Till)
}

// Takes of more than the capacity of 1000 can never be made.
func TestWhichTakesOfARunCountAsDenied(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	for _, c := range []struct {
		tokens int64
		run    policy.Run
		want   string
	}{
		{2, policy.Run{N: 1, Count: 5}, "3"},
		{2, policy.Run{N: 1, Count: 1001}, "999"},
		{2, policy.Run{N: 1000, Count: 1}, "1000"},
		{2, policy.Run{N: 999, Count: 1, Leave: policy.Leave{Tokens: 1}}, "999"},
		{2, policy.Run{N: 1000, Count: 1, Leave: policy.Leave{Tokens: 1}}, ""},
		{2, policy.Run{N: 1001, Count: 1}, ""},
		{2, policy.Run{N: 1, Count: 5, UpTo: true}, ""},
		{0, policy.Run{N: 1, Count: 1000, UpTo: true}, "1000"},
		{0, policy.Run{N: 1, Count: 1001, UpTo: true}, ""},
	} {
		b := buckettest.Bucket(c.tokens, embeddedNow, 0)
		b.Control.Terms.Pool = true
		b.Control.Terms.PoolsVersion = 3
		store(ctx, t, rdb, "b", b)
		_, err := takeWhole(ctx, rdb, lua.Takes{Key: "b", Runs: []policy.Run{c.run}})
		require.NoError(t, err)
		require.Equal(t, c.want, rdb.HGet(ctx, "{b}:ctl", "denied").Val(), "%+v", c.run)
	}
}

// The table has room for ten unlisted flows, and for a team more. Flows of a team that has its place count under it,
// also after the table became full.
func TestATeamThatIsCountedKeepsItsPlace(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeDivided(ctx, t, rdb, "b")
		plan := listing(2)
		plan.Most = 10
		require.NoError(t, planned(ctx, rdb, "b", plan))
		flows := []string{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "team/a", "other/b", "team/c"}
		for _, flow := range flows {
			_, err := takeFor(ctx, rdb, "b", flow, 1)
			require.NoError(t, err)
		}
		use := rdb.HGetAll(ctx, lua.UseKey("b")).Val()
		require.Equal(t, "2", use["team/"], "%v", use)
		require.Equal(t, "1", use["/"], "%v", use)
	})
}

func TestALazyBucketThatIsFullDoesNotExist(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	reply, err := lua.SetOverride(ctx, rdb, "user:1", userTerms, userTerms, policy.EnforceLazy)
	require.NoError(t, err)
	require.False(t, reply.Exists)
	_, err = lua.LazyTake(ctx, rdb, "user:1", &userTerms, one(1), false)
	require.NoError(t, err)
	reply, err = lua.SetOverride(ctx, rdb, "user:1", userTerms, userTerms, policy.EnforceLazy)
	require.NoError(t, err)
	require.True(t, reply.Exists)
	require.EqualValues(t, userTerms.Capacity-1, reply.Tokens)
}

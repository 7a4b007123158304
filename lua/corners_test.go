package lua_test

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// hourly has the terms of a bucket of 5000 tokens that gets 1000 tokens each hour.
var hourly = policy.Policy{Capacity: 5000, Steps: policy.Every(time.Hour),
	StepTokens: 1000}.Terms(policy.Fence{Epoch: 7})

const anHour = int64(3_600_000_000)

// The server's clock is 30 days ahead for a moment. No step of an hourly schedule is credited in advance, and after at
// most one hour steps are credited again: at least 11 of the next 12 steps.
func TestAScheduleGoesOnAfterAClockThatWasAheadForAMoment(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	now, version := embeddedNow-embeddedNow%anHour, policy.Version{}
	refill := func(create policy.Create) policy.Outcome {
		m.SetTime(time.UnixMicro(now))
		step := now - now%anHour
		call := policy.Call{Version: version, Create: create, Terms: &hourly, Step: step, Next: step + anHour}
		o, err := lua.Refill(ctx, rdb, "quota", call)
		require.NoError(t, err)
		version = o.Version
		return o
	}
	require.Equal(t, policy.StatusInitialised, refill(policy.CreateInitial).Status)
	_, err := takeOne(ctx, rdb, "quota", 5000, false)
	require.NoError(t, err)

	begin := now
	now += 30 * 24 * anHour
	require.EqualValues(t, 1000, refill(policy.CreateLost).Added, "only the named step is credited")
	now = begin + 4_000_000
	back := refill(policy.CreateLost)
	require.Equal(t, policy.StatusClock, back.Status)
	require.Equal(t, now+anHour, back.Step, "the last step is one period ahead, so that no step is credited twice")
	credited := int64(0)
	for now < begin+12*anHour {
		now += 600_000_000
		added := refill(policy.CreateLost).Added
		credited += added
		if added > 0 {
			_, err := takeOne(ctx, rdb, "quota", added, false)
			require.NoError(t, err)
		}
	}
	require.GreaterOrEqual(t, credited, int64(11*1000))
	require.LessOrEqual(t, credited, int64(12*1000))
}

// A bucket's hourly schedule begins while the server's clock is 30 days ahead, and the replica's clock is right. The
// first refill after the server's clock is right again comes from a replica with an older file, which has no schedule.
// Nevertheless at least 11 of the next 12 steps are credited, and no more than 12.
func TestAScheduleThatBeganUnderAClockAheadGoesOn(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	begin := embeddedNow - embeddedNow%anHour
	smooth := policy.Policy{Capacity: 5000, Rate: policy.Rate{Tokens: 1, Per: time.Hour}}.Terms(policy.Fence{Epoch: 6})
	right, version := begin, policy.Version{}
	refill := func(server int64, terms *policy.Terms) policy.Outcome {
		m.SetTime(time.UnixMicro(server))
		call := policy.Call{Version: version, Create: policy.CreateInitial, Terms: terms}
		if terms == &hourly {
			call.Step = right - right%anHour
			call.Next = call.Step + anHour
		}
		o, err := lua.Refill(ctx, rdb, "quota", call)
		require.NoError(t, err)
		version = o.Version
		return o
	}
	const ahead = 30 * 24 * anHour
	refill(begin+ahead-1_000_000, &smooth)
	_, err := takeOne(ctx, rdb, "quota", 5000, false)
	require.NoError(t, err)
	refill(begin+ahead, &hourly)
	require.Equal(t, policy.StatusClock, refill(begin, &smooth).Status)

	credited := int64(0)
	for right < begin+12*anHour {
		right += 600_000_000
		added := refill(right, &hourly).Added
		credited += added
		if added > 0 {
			_, err := takeOne(ctx, rdb, "quota", added, false)
			require.NoError(t, err)
		}
	}
	require.GreaterOrEqual(t, credited, int64(11*1000))
	require.LessOrEqual(t, credited, int64(12*1000))
}

// A step of 1000 tokens is credited, and the tokens are taken. Then the server comes back with the state from before
// that step. The step that it forgot is not credited again.
func TestAForgottenStepIsNotCreditedAgain(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	now := embeddedNow - embeddedNow%anHour
	m.SetTime(time.UnixMicro(now))
	tokens, index := int64(0), int64(20)
	before := policy.Bucket{Tokens: &tokens, Index: &index, Control: &policy.Control{
		Terms: hourly, Era: now - anHour, Index: 20, Last: now - 100_000, Step: now - anHour, Next: now,
	}}
	store(ctx, t, rdb, "quota", before)
	call := policy.Call{Version: policy.Version{Era: now - anHour, Index: 20}, Terms: &hourly, Step: now,
		Next: now + anHour}
	o, err := lua.Refill(ctx, rdb, "quota", call)
	require.NoError(t, err)
	require.EqualValues(t, 1000, o.Added)
	_, err = takeOne(ctx, rdb, "quota", 1000, false)
	require.NoError(t, err)

	store(ctx, t, rdb, "quota", before) // the fail-over
	call.Version = o.Version
	again := int64(0)
	for range 10 {
		now += 1_000_000
		m.SetTime(time.UnixMicro(now))
		o, err = lua.Refill(ctx, rdb, "quota", call)
		require.NoError(t, err)
		again += o.Added
		call.Version = o.Version
	}
	require.Zero(t, again)
	now += anHour
	m.SetTime(time.UnixMicro(now))
	call.Step, call.Next = call.Next, call.Next+anHour
	o, err = lua.Refill(ctx, rdb, "quota", call)
	require.NoError(t, err)
	require.EqualValues(t, 1000, o.Added, "the next step is credited")
}

// A bucket of a template becomes a configured bucket. Then it never expires, even if callers still take from it as from
// the template's bucket.
func TestATemplatesKeyThatIsConfiguredNeverExpires(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aTemplatesKeyThatIsConfiguredNeverExpires)
}

func aTemplatesKeyThatIsConfiguredNeverExpires(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	_, err := takeTemplate(ctx, rdb, "user:1", user(), one(5), false, false)
	require.NoError(t, err)
	configured := policy.Policy{Capacity: 60, Rate: policy.PerSecond(1),
		Interval: time.Second}.Terms(policy.Fence{Epoch: 8})
	_, err = lua.Refill(ctx, rdb, "user:1", policy.Call{Terms: &configured, Create: policy.CreateLost})
	require.NoError(t, err)
	never := func() {
		t.Helper()
		for _, k := range []string{"user:1", "{user:1}", "{user:1}:ctl"} {
			require.EqualValues(t, -1, rdb.PTTL(ctx, k).Val(), k)
		}
	}
	never()
	require.NoError(t, rdb.SRem(ctx, lua.ActiveKey("user:", lua.ActiveShard("user:1")), "user:1").Err())
	for _, n := range []int64{1, 100} { // taken, and denied
		_, err = takeTemplate(ctx, rdb, "user:1", user(), one(n), true, false)
		require.NoError(t, err)
		never()
		require.False(t, isActive(ctx, t, rdb, "user:1"))
	}
	lua.RefillActive(ctx, rdb, shardOf("user:1"), []lua.RefillCall{{Key: "user:1", Call: policy.Call{Terms: &userTerms}}},
		1)
	never()
}

// A program that adds with plain commands raises the index by one for a moment. A caller that reads the bucket
// meanwhile gets the lower index. Otherwise it would later report a rollback.
func TestAnIndexThatAForeignClientTakesBackIsNotApplied(t *testing.T) {
	t.Parallel()
	withEmbedded(t, anIndexThatAForeignClientTakesBackIsNeverReported)
}

func anIndexThatAForeignClientTakesBackIsNeverReported(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	b := storeCase(ctx, t, rdb, "b", 100)
	version := policy.Version{Era: b.Control.Era, Index: b.Control.Index}
	require.NoError(t, rdb.Incr(ctx, "{b}").Err())
	peek, err := lua.Peek(ctx, rdb, "b", 1)
	require.NoError(t, err)
	denied, err := takeOne(ctx, rdb, "b", 900, false)
	require.NoError(t, err)
	ticket := lua.Tickets(ctx, rdb, []string{"b"})[0]
	stale, err := lua.Refill(ctx, rdb, "b", policy.Call{})
	require.NoError(t, err)
	require.Equal(t, policy.StatusStale, stale.Status)
	for _, got := range []policy.Version{peek.Version, denied.Version, ticket.Version, stale.Version} {
		require.Equal(t, version, got)
	}
	require.NoError(t, rdb.Decr(ctx, "{b}").Err())
	o, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: stale.Version})
	require.NoError(t, err)
	require.Equal(t, policy.StatusApplied, o.Status, "the refill starts no quarantine")
	require.GreaterOrEqual(t, o.Tokens, int64(100))
}

// Eras are microseconds in every script, so none falls when a bucket expires and is created again.
func TestAnEraNeverFallsOverAnExpiry(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	era := int64(0)
	rises := func(what string) {
		t.Helper()
		peek, err := lua.Peek(ctx, rdb, "user:1", 1)
		require.NoError(t, err)
		require.Greater(t, peek.Version.Era, era, what)
		era = peek.Version.Era
	}
	create := func() {
		_, err := takeTemplate(ctx, rdb, "user:1", user(), one(5), false, false)
		require.NoError(t, err)
	}
	era = time.Now().Add(-time.Minute).UnixMicro()
	create()
	rises("created")
	own := userTerms
	own.Fence.Epoch = policy.OwnEpoch
	_, err := lua.SetOverride(ctx, rdb, "user:1", own, userTerms, policy.EnforceRefilled)
	require.NoError(t, err)
	_, err = lua.UnsetOverride(ctx, rdb, "user:1", &userTerms, policy.EnforceRefilled)
	require.NoError(t, err)
	rises("the era rises when the override is removed")
	require.NoError(t, rdb.Del(ctx, "user:1", "{user:1}", "{user:1}:ctl").Err()) // as if it had expired
	create()
	rises("the era rises when the bucket is created again")
}

// The clock was an hour ahead, so a new era can't be the present time. A bucket begins a second era because of a
// rollback, 30 tokens are taken, and the bucket is deleted. Then a replica that remembers the first era creates the
// bucket anew. This begins a third era, to which no tokens of the second era are returned.
func TestErasOfTwoHistoriesDifferThoughBothFollowTheSameOne(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	terms := policy.Policy{Capacity: 100, Rate: policy.PerSecond(1), OnRollback: policy.RollbackKeep,
		Initial: new(int64)}.Terms(policy.Fence{Epoch: 1})
	now := serverTime(ctx, t, rdb)
	b := buckettest.Bucket(100, now, 0)
	b.Control.Terms = terms
	b.Control.Era = now + anHour
	store(ctx, t, rdb, "b", b)
	before := policy.Version{Era: b.Control.Era, Index: b.Control.Index}
	forgotten := policy.Version{Era: before.Era, Index: before.Index + 1}
	second, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: forgotten})
	require.NoError(t, err)
	require.Equal(t, policy.StatusRolledBack, second.Status)
	_, err = takeOne(ctx, rdb, "b", 30, false)
	require.NoError(t, err)

	require.NoError(t, rdb.Del(ctx, "b", "{b}", "{b}:ctl").Err())
	third, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: before, Terms: &terms, Create: policy.CreateLost})
	require.NoError(t, err)
	require.Equal(t, policy.StatusInitialised, third.Status)
	require.Greater(t, second.Version.Era, before.Era)
	require.Greater(t, third.Version.Era, before.Era)
	_, err = lua.Return(ctx, rdb, "b", 30, second.Version.Era)
	require.ErrorIs(t, err, lua.ErrOtherEra)
	require.Equal(t, "0", rdb.Get(ctx, "b").Val())
}

// A bucket has lost its tokens. A denied take does not create their key, so the next refill adds the 1000 tokens of
// on_loss.
func TestADeniedTakeOfABucketThatLostItsTokensLeavesNothing(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aDeniedTakeOfABucketThatLostItsTokensLeavesNothing)
}

func aDeniedTakeOfABucketThatLostItsTokensLeavesNothing(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	b := storeCase(ctx, t, rdb, "b", 100)
	b.Control.Terms.OnLoss, b.Tokens = policy.LossFull, nil
	store(ctx, t, rdb, "b", b)
	reply, err := lua.Take(ctx, rdb, "b", 1, false)
	require.NoError(t, err)
	require.False(t, reply.OK)
	require.Zero(t, rdb.Exists(ctx, "b").Val())
	o, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: reply.Version})
	require.NoError(t, err)
	require.EqualValues(t, 1000, o.Tokens)
}

// Neither do tokens that are given back create the key of lost tokens.
func TestNothingComesBackToABucketThatLostItsTokens(t *testing.T) {
	t.Parallel()
	withEmbedded(t, nothingComesBackToABucketThatLostItsTokens)
}

func nothingComesBackToABucketThatLostItsTokens(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	b := storeCase(ctx, t, rdb, "b", 1000)
	b.Control.Terms.OnLoss = policy.LossFull
	store(ctx, t, rdb, "b", b)
	_, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "settled", N: 100, TTL: time.Minute})
	require.NoError(t, err)
	_, err = lua.Lease(ctx, rdb, "b", lua.LeaseCall{ID: "block", Seq: 1, Want: 100, TTL: time.Minute})
	require.NoError(t, err)
	require.NoError(t, rdb.Del(ctx, "b").Err())

	back, err := lua.Return(ctx, rdb, "b", 5, 0)
	require.NoError(t, err)
	require.Equal(t, lua.ReturnReply{Clamped: 5}, back)
	settled, err := lua.Settle(ctx, rdb, "b", "settled", 40)
	require.NoError(t, err)
	require.Equal(t, policy.Settlement{Clamped: 60}, settled.Settlement)
	leased, err := lua.Lease(ctx, rdb, "b", lua.LeaseCall{ID: "block", Seq: 2, Keep: 20, Back: 70, Want: 50,
		TTL: time.Minute})
	require.NoError(t, err)
	require.Equal(t, []int64{0, 0, 70}, []int64{leased.Remaining, leased.Granted, leased.Clamped})
	require.Zero(t, rdb.Exists(ctx, "b").Val())

	o, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: policy.Version{Era: b.Control.Era, Index: b.Control.Index}})
	require.NoError(t, err)
	require.EqualValues(t, 1000, o.Tokens)
}

// A template's bucket of 60 tokens with on_loss full has lost K. After any call that gives tokens back, K is missing or
// expires with the other keys, and the next refill fills the bucket. A grant first restores the tokens of on_loss, and
// then adds its own.
func TestTheLossOfTokensIsNotHiddenByWhatComesBack(t *testing.T) {
	t.Parallel()
	withEmbedded(t, theLossOfTokensIsNotHiddenByWhatComesBack)
}

func theLossOfTokensIsNotHiddenByWhatComesBack(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	terms := userTerms
	terms.OnLoss = policy.LossFull
	template := templateCall{Prefix: "user:", Terms: terms.Encode(), Capacity: 60, Hold: time.Hour}
	for name, act := range map[string]func() error{
		"return": func() error {
			_, err := lua.Return(ctx, rdb, "user:1", 5, 0)
			return err
		},
		"grant": func() error {
			r, err := lua.Grant(ctx, rdb, "user:1", 5)
			require.Equal(t, []int64{60, 5}, []int64{r.Tokens, r.Clamped})
			return err
		},
		"settle": func() error {
			_, err := lua.Settle(ctx, rdb, "user:1", "job", 1)
			return err
		},
		"settle above": func() error {
			_, err := lua.Settle(ctx, rdb, "user:1", "job", 9)
			return err
		},
		"lease": func() error {
			call := lua.LeaseCall{ID: "block", Seq: 2, Keep: 2, Back: 5, Want: 5, TTL: time.Hour}
			_, err := lua.Lease(ctx, rdb, "user:1", call)
			return err
		},
		"new lease": func() error {
			_, err := lua.Lease(ctx, rdb, "user:1", lua.LeaseCall{ID: "new", Seq: 1, Want: 5, TTL: time.Hour})
			return err
		},
		"sweep": func() error {
			endNow(ctx, t, rdb, "user:1", "job", "block")
			return lua.Sweep(ctx, rdb, []string{"user:1"}, 10)[0].Err
		},
		"take": func() error {
			_, err := lua.Take(ctx, rdb, "user:1", 5, true)
			return err
		},
	} {
		require.NoError(t, rdb.FlushAll(ctx).Err())
		_, err := takeTemplate(ctx, rdb, "user:1", template, one(20), false, false)
		require.NoError(t, err)
		reserve(ctx, t, rdb, "user:1", "job", 5)
		_, err = lua.Lease(ctx, rdb, "user:1", lua.LeaseCall{ID: "block", Seq: 1, Want: 7, TTL: time.Hour})
		require.NoError(t, err)
		require.NoError(t, rdb.Del(ctx, "user:1").Err())
		require.NoError(t, act(), name)
		if rdb.Exists(ctx, "user:1").Val() > 0 {
			require.Equal(t, rdb.PExpireTime(ctx, "{user:1}:ctl").Val(), rdb.PExpireTime(ctx, "user:1").Val(), name)
		}
		require.EqualValues(t, 60, idle(ctx, t, rdb, "user:1"), name)
		require.Equal(t, rdb.PExpireTime(ctx, "{user:1}:ctl").Val(), rdb.PExpireTime(ctx, "user:1").Val(), name)
	}
}

// A template's bucket has lost a key. If an operator's call creates the key again, it expires with the other keys.
func TestWhatOperatorsSetExpiresWithTheBucket(t *testing.T) {
	t.Parallel()
	withEmbedded(t, whatOperatorsSetExpiresWithTheBucket)
}

func whatOperatorsSetExpiresWithTheBucket(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	for _, lost := range []string{"user:1", "{user:1}"} {
		for name, act := range map[string]func() (lua.OperatorReply, error){
			"reset": func() (lua.OperatorReply, error) { return lua.Reset(ctx, rdb, "user:1", 9) },
			"grant": func() (lua.OperatorReply, error) { return lua.Grant(ctx, rdb, "user:1", 9) },
		} {
			require.NoError(t, rdb.FlushAll(ctx).Err())
			_, err := takeTemplate(ctx, rdb, "user:1", user(), one(50), false, false)
			require.NoError(t, err)
			require.NoError(t, rdb.Del(ctx, lost).Err())
			_, err = act()
			require.NoError(t, err)
			for _, key := range rdb.Keys(ctx, "*user:1*").Val() {
				require.Equal(t, rdb.PExpireTime(ctx, "{user:1}:ctl").Val(), rdb.PExpireTime(ctx, key).Val(), "%s: %s", name, key)
			}
		}
	}
}

// The key of the set of a template's buckets alive can't be the key of a bucket.
func TestTheBucketsAliveAreCountedUnderNoBucketsKey(t *testing.T) {
	t.Parallel()
	for _, prefix := range []string{"", "user:", "a:*:b"} {
		for _, key := range []string{"refiller:alive:" + prefix, prefix} {
			require.NotContains(t, []string{key, lua.IndexKey(key), lua.ControlKey(key), lua.OutstandingKey(key),
				lua.DueKey(key), lua.OverrideKey(key), lua.LazyKey(key), lua.LiveKey(key)}, lua.AliveKey(prefix))
		}
	}
}

// fetchToken and addToken do what the two scripts of a client do that uses only two keys.
func fetchToken(ctx context.Context, t testing.TB, rdb *redis.Client, key string) bool {
	t.Helper()
	left, err := rdb.Decr(ctx, key).Result()
	require.NoError(t, err)
	if left < 0 {
		require.NoError(t, rdb.Incr(ctx, key).Err())
	}
	return left >= 0
}

func addToken(ctx context.Context, t testing.TB, rdb *redis.Client, key string, n, limit, expected int64) {
	t.Helper()
	index, err := rdb.Incr(ctx, lua.IndexKey(key)).Result()
	require.NoError(t, err)
	if index != expected+1 {
		require.NoError(t, rdb.Decr(ctx, lua.IndexKey(key)).Err())
		return
	}
	if tokens := rdb.IncrBy(ctx, key, n).Val(); tokens > limit {
		require.NoError(t, rdb.Set(ctx, key, limit, 0).Err()) // which drops the expiry
	}
}

// Plain clients use a template's key. No refiller refills it for them, and no token is minted when a consumer with the
// SDK uses it, too.
func TestPlainClientsOnATemplatesKeyMintNothing(t *testing.T) {
	t.Parallel()
	withEmbedded(t, plainClientsOnATemplatesKeyMintNothing)
}

func plainClientsOnATemplatesKeyMintNothing(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	take := func(n int64) int64 {
		r, err := takeTemplate(ctx, rdb, "user:1", user(), []policy.Run{{N: 1, Count: n, UpTo: true}}, false, false)
		require.NoError(t, err)
		if r.OK {
			return n
		}
		return r.Runs[0].Taken
	}
	expiring := func(what string) {
		t.Helper()
		for _, k := range []string{"user:1", "{user:1}", "{user:1}:ctl"} {
			require.Positive(t, rdb.PTTL(ctx, k).Val(), "%s: %s", what, k)
		}
	}
	// A plain fetch of a missing key leaves an empty key. The next take of a consumer creates a bucket there.
	require.False(t, fetchToken(ctx, t, rdb, "user:1"))
	require.EqualValues(t, 10, take(10))
	expiring("created")

	// The bucket has been full for a long time. Plain clients fetch as many tokens as they can, and then consumers take.
	// Together they get 60 tokens and not 65, however much time has passed.
	require.NoError(t, rdb.Set(ctx, "user:1", 60, redis.KeepTTL).Err())
	rewind(ctx, t, rdb, "user:1", 20*time.Second)
	require.NoError(t, rdb.Del(ctx, lua.ActiveKey("user:", lua.ActiveShard("user:1"))).Err())
	taken := int64(0)
	for fetchToken(ctx, t, rdb, "user:1") {
		taken++
	}
	require.EqualValues(t, 60, taken)
	require.Zero(t, take(1))
	require.True(t, isActive(ctx, t, rdb, "user:1"), "the bucket is refilled from now on")
	r := refillUser(ctx, t, rdb, "user:1", userTerms)
	require.LessOrEqual(t, r.Added, int64(1), "the time while the bucket was full is not credited")

	// An add with SET drops the expiry of K. When a consumer adopts the bucket, K expires again.
	index, err := strconv.ParseInt(rdb.Get(ctx, "{user:1}").Val(), 10, 64)
	require.NoError(t, err)
	addToken(ctx, t, rdb, "user:1", 100, 60, index)
	require.EqualValues(t, -1, rdb.PTTL(ctx, "user:1").Val())
	require.NoError(t, rdb.Del(ctx, "{user:1}", "{user:1}:ctl").Err()) // they expire
	require.EqualValues(t, 60, take(100), "the bucket has 60 tokens, not 120")
	expiring("adopted")
}

// If a try of a plain client fails, it leaves -1 for a moment, and then sets that to 0 again. A bucket that is created
// in between has one token less until then.
func TestATryOfAPlainClientIsUndoneInABucketThatBeganAnew(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aTryOfAPlainClientIsUndoneInABucketThatBeganAnew)
}

func aTryOfAPlainClientIsUndoneInABucketThatBeganAnew(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	try := func(key string) { require.EqualValues(t, -1, rdb.Decr(ctx, key).Val(), key) }
	undone := func(key string, want int64) { require.Equal(t, want, rdb.Incr(ctx, key).Val(), key) }
	terms := policy.Policy{Rate: policy.PerSecond(10), Capacity: 100}.Terms(policy.Fence{Epoch: 1})

	for key, want := range map[string]struct {
		call   policy.Call
		tokens int64
	}{
		"new":     {policy.Call{Terms: &terms, Create: policy.CreateInitial}, 100},
		"lost":    {policy.Call{Terms: &terms, Version: policy.Version{Era: 1, Index: 1}, Create: policy.CreateLost}, 0},
		"foreign": {policy.Call{Terms: &terms, Create: policy.CreateInitial}, 0},
	} {
		if key == "foreign" {
			require.NoError(t, rdb.Set(ctx, lua.IndexKey(key), 7, 0).Err())
		}
		try(key)
		o, err := lua.Refill(ctx, rdb, key, want.call)
		require.NoError(t, err)
		require.Equal(t, policy.StatusInitialised, o.Status, key)
		require.Equal(t, want.tokens-1, o.Tokens, key)
		undone(key, want.tokens)
	}

	for key, rollback := range map[string]policy.Rollback{"emptied": policy.RollbackEmpty, "kept": policy.RollbackKeep} {
		own := terms
		own.OnRollback = rollback
		seen, err := lua.Refill(ctx, rdb, key, policy.Call{Terms: &own, Create: policy.CreateInitial})
		require.NoError(t, err)
		require.NoError(t, rdb.Set(ctx, key, 0, 0).Err())
		try(key)
		seen.Version.Index += 7 // a write that the server forgot
		o, err := lua.Refill(ctx, rdb, key, policy.Call{Terms: &own, Version: seen.Version})
		require.NoError(t, err)
		require.Equal(t, policy.StatusRolledBack, o.Status)
		require.EqualValues(t, -1, o.Tokens, key)
		undone(key, 0)
	}

	// After an operator's reset, a try that is undone does not increase the tokens beyond the requested number.
	for key, reset := range map[string]struct{ to, want int64 }{"reset": {40, 40}, "filled": {-1, 100}} {
		_, err := lua.Refill(ctx, rdb, key, policy.Call{Terms: &terms, Create: policy.CreateInitial})
		require.NoError(t, err)
		require.NoError(t, rdb.Set(ctx, key, 0, 0).Err())
		try(key)
		_, err = lua.Reset(ctx, rdb, key, reset.to)
		require.NoError(t, err)
		undone(key, reset.want)
	}

	// A template's bucket is missing. It begins with 60 tokens, less one for the try. Of these 10 are taken, and the try
	// is undone.
	try("user:1")
	r, err := takeTemplate(ctx, rdb, "user:1", user(), one(10), false, false)
	require.NoError(t, err)
	require.True(t, r.OK)
	undone("user:1", 50)

	// A bucket that has only its index left has no tokens.
	require.NoError(t, rdb.Set(ctx, "{user:2}", 7, 0).Err())
	try("user:2")
	r, err = takeTemplate(ctx, rdb, "user:2", user(), one(1), false, false)
	require.NoError(t, err)
	require.False(t, r.OK)
	undone("user:2", 0)
}

// If only K of a bucket with on_loss full is evicted, the next refill fills the bucket. If a plain client tries to take
// before that refill, it leaves an empty K, like that of a drained bucket. Then the refill adds nothing.
func TestATryBeforeTheRefillOfAnEvictedKeyEmptiesIt(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aTryBeforeTheRefillOfAnEvictedKeyEmptiesIt)
}

func aTryBeforeTheRefillOfAnEvictedKeyEmptiesIt(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	terms := policy.Policy{Capacity: 100, Rate: policy.Rate{Tokens: 1, Per: time.Hour}, OnLoss: policy.LossFull}.
		Terms(policy.Fence{Epoch: 1})
	terms.Interval = 1 // no refill is early
	for try, want := range map[bool]int64{false: 100, true: 0} {
		require.NoError(t, rdb.FlushAll(ctx).Err())
		out, err := lua.Refill(ctx, rdb, "b", policy.Call{Terms: &terms, Create: policy.CreateInitial})
		require.NoError(t, err)
		require.NoError(t, rdb.Del(ctx, "b").Err())
		if try {
			require.NoError(t, rdb.Decr(ctx, "b").Err())
			require.NoError(t, rdb.Incr(ctx, "b").Err())
		}
		out, err = lua.Refill(ctx, rdb, "b", policy.Call{Version: out.Version, Terms: &terms})
		require.NoError(t, err)
		require.Equal(t, policy.StatusApplied, out.Status)
		require.Equal(t, want, out.Tokens, try)
	}
}

// A plain adder that undid its only try leaves an index of 0. Such an index, without tokens or with 0 tokens, is no
// bucket. A new bucket there begins with the tokens of its policy and with index 1.
func TestAnIndexOfZeroAloneIsNoBucket(t *testing.T) {
	t.Parallel()
	withEmbedded(t, anIndexOfZeroAloneIsNoBucket)
}

func anIndexOfZeroAloneIsNoBucket(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	configured := strictTerms()
	for _, tokens := range []bool{false, true} {
		for name, begin := range map[string]func() error{
			"refill": func() error {
				_, err := lua.Refill(ctx, rdb, "user:1", policy.Call{Terms: &configured, Create: policy.CreateInitial})
				return err
			},
			"take": func() error {
				_, err := takeTemplate(ctx, rdb, "user:1", user(), one(1), false, false)
				return err
			},
		} {
			require.NoError(t, rdb.FlushAll(ctx).Err())
			require.NoError(t, rdb.Set(ctx, "{user:1}", 0, 0).Err())
			if tokens {
				require.NoError(t, rdb.Set(ctx, "user:1", 0, 0).Err())
			}
			o, err := lua.Refill(ctx, rdb, "user:1", policy.Call{Terms: &configured, Create: policy.CreateLost})
			require.NoError(t, err)
			require.Equal(t, policy.StatusUnknown, o.Status, "there is no bucket to adopt")
			require.NoError(t, begin(), name)
			require.Equal(t, map[string]string{"refill": "100", "take": "59"}[name], rdb.Get(ctx, "user:1").Val(), name)
			require.Equal(t, "1", rdb.Get(ctx, "{user:1}").Val(), name)
		}
	}
}

// Five tries of plain clients have failed and are about to be undone when a call fills the bucket. After they are
// undone, the bucket is exactly full.
func TestWhatPlainClientsAreAboutToUndoIsNoRoom(t *testing.T) {
	t.Parallel()
	withEmbedded(t, whatPlainClientsAreAboutToUndoIsNoRoom)
}

func whatPlainClientsAreAboutToUndoIsNoRoom(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	now := serverTime(ctx, t, rdb)
	era := now - 2*anHour
	index := int64(3)
	tries := int64(-5)
	bucket := func(key string, terms policy.Terms, last, step int64) policy.Version {
		c := policy.Control{Terms: terms, Era: era, Index: index, Last: last, Step: step}
		if step > 0 {
			c.Next = step + anHour
		}
		store(ctx, t, rdb, key, policy.Bucket{Tokens: &tries, Index: &index, Control: &c})
		return policy.Version{Era: era, Index: index}
	}
	undone := func(key string, want int64) {
		t.Helper()
		require.Equal(t, want, rdb.IncrBy(ctx, key, 5).Val(), key)
	}
	full := func(key string, v policy.Version, terms policy.Terms, step int64) {
		t.Helper()
		o, err := lua.Refill(ctx, rdb, key, policy.Call{Terms: &terms, Version: v, Step: step, Next: step + anHour})
		require.NoError(t, err)
		require.Equal(t, policy.StatusApplied, o.Status)
		undone(key, 100)
	}
	steps := policy.Policy{Capacity: 100, Steps: policy.Every(time.Hour), StepTokens: 200}.Terms(policy.Fence{Epoch: 1})
	full("stepped", bucket("stepped", steps, now-2_000_000, now-1_000_000-anHour), steps, now-1_000_000)
	smooth := policy.Policy{Rate: policy.PerSecond(200), Capacity: 100}.Terms(policy.Fence{Epoch: 1})
	full("smooth", bucket("smooth", smooth, now-1_000_000, 0), smooth, 0)

	bucket("granted", smooth, now, 0)
	_, err := lua.Grant(ctx, rdb, "granted", 1000)
	require.NoError(t, err)
	undone("granted", 100)
	bucket("returned", smooth, now, 0)
	_, err = lua.Return(ctx, rdb, "returned", 1000, 0)
	require.NoError(t, err)
	undone("returned", 100)
}

// Redis evicts single keys. If a refill or a take creates such a key again, it expires with the other keys. Otherwise
// it would remain, and count as a foreign client's bucket later.
func TestAKeyThatWasLostAloneExpiresWithTheOthers(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aKeyThatWasLostAloneExpiresWithTheOthers)
}

func aKeyThatWasLostAloneExpiresWithTheOthers(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	expireTogether := func(what string) {
		t.Helper()
		at := rdb.PExpireTime(ctx, "{user:1}:ctl").Val()
		require.Positive(t, at, what)
		for _, k := range []string{"user:1", "{user:1}"} {
			require.Equal(t, at, rdb.PExpireTime(ctx, k).Val(), "%s: %s", what, k)
		}
	}
	for _, lost := range []string{"user:1", "{user:1}"} {
		require.NoError(t, rdb.FlushAll(ctx).Err())
		_, err := takeTemplate(ctx, rdb, "user:1", user(), one(50), false, false)
		require.NoError(t, err)
		peek, err := lua.Peek(ctx, rdb, "user:1", 1)
		require.NoError(t, err)
		rewind(ctx, t, rdb, "user:1", 2*time.Second)
		require.NoError(t, rdb.Del(ctx, lost).Err())
		call := lua.RefillCall{Key: "user:1", Call: policy.Call{Version: peek.Version, Terms: &userTerms}}
		r := lua.RefillActive(ctx, rdb, shardOf("user:1"), []lua.RefillCall{call}, 1)[0]
		require.NoError(t, r.Err)
		require.Equal(t, policy.StatusApplied, r.Status)
		require.EqualValues(t, 1, rdb.Exists(ctx, lost).Val())
		expireTogether("lost " + lost + ", refilled")
	}
	require.NoError(t, rdb.Persist(ctx, "user:1").Err()) // as a SET of a plain client does
	_, err := takeTemplate(ctx, rdb, "user:1", user(), one(1), true, false)
	require.NoError(t, err)
	expireTogether("taken")
}

// A foreign client's key that has an expiry becomes a configured bucket, which has none.
func TestABucketThatIsAdoptedNeverExpires(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aBucketThatIsAdoptedNeverExpires)
}

func aBucketThatIsAdoptedNeverExpires(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	for _, k := range []string{"b", "{b}"} {
		require.NoError(t, rdb.Set(ctx, k, 40, time.Minute).Err())
	}
	terms := policy.Policy{Capacity: 60, Rate: policy.PerSecond(1)}.Terms(policy.Fence{Epoch: 1})
	o, err := lua.Refill(ctx, rdb, "b", policy.Call{Terms: &terms, Create: policy.CreateInitial})
	require.NoError(t, err)
	require.Equal(t, policy.StatusInitialised, o.Status)
	require.EqualValues(t, 40, o.Tokens)
	for _, k := range []string{"b", "{b}", "{b}:ctl"} {
		require.EqualValues(t, -1, rdb.PTTL(ctx, k).Val(), k)
	}
}

// Overrides are only for buckets of templates. A bucket that is configured, or a pool's, keeps its own policy even if a
// template matches its key, and it doesn't expire.
func TestAnOverrideIsForBucketsOfATemplateAlone(t *testing.T) {
	t.Parallel()
	withEmbedded(t, anOverrideIsForBucketsOfATemplateAlone)
}

func anOverrideIsForBucketsOfATemplateAlone(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	configured := policy.Policy{Capacity: 60, Rate: policy.PerSecond(1)}.Terms(policy.Fence{Epoch: 8})
	pool := configured
	pool.Pool = true
	pool.Version = 8
	pool.PoolsVersion = 8
	pool.Fence = policy.Fence{Epoch: 3, Seq: 4}
	own := userTerms
	own.Capacity = 30
	own.Initial = 30
	own.Fence.Epoch = policy.OwnEpoch
	for _, terms := range []policy.Terms{configured, pool} {
		require.NoError(t, rdb.FlushAll(ctx).Err())
		_, err := lua.Refill(ctx, rdb, "user:1", policy.Call{Terms: &terms, Create: policy.CreateInitial})
		require.NoError(t, err)
		before := rdb.HGetAll(ctx, "{user:1}:ctl").Val()
		_, err = lua.SetOverride(ctx, rdb, "user:1", own, userTerms, policy.EnforceRefilled)
		require.ErrorIs(t, err, lua.ErrNotOfTemplate)
		require.Zero(t, rdb.Exists(ctx, lua.OverrideKey("user:1")).Val())
		_, err = lua.UnsetOverride(ctx, rdb, "user:1", &userTerms, policy.EnforceRefilled)
		require.NoError(t, err)
		require.Equal(t, before, rdb.HGetAll(ctx, "{user:1}:ctl").Val())
		require.EqualValues(t, -1, rdb.PTTL(ctx, "{user:1}:ctl").Val())
	}
}

// A step was credited, the clock steps back to just before it, and the bucket is reset. Then the step does not fall due
// again.
func TestAResetKeepsAStepThatWasCreditedBeforeTheClockSteppedBack(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	tokens, index := int64(1000), int64(20)
	credited := embeddedNow + 30_000
	store(ctx, t, rdb, "quota", policy.Bucket{Tokens: &tokens, Index: &index, Control: &policy.Control{
		Terms: hourly, Era: embeddedNow - anHour, Index: 20, Last: credited, Step: credited, Next: credited + anHour,
	}})
	m.SetTime(time.UnixMicro(embeddedNow))
	_, err := lua.Reset(ctx, rdb, "quota", 400)
	require.NoError(t, err)
	require.Equal(t, credited, load(ctx, t, rdb, "quota").Control.Step)
}

// The clock went back by an hour. A take that is denied before the next refill gets a wait that counts from the
// present. The next refill begins a new era, and the refill after it adds the token.
func TestADenialAfterTheClockWentBackWaitsFromThePresent(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	b := buckettest.Bucket(0, embeddedNow, 0)
	b.Control.Terms = policy.Policy{Capacity: 100, Rate: policy.PerSecond(10), Interval: 100 * time.Millisecond}.
		Terms(policy.Fence{Epoch: 1})
	b.Control.Last = embeddedNow + time.Hour.Microseconds()
	store(ctx, t, rdb, "b", b)
	denied, err := takeOne(ctx, rdb, "b", 1, false)
	require.NoError(t, err)
	require.False(t, denied.OK)
	require.Equal(t, 100*time.Millisecond, denied.Wait)

	version := denied.Version
	for _, after := range []time.Duration{0, denied.Wait} {
		m.SetTime(time.UnixMicro(embeddedNow).Add(after))
		o, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: version})
		require.NoError(t, err)
		require.True(t, o.Status.Wrote())
		version = o.Version
	}
	taken, err := takeOne(ctx, rdb, "b", 1, false)
	require.NoError(t, err)
	require.True(t, taken.OK)
}

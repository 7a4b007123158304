package lua_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// userTerms have 60 tokens at 1/s, so a bucket fills in a minute.
var userTerms = policy.Template{Policy: policy.Policy{Capacity: 60, Rate: policy.PerSecond(1),
	Interval: time.Second}}.Terms(policy.Fence{Epoch: 7})

func ofTemplate(p policy.Policy) policy.Terms {
	return policy.Template{Policy: p}.Terms(policy.Fence{})
}

func user() templateCall {
	return templateCall{Prefix: "user:", Terms: userTerms.Encode(), Capacity: userTerms.Capacity}
}

// users is the template with userTerms.
var users = lua.NewTemplate(ruled(user()), false)

func one(n int64) []policy.Run { return []policy.Run{{N: n, Count: 1}} }

func isActive(ctx context.Context, t testing.TB, rdb redis.UniversalClient, key string) bool {
	t.Helper()
	is, err := rdb.SIsMember(ctx, lua.ActiveKey("user:", lua.ActiveShard(key)), key).Result()
	require.NoError(t, err)
	return is
}

func TestTakesOfATemplateAgreeWithTheModel(t *testing.T) {
	t.Parallel()
	withEmbedded(t, agreeOnTemplates)
}

func agreeOnTemplates(t *testing.T, rdb *redis.Client) {
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	created := 0
	stamped := 0
	denied := 0
	alone := 0
	switched := 0
	for i := range 30 {
		key, h := fmt.Sprintf("user:%d", i), buckettest.NewHistory(rng)
		draw := func(version int64) policy.Terms {
			terms := h.Terms()
			for terms.Kind != policy.Smooth || terms.Pool {
				terms = h.Terms()
			}
			terms.Template = true
			terms.Fence = policy.Fence{Epoch: version}
			return terms
		}
		terms := draw(7)
		for step := range 40 {
			where := fmt.Sprintf("key %s step %d", key, step)
			if rng.IntN(8) == 0 { // the caller knows a later template, or an earlier one
				terms = draw(max(0, terms.Fence.Epoch+rng.Int64N(4)-1))
			}
			model := load(ctx, t, rdb, key)
			h.Disturb(&model)
			if model.Control != nil && rng.IntN(3) == 0 {
				full := model.Control.Terms.Capacity
				model.Tokens = &full
			}
			store(ctx, t, rdb, key, model)
			before := model
			if model.Tokens != nil {
				n := *model.Tokens
				before.Tokens = &n
			}
			if model.Control != nil {
				s := *model.Control
				before.Control = &s
			}
			call := templateCall{Prefix: "user:", Terms: terms.Encode(), Capacity: terms.Capacity}
			if model.Control != nil {
				call.Capacity = model.Control.Terms.Capacity
			}
			// The capacity that the caller knows may be too low. Then the call costs more time, but its result is the same.
			call.Capacity -= rng.Int64N(2) * rng.Int64N(call.Capacity+1)
			n := 1 + rng.Int64N(terms.Capacity+terms.Capacity/4)
			active := rng.IntN(2) == 0
			require.NoError(t, rdb.Del(ctx, lua.ActiveKey("user:", lua.ActiveShard(key))).Err())
			if active {
				require.NoError(t, rdb.SAdd(ctx, lua.ActiveKey("user:", lua.ActiveShard(key)), key).Err())
			}
			takes := []lua.Takes{{Key: key, Runs: one(n), Template: lua.NewTemplate(ruled(call), false), Below: call.Capacity}}
			takes[0].Whole = model.Control == nil || call.Capacity == 0 || rng.IntN(2) == 0
			replies, err := new(lua.TakesCall).Do(ctx, rdb, takes)
			require.NoError(t, err, where)
			if replies[0].Missed {
				require.Equal(t, model, load(ctx, t, rdb, key), where)
				takes[0].Whole = true
				replies, err = new(lua.TakesCall).Do(ctx, rdb, takes)
			}
			reply := replies[0]
			require.NoError(t, err, where)
			after := load(ctx, t, rdb, key)
			if !takes[0].Whole {
				alone++
				require.Equal(t, n, model.Take(n, 0).Taken, where)
				require.Equal(t, model, after, where)
				require.Equal(t, active, isActive(ctx, t, rdb, key), where)
				continue
			}
			want, active := oracle.TakeTemplate(&model, terms, n, reply.Now, active)
			require.Equal(t, want.OK, reply.OK, where)
			require.Equal(t, want.Tokens, reply.Remaining, where)
			if !want.OK {
				denied++
				require.Equal(t, want.Wait, micros(reply.Runs[0].Wait), where)
			}
			require.Equal(t, model, after, where)
			if before.Control != nil && after.Control.Terms.Fence != before.Control.Terms.Fence {
				switched++
			}
			if before.Control == nil && after.Control != nil {
				created++
				require.Equal(t, active, isActive(ctx, t, rdb, key), where)
			}
			if before.Tokens != nil && before.Control != nil && *before.Tokens >= before.Control.Terms.Capacity && active {
				stamped++
				require.True(t, isActive(ctx, t, rdb, key), where)
			}
			require.Equal(t, active, isActive(ctx, t, rdb, key), where)
		}
	}
	require.NotZero(t, created)
	require.NotZero(t, stamped)
	require.NotZero(t, denied)
	require.NotZero(t, alone)
	require.NotZero(t, switched)
}

// sent counts the commands that scripts and clients sent.
func sent(ctx context.Context, t testing.TB, rdb *redis.Client) map[string]int {
	t.Helper()
	info, err := rdb.Info(ctx, "commandstats").Result()
	require.NoError(t, err)
	counts := map[string]int{}
	for line := range strings.Lines(info) {
		name, rest, found := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
		if found {
			var n int
			_, err := fmt.Sscanf(rest, "%d,", &n)
			require.NoError(t, err)
			counts[name] = n
		}
	}
	return counts
}

func TestATakeFromABucketThatIsNotFullReadsItsTokensOnly(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	require.NoError(t, lua.Load(ctx, rdb))
	require.True(t, takeUser(ctx, t, rdb, "user:1", user(), 1), "the take creates the bucket")
	take := func(n int64) {
		r, err := new(lua.TakesCall).Do(ctx, rdb, []lua.Takes{{Key: "user:1", Runs: one(n), Template: users,
			Below: userTerms.Capacity}})
		require.NoError(t, err)
		require.True(t, r[0].OK)
	}
	require.NoError(t, rdb.ConfigResetStat(ctx).Err())
	for range 20 {
		take(1)
	}
	counts := sent(ctx, t, rdb)
	require.Equal(t, 20, counts["evalsha"])
	require.Equal(t, 20, counts["exists"])
	require.Equal(t, 20, counts["decrby"])
	delete(counts, "evalsha")
	delete(counts, "exists")
	delete(counts, "decrby")
	delete(counts, "config|resetstat")
	require.Empty(t, counts, "no other commands are sent")

	// A denied take adds a lost name to the active set again.
	require.NoError(t, rdb.Del(ctx, lua.ActiveKey("user:", lua.ActiveShard("user:1"))).Err())
	take(1)
	require.False(t, isActive(ctx, t, rdb, "user:1"))
	r, err := takeTemplate(ctx, rdb, "user:1", user(), one(50), false, false)
	require.NoError(t, err)
	require.False(t, r.OK)
	require.True(t, isActive(ctx, t, rdb, "user:1"))
}

// A bucket is counted until its expiry, so a later reservation in it must not move the expiry.
func TestABucketThatIsOpenedForAReservationIsCountedForAsLong(t *testing.T) {
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx, call := t.Context(), user()
		_, call.CrossSlot = rdb.(*redis.ClusterClient)
		call.MaxKeys = 100
		expiry := func() int64 { return rdb.PExpireTime(ctx, lua.ControlKey("user:1")).Val().Milliseconds() }
		open := func(hold time.Duration) {
			call.Hold = hold
			r, err := takeTemplate(ctx, rdb, "user:1", call, nil, true, false)
			require.NoError(t, err)
			if r.Till != 0 {
				require.NoError(t, lua.NewTemplate(ruled(call), true).Enter(ctx, rdb, "user:1", r.Till))
			}
		}
		for _, hold := range []time.Duration{0, time.Hour, time.Minute, 5 * time.Hour} {
			open(hold)
			till := expiry()
			require.Greater(t, time.Until(time.UnixMilli(till)), hold)
			if hold == 0 {
				continue
			}
			id := hold.String()
			_, err := lua.Reserve(ctx, rdb, "user:1", lua.ReserveCall{ID: id, N: 1, TTL: hold})
			require.NoError(t, err)
			_, err = lua.Settle(ctx, rdb, "user:1", id, 1)
			require.NoError(t, err)
			_, err = lua.Lease(ctx, rdb, "user:1", lua.LeaseCall{ID: "lease" + id, Seq: 1, Want: 1, TTL: hold})
			require.NoError(t, err)
			require.Equal(t, till, expiry())
			require.Equal(t, []redis.Z{{Member: "user:1", Score: float64(till / 1000)}},
				rdb.ZRangeWithScores(ctx, lua.AliveKey("user:"), 0, -1).Val())
		}
	})
}

func TestAllKeysOfATemplatesBucketExpireAtOneInstant(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	for i, terms := range []policy.Terms{
		userTerms,
		ofTemplate(policy.Policy{Capacity: 1000, Rate: policy.PerSecond(100)}),
		ofTemplate(policy.Policy{Capacity: 7, Rate: policy.Rate{Tokens: 7, Per: 24 * time.Hour}}),
		ofTemplate(policy.Policy{Capacity: policy.MaxTokens, Rate: policy.Rate{Tokens: 1, Per: policy.MaxPer}}),
	} {
		key := fmt.Sprintf("user:%d", i)
		call := templateCall{Prefix: "user:", Terms: terms.Encode(), MaxKeys: 1000}
		_, err := takeTemplate(ctx, rdb, key, call, one(1), false, false)
		require.NoError(t, err)
		at := rdb.PExpireTime(ctx, key).Val()
		require.Equal(t, at, rdb.PExpireTime(ctx, lua.IndexKey(key)).Val())
		require.Equal(t, at, rdb.PExpireTime(ctx, lua.ControlKey(key)).Val())
		left := time.Until(time.UnixMilli(at.Milliseconds()))
		life := terms.Lifetime()
		require.GreaterOrEqual(t, left, life-time.Second)
		require.LessOrEqual(t, left, life+life/8+2*time.Second, "the lifetime is rounded up by less than an eighth")
		if i > 0 {
			continue
		}
		// A take from the full bucket renews its expiry if a quarter of its life has passed. The bucket is still counted
		// once.
		for _, passed := range []time.Duration{life / 8, life / 2} {
			soon := time.Now().Add(life - passed).Truncate(time.Second)
			for _, k := range []string{key, lua.IndexKey(key), lua.ControlKey(key)} {
				require.NoError(t, rdb.ExpireAt(ctx, k, soon).Err())
			}
			require.NoError(t, rdb.Set(ctx, key, terms.Capacity, redis.KeepTTL).Err())
			require.NoError(t, rdb.Del(ctx, lua.AliveKey("user:")).Err())
			require.NoError(t, rdb.ZAdd(ctx, lua.AliveKey("user:"), redis.Z{Member: key, Score: float64(soon.Unix())}).Err())
			_, err = takeTemplate(ctx, rdb, key, call, one(1), false, false)
			require.NoError(t, err)
			again := rdb.PExpireTime(ctx, key).Val()
			require.Equal(t, again, rdb.PExpireTime(ctx, lua.ControlKey(key)).Val())
			alive := rdb.ZScore(ctx, lua.AliveKey("user:"), key).Val()
			if passed < life/4 {
				require.EqualValues(t, soon.UnixMilli(), again.Milliseconds())
				require.EqualValues(t, soon.Unix(), alive)
			} else {
				require.GreaterOrEqual(t, again.Milliseconds(), at.Milliseconds())
				require.EqualValues(t, again.Milliseconds()/1000, alive)
			}
		}
	}
}

func TestANewBucketHasItsExpiryWithoutATake(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aBucketThatIsCreatedHasItsExpiryThoughNothingIsTakenFromIt)
}

func aBucketThatIsCreatedHasItsExpiryThoughNothingIsTakenFromIt(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	call := user()
	call.MaxKeys = 1
	// the first take can never be made, and the second one may not overtake it
	runs := []policy.Run{{N: 61, Count: 1}, {N: 1, Count: 1}}
	r, err := takeTemplate(ctx, rdb, "user:1", call, runs, true, true)
	require.NoError(t, err)
	require.Equal(t, []int64{0, 0}, []int64{r.Runs[0].Taken, r.Runs[1].Taken})
	for _, key := range []string{"user:1", "{user:1}", "{user:1}:ctl"} {
		require.Positive(t, rdb.PTTL(ctx, key).Val(), key)
	}
	_, err = takeTemplate(ctx, rdb, "user:2", call, one(1), true, false)
	require.ErrorIs(t, err, lua.ErrTooManyBuckets, "user:1 counts as a bucket of the template")
}

func TestAnUnknownKeyLeavesNothing(t *testing.T) {
	t.Parallel()
	withEmbedded(t, anUnknownKeyLeavesNothing)
}

func anUnknownKeyLeavesNothing(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	call := user()
	call.Terms = ""
	_, err := takeTemplate(ctx, rdb, "user:1", call, one(1), false, false)
	require.ErrorIs(t, err, lua.ErrUnknownBucket)
	r, err := takeTemplate(ctx, rdb, "user:1", user(), one(61), false, false)
	require.NoError(t, err)
	require.False(t, r.OK)
	require.EqualValues(t, 60, r.Terms.Capacity, "the reply has the template's capacity")
	require.Zero(t, rdb.DBSize(ctx).Val())
}

func TestABucketHasThePolicyOfItsKey(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aBucketHasThePolicyOfItsKey)
}

func aBucketHasThePolicyOfItsKey(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	own := ofTemplate(policy.Policy{Capacity: 500, Rate: policy.PerSecond(5), Interval: time.Second})
	own.Fence = policy.Fence{Epoch: 7, Seq: 1}
	require.NoError(t, rdb.Set(ctx, lua.OverrideKey("user:1"), own.Encode(), 0).Err())
	r, err := takeTemplate(ctx, rdb, "user:1", user(), one(100), true, false)
	require.NoError(t, err)
	require.EqualValues(t, 400, r.Remaining)
	require.Equal(t, own, *r.Terms)

	lazy, err := lua.LazyTake(ctx, rdb, "user:1", &userTerms, one(100), false)
	require.NoError(t, err)
	require.EqualValues(t, 400, lazy.Remaining)
	require.Equal(t, own, *lazy.Terms)

	for _, bad := range []any{"nonsense", "1 2 3"} {
		require.NoError(t, rdb.Set(ctx, lua.OverrideKey("user:2"), bad, 0).Err())
		r, err = takeTemplate(ctx, rdb, "user:2", user(), one(1), true, false)
		require.NoError(t, err)
		require.EqualValues(t, 60, r.Terms.Capacity)
		require.NoError(t, rdb.Del(ctx, "user:2", "{user:2}", "{user:2}:ctl").Err())
	}
}

// A call without the key of the override gets the same reply as a call with it, if the caller has read the override.
func TestACallWithoutTheKeyOfTheOverrideFollowsIt(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aCallWithoutTheKeyOfTheOverrideFollowsIt)
}

func aCallWithoutTheKeyOfTheOverrideFollowsIt(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	own := ofTemplate(policy.Policy{Capacity: 500, Rate: policy.Rate{Tokens: 5, Per: time.Hour}, Interval: time.Second})
	own.Fence = policy.Fence{Epoch: 7, Seq: 1}
	for key, resolved := range map[string]bool{"user:1": false, "user:2": true} {
		require.NoError(t, rdb.Set(ctx, lua.OverrideKey(key), own.Encode(), 0).Err())
		for left := int64(400); left >= 0; left -= 100 {
			replies, err := new(lua.TakesCall).Do(ctx, rdb, []lua.Takes{{Key: key, Runs: one(100), Lazy: &own, Whole: true,
				Resolved: resolved}})
			require.NoError(t, err)
			require.True(t, replies[0].OK)
			require.Equal(t, left, replies[0].Remaining)
			require.Equal(t, own, *replies[0].Terms)
		}
	}
	for _, key := range []string{"user:1", "user:2"} {
		peek, err := lua.LazyPeek(ctx, rdb, key, &userTerms, 1)
		require.NoError(t, err)
		require.Zero(t, peek.Remaining, "each bucket is empty")
		require.InDelta(t, 12*time.Minute, peek.Runs[0].Wait, float64(time.Minute))

		_, err = takeTemplate(ctx, rdb, key, user(), one(100), true, false)
		require.NoError(t, err)
		existing := user()
		existing.Terms = "" // the bucket is not created
		r, err := takeTemplate(ctx, rdb, key, existing, one(100), true, false)
		require.NoError(t, err)
		require.EqualValues(t, 300, r.Remaining)
		require.Equal(t, own, *r.Terms)
	}
}

func TestNoMoreBucketsThanTheTemplateAllows(t *testing.T) {
	t.Parallel()
	withEmbedded(t, noMoreBucketsThanTheTemplateAllows)
}

func noMoreBucketsThanTheTemplateAllows(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	call := user()
	call.MaxKeys = 100
	var made, refused atomic.Int64
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 50 {
				_, err := takeTemplate(ctx, rdb, fmt.Sprintf("user:%d:%d", w, i), call, one(1), false, false)
				if err == nil {
					made.Add(1)
				} else if assertIs(t, err, lua.ErrTooManyBuckets) {
					refused.Add(1)
				}
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 100, made.Load(), "exactly 100 buckets are created")
	require.EqualValues(t, 300, refused.Load())
	require.EqualValues(t, 100*3+activeShards(ctx, rdb)+1, rdb.DBSize(ctx).Val(), "refused takes create no keys")
	_, err := takeTemplate(ctx, rdb, "user:one more", call, one(1), false, false)
	require.ErrorContains(t, err, `"user:": 100 are alive, at most 100 may be`)
	call.MaxKeys = 101
	_, err = takeTemplate(ctx, rdb, "user:one more", call, one(1), false, false)
	require.NoError(t, err)
}

// A lazy bucket is stored as the instant at which it is full. Under another policy the time until then is worth another
// number of tokens.
func TestALazyBucketUnderAnotherPolicyIsFullAtTheSameInstant(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	terms := func(capacity, perSecond int64) *policy.Terms {
		t := policy.Policy{Capacity: capacity, Rate: policy.PerSecond(perSecond), Interval: time.Second}.Terms(policy.Fence{})
		return &t
	}
	r, err := lua.LazyTake(ctx, rdb, "user:1", terms(60, 2), one(40), false)
	require.NoError(t, err)
	require.True(t, r.OK)
	for _, c := range []struct {
		under *policy.Terms
		left  int64
		why   string
	}{
		{terms(60, 2), 20, "the policy is the same"},
		{terms(60, 1), 40, "half of the rate restores half of the taken tokens"},
		{terms(60, 3), 0, "a higher rate empties the bucket"},
		{terms(100, 2), 60, "a larger capacity adds its new tokens at once"},
		{terms(50, 2), 10, "a smaller capacity removes as many tokens"},
		{terms(30, 2), 0, "a small capacity leaves no tokens"},
	} {
		r, err := lua.LazyPeek(ctx, rdb, "user:1", c.under, 1)
		require.NoError(t, err)
		require.Equal(t, c.left, r.Remaining, c.why)
	}
}

func TestAsManyBucketsAsBeforeAfterAllWereLost(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	rdb := server.Client()
	call := user()
	call.MaxKeys = 10
	for lost, lose := range map[string]func(){
		"nothing":  func() {},
		"flushed":  func() { require.NoError(t, rdb.FlushAll(ctx).Err()) },
		"restarts": server.Restart,
	} {
		require.NoError(t, rdb.FlushAll(ctx).Err())
		for round := range 2 {
			made := 0
			for i := range 12 {
				_, err := takeTemplate(ctx, rdb, fmt.Sprintf("user:%d:%d", round, i), call, one(1), false, false)
				if err == nil {
					made++
				} else {
					require.ErrorIs(t, err, lua.ErrTooManyBuckets)
				}
			}
			if lost == "nothing" && round == 1 {
				require.Zero(t, made)
			} else {
				require.Equal(t, 10, made, "%s, round %d", lost, round)
			}
			lose()
		}
	}
}

func TestExpiredBucketsMakeRoomForOthers(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	call := user()
	call.MaxKeys = 5
	for round := range 4 {
		for i := range 6 {
			_, err := takeTemplate(ctx, rdb, fmt.Sprintf("user:%d:%d", round, i), call, one(1), false, false)
			if i < 5 {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, lua.ErrTooManyBuckets)
			}
		}
		now := time.UnixMicro(embeddedNow).Add(time.Duration(round+1) * 3 * time.Minute)
		m.SetTime(now)
		m.FastForward(3 * time.Minute)
		for i := range 5 {
			require.False(t, m.Exists(fmt.Sprintf("user:%d:%d", round, i)))
		}
	}
	require.NoError(t, lua.NewTemplate(ruled(call), true).Claim(ctx, rdb, "user:claimed"))
	require.Equal(t, []string{"user:claimed"}, rdb.ZRange(ctx, lua.AliveKey("user:"), 0, -1).Val(),
		"expired buckets are removed from the set")
}

// All buckets of an abandoned template expire, and no names stay in its active set.
func TestAbandonedBucketsExpireCompletely(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	slow := policy.Template{Policy: policy.Policy{Capacity: 600, Rate: policy.PerSecond(1),
		Interval: time.Second}}.Terms(policy.Fence{Epoch: 7})
	for i := range 50 {
		call := user()
		if i%10 == 0 { // some live longer than the others
			call.Terms = slow.Encode()
		}
		require.True(t, takeUser(ctx, t, rdb, fmt.Sprintf("user:%d", i), call, 5))
		require.NoError(t, users.Enter(ctx, rdb, fmt.Sprintf("user:cross-slot %d", i),
			time.UnixMicro(embeddedNow).Add(time.Minute).Unix()))
	}
	pass := func(d time.Duration) {
		m.SetTime(time.UnixMicro(embeddedNow).Add(d))
		m.FastForward(d)
	}
	pass(3 * time.Minute)
	for i := range 50 {
		key := fmt.Sprintf("user:%d", i)
		require.Equal(t, i%10 == 0, m.Exists(key), key)
		if i%10 == 0 {
			require.True(t, isActive(ctx, t, rdb, key), "the bucket's active set still exists")
		}
	}
	pass(25 * time.Minute)
	require.Empty(t, m.Keys())
	require.True(t, takeUser(ctx, t, rdb, "user:1", user(), userTerms.Capacity), "the bucket is created full")
}

func activeShards(ctx context.Context, rdb *redis.Client) int64 {
	n := int64(0)
	for i := range lua.ActiveShards {
		n += rdb.Exists(ctx, lua.ActiveKey("user:", i)).Val()
	}
	return n
}

func assertIs(t *testing.T, err, target error) bool {
	t.Helper()
	if strings.Contains(err.Error(), target.Error()) {
		return true
	}
	t.Errorf("%v is not %v", err, target)
	return false
}

func TestAShardsKeysShareASlotInTheShardsRange(t *testing.T) {
	t.Parallel()
	rdb := testenv.Cluster(t).Client()
	for i := range lua.ActiveShards {
		slots := map[int64]bool{}
		for _, key := range []string{lua.ActiveKey("a", i), lua.ActiveKey("b{", i)} {
			slot, err := rdb.ClusterKeySlot(t.Context(), key).Result()
			require.NoError(t, err)
			slots[slot] = true
			require.EqualValues(t, i, slot*lua.ActiveShards/lua.Slots)
		}
		require.Len(t, slots, 1)
	}
	_, err := takeTemplate(t.Context(), rdb, "user:1",
		templateCall{Prefix: "user:", Terms: userTerms.Encode(), CrossSlot: true}, one(1), false, false)
	require.NoError(t, err)
}

func TestKeysThatAreNoBucketsAreLeftAlone(t *testing.T) {
	t.Parallel()
	withEmbedded(t, keysThatAreNoBucketsAreLeftAlone)
}

func keysThatAreNoBucketsAreLeftAlone(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	for i, name := range []string{"user:1", "{user:1}", "{user:1}:ctl"} {
		require.NoError(t, rdb.FlushAll(ctx).Err())
		require.NoError(t, rdb.LPush(ctx, name, "x").Err())
		_, err := takeTemplate(ctx, rdb, "user:1", user(), one(1), true, false)
		require.ErrorIs(t, err, lua.ErrMalformedBucket, "key %d", i+1)
		require.EqualValues(t, 1, rdb.DBSize(ctx).Val(), "key %d", i+1)
	}
	require.NoError(t, rdb.FlushAll(ctx).Err())
	require.NoError(t, rdb.LPush(ctx, lua.LazyKey("user:1"), "x").Err())
	_, err := lua.LazyTake(ctx, rdb, "user:1", &userTerms, one(1), false)
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
	require.ErrorContains(t, err, "{user:1}:lazy")
}

// A lazy template's bucket has the same format as a bucket of limit/lazy. Both callers find the same tokens, whichever
// of them takes or returns tokens.
func TestLazyBucketsAreThoseOfTheLazyLimiter(t *testing.T) {
	t.Parallel()
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	m, rdb := embedded(t)
	m.ClockTTL(true)
	now := time.UnixMicro(embeddedNow)
	for i, rate := range []policy.Rate{policy.PerSecond(50), {Tokens: 7, Per: time.Minute},
		{Tokens: 999_983, Per: 100 * time.Second}} {
		p := policy.Policy{Capacity: 100, Rate: rate, Interval: time.Millisecond}
		terms, key := p.Terms(policy.Fence{}), fmt.Sprintf("user:%d", i)
		limiter, err := lazy.New(rdb, lazy.Config{Capacity: p.Capacity, Rate: rate})
		require.NoError(t, err)
		for range 200 {
			now = now.Add(time.Duration(rng.Int64N(3_000_000)) * time.Microsecond)
			m.SetTime(now)
			before, err := limiter.Peek(ctx, key)
			require.NoError(t, err)
			n := 1 + rng.Int64N(40)
			if rng.IntN(4) == 0 {
				require.NoError(t, lua.LazyReturn(ctx, rdb, key, &terms, n))
				after, err := limiter.Peek(ctx, key)
				require.NoError(t, err)
				require.Equal(t, min(p.Capacity, before.Remaining+n), after.Remaining)
				continue
			}
			peek, err := lua.LazyPeek(ctx, rdb, key, &terms, n)
			require.NoError(t, err)
			require.Equal(t, before.Remaining, peek.Remaining)
			require.Equal(t, before.ResetAfter, peek.Reset)
			took, err := lua.LazyTake(ctx, rdb, key, &terms, one(n), false)
			require.NoError(t, err)
			require.Equal(t, before.Remaining >= n, took.OK)
			if !took.OK {
				require.Equal(t, peek.Runs[0].Wait, took.Runs[0].Wait)
				now = now.Add(took.Runs[0].Wait - time.Microsecond)
				m.SetTime(now)
				early, err := lua.LazyTake(ctx, rdb, key, &terms, one(n), false)
				require.NoError(t, err)
				require.False(t, early.OK, "a take a microsecond too early is denied")
				now = now.Add(time.Microsecond)
				m.SetTime(now)
				took, err = lua.LazyTake(ctx, rdb, key, &terms, one(n), false)
				require.NoError(t, err)
				require.True(t, took.OK)
			}
			after, err := limiter.Peek(ctx, key)
			require.NoError(t, err)
			require.Equal(t, took.Remaining, after.Remaining)
			require.Equal(t, took.Reset, after.ResetAfter)
		}
	}
}

// The takes of one call get the same results as the same takes made one by one.
func TestLazyTakesTogetherAreThoseOneByOne(t *testing.T) {
	t.Parallel()
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	_, rdb := embedded(t)
	for i := range 50 {
		runs := make([]policy.Run, 1+rng.IntN(5))
		for j := range runs {
			runs[j] = policy.Run{N: 1 + rng.Int64N(30), Count: 1 + rng.Int64N(3)}
		}
		inLine := rng.IntN(2) == 0
		together, err := lua.LazyTake(ctx, rdb, fmt.Sprintf("user:%d:a", i), &userTerms, runs, inLine)
		require.NoError(t, err)
		left, closed := int64(0), false
		for j, r := range runs {
			taken := int64(0)
			for range r.Count {
				if closed {
					break
				}
				alone, err := lua.LazyTake(ctx, rdb, fmt.Sprintf("user:%d:b", i), &userTerms, one(r.N), false)
				require.NoError(t, err)
				left = alone.Remaining
				if alone.OK {
					taken++
				} else {
					closed = inLine
				}
			}
			if !together.OK {
				require.Equal(t, taken, together.Runs[j].Taken)
			} else {
				require.Equal(t, r.Count, taken)
			}
		}
		require.Equal(t, left, together.Remaining)
	}
}

// The expected numbers are worked out by hand.
func TestWhatALazyBucketAnswers(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	m.SetTime(time.UnixMicro(embeddedNow))
	terms := func(capacity int64, rate policy.Rate) policy.Terms {
		p := policy.Policy{Capacity: capacity, Rate: rate, Interval: time.Second}
		return policy.Template{Policy: p}.Terms(policy.Fence{Epoch: 7})
	}
	template := terms(10, policy.PerSecond(1))
	peek, err := lua.LazyPeek(ctx, rdb, "user:1", &template, 4)
	require.NoError(t, err)
	require.EqualValues(t, 10, peek.Remaining)
	require.Zero(t, peek.Runs[0].Wait, "the bucket has 4 tokens")
	runs := []policy.Run{{N: 6, Count: 1}, {N: 6, Count: 1}, {N: 20, Count: 1}}
	took, err := lua.LazyTake(ctx, rdb, "user:1", &template, runs, false)
	require.NoError(t, err)
	require.Equal(t, []lua.RunReply{{Taken: 1}, {Wait: 2 * time.Second}, {Wait: -time.Microsecond}}, took.Runs)

	require.NoError(t, lua.Load(ctx, rdb))
	returned, err := rdb.Do(ctx, "EVALSHA", lua.LazySHA(), 1, lua.LazyKey("user:1"), -1, 0, template.Tokens, template.Per,
		template.Capacity, 5, 1, 0).Slice()
	require.NoError(t, err)
	require.Equal(t, []any{int64(1), int64(9), int64(1_000_000), embeddedNow, ""}, returned, "5 of 6 tokens are returned")
	denied, err := rdb.Do(ctx, "EVALSHA", lua.LazySHA(), 1, lua.LazyKey("user:1"), 1, 0, template.Tokens, template.Per,
		template.Capacity, 20, 1, 0).Slice()
	require.NoError(t, err)
	require.Equal(t, []any{int64(0), int64(9), int64(1_000_000), embeddedNow, "", int64(0), int64(-1)}, denied)

	own := terms(30, policy.Rate{Tokens: 3, Per: 2 * time.Second})
	_, err = lua.SetOverride(ctx, rdb, "user:2", own, template, policy.EnforceLazy)
	require.NoError(t, err)
	took, err = lua.LazyTake(ctx, rdb, "user:2", &template, []policy.Run{{N: 1, Count: 30, UpTo: true}}, false)
	require.NoError(t, err)
	require.EqualValues(t, 30, took.Terms.Capacity)
	full := 6 * time.Second // for 9 tokens, at 3 in 2 seconds
	require.NoError(t, lua.LazyReturn(ctx, rdb, "user:2", &template, 21))
	peek, err = lua.LazyPeek(ctx, rdb, "user:2", &template, 1)
	require.NoError(t, err)
	require.Equal(t, full, peek.Reset)

	require.NoError(t, rdb.Set(ctx, lua.OverrideKey("user:3"), "1 1 30 2 3000000 ", 0).Err())
	peek, err = lua.LazyPeek(ctx, rdb, "user:3", &template, 1)
	require.NoError(t, err)
	require.Nil(t, peek.Terms, "an override for a refilled bucket is ignored")
	require.EqualValues(t, 10, peek.Remaining)
}

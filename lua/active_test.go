package lua_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// inAMinute returns an instant for the expiry of a bucket.
func inAMinute() int64 { return time.Now().Add(time.Minute).Unix() }

// shardOf returns the shard of a user's bucket.
func shardOf(key string) lua.Shard { return lua.Shard{Prefix: "user:", Number: lua.ActiveShard(key)} }

func TestRefillsOfAShardAgreeWithTheModel(t *testing.T) {
	t.Parallel()
	withEmbedded(t, agreeOnShard)
}

// ofHistory draws terms, in most cases those of a template.
func ofHistory(h *buckettest.History) policy.Terms {
	t := h.Terms()
	t.Template = !t.Pool && t.Kind == policy.Smooth
	return t
}

func agreeOnShard(t *testing.T, rdb *redis.Client) {
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	const buckets = 30
	shard := lua.Shard{Prefix: "user:", Number: 3}
	set := lua.ActiveKey(shard.Prefix, shard.Number)
	histories := make([]*buckettest.History, buckets)
	for i := range histories {
		histories[i] = buckettest.NewHistory(rng)
	}
	full := 0
	unknown := 0
	stayed := 0
	loweredNow := 0
	for step := range 40 {
		models, calls := make([]policy.Bucket, buckets), make([]lua.RefillCall, buckets)
		now := serverTime(ctx, t, rdb)
		for i, h := range histories {
			key := fmt.Sprintf("user:%d", i)
			models[i] = load(ctx, t, rdb, key)
			h.Disturb(&models[i])
			if s := models[i].Control; s != nil && rng.IntN(4) == 0 {
				tokens := s.Terms.Capacity - rng.Int64N(2)
				models[i].Tokens = &tokens
			}
			if models[i].Control == nil && rng.IntN(2) == 0 {
				models[i] = buckettest.Bucket(rng.Int64N(100), now, rng.Int64N(1_000_000))
				models[i].Control.Terms = ofHistory(h)
			}
			store(ctx, t, rdb, key, models[i])
			calls[i] = lua.RefillCall{Key: key, Call: orOrdinary(h.Call(now), models[i], rng)}
			require.NoError(t, rdb.SAdd(ctx, set, key).Err())
		}
		before := make([]policy.Terms, buckets)
		for i := range models {
			if models[i].Control != nil {
				before[i] = models[i].Control.Terms
			}
		}
		results := lua.RefillActive(ctx, rdb, shard, calls, 1+rng.IntN(buckets))
		for i, r := range results {
			where := fmt.Sprintf("bucket %d step %d", i, step)
			require.NoError(t, r.Err, where)
			require.Equal(t, policy.CreateNever, calls[i].Create, where)
			require.Equal(t, models[i].Refill(calls[i].Call, r.Now), r.Outcome, where)
			require.Equal(t, models[i], load(ctx, t, rdb, calls[i].Key), where)
			lowered, err := rdb.HGet(ctx, lua.ControlKey(calls[i].Key), "lowered").Int64()
			if err != nil {
				require.ErrorIs(t, err, redis.Nil, where)
			}
			if before[i].Capacity > 0 && r.Status.Wrote() && models[i].Control.Terms.Template &&
				models[i].Control.Terms.Capacity < before[i].Capacity {
				require.Equal(t, r.Now, lowered, where)
				loweredNow++
			}
			isIdle := r.Status.Wrote() && models[i].Control.Due == 0 && *models[i].Tokens >= models[i].Control.Terms.Capacity &&
				(!models[i].Control.Terms.Template || r.Now-lowered > 15_000_000)
			require.Equal(t, isIdle, r.Idle, where)
			require.Equal(t, isIdle || models[i].Control == nil || !models[i].Control.Terms.Template, r.Left, where)
			require.Equal(t, !r.Left, rdb.SIsMember(ctx, set, calls[i].Key).Val(), where)
			switch {
			case isIdle:
				full++
			case r.Left:
				unknown++
			default:
				stayed++
			}
			histories[i].Remember(r.Version)
		}
	}
	require.NotZero(t, loweredNow)
	require.NotZero(t, full)
	require.NotZero(t, unknown)
	require.NotZero(t, stayed)
}

// onBoth runs a test on a single Redis and on a Cluster.
func onBoth(t *testing.T, test func(t *testing.T, rdb redis.UniversalClient)) {
	t.Helper()
	t.Parallel()
	t.Run("Redis", func(t *testing.T) { test(t, testenv.Redis(t).Client()) })
	t.Run("Cluster", func(t *testing.T) { test(t, testenv.Cluster(t).Client()) })
}

// takeUser takes n tokens of a user's bucket as a consumer does.
func takeUser(ctx context.Context, t testing.TB, rdb redis.UniversalClient, key string, call templateCall,
	n int64) bool {
	t.Helper()
	_, call.CrossSlot = rdb.(*redis.ClusterClient)
	r, err := takeTemplate(ctx, rdb, key, call, one(n), true, false)
	require.NoError(t, err)
	if r.Till != 0 {
		require.NoError(t, lua.NewTemplate(ruled(call), call.CrossSlot).Enter(ctx, rdb, key, r.Till))
	}
	return r.OK
}

// refillUser refills a user's bucket, as a caller does that doesn't know its index.
func refillUser(ctx context.Context, t testing.TB, rdb redis.UniversalClient, key string,
	terms policy.Terms) lua.RefillResult {
	t.Helper()
	call := lua.RefillCall{Key: key, Call: policy.Call{Terms: &terms}}
	r := lua.RefillActive(ctx, rdb, shardOf(key), []lua.RefillCall{call}, 20)[0]
	if r.Status == policy.StatusStale {
		call.Version = r.Version
		r = lua.RefillActive(ctx, rdb, shardOf(key), []lua.RefillCall{call}, 20)[0]
	}
	return r
}

// rewind makes a bucket's last refill earlier.
func rewind(ctx context.Context, t testing.TB, rdb redis.UniversalClient, key string, by time.Duration) {
	t.Helper()
	b := loadHeld(ctx, t, rdb, key)
	b.Control.Last -= by.Microseconds()
	ttl := rdb.PExpireTime(ctx, key).Val()
	storeHeld(ctx, t, rdb, key, b)
	for _, k := range []string{key, lua.IndexKey(key), lua.ControlKey(key)} {
		require.NoError(t, rdb.PExpireAt(ctx, k, time.UnixMilli(ttl.Milliseconds())).Err())
	}
}

// forgetHeld removes what the bucket's state counts of reservations and leases.
func forgetHeld(ctx context.Context, t testing.TB, rdb redis.UniversalClient, key string) {
	t.Helper()
	control := lua.ControlKey(key)
	st := rdb.HGet(ctx, control, "st").Val()
	require.NoError(t, rdb.HSet(ctx, control, "st", strings.TrimSuffix(st, "+")).Err())
	require.NoError(t, rdb.HDel(ctx, control, "out").Err())
}

func TestARefillThatFillsABucketTakesItOutOfTheActiveSet(t *testing.T) {
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		require.True(t, takeUser(ctx, t, rdb, "user:1", user(), 40))
		rewind(ctx, t, rdb, "user:1", 30*time.Second)
		r := refillUser(ctx, t, rdb, "user:1", userTerms)
		require.EqualValues(t, 5, r.Added, "a refill credits at most five seconds")
		require.False(t, r.Left)
		require.True(t, isActive(ctx, t, rdb, "user:1"))
		for !r.Left {
			rewind(ctx, t, rdb, "user:1", 5*time.Second)
			r = refillUser(ctx, t, rdb, "user:1", userTerms)
			require.Equal(t, policy.StatusApplied, r.Status)
			require.Equal(t, !r.Left, isActive(ctx, t, rdb, "user:1"))
		}
		require.EqualValues(t, 60, r.Tokens)
		require.True(t, takeUser(ctx, t, rdb, "user:1", user(), 1))
		require.True(t, isActive(ctx, t, rdb, "user:1"), "the next take adds the bucket to the active set again")
	})
}

func TestANameThatIsNoBucketLeavesTheActiveSetAndNothingIsMade(t *testing.T) {
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		for _, version := range []policy.Version{{}, {Era: 5, Index: 7}} { // remembered or not
			require.NoError(t, users.Enter(ctx, rdb, "user:1", inAMinute()))
			r := lua.RefillActive(ctx, rdb, shardOf("user:1"),
				[]lua.RefillCall{{Key: "user:1", Call: policy.Call{Version: version, Terms: &userTerms}}}, 1)[0]
			require.NoError(t, r.Err)
			require.Equal(t, policy.StatusUnknown, r.Status)
			require.True(t, r.Left)
			require.False(t, isActive(ctx, t, rdb, "user:1"))
			require.Zero(t, rdb.Exists(ctx, "user:1").Val()+rdb.Exists(ctx, lua.ControlKey("user:1")).Val())
		}
		require.NoError(t, rdb.LPush(ctx, "user:2", "x").Err())
		require.NoError(t, users.Enter(ctx, rdb, "user:2", inAMinute()))
		r := refillUser(ctx, t, rdb, "user:2", userTerms)
		require.ErrorIs(t, r.Err, lua.ErrMalformedBucket)
		require.True(t, r.Left)
		require.False(t, isActive(ctx, t, rdb, "user:2"))
		require.Equal(t, "list", rdb.Type(ctx, "user:2").Val())
	})
}

func TestABucketLeavesTheActiveSetAtTheCapacityOfItsOwnPolicy(t *testing.T) {
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		own := ofTemplate(policy.Policy{Capacity: 100, Rate: policy.Rate{Tokens: 5, Per: time.Second}, Interval: time.Second})
		own.Fence = policy.Fence{Epoch: 7, Seq: 1}
		require.NoError(t, rdb.Set(ctx, lua.OverrideKey("user:1"), own.Encode(), 0).Err())
		require.True(t, takeUser(ctx, t, rdb, "user:1", user(), 35))
		rewind(ctx, t, rdb, "user:1", 2*time.Second)
		require.False(t, refillUser(ctx, t, rdb, "user:1", userTerms).Left,
			"a bucket of 75 tokens is not full under its own capacity")
		rewind(ctx, t, rdb, "user:1", 5*time.Second)
		r := refillUser(ctx, t, rdb, "user:1", userTerms)
		for i := 0; i < 10 && !r.Left; i++ {
			rewind(ctx, t, rdb, "user:1", 5*time.Second)
			r = refillUser(ctx, t, rdb, "user:1", userTerms)
		}
		require.EqualValues(t, 100, r.Tokens)
		require.True(t, r.Left)
	})
}

func TestABucketWithAReservationStaysInTheActiveSet(t *testing.T) {
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		require.True(t, takeUser(ctx, t, rdb, "user:1", user(), 1))
		_, err := lua.Reserve(ctx, rdb, "user:1", lua.ReserveCall{ID: "r", N: 5, TTL: time.Minute})
		require.NoError(t, err)
		for range 5 {
			rewind(ctx, t, rdb, "user:1", 5*time.Second)
			require.False(t, refillUser(ctx, t, rdb, "user:1", userTerms).Left, "the reservation has not ended")
		}
		require.EqualValues(t, 60, *loadHeld(ctx, t, rdb, "user:1").Tokens)
		_, err = lua.Settle(ctx, rdb, "user:1", "r", 5)
		require.NoError(t, err)
		require.NoError(t, rdb.Del(ctx, lua.OutstandingKey("user:1"), lua.DueKey("user:1")).Err()) // the remembered records
		forgetHeld(ctx, t, rdb, "user:1")
		rewind(ctx, t, rdb, "user:1", 5*time.Second)
		require.True(t, refillUser(ctx, t, rdb, "user:1", userTerms).Left)
	})
}

func TestARefillGivesABucketANewExpiryAndCountsIt(t *testing.T) {
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		slow := ofTemplate(policy.Policy{Capacity: 600, Rate: policy.PerSecond(1), Interval: time.Second})
		call := templateCall{Prefix: "user:", Terms: slow.Encode(), MaxKeys: 10}
		life := slow.Lifetime()
		require.Equal(t, 20*time.Minute, life)
		for _, c := range []struct {
			left  time.Duration
			alive string // the bucket that is counted among those alive
		}{{life * 3 / 4, "user:1"}, {life / 4, "user:1"}, {life / 4, "user:2"}} {
			require.NoError(t, rdb.Del(ctx, lua.AliveKey("user:")).Err())
			require.NoError(t, rdb.Del(ctx, "user:1", "{user:1}", "{user:1}:ctl").Err())
			require.True(t, takeUser(ctx, t, rdb, "user:1", call, 500))
			was := time.Now().Add(c.left).Truncate(time.Second)
			require.NoError(t, rdb.Del(ctx, lua.AliveKey("user:")).Err())
			require.NoError(t, rdb.ZAdd(ctx, lua.AliveKey("user:"), redis.Z{Member: c.alive, Score: float64(was.Unix())}).Err())
			// The expiry is checked after an eighth of its life: when the index is a multiple of 150.
			b := load(ctx, t, rdb, "user:1")
			*b.Index, b.Control.Index = 148, 148
			store(ctx, t, rdb, "user:1", b)
			set := lua.ActiveKey("user:", lua.ActiveShard("user:1"))
			for _, k := range []string{"user:1", "{user:1}", "{user:1}:ctl", set} {
				require.NoError(t, rdb.ExpireAt(ctx, k, was).Err())
			}
			for range 2 {
				require.EqualValues(t, was.UnixMilli(), rdb.PExpireTime(ctx, "user:1").Val().Milliseconds())
				rewind(ctx, t, rdb, "user:1", time.Second)
				require.Equal(t, policy.StatusApplied, refillUser(ctx, t, rdb, "user:1", slow).Status)
			}
			till := rdb.PExpireTime(ctx, "user:1").Val()
			for _, k := range []string{"{user:1}", "{user:1}:ctl"} {
				require.Equal(t, till, rdb.PExpireTime(ctx, k).Val())
			}
			require.GreaterOrEqual(t, rdb.PExpireTime(ctx, set).Val(), till, "the active set lives as long")
			alive := rdb.ZRangeWithScores(ctx, lua.AliveKey("user:"), 0, -1).Val()
			require.Len(t, alive, 1, "a refill doesn't add a bucket that wasn't counted")
			if c.left > life/2 {
				require.EqualValues(t, was.UnixMilli(), till.Milliseconds())
				require.EqualValues(t, was.Unix(), alive[0].Score)
				continue
			}
			require.GreaterOrEqual(t, time.Until(time.UnixMilli(till.Milliseconds())), life-time.Second)
			if c.alive == "user:1" {
				require.EqualValues(t, till.Milliseconds()/1000, alive[0].Score)
			}
		}
	})
}

// A bucket that was drained under a faster rate lives until it could have been filled under the slower rate.
func TestARefillThatSwitchesToASlowerRateGivesABucketALongerLife(t *testing.T) {
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		call := user()
		call.MaxKeys = 10
		require.True(t, takeUser(ctx, t, rdb, "user:1", call, 60))
		slow := policy.Template{Policy: policy.Policy{Capacity: 60, Rate: policy.Rate{Tokens: 60, Per: time.Hour},
			Interval: time.Second}}.Terms(policy.Fence{Epoch: 8})
		require.EqualValues(t, 8, refillUser(ctx, t, rdb, "user:1", slow).Fence.Epoch)
		till := time.Now().Add(slow.Lifetime() - time.Minute).UnixMilli()
		set := lua.ActiveKey("user:", lua.ActiveShard("user:1"))
		for _, k := range []string{"user:1", "{user:1}", "{user:1}:ctl", set, lua.AliveKey("user:")} {
			require.GreaterOrEqual(t, rdb.PExpireTime(ctx, k).Val().Milliseconds(), till, k)
		}
		require.GreaterOrEqual(t, rdb.ZScore(ctx, lua.AliveKey("user:"), "user:1").Val(), float64(till/1000))
	})
}

// before makes something happen before a client sends a command, as if by another client.
func before(command string, happens func()) onCommand {
	return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if cmd.Name() == command {
			happens()
		}
		return next(ctx, cmd)
	}
}

// On a Cluster a bucket is filled and then leaves the active set, in two steps.
func TestABucketOfAClusterThatIsTakenFromAsItLeavesStays(t *testing.T) {
	t.Parallel()
	ctx, c := t.Context(), testenv.Cluster(t)
	other, rdb := c.Client(), c.Client()
	takes := 0
	rdb.AddHook(before("srem", func() {
		takes++
		require.True(t, takeUser(ctx, t, other, "user:1", user(), 1))
		require.True(t, takeUser(ctx, t, other, "user:2", user(), 1), "the take creates the missing bucket")
	}))
	require.True(t, takeUser(ctx, t, other, "user:1", user(), 1))
	rewind(ctx, t, other, "user:1", 5*time.Second)
	require.False(t, refillUser(ctx, t, rdb, "user:1", userTerms).Left)
	require.True(t, isActive(ctx, t, other, "user:1"))

	require.NoError(t, other.Del(ctx, "user:2", "{user:2}", "{user:2}:ctl").Err())
	require.False(t, refillUser(ctx, t, rdb, "user:2", userTerms).Left, "the bucket was created meanwhile")
	require.True(t, isActive(ctx, t, other, "user:2"))
	require.Equal(t, 2, takes)
}

func TestActiveBucketsAreListedWithFewCommands(t *testing.T) {
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		var shards []lua.Shard
		for _, prefix := range []string{"user:", "tenant:*:api", ""} {
			for i := range lua.ActiveShards {
				shards = append(shards, lua.Shard{Prefix: prefix, Number: i})
			}
		}
		single, _ := rdb.(*redis.Client)
		if single != nil {
			require.NoError(t, single.ConfigResetStat(ctx).Err())
		}
		occupied, err := lua.Occupied(ctx, rdb, shards)
		require.NoError(t, err)
		require.Equal(t, make([]bool, len(shards)), occupied)
		if single != nil {
			require.Equal(t, 1, sent(ctx, t, single)["exists"])
		}

		names := []string{}
		for i := range 3000 {
			names = append(names, fmt.Sprintf("user:%d", i))
			require.NoError(t, users.Enter(ctx, rdb, names[i], inAMinute()))
		}
		require.NoError(t, lua.NewTemplate(&policy.CompiledTemplate{}, false).Enter(ctx, rdb, "x", inAMinute()))
		occupied, err = lua.Occupied(ctx, rdb, shards)
		require.NoError(t, err)
		read := []string{}
		counts := lua.Counts(ctx, rdb, shards)
		for i, s := range shards {
			require.Equal(t, s.Prefix == "user:" || s.Prefix == "" && s.Number == lua.ActiveShard("x"), occupied[i], "%+v", s)
			require.NoError(t, counts[i].Err)
			of := map[string]bool{}
			for cursor, first := uint64(0), true; first || cursor > 0; first = false {
				var part []string
				part, cursor, err = s.Names(ctx, rdb, cursor, 50)
				require.NoError(t, err)
				for _, name := range part {
					of[name] = true
				}
			}
			require.Len(t, of, int(counts[i].Count))
			for name := range of {
				require.Equal(t, s.Number, lua.ActiveShard(name))
				if s.Prefix == "user:" {
					read = append(read, name)
				}
			}
		}
		slices.Sort(names)
		slices.Sort(read)
		require.Equal(t, names, read)
		s := shardOf("user:1")
		require.NoError(t, s.Remove(ctx, rdb, []string{"user:1"}))
		require.False(t, isActive(ctx, t, rdb, "user:1"))

		require.NoError(t, rdb.Set(ctx, lua.ActiveKey("bad:", 0), "x", 0).Err())
		bad := lua.Shard{Prefix: "bad:"}
		counts = lua.Counts(ctx, rdb, []lua.Shard{bad, shardOf(names[0])})
		require.ErrorIs(t, counts[0].Err, lua.ErrMalformedBucket)
		require.NoError(t, counts[1].Err, "the error of one shard doesn't affect the other")
		require.Positive(t, counts[1].Count)
		_, _, err = bad.Names(ctx, rdb, 0, 10)
		require.ErrorIs(t, err, lua.ErrMalformedBucket)
	})
}

// The set to which names move lives as long as the set in which they were. Names that can't be moved stay where they
// are.
func TestNamesMoveBetweenShardsOfOneNumber(t *testing.T) {
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		names := []string{"user:vip:1"}
		from := shardOf(names[0])
		for i := 2; len(names) < 1500; i++ {
			if name := fmt.Sprintf("user:vip:%d", i); shardOf(name) == from {
				names = append(names, name)
			}
		}
		to := lua.ActiveKey("user:vip:", from.Number)
		require.NoError(t, from.Add(ctx, rdb, append(names, "user:1")))
		till := inAMinute()
		require.NoError(t, rdb.PExpireAt(ctx, lua.ActiveKey(from.Prefix, from.Number), time.Unix(till, 0)).Err())
		for range 2 { // once more after a lost reply
			require.NoError(t, from.Move(ctx, rdb, "user:vip:", names))
			require.Equal(t, []string{"user:1"}, rdb.SMembers(ctx, lua.ActiveKey(from.Prefix, from.Number)).Val())
			require.ElementsMatch(t, names, rdb.SMembers(ctx, to).Val())
			require.EqualValues(t, till, rdb.ExpireTime(ctx, to).Val().Seconds())
		}
		require.NoError(t, rdb.Set(ctx, lua.ActiveKey("other:", from.Number), "x", 0).Err())
		require.ErrorIs(t, from.Move(ctx, rdb, "other:", []string{"user:1"}), lua.ErrMalformedBucket)
		require.Equal(t, []string{"user:1"}, rdb.SMembers(ctx, lua.ActiveKey(from.Prefix, from.Number)).Val())
	})
}

package lua_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// An override is put in force as a refiller puts a later version in force. The bucket is credited under the old policy,
// and then switched.
func TestAnOverrideSwitchesABucketAsALaterPolicyDoes(t *testing.T) {
	t.Parallel()
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	m, rdb := embedded(t)
	history := buckettest.NewHistory(rng)
	terms := func(f policy.Fence) policy.Terms {
		p := history.Terms()
		for p.Kind != policy.Smooth || p.Pool {
			p = history.Terms()
		}
		p.Template = true
		p.Fence = f
		p.Strict = rng.IntN(2) == 0
		return p
	}
	added := 0
	taken := 0
	for i := range 300 {
		key, where := fmt.Sprintf("user:%d", i), fmt.Sprintf("key %d", i)
		template, own := terms(policy.Fence{Epoch: 7}), terms(policy.Fence{Epoch: policy.OwnEpoch})
		now := embeddedNow + int64(i)*10_000_000
		m.SetTime(time.UnixMicro(now))
		tokens, index := rng.Int64N(template.Capacity+1), 5+rng.Int64N(100)
		model := policy.Bucket{Tokens: &tokens, Index: &index, Control: &policy.Control{
			Terms: template, Era: now / 1_000_000 / 2, Index: index - rng.Int64N(5)/4, Last: now - rng.Int64N(4_000_000),
			Carry:       rng.Int64N(template.Per),
			Outstanding: rng.Int64N(3) * rng.Int64N(template.Capacity), Debt: rng.Int64N(3) * rng.Int64N(10),
		}}
		store(ctx, t, rdb, key, model)
		reply, err := lua.SetOverride(ctx, rdb, key, own, template, policy.EnforceRefilled)
		require.NoError(t, err, where)
		own.Fence.Seq = 1
		out := model.Refill(policy.Call{Terms: &own}, now)
		if out.Added > 0 {
			added++
		}
		require.Equal(t, model, load(ctx, t, rdb, key), where)
		require.Equal(t, lua.OverrideReply{
			Terms: &own, Exists: true, Tokens: *model.Tokens, Till: reply.Till,
		}, reply, where)
		require.GreaterOrEqual(t, reply.Till, (now+own.Lifetime().Microseconds())/1_000_000,
			"the bucket lives as long as its new policy requires")
		stored, err := lua.Override(ctx, rdb, key)
		require.NoError(t, err)
		require.Equal(t, own, *stored)

		// No version of the template replaces the override.
		template.Fence.Epoch = 8
		o, err := lua.Refill(ctx, rdb, key, policy.Call{Version: out.Version, Terms: &template})
		require.NoError(t, err)
		require.Equal(t, own.Fence, o.Fence, where)

		// After the override is removed, the template's policy is in force again. A new era begins, because the fence falls.
		before := load(ctx, t, rdb, key)
		reply, err = lua.UnsetOverride(ctx, rdb, key, &template, policy.EnforceRefilled)
		require.NoError(t, err, where)
		require.True(t, reply.Had)
		require.Nil(t, reply.Terms)
		after := load(ctx, t, rdb, key)
		require.Equal(t, template, after.Control.Terms, where)
		require.Greater(t, after.Control.Era, before.Control.Era, where)
		require.LessOrEqual(t, *after.Tokens, min(*before.Tokens, template.Capacity), "in no time no tokens are added")
		switch template.CarryOver {
		case policy.CarryReset:
			require.Zero(t, *after.Tokens, where)
		case policy.CarryKeep:
			require.Equal(t, min(*before.Tokens, template.Capacity, room(after)), *after.Tokens, where)
		}
		if *after.Tokens > 0 {
			taken++
		}
		again, err := lua.UnsetOverride(ctx, rdb, key, &template, policy.EnforceRefilled)
		require.NoError(t, err, where)
		require.False(t, again.Had)
		require.Equal(t, after, load(ctx, t, rdb, key), "a second Unset changes nothing")
	}
	require.NotZero(t, added)
	require.NotZero(t, taken)
}

// An override that is set again without a change changes nothing, even if its policy drops all tokens at a change.
func TestAnOverrideThatIsSetAgainUnchangedDropsNothing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	m.SetTime(time.UnixMicro(embeddedNow))
	own := policy.Template{Policy: policy.Policy{Capacity: 600, Rate: policy.PerSecond(1), Interval: time.Millisecond,
		CarryOver: policy.CarryReset}}.Terms(policy.Fence{Epoch: 7})
	for _, e := range []policy.Enforce{policy.EnforceRefilled, policy.EnforceLazy} {
		key, template := fmt.Sprintf("user:%d", e), own
		_, err := lua.SetOverride(ctx, rdb, key, own, template, e)
		require.NoError(t, err)
		if e == policy.EnforceLazy {
			_, err = lua.LazyTake(ctx, rdb, key, &own, one(100), false)
		} else {
			_, err = takeTemplate(ctx, rdb, key, templateCall{Prefix: "user:", Terms: template.Encode()}, one(100), false, false)
		}
		require.NoError(t, err)
		reply, err := lua.SetOverride(ctx, rdb, key, own, template, e)
		require.NoError(t, err)
		require.True(t, reply.Exists)
		require.EqualValues(t, 500, reply.Tokens, e)
		require.EqualValues(t, 2, reply.Terms.Fence.Seq)
	}
}

// A program may set and unset an override again and again, for example because it reapplies its file. A lazy bucket
// still fills at its rate, because it keeps the part of a token that it has earned.
func TestOverridesThatAreSetOftenHoldUpNoLazyBucket(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	for name, change := range map[string]func(key string, own, template policy.Terms) error{
		"set again": func(key string, own, template policy.Terms) error {
			_, err := lua.SetOverride(ctx, rdb, key, own, template, policy.EnforceLazy)
			return err
		},
		"unset again": func(key string, _, template policy.Terms) error {
			_, err := lua.UnsetOverride(ctx, rdb, key, &template, policy.EnforceLazy)
			return err
		},
		"set and unset": func(key string, own, template policy.Terms) error {
			if _, err := lua.SetOverride(ctx, rdb, key, own, template, policy.EnforceLazy); err != nil {
				return err
			}
			_, err := lua.UnsetOverride(ctx, rdb, key, &template, policy.EnforceLazy)
			return err
		},
	} {
		terms := policy.Template{
			Policy: policy.Policy{Capacity: 60, Rate: policy.Rate{Tokens: 1, Per: time.Minute}, Interval: time.Second},
		}.Terms(policy.Fence{Epoch: 7})
		own := terms
		own.Capacity = 90
		own.Initial = 90
		now := embeddedNow
		m.SetTime(time.UnixMicro(now))
		require.NoError(t, change(name, own, terms))
		_, err := lua.LazyTake(ctx, rdb, name, &terms, []policy.Run{{N: 1, Count: 90, UpTo: true}}, false)
		require.NoError(t, err)
		for range 30 {
			now += 10_000_000
			m.SetTime(time.UnixMicro(now))
			require.NoError(t, change(name, own, terms))
		}
		peek, err := lua.LazyPeek(ctx, rdb, name, &terms, 1)
		require.NoError(t, err)
		require.EqualValues(t, 5, peek.Remaining, "%s: five minutes have passed", name)
	}
}

func room(b policy.Bucket) int64 {
	if b.Control.Terms.Strict {
		return max(0, b.Control.Terms.Capacity-b.Control.Outstanding)
	}
	return b.Control.Terms.Capacity
}

// A lazy bucket keeps its tokens when its rate changes.
func TestAnOverrideOfALazyBucketRefillsNothing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	m.SetTime(time.UnixMicro(embeddedNow))
	terms := func(capacity int64, rate policy.Rate, carry policy.CarryOver) policy.Terms {
		return policy.Template{
			Policy: policy.Policy{Capacity: capacity, Rate: rate, Interval: time.Millisecond, CarryOver: carry},
		}.Terms(policy.Fence{Epoch: 7})
	}
	for i, tc := range []struct {
		own  policy.Terms
		want int64
	}{
		{terms(1000, policy.PerSecond(10), policy.CarryKeep), 100},
		{terms(1000, policy.PerSecond(10_000), policy.CarryKeep), 100},
		{terms(4000, policy.PerSecond(1000), policy.CarryKeep), 100},
		{terms(50, policy.PerSecond(1), policy.CarryKeep), 50},
		{terms(500, policy.PerSecond(1), policy.CarryProportional), 50},
		{terms(1000, policy.PerSecond(10), policy.CarryReset), 0},
	} {
		key, template := fmt.Sprintf("user:%d", i), terms(1000, policy.PerSecond(1000), policy.CarryKeep)
		_, err := lua.LazyTake(ctx, rdb, key, &template, one(900), false)
		require.NoError(t, err)
		reply, err := lua.SetOverride(ctx, rdb, key, tc.own, template, policy.EnforceLazy)
		require.NoError(t, err)
		full := tc.want == tc.own.Capacity
		require.Equal(t, !full, reply.Exists, "case %d", i)
		require.Equal(t, !full, rdb.Exists(ctx, lua.LazyKey(key)).Val() == 1, "case %d", i)
		if !full {
			require.Equal(t, tc.want, reply.Tokens, "case %d", i)
		}
		peek, err := lua.LazyPeek(ctx, rdb, key, &template, 1)
		require.NoError(t, err)
		require.Equal(t, tc.want, peek.Remaining, "case %d", i)
		require.Equal(t, tc.own.Capacity, peek.Terms.Capacity)
		require.Equal(t, policy.Fence{Epoch: policy.OwnEpoch, Seq: 1}, peek.Terms.Fence)

		reply, err = lua.SetOverride(ctx, rdb, key, terms(2000, policy.PerSecond(5), policy.CarryKeep), template,
			policy.EnforceLazy)
		require.NoError(t, err)
		require.True(t, reply.Had)
		require.EqualValues(t, 2, reply.Terms.Fence.Seq)
		require.Equal(t, tc.want, reply.Tokens, "case %d", i)
		reply, err = lua.UnsetOverride(ctx, rdb, key, &template, policy.EnforceLazy)
		require.NoError(t, err)
		require.Equal(t, tc.want, reply.Tokens, "case %d", i)
		require.Zero(t, rdb.Exists(ctx, lua.OverrideKey(key)).Val())
	}
}

func TestAnOverrideOfAKeyWithoutABucketWaitsForIt(t *testing.T) {
	t.Parallel()
	withEmbedded(t, anOverrideOfAKeyWithoutABucketWaitsForIt)
}

func anOverrideOfAKeyWithoutABucketWaitsForIt(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	own := policy.Template{Policy: policy.Policy{Capacity: 500, Rate: policy.PerSecond(5), Interval: time.Second}}.
		Terms(policy.Fence{Epoch: policy.OwnEpoch})
	reply, err := lua.SetOverride(ctx, rdb, "user:1", own, userTerms, policy.EnforceRefilled)
	require.NoError(t, err)
	own.Fence.Seq = 1
	require.Equal(t, lua.OverrideReply{Terms: &own}, reply)
	r, err := takeTemplate(ctx, rdb, "user:1", user(), one(100), true, false)
	require.NoError(t, err)
	require.EqualValues(t, 400, r.Remaining)
	_, err = lua.UnsetOverride(ctx, rdb, "user:1", nil, policy.EnforceRefilled)
	require.NoError(t, err)
	require.Zero(t, rdb.Exists(ctx, lua.OverrideKey("user:1")).Val(), "an override without a template can be removed")
	peek, err := lua.Peek(ctx, rdb, "user:1", 1)
	require.NoError(t, err)
	own.Fence = policy.Fence{}
	require.Equal(t, own, *peek.Terms, "the policy without a fence remains, so that any other replaces it")

	for i, key := range []string{"user:2", "{user:2}", "{user:2}:ctl", "{user:2}:override", "{user:2}:lazy"} {
		require.NoError(t, rdb.FlushAll(ctx).Err())
		if i < 2 {
			store(ctx, t, rdb, "user:2", policy.Bucket{Control: &policy.Control{Terms: userTerms, Era: 1, Index: 1, Last: 1}})
		}
		require.NoError(t, rdb.LPush(ctx, key, "x").Err())
		size := rdb.DBSize(ctx).Val()
		_, err = lua.SetOverride(ctx, rdb, "user:2", own, userTerms, policy.EnforceLazy)
		require.ErrorIs(t, err, lua.ErrMalformedBucket, key)
		require.ErrorContains(t, err, fmt.Sprintf("the key %q does not hold", key))
		require.Equal(t, size, rdb.DBSize(ctx).Val(), "no key is written")
	}
}

// A key that has an override becomes a configured bucket, so that no template matches it any more.
func TestAfterAnOverrideAKeysOwnConfigurationIsInForce(t *testing.T) {
	t.Parallel()
	withEmbedded(t, afterAnOverrideOfAKeyWithoutATemplateItsConfigurationCounts)
}

func afterAnOverrideOfAKeyWithoutATemplateItsConfigurationCounts(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	_, err := takeTemplate(ctx, rdb, "user:1", user(), one(5), false, false)
	require.NoError(t, err)
	own := userTerms
	own.Capacity = 100
	own.Initial = 100
	own.Fence.Epoch = policy.OwnEpoch
	_, err = lua.SetOverride(ctx, rdb, "user:1", own, userTerms, policy.EnforceRefilled)
	require.NoError(t, err)
	configured := policy.Policy{Capacity: 600, Rate: policy.PerSecond(10)}.Terms(policy.Fence{Epoch: 8})
	o, err := lua.Refill(ctx, rdb, "user:1", policy.Call{Terms: &configured})
	require.NoError(t, err)
	require.True(t, o.Fence.Own(), "no version of the template replaces the override")
	b := load(ctx, t, rdb, "user:1")
	*b.Index = 24
	b.Control.Index = 24
	b.Control.Last = b.Control.Last - 1_000_000
	store(ctx, t, rdb, "user:1", b)
	for _, k := range []string{"user:1", "{user:1}", "{user:1}:ctl"} {
		require.NoError(t, rdb.Expire(ctx, k, 90*time.Second).Err())
	}
	o, err = lua.Refill(ctx, rdb, "user:1", policy.Call{Version: policy.Version{Era: o.Version.Era, Index: 24}})
	require.NoError(t, err)
	require.EqualValues(t, 25, o.Version.Index)
	require.Greater(t, rdb.PTTL(ctx, "user:1").Val(), 190*time.Second, "a refill renews the expiry")
	_, err = lua.UnsetOverride(ctx, rdb, "user:1", nil, policy.EnforceRefilled)
	require.NoError(t, err)
	o, err = lua.Refill(ctx, rdb, "user:1", policy.Call{Version: o.Version, Terms: &configured})
	require.NoError(t, err)
	require.Equal(t, configured.Fence, o.Fence)
	require.EqualValues(t, 56, o.Tokens)
	require.EqualValues(t, -1, rdb.PTTL(ctx, "user:1").Val())
}

// A refill creates or adopts a bucket under the override of its key, with no more tokens than the configured policy
// gives. A pool's bucket has no override, and the override of a budget has no rate.
func TestARefillCreatesABucketUnderTheOverrideOfItsKey(t *testing.T) {
	t.Parallel()
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	m, rdb := embedded(t)
	m.SetTime(time.UnixMicro(embeddedNow))
	history := buckettest.NewHistory(rng)
	inForce, ignored := 0, 0
	for i := range 300 {
		key, where := fmt.Sprintf("user:%d", i), fmt.Sprintf("key %d", i)
		own := history.Terms()
		for own.Pool {
			own = history.Terms()
		}
		own.Template = true
		own.Fence = policy.Fence{Epoch: policy.OwnEpoch, Seq: 1}
		configured := history.Terms()
		configured.Template = false
		call := policy.Call{Terms: &configured, Create: policy.Create(rng.IntN(3))}
		if rng.IntN(2) == 0 {
			call.Version = policy.Version{Era: embeddedNow / 2, Index: 5}
		}
		model := policy.Bucket{}
		if rng.IntN(3) == 0 {
			tokens := rng.Int64N(2*configured.Capacity) - 1
			model.Tokens = &tokens
		}
		store(ctx, t, rdb, key, model)
		require.NoError(t, rdb.Set(ctx, lua.OverrideKey(key), own.Encode(), 0).Err())
		model.Override = &own
		want := model.Refill(call, embeddedNow)
		got, err := lua.Refill(ctx, rdb, key, call)
		require.NoError(t, err, where)
		require.Equal(t, want, got, where)
		model.Override = nil
		require.Equal(t, model, load(ctx, t, rdb, key), where)
		switch {
		case got.Fence.Own():
			inForce++
			require.LessOrEqual(t, got.Tokens, min(own.Capacity, configured.Capacity), where)
		case got.Status == policy.StatusInitialised:
			ignored++
		}
	}
	require.NotZero(t, inForce)
	require.NotZero(t, ignored)
	require.NoError(t, rdb.LPush(ctx, lua.OverrideKey("user:list"), "x").Err())
	configured := policy.Policy{Capacity: 600, Rate: policy.PerSecond(10)}.Terms(policy.Fence{Epoch: 8})
	got, err := lua.Refill(ctx, rdb, "user:list", policy.Call{Terms: &configured, Create: policy.CreateInitial})
	require.NoError(t, err)
	require.Equal(t, configured.Fence, got.Fence, "an override that can't be read is ignored")
}

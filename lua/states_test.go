package lua_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// These tests check what the scripts read from a bucket's keys if another program, another release or a server with
// another clock has written them. The expected numbers are worked out by hand.

func TestEachStateThatCanNotBeReadIsMalformed(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		const instants = "1700000000000000 1700000000000000"
		smooth := "1 0 100 0 1 1000000"
		stepped := scheduled(3)
		// If a bucket has the field named out, its field st has a mark: a + after the fourth number, which is the carry.
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

// Several servers may serve a bucket in turn. While their clocks differ by up to 50 ms, the bucket's era goes on.
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

// The capacity stays 49, so a proportional carry-over must keep the tokens as they are. If the script scaled them, the
// last one would be lost: 1/49*49 is less than 1 in floating point.
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

// If an override is unset and no template matches the key any more, the bucket keeps the override's policy, under
// version 0. Zeros at the end of a policy are left out, so that equal policies are equal texts.
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

// Each refill is the first one for ten seconds. It credits the last five intervals or the last two seconds, whichever
// is longer.
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

// The key of a bucket's index is the name in braces. If its value isn't a number, the error names that key.
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

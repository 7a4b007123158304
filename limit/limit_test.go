package limit_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/limit/internal/limittest"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/schedule"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

var (
	burst = lazy.Config{Name: "burst", Capacity: 10, Rate: policy.Rate{Tokens: 1, Per: time.Hour}}
	daily = window.Config{Name: "daily", Limit: 15, Window: 24 * time.Hour}
	slid  = window.Config{Name: "slid", Kind: window.Sliding, Limit: 100, Window: time.Hour}
)

func many(t *testing.T, rdb redis.UniversalClient, limits ...limit.Config) *limit.Many {
	t.Helper()
	m, err := limit.NewMany(rdb, limits...)
	require.NoError(t, err)
	return m
}

func TestADeniedRequestChargesNoLimitAndNamesWhoSaidNo(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), limittest.Redis(t)
	m := many(t, rdb, burst, daily, slid)
	d, err := m.Decide(ctx, 8, "K")
	require.NoError(t, err)
	require.True(t, d.OK)
	require.Empty(t, d.DeniedBy)
	require.EqualValues(t, 2, d.Remaining, "the strictest limit has two tokens left")
	require.EqualValues(t, 8, d.Limits[2].Taken)

	before := []string{rdb.Dump(ctx, "{K}:lazy:burst").Val(), rdb.Dump(ctx, "{K}:win:daily").Val(),
		rdb.Dump(ctx, "{K}:sld:slid").Val()}
	d, err = m.Decide(ctx, 3, "K")
	require.NoError(t, err)
	require.False(t, d.OK)
	require.Equal(t, []string{"burst"}, d.DeniedBy)
	require.InDelta(t, time.Hour, d.RetryAfter, float64(time.Minute))
	d, err = m.Decide(ctx, 8, "K")
	require.NoError(t, err)
	require.Equal(t, []string{"burst", "daily"}, d.DeniedBy)
	require.InDelta(t, 24*time.Hour, d.RetryAfter, float64(time.Minute), "RetryAfter is the longest wait")
	require.True(t, d.Limits[2].OK)
	require.Zero(t, d.Limits[2].Taken)
	require.EqualValues(t, 92, d.Limits[2].Remaining)
	require.Equal(t, before, []string{rdb.Dump(ctx, "{K}:lazy:burst").Val(), rdb.Dump(ctx, "{K}:win:daily").Val(),
		rdb.Dump(ctx, "{K}:sld:slid").Val()}, "no limit is charged")

	require.NoError(t, m.Return(ctx, "K", 8))
	p, err := m.Peek(ctx, "K")
	require.NoError(t, err)
	require.True(t, p.OK)
	for i, left := range []int64{10, 15, 100} {
		require.Equal(t, left, p.Limits[i].Remaining)
	}
}

func TestAMalformedLimitChargesNoOther(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), limittest.Redis(t)
	m := many(t, rdb, burst, daily)
	require.NoError(t, rdb.Set(ctx, "{K}:win:daily", "x", 0).Err())
	_, err := m.Take(ctx, "K", 1)
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
	require.ErrorContains(t, err, "{K}:win:daily")
	require.EqualValues(t, 1, rdb.DBSize(ctx).Val())
}

func TestManyOnAClusterNeedsOneSlot(t *testing.T) {
	t.Parallel()
	m := many(t, limittest.Cluster(t), burst, daily)
	_, err := m.Decide(t.Context(), 1, "a", "b")
	require.ErrorIs(t, err, limit.ErrSlots)
	d, err := m.Decide(t.Context(), 1, "K", "K")
	require.NoError(t, err)
	require.True(t, d.OK)
}

func TestManyWithAKeyForEachLimit(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), limittest.Redis(t)
	m := many(t, rdb, burst, daily)
	for i, want := range [][]string{nil, {"daily"}, nil} {
		d, err := m.Decide(ctx, 8, fmt.Sprint("user", i), []string{"tenant1", "tenant1", "tenant2"}[i])
		require.NoError(t, err)
		require.Equal(t, want, d.DeniedBy)
	}
	_, err := m.Decide(ctx, 1, "a", "b", "c")
	require.ErrorIs(t, err, limit.ErrConfig)
	_, err = m.Decide(ctx, 11, "a")
	require.ErrorIs(t, err, fetch.ErrExceedsCapacity)
}

func TestADecisionOfOtherLimitsIsNotUndone(t *testing.T) {
	t.Parallel()
	local, err := limit.NewManyLocal(time.Now, burst, daily)
	require.NoError(t, err)
	d, err := local.Decide(t.Context(), 2, "K")
	require.NoError(t, err)
	d.Limits = d.Limits[:1]
	require.ErrorIs(t, local.Undo(t.Context(), d, "K"), limit.ErrConfig)
	p, err := local.Peek(t.Context(), "K")
	require.NoError(t, err)
	require.EqualValues(t, 8, p.Remaining)
}

func TestBadLimitsAreRefused(t *testing.T) {
	t.Parallel()
	rdb := limittest.Redis(t)
	for what, limits := range map[string][]limit.Config{
		"0 limits":               {},
		"limit 0 is nil":         {nil},
		`the name "burst" is ta`: {burst, burst},
		"capacity":               {lazy.Config{}},
	} {
		_, err := limit.NewMany(rdb, limits...)
		require.ErrorIs(t, err, limit.ErrConfig)
		require.ErrorContains(t, err, what)
	}
	for _, none := range []redis.UniversalClient{nil, (*redis.Client)(nil)} {
		_, err := limit.NewMany(none, burst)
		require.ErrorIs(t, err, limit.ErrConfig)
		_, err = lazy.New(none, burst)
		require.ErrorIs(t, err, lazy.ErrConfig)
		_, err = limit.Reset(t.Context(), none, "user:")
		require.ErrorIs(t, err, limit.ErrConfig)
		require.ErrorContains(t, err, "its Reset for each key", "the error describes how to reset limiters in the process")
	}
}

// foreignLimit is a limit of a type that Many does not know.
type foreignLimit struct{}

func (foreignLimit) Validate() error { return nil }

func TestALimitOfAnotherTypeIsRefused(t *testing.T) {
	_, err := limit.NewManyLocal(time.Now, burst, foreignLimit{})
	require.ErrorIs(t, err, limit.ErrConfig)
	require.ErrorContains(t, err, "limit 1: a limit_test.foreignLimit; want a lazy.Config")
}

func TestALimitersOnlyOptionIsItsTimeout(t *testing.T) {
	m, err := limit.NewManyLocal(time.Now, burst)
	require.NoError(t, err)
	for name, o := range map[string]fetch.CallOption{
		"WithLeave": fetch.WithLeave(1), "WithRequestMemory": fetch.WithRequestMemory(time.Minute),
		"timeout -1ns": fetch.WithTimeout(-1), "nil": nil,
	} {
		_, err := m.Take(t.Context(), "k", 1, o)
		require.ErrorIs(t, err, fetch.ErrInvalidOption)
		require.ErrorContains(t, err, name)
	}
	_, err = m.Take(t.Context(), "k", 1, fetch.WithTimeout(time.Minute))
	require.NoError(t, err)
}

func TestResetDropsALimitersKeysUnderAPrefix(t *testing.T) {
	t.Parallel()
	for name, rdb := range map[string]redis.UniversalClient{"single": limittest.Redis(t),
		"cluster": limittest.Cluster(t)} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			m := many(t, rdb, burst, daily, slid)
			plain, err := lazy.New(rdb, lazy.Config{Capacity: 10, Rate: burst.Rate})
			require.NoError(t, err)
			sched, err := schedule.New(rdb, schedule.Config{Windows: []schedule.Window{{Limit: 1, Length: time.Hour}}})
			require.NoError(t, err)
			for i := range 700 {
				_, err := plain.Take(ctx, fmt.Sprint("user:*", i), 1)
				require.NoError(t, err)
			}
			for _, key := range []string{"user:*x", "user:y", "other"} {
				_, err := m.Take(ctx, key, 1)
				require.NoError(t, err)
			}
			_, err = sched.Reserve(ctx, "user:*x", "id", time.Now().Add(time.Hour))
			require.NoError(t, err)
			bucket := []string{"user:*b", "{user:*b}", "{user:*b}:ctl"}
			for _, k := range bucket {
				require.NoError(t, rdb.Set(ctx, k, 1, 0).Err())
			}

			n, err := limit.Reset(ctx, rdb, "user:*")
			require.NoError(t, err)
			require.EqualValues(t, 700+4, n)
			r, err := plain.Peek(ctx, "user:*7")
			require.NoError(t, err)
			require.EqualValues(t, 10, r.Remaining)
			for _, key := range []string{"user:y", "other"} {
				d, err := m.Peek(ctx, key)
				require.NoError(t, err)
				require.EqualValues(t, 9, d.Remaining, "other keys keep their counts")
			}
			for _, k := range bucket {
				require.EqualValues(t, 1, rdb.Exists(ctx, k).Val(), "a refilled bucket stays")
			}
			for _, bad := range []string{"", "}"} {
				_, err = limit.Reset(ctx, rdb, bad)
				require.ErrorIs(t, err, lua.ErrInvalidKey)
			}
		})
	}
}

func ExampleMany() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", ContextTimeoutEnabled: true})
	defer rdb.Close()
	limits, err := limit.NewMany(rdb,
		lazy.Config{Name: "burst", Capacity: 20, Rate: policy.PerSecond(10)},
		window.Config{Name: "daily", Limit: 10_000, Window: 24 * time.Hour},
	)
	if err != nil {
		fmt.Println(err)
		return
	}
	d, err := limits.Decide(context.Background(), 1, "user:42")
	switch {
	case err != nil:
		fmt.Println(err)
	case !d.OK:
		fmt.Println("denied by", d.DeniedBy, "retry after", d.RetryAfter)
	default:
		fmt.Println("taken,", d.Remaining, "left")
	}
}

// An operator resets the limits of all users.
func ExampleReset() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379"})
	defer rdb.Close()
	dropped, err := limit.Reset(context.Background(), rdb, "user:")
	fmt.Println(dropped, err)
}

package pacing_test

import (
	"context"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/internal/limittest"
	"github.com/tokenrefill/refiller/limit/pacing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func local(t *testing.T, cfg pacing.Config) (*pacing.Limiter, *limittest.Clock) {
	t.Helper()
	clock := limittest.NewClock(time.Unix(1_800_000_000, 0))
	l, err := pacing.NewLocal(cfg, clock.Now)
	require.NoError(t, err)
	return l, clock
}

func TestPlacesAreEvenlySpacedAndTheQueueIsBounded(t *testing.T) {
	t.Parallel()
	l, clock := local(t, pacing.Config{Rate: policy.PerSecond(10), MaxWait: 500 * time.Millisecond})
	for i := range 6 {
		p, err := l.Reserve(t.Context(), "K", 1)
		require.NoError(t, err)
		require.True(t, p.OK)
		require.Equal(t, time.Duration(i)*100*time.Millisecond, p.Wait)
		require.EqualValues(t, 5-i, p.Remaining)
		require.EqualValues(t, 6, p.Limit)
	}
	p, err := l.Reserve(t.Context(), "K", 1)
	require.NoError(t, err)
	require.Equal(t, pacing.Place{Result: fetch.Result{Limit: 6, RetryAfter: 100 * time.Millisecond,
		ResetAfter: 600 * time.Millisecond}}, p)
	clock.Add(100 * time.Millisecond)
	p, err = l.Reserve(t.Context(), "K", 1)
	require.NoError(t, err)
	require.Equal(t, 500*time.Millisecond, p.Wait)
	clock.Add(time.Hour)
	p, err = l.Reserve(t.Context(), "K", 3)
	require.NoError(t, err)
	require.Zero(t, p.Wait, "idle time earns no burst")
	p, err = l.Reserve(t.Context(), "K", 1)
	require.NoError(t, err)
	require.Equal(t, 300*time.Millisecond, p.Wait)
}

// At 7 places a minute, the time between places is no whole number of microseconds. The places don't drift
// nevertheless.
func TestPlacesDoNotDrift(t *testing.T) {
	t.Parallel()
	l, _ := local(t, pacing.Config{Rate: policy.Rate{Tokens: 7, Per: time.Minute}, MaxWait: 10 * time.Minute})
	for i := range 71 {
		p, err := l.Reserve(t.Context(), "K", 1)
		require.NoError(t, err)
		require.Equal(t, time.Duration((i*60_000_000+6)/7)*time.Microsecond, p.Wait)
	}
}

func TestTakeWaitsForItsPlace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, err := pacing.NewLocal(pacing.Config{Rate: policy.PerSecond(1), MaxWait: time.Minute}, time.Now)
		require.NoError(t, err)
		start := time.Now()
		for i := range 3 {
			r, err := l.Take(t.Context(), "K", 1)
			require.NoError(t, err)
			require.True(t, r.OK)
			require.Equal(t, time.Duration(i)*time.Second, time.Since(start))
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err = l.Take(ctx, "K", 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 2100*time.Millisecond, time.Since(start))
	})
}

func TestTenThousandTakesOnAThousandPlacesAdmitAThousand(t *testing.T) {
	t.Parallel()
	cfg := pacing.Config{Rate: policy.Rate{Tokens: 1, Per: time.Hour}, MaxWait: 999 * time.Hour}
	single, err := pacing.New(limittest.Redis(t), cfg)
	require.NoError(t, err)
	cluster, err := pacing.New(limittest.Cluster(t), cfg)
	require.NoError(t, err)
	memory, _ := local(t, cfg)
	for _, l := range []*pacing.Limiter{single, cluster, memory} {
		limittest.AdmitExactly(t, func(ctx context.Context) (fetch.Result, error) {
			p, err := l.Reserve(ctx, "K", 1)
			return p.Result, err
		})
	}
}

func TestAnIdleQueueExpiresAndNeedsAtMost130Bytes(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), limittest.Redis(t)
	l, err := pacing.New(rdb, pacing.Config{Rate: policy.Rate{Tokens: 1, Per: time.Hour}})
	require.NoError(t, err)
	_, err = l.Reserve(ctx, "K", 1)
	require.NoError(t, err)
	require.Equal(t, []string{"{K}:pace"}, rdb.Keys(ctx, "*").Val())
	require.LessOrEqual(t, rdb.PTTL(ctx, "{K}:pace").Val(), time.Hour+time.Millisecond)
	short, err := pacing.New(rdb, pacing.Config{Rate: policy.PerSecond(1), MaxWait: time.Second})
	require.NoError(t, err)
	_, err = short.Reserve(ctx, "soon", 1)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return rdb.DBSize(ctx).Val() == 1 }, 20*time.Second, 5*time.Millisecond)

	usage, delta := limittest.BytesPerKey(t, rdb, 20_000, func(k string) string { return "{" + k + "}:pace" },
		func(ctx context.Context, key string) error {
			_, err := l.Reserve(ctx, key, 1)
			return err
		})
	require.LessOrEqual(t, usage, 130.0)
	require.LessOrEqual(t, delta, 130.0)
}

func TestALostReplyTakesOnePlace(t *testing.T) {
	t.Parallel()
	limittest.ChargedOnce(t, func(rdb redis.UniversalClient) (func(context.Context) error, func(context.Context) int64) {
		l, err := pacing.New(rdb, pacing.Config{Rate: policy.Rate{Tokens: 1, Per: 24 * time.Hour}, MaxWait: 240 * time.Hour})
		require.NoError(t, err)
		return func(ctx context.Context) error {
				_, err := l.Reserve(ctx, "K", 1)
				return err
			},
			func(ctx context.Context) int64 {
				r, err := l.Peek(ctx, "K")
				require.NoError(t, err)
				return r.Remaining
			}
	})
}

func TestBadInputIsRefused(t *testing.T) {
	t.Parallel()
	for field, cfg := range map[string]pacing.Config{
		"name":                   {Name: " ", Rate: policy.PerSecond(1)},
		"use no limiter":         {},
		"max wait: -1":           {Rate: policy.PerSecond(1), MaxWait: -1},
		"max wait: 1n":           {Rate: policy.PerSecond(1), MaxWait: 1},
		"too long":               {Rate: policy.Rate{Tokens: 1 << 40, Per: policy.MaxPer}, MaxWait: policy.MaxPer},
		"most 312h44m59.906842s": {Rate: policy.PerSecond(1_000_000_000), MaxWait: 1_125_899_906_843 * time.Microsecond},
		"max wait: at 3299803918": {Rate: policy.Rate{Tokens: 3_299_803_918, Per: time.Microsecond},
			MaxWait: 212 * 24 * time.Hour},
	} {
		_, err := pacing.NewLocal(cfg, time.Now)
		require.ErrorIs(t, err, pacing.ErrConfig, field)
		require.ErrorContains(t, err, field)
	}
	longest, _ := local(t, pacing.Config{Rate: policy.PerSecond(1_000_000_000),
		MaxWait: 1_125_899_906_842 * time.Microsecond})
	r, err := longest.Peek(t.Context(), "K")
	require.NoError(t, err)
	require.EqualValues(t, 1_125_899_906_842_001, r.Remaining)
	ctx, rdb := t.Context(), limittest.Redis(t)
	l, err := pacing.New(rdb, pacing.Config{Rate: policy.PerSecond(1)})
	require.NoError(t, err)
	for _, n := range []int64{0, -1, math.MaxInt64} {
		_, err = l.Reserve(ctx, "K", n)
		require.ErrorIs(t, err, fetch.ErrInvalidAmount)
	}
	_, err = l.Reserve(ctx, "K", 2)
	require.ErrorIs(t, err, fetch.ErrExceedsCapacity)
	require.NoError(t, rdb.Set(ctx, "{K}:pace", "x", 0).Err())
	_, err = l.Reserve(ctx, "K", 1)
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
}

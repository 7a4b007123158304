package window_test

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/calendar"
	"github.com/tokenrefill/refiller/limit/internal/limittest"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func local(t *testing.T, cfg window.Config) (*window.Limiter, *limittest.Clock) {
	t.Helper()
	clock := limittest.NewClock(time.Unix(1_800_000_000, 0))
	l, err := window.NewLocal(cfg, clock.Now)
	require.NoError(t, err)
	return l, clock
}

func take(t *testing.T, l *window.Limiter, n int64) fetch.Result {
	t.Helper()
	r, err := l.Take(t.Context(), "K", n)
	require.NoError(t, err)
	return r
}

// The test checks Limit, Remaining and ResetAfter from the first take on, with takes of several sizes.
func TestAFixedWindowStartsAtItsFirstTake(t *testing.T) {
	t.Parallel()
	l, clock := local(t, window.Config{Limit: 5, Window: time.Minute})
	clock.Add(17*time.Second + 300*time.Millisecond)
	ends := clock.Now().Add(time.Minute).UnixMilli()
	require.Equal(
		t,
		fetch.Result{OK: true, Taken: 1, Remaining: 4, Limit: 5, ResetAfter: time.Minute, MoreAfter: time.Minute, Era: ends},
		take(t, l, 1),
	)
	clock.Add(20 * time.Second)
	require.Equal(
		t,
		fetch.Result{
			OK: true, Taken: 3, Remaining: 1, Limit: 5, ResetAfter: 40 * time.Second, MoreAfter: 40 * time.Second, Era: ends,
		},
		take(t, l, 3),
	)
	require.Equal(
		t,
		fetch.Result{Remaining: 1, Limit: 5, RetryAfter: 40 * time.Second, ResetAfter: 40 * time.Second},
		take(t, l, 2),
	)
	require.True(t, take(t, l, 1).OK, "a denied take doesn't count")
	require.NoError(t, l.Return(t.Context(), "K", 2))
	require.EqualValues(t, 0, take(t, l, 2).Remaining)
	clock.Add(40*time.Second - time.Microsecond)
	require.False(t, take(t, l, 1).OK)
	clock.Add(time.Microsecond)
	require.Equal(
		t,
		fetch.Result{OK: true, Taken: 5, Limit: 5, ResetAfter: time.Minute, MoreAfter: time.Minute,
			Era: ends + time.Minute.Milliseconds()},
		take(t, l, 5),
	)
	clock.Add(time.Minute)
	require.NoError(t, l.Return(t.Context(), "K", 5))
	r, err := l.Peek(t.Context(), "K")
	require.NoError(t, err)
	require.Equal(
		t,
		fetch.Result{OK: true, Remaining: 5, Limit: 5},
		r,
		"a return after the window's end opens no window",
	)
}

// The tokens of a window that has ended are not returned to the present one, which would then admit too many.
func TestATakeIsUndoneInItsOwnWindow(t *testing.T) {
	t.Parallel()
	for kind, own := range map[window.Kind]int64{window.Fixed: 5, window.Sliding: 5} {
		l, clock := local(t, window.Config{Kind: kind, Limit: 5, Window: time.Minute})
		first := take(t, l, 3)
		clock.Add(time.Second)
		require.NoError(t, l.Undo(t.Context(), "K", first))
		require.EqualValues(t, own-1, take(t, l, 1).Remaining, kind)
		second := take(t, l, 4)
		require.True(t, second.OK)
		clock.Add(2 * time.Minute)
		require.EqualValues(t, 0, take(t, l, 5).Remaining)
		require.NoError(t, l.Undo(t.Context(), "K", second))
		require.False(t, take(t, l, 1).OK, "%v: Undo doesn't change the new window", kind)
		require.NoError(t, l.Undo(t.Context(), "K", fetch.Result{}), "undoing a denial does nothing")
	}
}

func TestATakeIsUndoneAfterTheClockWentBack(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]window.Config{
		"sliding": {Kind: window.Sliding, Limit: 5, Window: time.Second},
		"fixed":   {Limit: 5, Window: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			l, clock := local(t, cfg)
			r := take(t, l, 5)
			require.True(t, r.OK)
			clock.Add(-150 * time.Millisecond)
			require.NoError(t, l.Undo(t.Context(), "K", r))
			p, err := l.Peek(t.Context(), "K")
			require.NoError(t, err)
			require.EqualValues(t, 5, p.Remaining)
		})
	}
}

// The test counts the tokens that each kind of window admits in 0.2 s around the end of a window.
func TestEdgesOfWindows(t *testing.T) {
	t.Parallel()
	for kind, want := range map[window.Kind]int{window.Fixed: 200, window.Sliding: 100} {
		l, clock := local(t, window.Config{Kind: kind, Limit: 100, Window: time.Minute})
		taken := 0
		if kind == window.Fixed {
			require.True(t, take(t, l, 1).OK) // starts the window
			require.NoError(t, l.Return(t.Context(), "K", 1))
		}
		clock.Add(59*time.Second + 900*time.Millisecond)
		for range 200 {
			if take(t, l, 1).OK {
				taken++
			}
			clock.Add(time.Millisecond)
		}
		for range 200 {
			if take(t, l, 1).OK {
				taken++
			}
		}
		require.Equal(t, want, taken)
	}
}

func TestNoStretchOfASlidingWindowsLengthAdmitsMoreThanItsLimit(t *testing.T) {
	t.Parallel()
	rng := limittest.Rand(t)
	for range 50 {
		cfg := window.Config{
			Kind:   window.Sliding,
			Limit:  1 + rng.Int64N(20),
			Window: time.Duration(1+rng.IntN(1000)) * time.Millisecond,
		}
		l, clock := local(t, cfg)
		type event struct{ at, n int64 }
		var events []event
		for range 300 {
			clock.Add(time.Duration(rng.Int64N(cfg.Window.Microseconds()/5)) * time.Microsecond)
			n := 1 + rng.Int64N(cfg.Limit)
			r := take(t, l, n)
			if !r.OK {
				require.LessOrEqual(t, r.RetryAfter, cfg.Window+cfg.Window/window.Slots)
				if rng.IntN(3) > 0 {
					continue
				}
				clock.Add(r.RetryAfter - time.Microsecond)
				require.False(t, take(t, l, n).OK, "the take comes a microsecond too early")
				clock.Add(time.Microsecond)
				require.True(t, take(t, l, n).OK, "the take comes after RetryAfter")
			}
			at := clock.Now().UnixMicro()
			events = append(events, event{at, n})
			sum := int64(0)
			for i := len(events) - 1; i >= 0 && at-events[i].at < cfg.Window.Microseconds(); i-- {
				sum += events[i].n
			}
			require.LessOrEqual(t, sum, cfg.Limit, "%+v", cfg)
			if rng.IntN(5) == 0 { // give back the last take or an earlier one
				i := rng.IntN(len(events))
				back := 1 + rng.Int64N(max(1, events[i].n))
				if at-events[i].at < cfg.Window.Microseconds() && back <= events[i].n {
					require.NoError(t, l.Return(t.Context(), "K", back))
					events[i].n -= back
				}
			}
		}
	}
}

// If the key expires between the INCR and the PTTL of a client, INCR creates a counter that never expires. A Limiter
// starts a new window instead.
func TestACounterThatLostItsExpiryRecovers(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), limittest.Redis(t)
	l, err := window.New(rdb, window.Config{Limit: 3, Window: time.Hour})
	require.NoError(t, err)

	// The key is the number of tokens taken, with an expiry.
	require.EqualValues(t, 2, take(t, l, 1).Remaining)
	require.EqualValues(t, 2, rdb.Incr(ctx, "{K}:win").Val())
	require.InDelta(t, time.Hour, rdb.PTTL(ctx, "{K}:win").Val(), float64(time.Minute))
	require.EqualValues(t, 0, take(t, l, 1).Remaining)
	require.EqualValues(t, 4, rdb.Incr(ctx, "{K}:win").Val(), "the other client denies the call but leaves the count")
	r := take(t, l, 1)
	require.False(t, r.OK)
	require.Zero(t, r.Remaining, "Remaining is never below zero")
	require.InDelta(t, time.Hour, r.RetryAfter, float64(time.Minute))

	// The key expires, and the other client's INCR makes a key without an expiry.
	require.NoError(t, rdb.Del(ctx, "{K}:win").Err())
	require.EqualValues(t, 1, rdb.Incr(ctx, "{K}:win").Val())
	require.EqualValues(t, -1, rdb.PTTL(ctx, "{K}:win").Val())
	r = take(t, l, 1)
	require.True(t, r.OK)
	require.EqualValues(t, 2, r.Remaining)
	require.Positive(t, rdb.PTTL(ctx, "{K}:win").Val())

	require.NoError(t, rdb.Set(ctx, "{K}:win", -5, time.Hour).Err())
	require.EqualValues(t, 2, take(t, l, 1).Remaining, "a count below zero counts as zero")

	require.NoError(t, rdb.Persist(ctx, "{K}:win").Err())
	require.True(t, take(t, l, 1).OK)
	require.Positive(t, rdb.PTTL(ctx, "{K}:win").Val(), "the window's key gets an expiry again")

	require.NoError(t, rdb.PExpire(ctx, "{K}:win", 1000*time.Hour).Err()) // the clock went back
	r, err = l.Peek(ctx, "K")
	require.NoError(t, err)
	require.LessOrEqual(t, r.ResetAfter, time.Hour)
	require.LessOrEqual(t, rdb.PTTL(ctx, "{K}:win").Val(), time.Hour)
}

func TestTenThousandTakesOnAThousandAdmitAThousand(t *testing.T) {
	t.Parallel()
	single, cluster := limittest.Redis(t), limittest.Cluster(t)
	for _, kind := range []window.Kind{window.Fixed, window.Sliding} {
		cfg := window.Config{Kind: kind, Limit: 1000, Window: time.Hour}
		l, _ := local(t, cfg)
		limittest.AdmitExactly(t, func(ctx context.Context) (fetch.Result, error) { return l.Take(ctx, "K", 1) })
		shared, err := window.New(single, cfg)
		require.NoError(t, err)
		limittest.AdmitExactly(t, func(ctx context.Context) (fetch.Result, error) { return shared.Take(ctx, "K", 1) })
		shared, err = window.New(cluster, cfg)
		require.NoError(t, err)
		limittest.AdmitExactly(t, func(ctx context.Context) (fetch.Result, error) { return shared.Take(ctx, "K", 1) })
	}
}

func TestAnIdleKeyExpiresWhenItsWindowHasEnded(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), limittest.Redis(t)
	for kind, lasts := range map[window.Kind]time.Duration{
		window.Fixed: time.Hour, window.Sliding: time.Hour + time.Hour/window.Slots,
	} {
		key := fmt.Sprint("long", kind)
		l, err := window.New(rdb, window.Config{Kind: kind, Limit: 10, Window: time.Hour})
		require.NoError(t, err)
		_, err = l.Take(ctx, key, 10)
		require.NoError(t, err)
		keys := rdb.Keys(ctx, "{"+key+"}*").Val()
		require.Len(t, keys, 1)
		require.LessOrEqual(t, rdb.PTTL(ctx, keys[0]).Val(), lasts+time.Millisecond)

		l, err = window.New(rdb, window.Config{Kind: kind, Limit: 10, Window: time.Second})
		require.NoError(t, err)
		require.True(t, take(t, l, 10).OK)
		require.Eventually(
			t,
			func() bool { return len(rdb.Keys(ctx, "{K}*").Val()) == 0 },
			20*time.Second,
			5*time.Millisecond,
		)
		r, err := l.Peek(ctx, "K")
		require.NoError(t, err)
		require.EqualValues(t, 10, r.Remaining)
		require.NoError(t, l.Return(ctx, "K", 10))
		require.Empty(t, rdb.Keys(ctx, "{K}*").Val(), "neither a peek nor a return creates a key")
	}
}

// docs/limiters.md has the figures for 200,000 keys (REFILLER_KEYS=200000).
func TestMemoryOfAKey(t *testing.T) {
	t.Parallel()
	for kind, c := range map[window.Kind]struct {
		suffix string
		most   float64
	}{window.Fixed: {"win", 130}, window.Sliding: {"sld", 180}} {
		rdb := limittest.Redis(t)
		l, err := window.New(rdb, window.Config{Kind: kind, Limit: 1000, Window: 24 * time.Hour})
		require.NoError(t, err)
		usage, delta := limittest.BytesPerKey(
			t,
			rdb,
			20_000,
			func(k string) string { return "{" + k + "}:" + c.suffix },
			func(ctx context.Context, key string) error {
				_, err := l.Take(ctx, key, 1)
				return err
			},
		)
		require.LessOrEqual(t, usage, c.most)
		require.LessOrEqual(t, delta, c.most)
	}
}

func TestAKeyThatHoldsSomethingElseIsAnErrorAndStays(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), limittest.Redis(t)
	for kind, suffix := range map[window.Kind]string{window.Fixed: "win", window.Sliding: "sld"} {
		l, err := window.New(rdb, window.Config{Kind: kind, Limit: 10, Window: time.Minute})
		require.NoError(t, err)
		require.NoError(t, rdb.LPush(ctx, "{list}:"+suffix, 1).Err())
		_, err = l.Take(ctx, "list", 1)
		require.ErrorIs(t, err, lua.ErrMalformedBucket)
		require.EqualValues(t, 1, rdb.LLen(ctx, "{list}:"+suffix).Val())
		for _, value := range []string{"ten", "", "1.5", " 1"} {
			require.NoError(t, rdb.Set(ctx, "{text}:"+suffix, value, 0).Err())
			_, err = l.Take(ctx, "text", 1)
			require.ErrorIs(t, err, lua.ErrMalformedBucket, value)
			require.Equal(t, value, rdb.Get(ctx, "{text}:"+suffix).Val())
		}
	}
}

func TestBadInputIsRefused(t *testing.T) {
	t.Parallel()
	for field, cfg := range map[string]window.Config{
		"name":            {Name: "}", Limit: 1, Window: time.Second},
		"limit: 0 is":     {Window: time.Second},
		"limit: 922":      {Limit: math.MaxInt64, Window: time.Second},
		"window: 0s is":   {Limit: 1},
		"window: 1.5ms":   {Limit: 1, Window: 1500 * time.Microsecond},
		"window: 8784h0m": {Limit: 1, Window: policy.MaxPer + time.Millisecond},
		"kind: 2 is":      {Kind: 2, Limit: 1, Window: time.Second},
		"use no limiter":  {Window: time.Second},
		"per: unit 9":     {Limit: 1, Per: 9},
		"excludes per":    {Limit: 1, Window: time.Hour, Per: calendar.Day},
		"per: a sliding":  {Kind: window.Sliding, Limit: 1, Per: calendar.Day},
		"in: only":        {Limit: 1, Window: time.Hour, In: time.UTC},
	} {
		_, err := window.NewLocal(cfg, time.Now)
		require.ErrorIs(t, err, window.ErrConfig)
		require.ErrorContains(t, err, field)
	}
	_, err := window.NewLocal(window.Config{Limit: 1, Window: time.Second}, nil)
	require.ErrorIs(t, err, window.ErrConfig)
	_, err = window.New(nil, window.Config{Limit: 1, Window: time.Second})
	require.ErrorIs(t, err, window.ErrConfig)
	l, _ := local(t, window.Config{Limit: 5, Window: time.Second})
	for _, n := range []int64{0, -1, policy.MaxTokens + 1} {
		_, err = l.Take(t.Context(), "K", n)
		require.ErrorIs(t, err, fetch.ErrInvalidAmount)
	}
	_, err = l.Take(t.Context(), "K", 6)
	require.ErrorIs(t, err, fetch.ErrExceedsCapacity)
	_, err = l.Take(t.Context(), "}", 1)
	require.ErrorIs(t, err, fetch.ErrInvalidKey)
}

func TestALostReplyChargesOnce(t *testing.T) {
	t.Parallel()
	for _, kind := range []window.Kind{window.Fixed, window.Sliding} {
		limittest.ChargedOnce(t, func(rdb redis.UniversalClient) (func(context.Context) error, func(context.Context) int64) {
			l, err := window.New(rdb, window.Config{Kind: kind, Limit: 10, Window: 24 * time.Hour})
			require.NoError(t, err)
			return func(ctx context.Context) error {
					_, err := l.Take(ctx, "K", 1)
					return err
				},
				func(ctx context.Context) int64 {
					r, err := l.Peek(ctx, "K")
					require.NoError(t, err)
					return r.Remaining
				}
		})
	}
}

func ExampleNewLocal() {
	now := time.Unix(0, 0)
	l, err := window.NewLocal(window.Config{Limit: 5, Window: time.Minute}, func() time.Time { return now })
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 2 {
		r, err := l.Take(context.Background(), "user:42", 3)
		fmt.Println(r.OK, r.Remaining, "of", r.Limit, r.ResetAfter, err)
		now = now.Add(10 * time.Second)
	}
	// Output:
	// true 2 of 5 1m0s <nil>
	// false 2 of 5 50s <nil>
}

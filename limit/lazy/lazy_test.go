package lazy_test

import (
	"context"
	"fmt"
	"math"
	"math/big"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/limit/internal/limittest"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

var start = time.Unix(1_800_000_000, 0)

func local(t *testing.T, cfg lazy.Config) (*lazy.Limiter, *limittest.Clock) {
	t.Helper()
	clock := limittest.NewClock(start)
	l, err := lazy.NewLocal(cfg, clock.Now)
	require.NoError(t, err)
	return l, clock
}

func take(t *testing.T, l *lazy.Limiter, n int64) fetch.Result {
	t.Helper()
	r, err := l.Take(t.Context(), "K", n)
	require.NoError(t, err)
	return r
}

// The test checks Limit, Remaining, OK and RetryAfter of a bucket of 60 tokens at 1/s.
func TestABucketIsCreditedWhenItIsAsked(t *testing.T) {
	t.Parallel()
	l, clock := local(t, lazy.Config{Capacity: 60, Rate: policy.PerSecond(1)})
	require.Equal(
		t,
		fetch.Result{OK: true, Taken: 50, Remaining: 10, Limit: 60, ResetAfter: 50 * time.Second, MoreAfter: time.Second},
		take(t, l, 50),
	)
	require.Equal(
		t,
		fetch.Result{Remaining: 10, Limit: 60, RetryAfter: 5 * time.Second, ResetAfter: 50 * time.Second},
		take(t, l, 15),
	)
	clock.Add(5*time.Second - time.Microsecond)
	require.Equal(
		t,
		fetch.Result{Remaining: 14, Limit: 60, RetryAfter: time.Microsecond, ResetAfter: 45*time.Second + time.Microsecond},
		take(t, l, 15),
	)
	clock.Add(time.Microsecond)
	require.True(t, take(t, l, 15).OK)
	require.False(t, take(t, l, 1).OK)
	require.NoError(t, l.Return(t.Context(), "K", 5))
	require.EqualValues(t, 4, take(t, l, 1).Remaining)
	require.NoError(t, l.Return(t.Context(), "K", policy.MaxTokens))
	r, err := l.Peek(t.Context(), "K")
	require.NoError(t, err)
	require.Equal(t, fetch.Result{OK: true, Remaining: 60, Limit: 60}, r, "a return adds no more than the capacity")
}

func TestATakeReturnsWhenTheNextTokenIsDue(t *testing.T) {
	t.Parallel()
	for _, per := range []int64{1, 7, 60, 997} {
		l, clock := local(t, lazy.Config{Capacity: 3, Rate: policy.Rate{Tokens: per, Per: time.Minute}})
		require.Zero(t, l.Next(take(t, l, 2)), "one token is left")
		for range 5 {
			r := take(t, l, 1)
			require.True(t, r.OK)
			next := l.Next(r)
			clock.Add(next - 2*time.Microsecond)
			denied := take(t, l, 1)
			require.False(t, denied.OK, "%d tokens a minute", per)
			require.LessOrEqual(t, denied.RetryAfter, l.Next(denied))
			clock.Add(2 * time.Microsecond)
		}
	}
}

func TestIdleTimeOfAFullBucketIsNotCounted(t *testing.T) {
	t.Parallel()
	l, clock := local(t, lazy.Config{Capacity: 2, Rate: policy.Rate{Tokens: 1, Per: time.Hour}})
	clock.Add(100*time.Hour + 59*time.Minute)
	require.True(t, take(t, l, 2).OK)
	clock.Add(time.Hour - time.Microsecond)
	require.Equal(t, time.Microsecond, take(t, l, 1).RetryAfter)
	clock.Add(time.Microsecond)
	require.True(t, take(t, l, 1).OK)
}

// At 7 tokens a minute, the time per token is no whole number of microseconds.
func TestFractionsOfATokenAreKept(t *testing.T) {
	t.Parallel()
	for _, step := range []time.Duration{time.Millisecond, 13 * time.Millisecond, time.Second} {
		l, clock := local(t, lazy.Config{Capacity: 7, Rate: policy.Rate{Tokens: 7, Per: time.Minute}})
		require.True(t, take(t, l, 7).OK)
		taken := 0
		for end := start.Add(10 * time.Minute); clock.Now().Before(end); {
			clock.Add(min(step, end.Sub(clock.Now())))
			if take(t, l, 1).OK {
				taken++
			}
		}
		require.Equal(t, 70, taken, "10 minutes with a take every %s", step)
	}
}

// In any time d at most capacity + rate·d tokens are admitted, whatever the callers. RetryAfter of a denial is exact to
// the microsecond.
func TestNoStretchOfTimeAdmitsMoreThanItsBound(t *testing.T) {
	t.Parallel()
	rng := limittest.Rand(t)
	for range 15 {
		cfg := lazy.Config{
			Capacity: 1 + rng.Int64N(20),
			Rate:     policy.Rate{Tokens: 1 + rng.Int64N(1000), Per: time.Duration(1+rng.Int64N(1e6)) * time.Microsecond},
		}
		l, clock := local(t, cfg)
		type event struct{ at, n int64 }
		var events []event
		for range 300 {
			clock.Add(time.Duration(rng.Int64N(2*cfg.Rate.TimeFor(cfg.Capacity).Microseconds()/5+2)) * time.Microsecond)
			n := 1 + rng.Int64N(cfg.Capacity)
			if r := take(t, l, n); r.OK {
				events = append(events, event{clock.Now().UnixMicro(), n})
			} else if rng.IntN(3) == 0 {
				clock.Add(r.RetryAfter - time.Microsecond)
				require.False(t, take(t, l, n).OK, "%+v: the take comes a microsecond too early", cfg)
				clock.Add(time.Microsecond)
				require.True(t, take(t, l, n).OK, "%+v: the take comes after RetryAfter", cfg)
				events = append(events, event{clock.Now().UnixMicro(), n})
			}
		}
		for i := range events {
			sum := int64(0)
			for _, e := range events[i:] {
				sum += e.n
				// (sum - capacity) · per ≤ tokens · d
				lhs := new(big.Int).Mul(big.NewInt(sum-cfg.Capacity), big.NewInt(cfg.Rate.Per.Microseconds()))
				rhs := new(big.Int).Mul(big.NewInt(cfg.Rate.Tokens), big.NewInt(e.at-events[i].at))
				require.LessOrEqual(t, lhs.Cmp(rhs), 0, "%+v: %d tokens in %dµs", cfg, sum, e.at-events[i].at)
			}
		}
	}
}

// A bucket of 10 tokens at 1/s lacks one token when the clock goes back by an hour. After that it lacks 3,601 tokens.
// It has a token again when it lacks only 9, and RetryAfter is the time until then.
func TestAClockThatGoesBackEmptiesABucketAtWorst(t *testing.T) {
	t.Parallel()
	l, clock := local(t, lazy.Config{Capacity: 10, Rate: policy.PerSecond(1)})
	require.True(t, take(t, l, 1).OK)
	clock.Add(-time.Hour)
	denied := fetch.Result{Limit: 10, RetryAfter: time.Hour - 8*time.Second, ResetAfter: time.Hour + time.Second}
	require.Equal(t, denied, take(t, l, 1))
	clock.Add(denied.RetryAfter)
	require.True(t, take(t, l, 1).OK)
	require.False(t, take(t, l, 1).OK)

	// The same in Redis: the stored instant is far beyond the capacity.
	ctx, rdb := t.Context(), limittest.Redis(t)
	shared, err := lazy.New(rdb, lazy.Config{Capacity: 10, Rate: policy.Rate{Tokens: 1, Per: time.Hour}})
	require.NoError(t, err)
	require.NoError(t, rdb.Set(ctx, "{K}:lazy", 0, 1000*time.Hour).Err())
	r, err := shared.Take(ctx, "K", 1)
	require.NoError(t, err)
	require.False(t, r.OK)
	require.InDelta(t, 991, r.RetryAfter.Hours(), 0.1)
	require.InDelta(t, 1000, r.ResetAfter.Hours(), 0.1)
}

// Two programs use a bucket with different capacities. For the program with the larger capacity it is empty. When the
// other program gives back a token, the bucket has one token for both.
func TestATokenThatComesBackToASmallerBucketIsOne(t *testing.T) {
	t.Parallel()
	rdb := limittest.Redis(t)
	of := func(capacity int64) *lazy.Limiter {
		l, err := lazy.New(rdb, lazy.Config{Capacity: capacity, Rate: policy.Rate{Tokens: 1, Per: time.Hour}})
		require.NoError(t, err)
		return l
	}
	large, small := of(100), of(10)
	require.True(t, take(t, large, 100).OK)
	require.NoError(t, small.Return(t.Context(), "K", 1))
	require.True(t, take(t, large, 1).OK)
	require.False(t, take(t, large, 1).OK)
}

// A bucket that lacks 5 of 10 tokens at 1/s is full in 5 s. If the rate changes, it is still full after the same time.
func TestAnotherRateKeepsTheTimeUntilABucketIsFull(t *testing.T) {
	t.Parallel()
	rdb := limittest.Redis(t)
	for i, rate := range []policy.Rate{policy.PerSecond(10), policy.PerSecond(997), {Tokens: 7, Per: time.Minute}} {
		key := fmt.Sprint(i)
		for _, r := range []policy.Rate{policy.PerSecond(1), rate, policy.PerSecond(1)} {
			l, err := lazy.New(rdb, lazy.Config{Capacity: 10_000_000, Rate: r})
			require.NoError(t, err)
			if r.Tokens == 1 && rdb.Exists(t.Context(), "{"+key+"}:lazy").Val() == 0 {
				_, err = l.Take(t.Context(), key, 1000)
				require.NoError(t, err)
			}
			peek, err := l.Peek(t.Context(), key)
			require.NoError(t, err)
			require.InDelta(t, 1000, peek.ResetAfter.Seconds(), 100)
			_, err = l.Take(t.Context(), key, 1) // stores it anew
			require.NoError(t, err)
		}
	}
}

func TestTenThousandTakesOnAThousandAdmitAThousand(t *testing.T) {
	t.Parallel()
	cfg := lazy.Config{Capacity: 1000, Rate: policy.Rate{Tokens: 1, Per: 24 * time.Hour}}
	l, _ := local(t, cfg)
	limittest.AdmitExactly(t, func(ctx context.Context) (fetch.Result, error) { return l.Take(ctx, "K", 1) })
	shared, err := lazy.New(limittest.Redis(t), cfg)
	require.NoError(t, err)
	limittest.AdmitExactly(t, func(ctx context.Context) (fetch.Result, error) { return shared.Take(ctx, "K", 1) })
	cluster, err := lazy.New(limittest.Cluster(t), cfg)
	require.NoError(t, err)
	limittest.AdmitExactly(t, func(ctx context.Context) (fetch.Result, error) { return cluster.Take(ctx, "K", 1) })
}

func TestAnIdleKeyExpiresWhenItsBucketIsFull(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), limittest.Redis(t)
	slow := lazy.Config{Capacity: 10, Rate: policy.Rate{Tokens: 10, Per: time.Hour}}
	require.Equal(t, time.Hour, slow.DrainTime())
	l, err := lazy.New(rdb, slow)
	require.NoError(t, err)
	r, err := l.Take(ctx, "K", 10)
	require.NoError(t, err)
	require.Equal(t, time.Hour, r.ResetAfter)
	require.Equal(t, []string{"{K}:lazy"}, rdb.Keys(ctx, "*").Val(), "the bucket has one key")
	require.LessOrEqual(t, rdb.PTTL(ctx, "{K}:lazy").Val(), time.Hour+time.Millisecond)
	require.NoError(t, l.Return(ctx, "K", 10))
	require.Zero(t, rdb.DBSize(ctx).Val(), "a full bucket has no key")
	r, err = l.Peek(ctx, "K")
	require.NoError(t, err)
	require.True(t, r.OK)
	require.Zero(t, rdb.DBSize(ctx).Val(), "a peek creates no key")

	l, err = lazy.New(rdb, lazy.Config{Capacity: 10, Rate: policy.Rate{Tokens: 10, Per: time.Second}})
	require.NoError(t, err)
	r, err = l.Take(ctx, "K", 10)
	require.NoError(t, err)
	require.True(t, r.OK)
	require.Eventually(t, func() bool { return rdb.DBSize(ctx).Val() == 0 }, 20*time.Second, 5*time.Millisecond)
	r, err = l.Take(ctx, "K", 10)
	require.NoError(t, err)
	require.True(t, r.OK)
}

// See docs/limiters.md for 200,000 keys (REFILLER_KEYS=200000).
func TestAKeyTakesAtMost130Bytes(t *testing.T) {
	t.Parallel()
	rdb := limittest.Redis(t)
	l, err := lazy.New(rdb, lazy.Config{Capacity: 60, Rate: policy.Rate{Tokens: 60, Per: 24 * time.Hour}})
	require.NoError(t, err)
	usage, delta := limittest.BytesPerKey(
		t,
		rdb,
		20_000,
		func(k string) string { return "{" + k + "}:lazy" },
		func(ctx context.Context, key string) error {
			_, err := l.Take(ctx, key, 1)
			return err
		},
	)
	require.LessOrEqual(t, usage, 130.0)
	require.LessOrEqual(t, delta, 130.0)
}

func TestAKeyThatHoldsSomethingElseIsAnErrorAndStays(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), limittest.Redis(t)
	l, err := lazy.New(rdb, lazy.Config{Capacity: 10, Rate: policy.PerSecond(1)})
	require.NoError(t, err)
	require.NoError(t, rdb.LPush(ctx, "{list}:lazy", 1).Err())
	for key, value := range map[string]string{
		"text": "ten", "empty": "", "negative": "-5", "fraction": "1.5", "huge": "9223372036854775807", "padded": "007",
		"without an expiry": "5",
	} {
		require.NoError(t, rdb.Set(ctx, "{"+key+"}:lazy", value, 0).Err())
		_, err = l.Take(ctx, key, 1)
		require.ErrorIs(t, err, lua.ErrMalformedBucket, key)
		require.ErrorContains(t, err, "{"+key+"}:lazy")
		require.Equal(t, value, rdb.Get(ctx, "{"+key+"}:lazy").Val())
	}
	_, err = l.Take(ctx, "list", 1)
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
	require.EqualValues(t, 1, rdb.LLen(ctx, "{list}:lazy").Val())
}

func TestBadInputIsRefused(t *testing.T) {
	t.Parallel()
	rate := policy.PerSecond(1)
	for field, cfg := range map[string]lazy.Config{
		"name":                      {Name: "a b", Capacity: 1, Rate: rate},
		"capacity: 0 is":            {Rate: rate},
		"capacity: -1 is":           {Capacity: -1, Rate: rate},
		"rate: policy":              {Capacity: 1},
		"to have no limit":          {Capacity: 1},
		"in lowest terms":           {Capacity: 1, Rate: policy.Rate{Tokens: 1 << 41, Per: 3333333 * time.Microsecond}},
		"too long to be counted":    {Capacity: 1e6, Rate: policy.Rate{Tokens: 1, Per: 24 * time.Hour}},
		"want at most 4503599627":   {Capacity: policy.MaxTokens, Rate: rate},
		"whole number from 1 to 11": {Capacity: math.MaxInt64, Rate: rate},
	} {
		_, err := lazy.NewLocal(cfg, time.Now)
		require.ErrorIs(t, err, lazy.ErrConfig)
		require.ErrorContains(t, err, field)
	}
	good := lazy.Config{Capacity: 5, Rate: rate}
	_, err := lazy.NewLocal(good, nil)
	require.ErrorIs(t, err, lazy.ErrConfig)
	_, err = lazy.New(nil, good)
	require.ErrorIs(t, err, lazy.ErrConfig)

	ctx, rdb := t.Context(), limittest.Redis(t)
	shared, err := lazy.New(rdb, good)
	require.NoError(t, err)
	single, _ := local(t, good)
	for _, l := range []*lazy.Limiter{shared, single} {
		for _, n := range []int64{0, -1, math.MinInt64, policy.MaxTokens + 1} {
			_, err = l.Take(ctx, "K", n)
			require.ErrorIs(t, err, fetch.ErrInvalidAmount)
			require.ErrorIs(t, l.Return(ctx, "K", n), fetch.ErrInvalidAmount)
		}
		_, err = l.Take(ctx, "K", 6)
		require.ErrorIs(t, err, fetch.ErrExceedsCapacity)
		for _, key := range []string{"", "a}b", string(make([]byte, 513))} {
			_, err = l.Take(ctx, key, 1)
			require.ErrorIs(t, err, fetch.ErrInvalidKey)
		}
	}
	require.Zero(t, rdb.DBSize(ctx).Val())
}

func TestASilentServerIsUnavailable(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	l, err := lazy.New(server.Client(), lazy.Config{Capacity: 5, Rate: policy.PerSecond(1)})
	require.NoError(t, err)
	server.Kill()
	_, err = l.Take(t.Context(), "K", 1)
	require.ErrorIs(t, err, fetch.ErrUnavailable)
}

func TestALostReplyChargesOnce(t *testing.T) {
	t.Parallel()
	limittest.ChargedOnce(t, func(rdb redis.UniversalClient) (func(context.Context) error, func(context.Context) int64) {
		l, err := lazy.New(rdb, lazy.Config{Capacity: 10, Rate: policy.Rate{Tokens: 1, Per: 24 * time.Hour}})
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

func ExampleNewLocal() {
	now := time.Unix(0, 0)
	l, err := lazy.NewLocal(lazy.Config{Capacity: 60, Rate: policy.PerSecond(1)}, func() time.Time { return now })
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 2 {
		r, err := l.Take(context.Background(), "user:42", 45)
		fmt.Println(r.OK, r.Remaining, "of", r.Limit, r.RetryAfter, err)
	}
	// Output:
	// true 15 of 60 0s <nil>
	// false 15 of 60 30s <nil>
}

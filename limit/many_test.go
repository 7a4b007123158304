package limit_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/limit/internal/limittest"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/pacing"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// spaced is a limit with two places. The second place is an hour after the first one.
var spaced = pacing.Config{Name: "spaced", Rate: policy.Rate{Tokens: 1, Per: time.Hour}, MaxWait: time.Hour}

func TestATakeFromManyWaitsForItsPlace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, err := limit.NewManyLocal(time.Now, burst, spaced)
		require.NoError(t, err)
		began := time.Now()
		for i, left := range []int64{1, 0} {
			r, err := m.Take(t.Context(), "K", 1)
			require.NoError(t, err)
			require.True(t, r.OK)
			require.Equal(t, left, r.Remaining, "the queue is the strictest limit")
			require.Equal(t, time.Duration(i)*time.Hour, time.Since(began))
		}
		_, err = m.Take(t.Context(), "K", 1)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err = m.Take(ctx, "K", 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 2*time.Hour+time.Minute, time.Since(began))
	})
}

func TestADecisionReturnsTheWaitOfItsPlace(t *testing.T) {
	t.Parallel()
	local, err := limit.NewManyLocal(time.Now, burst, spaced)
	require.NoError(t, err)
	for name, m := range map[string]*limit.Many{"redis": many(t, limittest.Redis(t), burst, spaced), "local": local} {
		ctx := t.Context()
		d, err := m.Decide(ctx, 1, "K")
		require.NoError(t, err)
		require.Zero(t, d.Wait, name)
		d, err = m.Decide(ctx, 1, "K")
		require.NoError(t, err)
		require.True(t, d.OK)
		require.InDelta(t, time.Hour, d.Wait, float64(time.Minute), name)
		require.Equal(t, d.Wait, d.Limits[1].Wait)
		require.Zero(t, d.Limits[0].Wait)

		d, err = m.Decide(ctx, 1, "K")
		require.NoError(t, err)
		require.Equal(t, []string{"spaced"}, d.DeniedBy, name)
		require.Zero(t, d.Wait, "a denied take has no place in the queue")
		require.EqualValues(t, 8, d.Limits[0].Remaining, "a denied take doesn't charge the bucket")

		require.NoError(t, m.Return(ctx, "K", 2))
		p, err := m.Peek(ctx, "K")
		require.NoError(t, err)
		require.EqualValues(t, 10, p.Limits[0].Remaining, name)
		require.EqualValues(t, 0, p.Limits[1].Remaining, "a place in the queue isn't returned")
		require.Zero(t, p.Wait)
	}
}

// The test makes random decisions, and moves the clock between them. Redis and memory give the same answers, whichever
// limit is the strictest.
func TestManyLocalDecidesAsRedisDoes(t *testing.T) {
	t.Parallel()
	rng := limittest.Rand(t)
	rdb, tick := limittest.Embedded(t, rng)
	for tight, name := range []string{"lazy", "fixed", "sliding", "pacing"} {
		size := []int64{200, 200, 200, 200}
		size[tight] = 20
		limits := []limit.Config{
			lazy.Config{Name: "lazy", Capacity: size[0], Rate: policy.PerSecond(37 * size[0])},
			window.Config{Name: "fixed", Limit: size[1], Window: 30 * time.Millisecond},
			window.Config{Name: "sliding", Kind: window.Sliding, Limit: size[2], Window: 30 * time.Millisecond},
			pacing.Config{Name: "pacing", Rate: policy.PerSecond(37 * size[3]), MaxWait: 20 * time.Millisecond},
		}
		clock := limittest.NewClock(rdb.Time(t.Context()).Val())
		local, err := limit.NewManyLocal(clock.Now, limits...)
		require.NoError(t, err)
		shared := many(t, rdb, limits...)
		denied := map[string]int{}
		for range 200 {
			tick()
			clock.Add(rdb.Time(t.Context()).Val().Sub(clock.Now()))
			n := 1 + rng.Int64N(8)
			var got, want limit.Decision
			switch rng.IntN(8) {
			case 0:
				want, err = shared.Peek(t.Context(), name)
				require.NoError(t, err)
				got, err = local.Peek(t.Context(), name)
			case 1:
				require.NoError(t, shared.Return(t.Context(), name, n))
				err = local.Return(t.Context(), name, n)
			default:
				want, err = shared.Decide(t.Context(), n, name)
				require.NoError(t, err)
				got, err = local.Decide(t.Context(), n, name)
			}
			require.NoError(t, err)
			require.Equal(t, want, got)
			for _, by := range got.DeniedBy {
				denied[by]++
			}
		}
		require.NotZero(t, denied[name])
	}
}

func TestManyLocalRefusesBadInput(t *testing.T) {
	t.Parallel()
	_, err := limit.NewManyLocal(nil, burst)
	require.ErrorIs(t, err, limit.ErrConfig)
	_, err = limit.NewManyLocal(time.Now)
	require.ErrorIs(t, err, limit.ErrConfig)
	m, err := limit.NewManyLocal(time.Now, burst, daily)
	require.NoError(t, err)
	_, err = m.Decide(t.Context(), 11, "a", "b")
	require.ErrorIs(t, err, fetch.ErrExceedsCapacity)
	_, err = m.Take(t.Context(), "}", 1)
	require.ErrorIs(t, err, fetch.ErrInvalidKey)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = m.Decide(ctx, 1, "a")
	require.ErrorIs(t, err, context.Canceled)
	p, err := m.Peek(t.Context(), "a")
	require.NoError(t, err)
	require.EqualValues(t, 10, p.Remaining, "no token was taken")
}

// The test is for a refilled bucket and for Many. The packages of the other limiters have the same test.
func TestTenThousandTakesOnAThousandAdmitAThousand(t *testing.T) {
	t.Parallel()
	wide := window.Config{Name: "wide", Limit: 1000, Window: 24 * time.Hour}
	wider := window.Config{Name: "wider", Kind: window.Sliding, Limit: 5000, Window: 24 * time.Hour}
	local, err := limit.NewManyLocal(time.Now, wide, wider)
	require.NoError(t, err)
	limittest.AdmitExactly(t, func(ctx context.Context) (fetch.Result, error) { return local.Take(ctx, "K", 1) })
	for name, rdb := range map[string]redis.UniversalClient{"single": limittest.Redis(t),
		"cluster": limittest.Cluster(t)} {
		m := many(t, rdb, wide, wider)
		limittest.AdmitExactly(t, func(ctx context.Context) (fetch.Result, error) { return m.Take(ctx, "K", 1) })
		p, err := m.Peek(t.Context(), "K")
		require.NoError(t, err)
		require.EqualValues(t, 4000, p.Limits[1].Remaining, "%s: denied takes charged no limit", name)

		terms := policy.Policy{Capacity: 1000, Rate: policy.Rate{Tokens: 1, Per: 24 * time.Hour}}.Terms(policy.Fence{})
		_, err = lua.Refill(t.Context(), rdb, "bucket", policy.Call{Create: policy.CreateInitial, Terms: &terms})
		require.NoError(t, err)
		client, err := fetch.New(rdb, fetch.WithTimeout(time.Minute))
		require.NoError(t, err)
		var buckets limit.Limiter = client
		limittest.AdmitExactly(t, func(ctx context.Context) (fetch.Result, error) { return buckets.Take(ctx, "bucket", 1) })
		require.NoError(t, client.Close(t.Context()))
		require.Equal(t, "0", rdb.Get(t.Context(), "bucket").Val(), name)
	}
}

func TestALostReplyChargesOnce(t *testing.T) {
	t.Parallel()
	limittest.ChargedOnce(t, func(rdb redis.UniversalClient) (func(context.Context) error, func(context.Context) int64) {
		m := many(t, rdb, burst, daily, slid)
		return func(ctx context.Context) error {
				_, err := m.Take(ctx, "K", 1)
				return err
			},
			func(ctx context.Context) int64 {
				d, err := m.Peek(ctx, "K")
				require.NoError(t, err)
				require.EqualValues(t, 5, d.Limits[1].Remaining-d.Remaining, "both limits were charged alike")
				require.EqualValues(t, 90, d.Limits[2].Remaining-d.Remaining)
				return d.Remaining
			}
	})
}

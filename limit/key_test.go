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
	"github.com/tokenrefill/refiller/limit/calendar"
	"github.com/tokenrefill/refiller/limit/internal/limittest"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/pacing"
	"github.com/tokenrefill/refiller/limit/schedule"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// resettable is a limiter with room for one take, which can be reset and printed.
type resettable struct {
	fmt.Stringer
	take  func(ctx context.Context, key string) (bool, error)
	reset func(ctx context.Context, key string) error
}

func of(t *testing.T, l interface {
	limit.Limiter
	fmt.Stringer
	Reset(ctx context.Context, key string) error
}, err error) resettable {
	t.Helper()
	require.NoError(t, err)
	return resettable{l, func(ctx context.Context, key string) (bool, error) {
		r, err := l.Take(ctx, key, 1)
		return r.OK, err
	}, l.Reset}
}

// oneOfEach makes a limiter of each kind. They are in Redis, or in this process if rdb is nil. Each has a name with a
// slash and a colon.
func oneOfEach(t *testing.T, rdb *redis.Client) map[string]resettable {
	t.Helper()
	const name = "GET:/v1/orders"
	rate := policy.Rate{Tokens: 1, Per: time.Hour}
	l := lazy.Config{Name: name, Capacity: 1, Rate: rate}
	w := window.Config{Name: name, Limit: 1, Window: time.Hour}
	v := window.Config{Name: name, Limit: 1, Window: time.Hour, Kind: window.Sliding}
	p := pacing.Config{Name: name, Rate: rate}
	windows := []schedule.Window{{Limit: 1, Per: calendar.Month}, {Limit: 2, Length: time.Hour}}
	s := schedule.Config{Name: name, Windows: windows}
	both := []limit.Config{l, window.Config{Name: "day", Limit: 5, Window: 24 * time.Hour}}
	must := func(l *limit.Many, err error) resettable {
		require.NoError(t, err)
		return resettable{l, func(ctx context.Context, key string) (bool, error) {
			d, err := l.Decide(ctx, 1, key)
			return d.OK, err
		}, func(ctx context.Context, key string) error { return l.Reset(ctx, key) }}
	}
	if rdb == nil {
		now := time.Now
		a, err1 := lazy.NewLocal(l, now)
		b, err2 := window.NewLocal(w, now)
		c, err3 := window.NewLocal(v, now)
		d, err4 := pacing.NewLocal(p, now)
		e, err5 := schedule.NewLocal(s, now)
		return map[string]resettable{
			"lazy": of(t, a, err1), "window": of(t, b, err2), "sliding": of(t, c, err3), "pacing": of(t, d, err4),
			"schedule": of(t, e, err5), "many": must(limit.NewManyLocal(now, both...)),
		}
	}
	a, err1 := lazy.New(rdb, l)
	b, err2 := window.New(rdb, w)
	c, err3 := window.New(rdb, v)
	d, err4 := pacing.New(rdb, p)
	e, err5 := schedule.New(rdb, s)
	return map[string]resettable{
		"lazy": of(t, a, err1), "window": of(t, b, err2), "sliding": of(t, c, err3), "pacing": of(t, d, err4),
		"schedule": of(t, e, err5), "many": must(limit.NewMany(rdb, both...)),
	}
}

func TestAResetKeyHasItsLimitAnewAndOthersAreAsTheyWere(t *testing.T) {
	t.Parallel()
	for where, rdb := range map[string]*redis.Client{"Redis": limittest.Redis(t), "process": nil} {
		for kind, l := range oneOfEach(t, rdb) {
			ctx := t.Context()
			key := "K" + kind
			other := "other" + kind
			for _, k := range []string{key, other} {
				for i, want := range []bool{true, false} {
					ok, err := l.take(ctx, k)
					require.NoError(t, err)
					require.Equal(t, want, ok, "%s in %s, take %d", kind, where, i)
				}
			}
			require.NoError(t, l.reset(ctx, key))
			require.NoError(t, l.reset(ctx, "never seen"))
			for k, want := range map[string]bool{key: true, other: false} {
				ok, err := l.take(ctx, k)
				require.NoError(t, err)
				require.Equal(t, want, ok, "%s in %s: %s", kind, where, k)
			}
			require.ErrorIs(t, l.reset(ctx, "a}b"), lua.ErrInvalidKey, "%s in %s", kind, where)
		}
	}
}

func TestAResetWithoutItsServerIsUnavailable(t *testing.T) {
	t.Parallel()
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
	t.Cleanup(func() { _ = rdb.Close() })
	for kind, l := range oneOfEach(t, rdb) {
		require.ErrorIs(t, l.reset(t.Context(), "K"), fetch.ErrUnavailable, kind)
	}
}

func TestALimiterPrintsItself(t *testing.T) {
	t.Parallel()
	all := oneOfEach(t, nil)
	for kind, want := range map[string]string{
		"lazy": "1, then 1/h", "window": "1 per 1h0m0s", "sliding": "1 per 1h0m0s",
		"pacing":   "1/h, evenly, waiting 0s at most",
		"schedule": "1 per month, 2 per 1h0m0s", "many": "GET:/v1/orders: 1, then 1/h; day: 5 per 24h0m0s",
	} {
		require.Equal(t, want, fmt.Sprint(all[kind]), kind)
	}
}

// Limits whose names have slashes and colons are reset with the prefix of their keys, too.
func TestResetFindsNamesWithSlashes(t *testing.T) {
	t.Parallel()
	rdb := limittest.Redis(t)
	for kind, l := range oneOfEach(t, rdb) {
		ok, err := l.take(t.Context(), "user:"+kind)
		require.NoError(t, err)
		require.True(t, ok)
	}
	n, err := limit.Reset(t.Context(), rdb, "user:")
	require.NoError(t, err)
	require.EqualValues(t, 7, n, "the limiter many has two keys")
	require.Zero(t, rdb.DBSize(t.Context()).Val())
}

// A former master, which may not write, could still deny calls. But its state may be outdated, so the call returns the
// server's error instead.
func TestADenialOfAServerThatMayNotWriteIsUnavailable(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), limittest.Redis(t)
	limiters := oneOfEach(t, rdb)
	for kind, l := range limiters {
		for _, want := range []bool{true, false} {
			ok, err := l.take(ctx, "K"+kind)
			require.NoError(t, err, kind)
			require.Equal(t, want, ok, kind)
		}
	}
	require.NoError(t, rdb.ReplicaOf(ctx, "127.0.0.1", "1").Err())
	for kind, l := range limiters {
		_, err := l.take(ctx, "K"+kind)
		require.ErrorIs(t, err, fetch.ErrUnavailable, kind)
		require.ErrorContains(t, err, "READONLY", kind)
	}
}

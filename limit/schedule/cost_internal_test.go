package schedule

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/limit/calendar"
	"github.com/tokenrefill/refiller/limit/internal/limittest"
)

// mostTime bounds the time of the faster calls. On an idle machine each call needs 1 ms. On a busy machine it may be
// longer, because Redis also counts the time in which it waits for a processor.
const mostTime = 3 * time.Millisecond

// fill stores reservations for some hours, from an instant on. Their distance is factor times the distance at which an
// hour has MaxLimit reservations.
func fill(t *testing.T, rdb *redis.Client, key string, from time.Time, factor float64) {
	t.Helper()
	distance := float64(time.Hour.Microseconds()) / MaxLimit * factor
	entries := make([]redis.Z, 6*MaxLimit)
	for i := range entries {
		at := from.UnixMicro() + int64(float64(i)*distance)
		entries[i] = redis.Z{Score: float64(at), Member: fmt.Sprint("mail:", i)}
	}
	require.NoError(t, rdb.ZAdd(t.Context(), "{"+key+"}:sched", entries...).Err())
}

// faster makes some calls, and returns the first quartile of their times, as Redis measures them.
func faster(t *testing.T, rdb *redis.Client, call func(ctx context.Context, i int)) time.Duration {
	t.Helper()
	ctx := t.Context()
	var times []time.Duration
	for i := range 60 {
		require.NoError(t, rdb.ConfigResetStat(ctx).Err())
		call(ctx, i)
		info, err := rdb.InfoMap(ctx, "commandstats").Result()
		require.NoError(t, err)
		var calls, us int64
		_, err = fmt.Sscanf(info["Commandstats"]["cmdstat_evalsha"], "calls=%d,usec=%d", &calls, &us)
		require.NoError(t, err)
		times = append(times, time.Duration(us)*time.Microsecond)
	}
	slices.Sort(times)
	t.Logf("p25 %s, p50 %s, p90 %s", times[len(times)/4], times[len(times)/2], times[len(times)*9/10])
	return times[len(times)/4]
}

// The schedule has as many windows as possible, with the highest limits, and is full on both sides of the instant. If
// it is not quite full, a call needs the exact count of each window. If it is full, the search for a free instant is as
// long as possible.
func TestATryTakesRedisAMillisecond(t *testing.T) {
	t.Parallel()
	rdb := limittest.Redis(t)
	cfg := Config{}
	for i := range MaxWindows {
		w := Window{Limit: MaxLimit, Length: time.Hour + time.Duration(i)*time.Second}
		cfg.Windows = append(cfg.Windows, w)
	}
	require.NoError(t, cfg.Validate())
	s := shared{engine.NewCommands(rdb, 8), cfg}
	from := time.Now().Add(48 * time.Hour)
	for _, c := range []struct {
		factor float64
		code   int64
	}{{1.02, codeDone}, {1, codeDenied}, {0.99, codeDenied}} {
		key := fmt.Sprint(c.factor)
		fill(t, rdb, key, from, c.factor)
		took := faster(t, rdb, func(ctx context.Context, i int) {
			at := from.Add(2*time.Hour + time.Duration(i)*time.Minute + time.Microsecond).UnixMicro()
			a, err := s.reserve(ctx, key, call{id: fmt.Sprint(i), at: at, n: 1, check: true})
			require.NoError(t, err)
			require.Equal(t, c.code, a.code)
		})
		require.Less(t, took, mostTime, "factor %v", c.factor)
	}
}

func TestATakeOfAsManyAsMayBeTakesRedisAMillisecond(t *testing.T) {
	t.Parallel()
	rdb := limittest.Redis(t)
	s := shared{engine.NewCommands(rdb, 8), Config{Windows: []Window{{Limit: MaxLimit, Per: calendar.Day}}}}
	require.NoError(t, s.config.Validate())
	at := time.Now().Add(48 * time.Hour).UnixMicro()
	took := faster(t, rdb, func(ctx context.Context, i int) {
		a, err := s.reserve(ctx, fmt.Sprint(i), call{id: "take-1y2p0ij32e8e7", at: at, n: MaxLimit})
		require.NoError(t, err)
		require.EqualValues(t, codeDone, a.code)
	})
	require.Less(t, took, mostTime)
}

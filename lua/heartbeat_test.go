package lua_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

func TestConsumersCountUntilTheirHeartbeatsStop(t *testing.T) {
	t.Run("Redis", func(t *testing.T) {
		rdb := testenv.Redis(t).Client()
		countConsumers(t, rdb, func(d time.Duration) {
			var now, end int64 // the server's clock decides
			for end = serverTime(t.Context(), t, rdb) + d.Microseconds(); now <= end; now = serverTime(t.Context(), t, rdb) {
				time.Sleep(time.Millisecond)
			}
		})
	})
	t.Run("Embedded", func(t *testing.T) {
		m, rdb := embedded(t)
		now := time.UnixMicro(embeddedNow)
		countConsumers(t, rdb, func(d time.Duration) {
			now = now.Add(d)
			m.SetTime(now)
			m.FastForward(d)
		})
	})
}

func countConsumers(t *testing.T, rdb *redis.Client, pass func(time.Duration)) {
	ctx := t.Context()
	beats := func(consumer string, ttl time.Duration, count int64, known bool) {
		t.Helper()
		reply, err := lua.Heartbeat(ctx, rdb, "b", consumer, ttl)
		require.NoError(t, err)
		require.Equal(t, lua.HeartbeatReply{Count: count, Known: known}, reply)
	}
	for i := range int64(5) {
		consumer := fmt.Sprintf("consumer-%d", i)
		beats(consumer, time.Hour, i+1, false)
		beats(consumer, time.Hour, i+1, true)
	}
	beats("brief", 20*time.Millisecond, 6, false)
	ttl, err := rdb.PTTL(ctx, lua.LiveKey("b")).Result()
	require.NoError(t, err)
	require.Greater(t, ttl, 59*time.Minute, "a short heartbeat doesn't shorten the others")
	pass(21 * time.Millisecond)
	beats("consumer-0", time.Hour, 5, true) // the brief consumer's heartbeat has expired
	beats("brief", time.Hour, 6, false)

	_, err = lua.Heartbeat(ctx, rdb, "other", "brief", 20*time.Millisecond)
	require.NoError(t, err)
	pass(21 * time.Millisecond)
	require.Zero(t, rdb.Exists(ctx, lua.LiveKey("other")).Val(), "an expired set of heartbeats is deleted")
	require.Zero(t, rdb.Exists(ctx, "b", lua.IndexKey("b"), lua.ControlKey("b")).Val(), "a heartbeat creates no bucket")

	require.NoError(t, rdb.Set(ctx, lua.LiveKey("spoilt"), "x", 0).Err())
	_, err = lua.Heartbeat(ctx, rdb, "spoilt", "c", time.Hour)
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
}

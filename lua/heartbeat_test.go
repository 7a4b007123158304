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

// A consumer that died while the server's clock was ahead doesn't count after the clock was set right.
func TestConsumersOfATimeThatIsAheadDoNotCount(t *testing.T) {
	ctx := t.Context()
	m, rdb := embedded(t)
	beats := func(consumer string) lua.HeartbeatReply {
		reply, err := lua.Heartbeat(ctx, rdb, "b", consumer, time.Minute)
		require.NoError(t, err)
		return reply
	}
	m.SetTime(time.UnixMicro(embeddedNow + 1))
	require.EqualValues(t, 1, beats("ahead").Count)
	m.SetTime(time.UnixMicro(embeddedNow))
	require.Equal(t, lua.HeartbeatReply{Count: 1}, beats("living"))
	require.Equal(t, lua.HeartbeatReply{Count: 2}, beats("another"))
	require.Equal(t, lua.HeartbeatReply{Count: 2, Known: true}, beats("living"))
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
		beats(consumer, time.Minute, i+1, false)
		beats(consumer, time.Minute, i+1, true)
	}
	beats("brief", 20*time.Millisecond, 6, false)
	ttl, err := rdb.PTTL(ctx, lua.LiveKey("b")).Result()
	require.NoError(t, err)
	require.Greater(t, ttl, 59*time.Second, "a short heartbeat doesn't shorten the others")
	pass(21 * time.Millisecond)
	beats("consumer-0", time.Minute, 5, true) // the brief consumer's heartbeat has expired
	beats("brief", time.Minute, 6, false)

	_, err = lua.Heartbeat(ctx, rdb, "other", "brief", 20*time.Millisecond)
	require.NoError(t, err)
	pass(21 * time.Millisecond)
	require.Zero(t, rdb.Exists(ctx, lua.LiveKey("other")).Val(), "an expired set of heartbeats is deleted")
	require.Zero(t, rdb.Exists(ctx, "b", lua.IndexKey("b"), lua.ControlKey("b")).Val(), "a heartbeat creates no bucket")

	require.NoError(t, rdb.Set(ctx, lua.LiveKey("spoilt"), "x", 0).Err())
	_, err = lua.Heartbeat(ctx, rdb, "spoilt", "c", time.Minute)
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
}

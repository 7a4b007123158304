package stats

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func everything(string) bool { return true }

func TestTheMostActiveBucketsAreFoundAmongManyOthers(t *testing.T) {
	t.Parallel()
	stats, now := New(), time.Unix(1e9, 0)
	for i := range 200_000 { // 100,000 buckets get one or two tokens; two get a twentieth of all tokens each
		stats.Active(fmt.Sprintf("user:%d", i%100_000), 1, now)
		if i%20 == 0 {
			stats.Active("user:busy", 2, now)
			stats.Active("team:busy", 1, now)
		}
	}
	now = now.Add(10 * time.Second)
	top := stats.MostActive(2, now, everything)
	require.Len(t, top, 2)
	require.Equal(t, "user:busy", top[0].Key)
	require.InDelta(t, 2000, top[0].Rate, 500, "the rate in tokens per second, lowered by other keys")
	require.Equal(t, "team:busy", top[1].Key)
	require.LessOrEqual(t, len(stats.active.now), maxActive)
	top = stats.MostActive(1, now, func(key string) bool { return key[0] == 't' })
	require.Equal(t, "team:busy", top[0].Key)
}

func TestActivityOfABucketThatIsLeftAloneIsForgotten(t *testing.T) {
	t.Parallel()
	stats, now := New(), time.Unix(1e9, 0)
	stats.Active("user:1", 300, now)
	now = now.Add(30 * time.Second)
	stats.Active("user:2", 1, now)
	require.Equal(t, []Active{{"user:1", 300.0 / 31}, {"user:2", 1.0 / 31}}, stats.MostActive(5, now, everything))
	now = now.Add(31 * time.Second)
	require.Equal(t, "user:2", stats.MostActive(5, now, everything)[0].Key)
	now = now.Add(time.Minute)
	require.Empty(t, stats.MostActive(5, now, everything))
}

func BenchmarkActive(b *testing.B) {
	stats, now := New(), time.Unix(1e9, 0)
	keys := make([]string, 100_000)
	for i := range keys {
		keys[i] = fmt.Sprintf("user:%d", i)
	}
	for i := 0; b.Loop(); i++ {
		stats.Active(keys[i%len(keys)], 1, now)
	}
}

package stats_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/stats"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
)

func TestATrendHasFillAndTakesSlotBySlot(t *testing.T) {
	t.Parallel()
	p := policy.Policy{Capacity: 100, Rate: policy.PerSecond(10), Interval: time.Second}
	kept := stats.New()
	kept.Configure([]refill.Bucket{{Key: "checkout", Policy: p}})
	start := time.Unix(1_000_000, 0)
	require.Nil(t, kept.Trend("checkout", start), "no refill is known yet")
	require.Nil(t, kept.Trend("other", start))

	terms := p.Terms(policy.Fence{Epoch: 1})
	refilled := func(after time.Duration, index, tokens, added int64) {
		kept.Observe(refill.Event{Key: "checkout", Replied: start.Add(after), Call: policy.Call{Terms: &terms},
			Outcome: policy.Outcome{
				Status: policy.StatusApplied, Version: policy.Version{Era: 1, Index: index}, Fence: terms.Fence, Tokens: tokens,
				Added:   added,
				Elapsed: int64(time.Second / time.Microsecond)}})
	}
	refilled(0, 1, 100, 0)
	refilled(time.Second, 2, 60, 10)   // 50 were taken
	refilled(2*time.Second, 3, 40, 10) // 30 were taken
	refilled(31*time.Second, 4, 50, 10)

	trend := kept.Trend("checkout", start.Add(35*time.Second))
	require.Len(t, trend, stats.TrendSlots)
	last := stats.TrendSlots - 1
	require.Equal(t, stats.TrendPoint{Known: true, Fill: 0.5}, rounded(trend[last]))
	require.False(t, trend[last-1].Known, "a slot without a reply is unknown")
	require.Equal(t, stats.TrendPoint{Known: true, Fill: 0.4, Taken: 8}, rounded(trend[last-3]))
	require.False(t, trend[0].Known)

	for _, point := range kept.Trend("checkout", start.Add(16*time.Minute)) {
		require.False(t, point.Known, "points older than a quarter of an hour are removed")
	}
}

// rounded returns a point without the errors of its single precision.
func rounded(p stats.TrendPoint) stats.TrendPoint {
	p.Fill = float64(int(p.Fill*1000+0.5)) / 1000
	return p
}

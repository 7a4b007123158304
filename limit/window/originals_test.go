package window_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/limit/internal/limittest"
	"github.com/tokenrefill/refiller/limit/window"
)

// These are the test cases of ratelimiter for Node, with their names: test/index.js of 2.2.0 (fixed windows) and of
// 3.4.1 (sliding windows). ratelimiter returns the number of tokens left before the call, and also counts denied calls.
// Here a take returns the number of tokens left after it, and a denied take is not counted.
func TestCasesOfRatelimiterForNode(t *testing.T) {
	t.Parallel()
	for _, kind := range []window.Kind{window.Fixed, window.Sliding} {
		t.Run(".total, .remaining and .reset", func(t *testing.T) {
			l, _ := local(t, window.Config{Kind: kind, Limit: 5, Window: time.Minute})
			for left := int64(4); left >= 2; left-- {
				r := take(t, l, 1)
				require.Equal(t, []int64{5, left}, []int64{r.Limit, r.Remaining})
				require.Positive(t, r.ResetAfter)
				require.LessOrEqual(t, r.ResetAfter, time.Minute+time.Minute/window.Slots)
			}
		})
		t.Run("when the limit is exceeded should retain .remaining at 0", func(t *testing.T) {
			l, _ := local(t, window.Config{Kind: kind, Limit: 2, Window: time.Minute})
			for range 2 {
				require.True(t, take(t, l, 1).OK)
			}
			for range 3 {
				r := take(t, l, 1)
				require.False(t, r.OK)
				require.Zero(t, r.Remaining)
			}
		})
		t.Run("when the duration is exceeded should reset", func(t *testing.T) {
			l, clock := local(t, window.Config{Kind: kind, Limit: 2, Window: 2 * time.Second})
			take(t, l, 2)
			clock.Add(3 * time.Second)
			require.EqualValues(t, 1, take(t, l, 1).Remaining)
		})
		t.Run("when limiter is called in parallel by multiple clients should set the count properly", func(t *testing.T) {
			rdb := limittest.Redis(t)
			var all sync.WaitGroup
			var sum atomic.Int64
			for range 7 {
				l, err := window.New(rdb, window.Config{Kind: kind, Limit: 7, Window: time.Hour})
				require.NoError(t, err)
				all.Go(func() {
					r, err := l.Take(t.Context(), "K", 1)
					if err == nil && r.OK {
						sum.Add(1 << (4 * r.Remaining))
					}
				})
			}
			all.Wait()
			require.EqualValues(t, 0x1111111, sum.Load(), "each number from 6 to 0 was left once")
		})
	}
	t.Run("the next calls should not create again the limiter, and keep all TTLs in sync", func(t *testing.T) {
		l, clock := local(t, window.Config{Limit: 2, Window: 10 * time.Second})
		first := take(t, l, 1)
		clock.Add(4 * time.Second)
		second := take(t, l, 1)
		require.Equal(t, first.Era, second.Era)
		require.Equal(t, 6*time.Second, second.ResetAfter)
	})
}

package window_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/internal/limittest"
	"github.com/tokenrefill/refiller/limit/window"
)

// A limit that changes is in force at once, in both kinds: what was taken in the window counts against the new one.
func TestAChangedLimitCountsWhatWasTaken(t *testing.T) {
	t.Parallel()
	for _, kind := range []window.Kind{window.Fixed, window.Sliding} {
		rdb := limittest.Redis(t)
		of := func(limit int64) *window.Limiter {
			l, err := window.New(rdb, window.Config{Kind: kind, Limit: limit, Window: time.Hour})
			require.NoError(t, err)
			return l
		}
		state := func(r fetch.Result) [3]int64 { return [3]int64{r.Taken, r.Remaining, r.Limit} }

		require.Equal(t, [3]int64{2, 3, 5}, state(take(t, of(5), 2)), kind)
		require.Equal(t, [3]int64{1, 997, 1000}, state(take(t, of(1000), 1)), "%v: raised, the rest is there at once", kind)
		require.Equal(t, [3]int64{47, 50, 100}, state(take(t, of(100), 47)), kind)
		require.Equal(t, [3]int64{0, 0, 10}, state(take(t, of(10), 1)), "%v: lowered below what was taken, nothing is left",
			kind)
		require.Equal(t, [3]int64{1, 9, 60}, state(take(t, of(60), 1)), kind)
		require.NoError(t, of(60).Return(t.Context(), "K", 51))
		require.Equal(t, [3]int64{10, 0, 10}, state(take(t, of(10), 10)), "%v: all came back", kind)
	}
}

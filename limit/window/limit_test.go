package window_test

import (
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/internal/limittest"
	"github.com/tokenrefill/refiller/limit/window"
)

// A changed limit is in force at once, in both kinds: earlier takes of the window count against the new limit.
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
		require.Equal(t, [3]int64{1, 997, 1000}, state(take(t, of(1000), 1)), "%v: a higher limit applies at once", kind)
		require.Equal(t, [3]int64{47, 50, 100}, state(take(t, of(100), 47)), kind)
		require.Equal(t, [3]int64{0, 0, 10}, state(take(t, of(10), 1)), "%v: a limit below the tokens taken leaves none",
			kind)
		require.Equal(t, [3]int64{1, 9, 60}, state(take(t, of(60), 1)), kind)
		require.NoError(t, of(60).Return(t.Context(), "K", 51))
		require.Equal(t, [3]int64{10, 0, 10}, state(take(t, of(10), 10)), "%v: all tokens came back", kind)
	}
}

// A window of an hour has slots of six minutes, and a window of ten minutes has slots of one minute. A limiter puts the
// count of another limiter's slot into its own slot that contains the end of that slot, but at the latest into the
// present slot.
func TestSlidingWindowsOfTwoLengthsCountOneAnothersTakes(t *testing.T) {
	t.Parallel()
	m := miniredis.RunT(t)
	rdb := redis.NewClient(&redis.Options{Addr: m.Addr()})
	t.Cleanup(func() { require.NoError(t, rdb.Close()) })
	of := func(length time.Duration) *window.Limiter {
		l, err := window.New(rdb, window.Config{Kind: window.Sliding, Limit: 10, Window: length})
		require.NoError(t, err)
		return l
	}
	at := func(d time.Duration) { m.SetTime(time.Unix(1_800_000_000, 0).Add(d)) }
	hour, short := of(time.Hour), of(10*time.Minute)
	denied := func(l *window.Limiter, wait time.Duration) {
		t.Helper()
		require.Equal(t, fetch.Result{Limit: 10, RetryAfter: wait, ResetAfter: wait}, take(t, l, 1))
	}

	at(0)
	require.EqualValues(t, 6, take(t, hour, 4).Remaining)
	at(2 * time.Minute)
	require.EqualValues(t, 0, take(t, short, 6).Remaining, "the hour's four tokens count as if taken now")
	denied(short, 11*time.Minute)
	denied(hour, 64*time.Minute)
	at(13*time.Minute - time.Microsecond)
	denied(short, time.Microsecond)
	at(13 * time.Minute)
	require.EqualValues(t, 9, take(t, short, 1).Remaining)
	require.EqualValues(t, 0, take(t, hour, 9).Remaining, "tokens that left the short window count in no window")
	denied(hour, 65*time.Minute)

	require.NoError(t, hour.Reset(t.Context(), "K"))
	at(0)
	require.EqualValues(t, 0, take(t, hour, 10).Remaining)
	at(9 * time.Minute)
	denied(short, 7*time.Minute) // in slot 5 of the shorter window, which stops counting at 16 minutes
	at(16 * time.Minute)
	require.EqualValues(t, 0, take(t, short, 10).Remaining)
	at(25 * time.Minute)
	denied(hour, 53*time.Minute) // in slot 2 of the longer window, which stops counting at 78 minutes

	for _, pair := range [][2]*window.Limiter{{hour, short}, {hour, of(2 * time.Hour)}, {of(24 * time.Hour), hour}} {
		require.NoError(t, hour.Reset(t.Context(), "K"))
		admitted := 0
		for i := range 40 {
			if take(t, pair[i%2], 1).OK {
				admitted++
			}
		}
		require.Equal(t, 10, admitted, "takes alternate, with windows of %s and %s", pair[0].Window(), pair[1].Window())
	}
}

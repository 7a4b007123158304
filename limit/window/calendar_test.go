package window_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/calendar"
	"github.com/tokenrefill/refiller/limit/internal/limittest"
	"github.com/tokenrefill/refiller/limit/window"
)

func zone(t *testing.T, name string) *time.Location {
	t.Helper()
	in, err := time.LoadLocation(name)
	require.NoError(t, err)
	return in
}

// A day ends at midnight in its time zone, whenever its first take was. If summer time begins on that day, the day has
// 23 hours.
func TestAWindowOfTheCalendarEndsAtMidnight(t *testing.T) {
	t.Parallel()
	berlin := zone(t, "Europe/Berlin")
	l, clock := local(t, window.Config{Limit: 5, Per: calendar.Day, In: berlin})
	clock.Add(time.Date(2027, 3, 27, 23, 59, 59, 0, berlin).Sub(clock.Now()))
	midnight := time.Date(2027, 3, 28, 0, 0, 0, 0, berlin)
	want := fetch.Result{OK: true, Taken: 5, Limit: 5, ResetAfter: time.Second, MoreAfter: time.Second,
		Era: midnight.UnixMilli()}
	require.Equal(t, want, take(t, l, 5))
	require.Equal(t, fetch.Result{Limit: 5, RetryAfter: time.Second, ResetAfter: time.Second}, take(t, l, 1))
	clock.Add(time.Second - time.Microsecond)
	require.False(t, take(t, l, 1).OK)
	clock.Add(time.Microsecond)
	next := midnight.Add(23 * time.Hour)
	want = fetch.Result{OK: true, Taken: 5, Limit: 5, ResetAfter: 23 * time.Hour, MoreAfter: 23 * time.Hour,
		Era: next.UnixMilli()}
	require.Equal(t, want, take(t, l, 5), "the new day has 23 hours")
	require.Equal(t, "5 per day", l.String())
	require.Equal(t, 24*time.Hour, l.Window())
}

// The test makes 5,000 random tries around ends of months and changes of the clock. A window admits exactly as many
// takes as a plain count of the takes in each unit of the calendar.
func TestWindowsOfTheCalendarAgreeWithCountingByHand(t *testing.T) {
	t.Parallel()
	rng := limittest.Rand(t)
	admitted, denied := 0, 0
	for _, name := range []string{"UTC", "America/New_York", "Australia/Lord_Howe", "America/Santiago", "Asia/Kathmandu"} {
		for unit := calendar.Minute; unit <= calendar.Month; unit++ {
			in := zone(t, name)
			limit := 5 + rng.Int64N(20)
			l, clock := local(t, window.Config{Limit: limit, Per: unit, In: in})
			counts, windows := map[time.Time]int64{}, map[int64]time.Time{}
			var taken []fetch.Result
			for range 200 {
				clock.Add(time.Duration(rng.Int64N(int64(unit.Usual() / 8))))
				begin, end := unit.Span(clock.Now(), in)
				n := 1 + rng.Int64N(5)
				r := take(t, l, n)
				require.Equal(t, counts[begin]+n <= limit, r.OK, "%s %s at %s", name, unit, clock.Now().In(in))
				if !r.OK {
					denied++
					require.Equal(t, end.Sub(clock.Now()), r.RetryAfter)
					continue
				}
				admitted++
				counts[begin] += n
				windows[r.Era] = begin
				require.Equal(t, limit-counts[begin], r.Remaining)
				taken = append(taken, r)
				if rng.IntN(6) == 0 { // a returned token counts in the window of its take
					i := rng.IntN(len(taken))
					require.NoError(t, l.Undo(t.Context(), "K", taken[i]))
					counts[windows[taken[i].Era]] -= taken[i].Taken
					taken = append(taken[:i], taken[i+1:]...)
				}
			}
		}
	}
	require.Greater(t, min(admitted, denied), 500, "of 5,000 tries, %d were admitted and %d denied", admitted, denied)
}

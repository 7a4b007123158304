package schedule_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/calendar"
	"github.com/tokenrefill/refiller/limit/internal/limittest"
	"github.com/tokenrefill/refiller/limit/schedule"
	"github.com/tokenrefill/refiller/lua"
)

// windows are 1 per minute, 5 per hour and 10 per day.
var windows = []schedule.Window{
	{Name: "minute", Limit: 1, Length: time.Minute},
	{Name: "hour", Limit: 5, Length: time.Hour},
	{Name: "day", Limit: 10, Length: 24 * time.Hour},
}

// each runs a test on Redis and in memory.
func each(t *testing.T, cfg schedule.Config, test func(t *testing.T, l *schedule.Limiter)) {
	t.Parallel()
	shared, err := schedule.New(limittest.Redis(t), cfg)
	require.NoError(t, err)
	local, err := schedule.NewLocal(cfg, time.Now)
	require.NoError(t, err)
	t.Run("redis", func(t *testing.T) { test(t, shared) })
	t.Run("local", func(t *testing.T) { test(t, local) })
}

func reserve(t *testing.T, l *schedule.Limiter, id string, at time.Time) schedule.Reservation {
	t.Helper()
	r, err := l.Reserve(t.Context(), "K", id, at)
	require.NoError(t, err)
	return r
}

// tomorrow returns an hour of tomorrow in UTC.
func tomorrow(hour int) time.Time {
	return time.Now().UTC().Truncate(24 * time.Hour).Add(time.Duration(24+hour) * time.Hour)
}

func TestOnePerMinuteFivePerHourTenPerDay(t *testing.T) {
	each(t, schedule.Config{Windows: windows}, func(t *testing.T, l *schedule.Limiter) {
		noon := tomorrow(12)
		require.True(t, reserve(t, l, "a", noon).OK)
		r := reserve(t, l, "b", noon.Add(30*time.Second))
		require.False(t, r.OK)
		require.Equal(t, []string{"minute"}, r.DeniedBy)
		require.Equal(t, noon.Add(time.Minute), r.Next)
		require.Equal(t, 30*time.Second, r.RetryAfter)
		require.False(t, reserve(t, l, "b", noon.Add(-59*time.Second)).OK, "a later reservation counts as well")
		require.True(t, reserve(t, l, "b", r.Next).OK)
		for i := 2; i < 5; i++ {
			require.True(t, reserve(t, l, fmt.Sprint("hour", i), noon.Add(time.Duration(i)*time.Minute)).OK)
		}
		r = reserve(t, l, "c", noon.Add(59*time.Minute+59*time.Second))
		require.Equal(t, []string{"hour"}, r.DeniedBy, "five reservations fit in an hour, not six")
		require.Equal(t, noon.Add(time.Hour), r.Next)
		for i := range 5 {
			require.True(t, reserve(t, l, fmt.Sprint("later", i), noon.Add(2*time.Hour+time.Duration(i)*time.Minute)).OK)
		}
		r = reserve(t, l, "d", noon.Add(8*time.Hour))
		require.Equal(t, []string{"day"}, r.DeniedBy)
		require.Equal(t, noon.Add(24*time.Hour), r.Next, "the first of ten reservations leaves the window at Next")
		require.Equal(t, fetch.Result{Limit: 1, RetryAfter: 16 * time.Hour}, r.Result)
	})
}

func TestASlidingWindowSpansMidnight(t *testing.T) {
	each(t, schedule.Config{Windows: windows}, func(t *testing.T, l *schedule.Limiter) {
		midnight := tomorrow(24)
		require.True(t, reserve(t, l, "before", midnight.Add(-10*time.Second)).OK)
		require.Equal(t, []string{"minute"}, reserve(t, l, "after", midnight.Add(10*time.Second)).DeniedBy)
		for i := range 4 {
			require.True(t, reserve(t, l, fmt.Sprint(i), midnight.Add(time.Duration(-5+i)*time.Minute)).OK)
		}
		require.Equal(t, []string{"hour"}, reserve(t, l, "after", midnight.Add(time.Minute)).DeniedBy)
	})
}

// In New York the clock shows 1:30 twice when summer time ends, and never 2:30
// when it begins.
func TestASlidingWindowIgnoresChangesToAndFromSummerTime(t *testing.T) {
	zone, err := time.LoadLocation("America/New_York")
	require.NoError(t, err)
	each(t, schedule.Config{Windows: windows, Horizon: 2 * 366 * 24 * time.Hour}, func(t *testing.T, l *schedule.Limiter) {
		year := time.Now().Year() + 1
		// The first Sunday of November, and the second of March.
		fall := time.Date(year, 11, 1, 0, 0, 0, 0, zone)
		fall = fall.AddDate(0, 0, (7-int(fall.Weekday()))%7)
		spring := time.Date(year, 3, 8, 0, 0, 0, 0, zone)
		spring = spring.AddDate(0, 0, (7-int(spring.Weekday()))%7)

		first := fall.Add(90 * time.Minute)
		second := first.Add(time.Hour)
		require.Equal(t, first.Format("15:04"), second.Format("15:04"), "both instants have the same local time")
		require.True(t, reserve(t, l, "fall 1", first).OK)
		require.True(t, reserve(t, l, "fall 2", second).OK)

		before, after := spring.Add(119*time.Minute+40*time.Second), spring.Add(2*time.Hour+10*time.Second)
		require.Equal(t, "01:59 03:00", before.Format("15:04")+" "+after.Format("15:04"), "the local times differ by an hour")
		require.True(t, reserve(t, l, "spring 1", before).OK)
		require.Equal(t, []string{"minute"}, reserve(t, l, "spring 2", after).DeniedBy, "30 seconds lie between the instants")
	})
}

func TestInstantsOfThePastAndFarAheadAreRefused(t *testing.T) {
	each(t, schedule.Config{Windows: windows, Horizon: time.Hour}, func(t *testing.T, l *schedule.Limiter) {
		for _, at := range []time.Time{time.Now().Add(-time.Second), time.Now().Add(-48 * time.Hour), {}} {
			_, err := l.Reserve(t.Context(), "K", "id", at)
			require.ErrorIs(t, err, schedule.ErrPast)
		}
		for _, at := range []time.Time{time.Now().Add(2 * time.Hour), time.Now().AddDate(8000, 0, 0)} {
			_, err := l.Reserve(t.Context(), "K", "id", at)
			require.ErrorIs(t, err, schedule.ErrHorizon)
			require.ErrorContains(t, err, "1h0m0s")
		}
	})
}

func TestReservationsAreIdempotentCancellableAndListed(t *testing.T) {
	each(t, schedule.Config{Windows: windows}, func(t *testing.T, l *schedule.Limiter) {
		ctx, noon := t.Context(), tomorrow(12)
		for _, repeated := range []bool{false, true, true} {
			r := reserve(t, l, "a", noon)
			require.True(t, r.OK)
			require.Equal(t, repeated, r.Repeated)
			require.Zero(t, r.Remaining)
		}
		_, err := l.Reserve(ctx, "K", "a", noon.Add(time.Hour))
		require.ErrorIs(t, err, schedule.ErrIDTaken)
		require.True(t, reserve(t, l, "b", noon.Add(time.Hour)).OK)
		entries, err := l.List(ctx, "K", noon, noon.Add(time.Hour), 10)
		require.NoError(t, err)
		require.Len(t, entries, 1)
		require.Equal(t, "a", entries[0].ID)
		require.True(t, noon.Equal(entries[0].At))

		for _, there := range []bool{true, false} {
			ok, err := l.Cancel(ctx, "K", "a")
			require.NoError(t, err)
			require.Equal(t, there, ok)
		}
		require.True(t, reserve(t, l, "c", noon).OK, "the cancelled reservation leaves room")
		entries, err = l.List(ctx, "K", time.Now(), noon.Add(48*time.Hour), 1)
		require.NoError(t, err)
		require.Len(t, entries, 1)
		require.Equal(t, "c", entries[0].ID)
	})
}

// A reservation whose instant has passed still counts, and can't be cancelled.
func TestAnInstantThatHasPassedCountsAndStays(t *testing.T) {
	each(
		t,
		schedule.Config{Windows: []schedule.Window{{Limit: 1, Length: time.Hour}}},
		func(t *testing.T, l *schedule.Limiter) {
			var at time.Time
			// The instant is set later and later, until the call comes before it, however slow the server is.
			for ahead := 50 * time.Millisecond; ; ahead *= 2 {
				at = time.Now().Add(ahead)
				r, err := l.Reserve(t.Context(), "K", "a", at)
				if err == nil {
					require.True(t, r.OK)
					break
				}
				require.Less(t, ahead, 20*time.Second)
			}
			require.Eventually(t, func() bool {
				_, err := l.Reserve(t.Context(), "other", time.Now().String(), at)
				return err != nil // the instant has passed
			}, 20*time.Second, time.Millisecond)
			ok, err := l.Cancel(t.Context(), "K", "a")
			require.NoError(t, err)
			require.False(t, ok)
			require.False(t, reserve(t, l, "b", at.Add(59*time.Minute)).OK)
			require.True(t, reserve(t, l, "a", at).Repeated, "a repeated call is still admitted")
		},
	)
}

// 10,000 callers want one of 1,000 places: two schedules have 500 places in an hour each. The published form of this
// limiter checks and adds in two steps. So concurrent callers all pass there.
func TestConcurrentReservationsNeverExceedAWindow(t *testing.T) {
	t.Parallel()
	cfg := schedule.Config{Windows: []schedule.Window{{Limit: schedule.MaxLimit, Length: time.Hour}}}
	single, err := schedule.New(limittest.Redis(t), cfg)
	require.NoError(t, err)
	cluster, err := schedule.New(limittest.Cluster(t), cfg)
	require.NoError(t, err)
	local, err := schedule.NewLocal(cfg, time.Now)
	require.NoError(t, err)
	base := time.Now().Add(time.Hour)
	for _, l := range []*schedule.Limiter{single, cluster, local} {
		var id atomic.Int64
		limittest.AdmitExactly(t, func(ctx context.Context) (fetch.Result, error) {
			i := id.Add(1)
			r, err := l.Reserve(ctx, fmt.Sprint("K", i%2), fmt.Sprint(i), base.Add(time.Duration(i)*time.Millisecond))
			return r.Result, err
		})
	}
}

func TestMemoryIsBoundedAndExpires(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), limittest.Redis(t)
	cfg := schedule.Config{
		Windows: []schedule.Window{{Limit: 1, Length: 20 * time.Millisecond}},
		Horizon: 40 * time.Millisecond,
	}
	require.EqualValues(t, 4, cfg.MaxReservations())
	l, err := schedule.New(rdb, cfg)
	require.NoError(t, err)
	server := func() time.Time {
		now, err := rdb.Time(ctx).Result()
		require.NoError(t, err)
		return now
	}
	for admitted := 0; admitted < 20; { // far more in total than may be held at once
		at := server().Add(20 * time.Millisecond)
		r, err := l.Reserve(ctx, "K", at.String(), at)
		if errors.Is(err, schedule.ErrPast) { // the machine is slow
			continue
		}
		require.NoError(t, err)
		if r.OK {
			admitted++
		}
		require.LessOrEqual(t, rdb.ZCard(ctx, "{K}:sched").Val(), cfg.MaxReservations())
	}
	require.Eventually(t, func() bool { return rdb.DBSize(ctx).Val() == 0 }, 20*time.Second, 10*time.Millisecond)
}

// If a reservation is so old that no window of a future instant can contain it, it is forgotten: in memory as well as
// by the expiry in Redis.
func TestALocalScheduleThatIsOverIsNone(t *testing.T) {
	t.Parallel()
	ctx, clock := t.Context(), limittest.NewClock(time.Unix(1_800_000_000, 0))
	cfg := schedule.Config{Windows: []schedule.Window{{Limit: 2, Length: time.Minute}, {Limit: 3, Length: time.Hour}}}
	l, err := schedule.NewLocal(cfg, clock.Now)
	require.NoError(t, err)
	at := clock.Now().Add(time.Second)
	require.True(t, reserve(t, l, "a", at).OK)
	taken, err := l.Take(ctx, "K", 1)
	require.NoError(t, err)
	entries := func() int {
		list, err := l.List(ctx, "K", time.Unix(0, 0), at.Add(time.Hour), 9)
		require.NoError(t, err)
		return len(list)
	}

	clock.Add(time.Hour + time.Second - time.Microsecond)
	require.True(t, reserve(t, l, "a", at).Repeated)
	require.Equal(t, 2, entries())
	clock.Add(time.Microsecond)
	require.Zero(t, entries())
	_, err = l.Reserve(ctx, "K", "a", at)
	require.ErrorIs(t, err, schedule.ErrPast)
	require.NoError(t, l.Undo(ctx, "K", taken))
	require.True(t, reserve(t, l, "a", at.Add(2*time.Hour)).OK, "the id is free again")
	require.Equal(t, 0, entries())
}

func TestMemoryOfAKey(t *testing.T) {
	t.Parallel()
	rdb := limittest.Redis(t)
	l, err := schedule.New(rdb, schedule.Config{Windows: windows})
	require.NoError(t, err)
	usage, delta := limittest.BytesPerKey(
		t,
		rdb,
		20_000,
		func(k string) string { return "{" + k + "}:sched" },
		func(ctx context.Context, key string) error {
			_, err := l.Reserve(ctx, key, "mail:1234567", tomorrow(12))
			return err
		},
	)
	require.LessOrEqual(t, usage, 200.0)
	require.LessOrEqual(t, delta, 250.0)
}

// Each charge has its own id. A call with the same id returns the result of the first one.
func TestALostReplyReservesOnce(t *testing.T) {
	t.Parallel()
	at, ids := time.Now().Add(48*time.Hour), 0
	config := schedule.Config{Windows: []schedule.Window{{Limit: 10, Length: time.Hour}}}
	limittest.ChargedOnce(t, func(rdb redis.UniversalClient) (func(context.Context) error, func(context.Context) int64) {
		l, err := schedule.New(rdb, config)
		require.NoError(t, err)
		reserve := func(ctx context.Context) error {
			ids++
			id := fmt.Sprint("id", ids)
			if _, err := l.Reserve(ctx, "K", id, at); err != nil {
				return err
			}
			again, err := l.Reserve(ctx, "K", id, at)
			require.NoError(t, err)
			require.True(t, again.Repeated)
			return nil
		}
		left := func(ctx context.Context) int64 {
			entries, err := l.List(ctx, "K", at, at.Add(time.Second), 100)
			require.NoError(t, err)
			return 10 - int64(len(entries))
		}
		return reserve, left
	})
}

func TestBadInputIsRefused(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), limittest.Redis(t)
	ok := schedule.Window{Limit: 1, Length: time.Minute}
	for field, cfg := range map[string]schedule.Config{
		"name":                   {Name: "{", Windows: []schedule.Window{ok}},
		"windows: there are 0":   {},
		"use no limiter":         {},
		"leave the window out":   {Windows: []schedule.Window{{Length: time.Minute}}},
		"windows: there are 9":   {Windows: []schedule.Window{ok, ok, ok, ok, ok, ok, ok, ok, ok}},
		"windows[1].limit: 0":    {Windows: []schedule.Window{ok, {Length: time.Minute}}},
		"[0].limit: 501 is not":  {Windows: []schedule.Window{{Limit: 501, Length: time.Minute}}},
		"windows[0].length: 0s":  {Windows: []schedule.Window{{Limit: 1}}},
		"windows[0].length: 1ns": {Windows: []schedule.Window{{Limit: 1, Length: 1}}},
		"excludes per, day":      {Windows: []schedule.Window{{Limit: 1, Length: time.Hour, Per: calendar.Day}}},
		"windows[0].per: unit 9": {Windows: []schedule.Window{{Limit: 1, Per: 9}}},
		"windows[0].in":          {Windows: []schedule.Window{{Limit: 1, Length: time.Hour, In: time.UTC}}},
		"horizon: -1s":           {Windows: []schedule.Window{ok}, Horizon: -time.Second},
	} {
		_, err := schedule.NewLocal(cfg, time.Now)
		require.ErrorIs(t, err, schedule.ErrConfig)
		require.ErrorContains(t, err, field)
	}
	for _, none := range []redis.UniversalClient{nil, (*redis.Client)(nil)} {
		_, err := schedule.New(none, schedule.Config{Windows: windows})
		require.ErrorIs(t, err, schedule.ErrConfig)
	}
	_, err := schedule.NewLocal(schedule.Config{Windows: windows}, nil)
	require.ErrorIs(t, err, schedule.ErrConfig)

	l, err := schedule.New(rdb, schedule.Config{Windows: windows})
	require.NoError(t, err)
	at := tomorrow(1)
	for _, id := range []string{"", strings.Repeat("x", 129)} {
		_, err = l.Reserve(ctx, "K", id, at)
		require.ErrorIs(t, err, schedule.ErrInvalidID)
		_, err = l.Cancel(ctx, "K", id)
		require.ErrorIs(t, err, schedule.ErrInvalidID)
	}
	_, err = l.Reserve(ctx, "}", "id", at)
	require.ErrorIs(t, err, fetch.ErrInvalidKey)
	_, err = l.List(ctx, "K", at, at.Add(-1), 1)
	require.ErrorIs(t, err, schedule.ErrInvalidRange)
	_, err = l.List(ctx, "K", at, at, 0)
	require.ErrorIs(t, err, schedule.ErrInvalidRange)

	require.NoError(t, rdb.Set(ctx, "{text}:sched", "x", 0).Err())
	_, err = l.Reserve(ctx, "text", "id", at)
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
	_, err = l.Cancel(ctx, "text", "id")
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
	_, err = l.List(ctx, "text", at, at, 1)
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
	require.Equal(t, "x", rdb.Get(ctx, "{text}:sched").Val())
}

func TestALocalScheduleIsSafeForConcurrentUse(t *testing.T) {
	t.Parallel()
	l, err := schedule.NewLocal(schedule.Config{Windows: windows}, time.Now)
	require.NoError(t, err)
	var wg sync.WaitGroup
	var admitted atomic.Int64
	at := tomorrow(1)
	for i := range 50 {
		wg.Go(func() {
			if r, err := l.Reserve(t.Context(), "K", fmt.Sprint(i), at); err == nil && r.OK {
				admitted.Add(1)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 1, admitted.Load())
}

// At most 10 reservations per day are admitted, at future instants. The days are those of a time zone.
func TestCalendarDaysBeginAtTheirMidnight(t *testing.T) {
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	daily := []schedule.Window{{Limit: 10, Per: calendar.Day, In: berlin}}
	each(t, schedule.Config{Windows: daily}, func(t *testing.T, l *schedule.Limiter) {
		day := time.Now().In(berlin).AddDate(0, 0, 2)
		midnight := time.Date(day.Year(), day.Month(), day.Day(), 0, 0, 0, 0, berlin)
		for i := range 10 {
			require.True(t, reserve(t, l, fmt.Sprint("late", i), midnight.Add(-time.Duration(i+1)*time.Second)).OK)
		}
		r := reserve(t, l, "eleventh", midnight.Add(-time.Hour))
		require.False(t, r.OK)
		require.Equal(t, []string{"10 per day"}, r.DeniedBy)
		require.True(t, midnight.Equal(r.Next), "%s", r.Next)
		require.Equal(t, time.Hour, r.RetryAfter)
		require.True(t, reserve(t, l, "eleventh", r.Next).OK, "the new day admits another reservation")
		ok, err := l.Cancel(t.Context(), "K", "late3")
		require.NoError(t, err)
		require.True(t, ok)
		require.True(t, reserve(t, l, "another", midnight.Add(-time.Hour)).OK)
	})
}

func TestATakeIsAReservationOfNow(t *testing.T) {
	cfg := schedule.Config{Windows: []schedule.Window{{Limit: 5, Length: time.Hour}, {Limit: 20, Per: calendar.Month}}}
	each(t, cfg, func(t *testing.T, l *schedule.Limiter) {
		ctx := t.Context()
		require.True(t, reserve(t, l, "soon", time.Now().Add(30*time.Minute)).OK)
		first, err := l.Take(ctx, "K", 3)
		require.NoError(t, err)
		require.Equal(t, []int64{3, 1, 5}, []int64{first.Taken, first.Remaining, first.Limit})
		r, err := l.Take(ctx, "K", 2)
		require.NoError(t, err)
		require.False(t, r.OK)
		require.EqualValues(t, 1, r.Remaining)
		require.InDelta(t, time.Hour, r.RetryAfter, float64(time.Minute))
		require.NoError(t, l.Undo(ctx, "K", r), "undoing a denial does nothing")
		for _, n := range []int64{-1, schedule.MaxLimit + 1, 1 << 62} {
			require.ErrorIs(t, l.Undo(ctx, "K", fetch.Result{Taken: n, Era: first.Era}), fetch.ErrInvalidAmount)
		}
		require.NoError(t, l.Undo(ctx, "K", first))
		r, err = l.Peek(ctx, "K")
		require.NoError(t, err)
		require.Equal(t, fetch.Result{OK: true, Remaining: 4, Limit: 5}, r)
		for _, n := range []int64{0, -1} {
			_, err = l.Take(ctx, "K", n)
			require.ErrorIs(t, err, fetch.ErrInvalidAmount)
		}
		_, err = l.Take(ctx, "K", 6)
		require.ErrorIs(t, err, fetch.ErrExceedsCapacity)
		_, err = l.Take(ctx, "}", 1)
		require.ErrorIs(t, err, fetch.ErrInvalidKey)
		require.Equal(t, time.Hour, l.Window())
	})
}

func ExampleLimiter_Reserve() {
	l, err := schedule.NewLocal(schedule.Config{Windows: []schedule.Window{
		{Limit: 1, Length: time.Minute}, {Limit: 5, Length: time.Hour}, {Limit: 10, Length: 24 * time.Hour},
	}}, time.Now)
	if err != nil {
		fmt.Println(err)
		return
	}
	at := time.Now().Add(time.Hour)
	for i := range 2 {
		r, err := l.Reserve(context.Background(), "newsletter", fmt.Sprint("mail ", i), at)
		fmt.Println(r.OK, r.DeniedBy, r.RetryAfter, err)
	}
	// Output:
	// true [] 0s <nil>
	// false [1 per 1m0s] 1m0s <nil>
}

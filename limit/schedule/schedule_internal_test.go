package schedule

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/internal/tz"
	"github.com/tokenrefill/refiller/limit/calendar"
	"github.com/tokenrefill/refiller/limit/internal/limittest"
)

// most returns the number of instants in the fullest window.
func most(instants []int64, w Window) int64 {
	best := int64(0)
	for _, begin := range instants {
		n, end := int64(0), begin+w.Length.Microseconds()
		if w.Per.Valid() {
			begin, end = w.span(begin)
		}
		for _, at := range instants {
			if begin <= at && at < end {
				n++
			}
		}
		best = max(best, n)
	}
	return best
}

func fits(instants []int64, at int64, windows []Window) bool {
	with := append(append([]int64{}, instants...), at)
	for _, w := range windows {
		if most(with, w) > w.Limit {
			return false
		}
	}
	return true
}

// history is a config, and the first instant of the days in which a test reserves instants.
type history struct {
	config Config
	base   time.Time
}

// next returns noon of the next day with the given date.
func next(month time.Month, day int, in *time.Location) time.Time {
	at := time.Date(time.Now().Year(), month, day, 12, 0, 0, 0, in)
	for !at.After(time.Now().Add(time.Hour)) {
		at = at.AddDate(1, 0, 0)
	}
	return at
}

// beforeChange returns a day before a zone changes its offset for the n-th time; zero if it doesn't.
func beforeChange(n int, in *time.Location) time.Time {
	end := time.Now().AddDate(0, 0, 2)
	for range n {
		end = tz.Change(end.In(in))
		if end.IsZero() {
			return end
		}
	}
	return end.AddDate(0, 0, -1)
}

// histories returns histories with sliding windows, with windows of the calendar, and with both. Those of the calendar
// cover ends of months and changes to and from summer time.
func histories(t *testing.T, rng *rand.Rand) []history {
	t.Helper()
	limits := func(units bool, in *time.Location) []Window {
		sliding := []Window{{Length: time.Minute}, {Length: time.Hour}, {Length: 24 * time.Hour}}
		ws := []Window{{Per: calendar.Minute, In: in}, {Per: calendar.Hour, In: in}, {Per: calendar.Day, In: in}}
		if !units {
			ws = sliding
		} else if rng.IntN(2) == 0 {
			ws = append(ws[:2], sliding[2])
		}
		for i := range ws {
			ws[i].Limit = []int64{1 + rng.Int64N(2), 3 + rng.Int64N(3), 6 + rng.Int64N(6)}[i]
		}
		if units {
			week := Window{Per: calendar.Week, In: in, Limit: 20 + rng.Int64N(9)}
			ws = append(ws, week, Window{Per: calendar.Month, In: in, Limit: 15 + rng.Int64N(15)})
		}
		return ws
	}
	var all []history
	for i := range 42 {
		in := []*time.Location{time.UTC, zone(t, "America/New_York"), zone(t, "Australia/Lord_Howe"),
			zone(t, "America/Santiago")}[i%4]
		bases := []time.Time{
			next(time.December, 30, in),
			next(time.February, 27, in),
			beforeChange(1, in),
			beforeChange(2, in),
		}
		base := bases[i/4%4]
		if base.IsZero() {
			base = next(time.April, 29, in)
		}
		all = append(all, history{Config{Windows: limits(i%12 > 0, in), Horizon: 2 * 366 * 24 * time.Hour}, base})
	}
	return all
}

func zone(t *testing.T, name string) *time.Location {
	t.Helper()
	in, err := time.LoadLocation(name)
	require.NoError(t, err)
	return in
}

// The test makes 5,040 random tries and some cancellations. The script and the memory give the same answers, and admit
// exactly as many reservations as a plain count allows. Next is always the first instant with room.
func TestScriptAndMemoryAgreeWithCountingByHand(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	rdb := limittest.Redis(t)
	rng := limittest.Rand(t)
	denied := 0
	sure := 0
	changes := 0
	for i, h := range histories(t, rng) {
		cfg, key := h.config, fmt.Sprint(i)
		memory := newLocal(cfg, time.Now)
		stores := []store{shared{engine.NewCommands(rdb, 8), cfg}, memory}
		held := map[string]int64{}
		base := h.base.UnixMicro()
		if change := tz.Change(h.base); !change.IsZero() && change.Before(h.base.AddDate(0, 0, 3)) {
			changes++
		}
		for try := range 120 {
			id := fmt.Sprint("id", try)
			at := base + rng.Int64N(3*24*60)*time.Minute.Microseconds()
			if rng.IntN(3) == 0 {
				at += rng.Int64N(time.Minute.Microseconds())
			}
			var instants []int64
			for _, x := range held {
				instants = append(instants, x)
			}
			ok, where := fits(instants, at, cfg.Windows), fmt.Sprintf("history %d, try %d", i, try)
			var answers []answer
			for _, s := range stores {
				a, err := (&Limiter{cfg, s}).ask(ctx, key, call{id: id, at: at, n: 1})
				require.NoError(t, err)
				a.now = 0
				answers = append(answers, a)
			}
			require.Equal(t, ok, answers[0].code == codeDone, where)
			if ok {
				held[id] = at
			} else {
				denied++
				next := answers[0].next
				for range 20 {
					require.False(t, fits(instants, at+rng.Int64N(next-at), cfg.Windows), "%s: an instant before Next fits", where)
				}
				if fits(instants, next, cfg.Windows) {
					sure++
				}
				answers[0].sure, answers[1].sure = true, true // the stores may end a search early at different points
			}
			require.Equal(t, answers[0], answers[1], where)
			if rng.IntN(6) == 0 {
				id := fmt.Sprint("id", rng.IntN(try+1))
				_, known := held[id]
				for _, s := range stores {
					ok, err := s.cancel(ctx, key, call{id: id, n: 1}, false)
					require.NoError(t, err)
					require.Equal(t, known, ok)
				}
				delete(held, id)
			}
		}
		a, err := stores[0].list(ctx, key, 0, base*2, 10_000)
		require.NoError(t, err)
		b, err := stores[1].list(ctx, key, 0, base*2, 10_000)
		require.NoError(t, err)
		require.Equal(t, a, b)
		require.Len(t, a, len(held))
	}
	require.Greater(t, denied, 500)
	require.Greater(t, changes, 10, "histories cross changes of the clock")
	require.Equal(t, denied, sure, "every Next fits")
}

// The same holds for reservations of the present instant. The test makes several at once, among reservations of later
// instants, on a clock that does not advance.
func TestTakesAgreeWithCountingByHand(t *testing.T) {
	t.Parallel()
	rng := limittest.Rand(t)
	for range 40 {
		clock := limittest.NewClock(time.Date(2027, 10, 31, 23, 59, 0, 0, time.UTC))
		cfg := Config{Windows: []Window{{Limit: 3 + rng.Int64N(3), Length: time.Minute},
			{Limit: 6 + rng.Int64N(5), Per: calendar.Day}}}
		l, err := NewLocal(cfg, clock.Now)
		require.NoError(t, err)
		var instants []int64
		for range 60 {
			clock.Add(time.Duration(rng.IntN(20_000)) * time.Millisecond)
			now, n := clock.Now().UnixMicro(), 1+rng.Int64N(3)
			if rng.IntN(4) == 0 {
				at := clock.Now().Add(time.Duration(rng.IntN(90)) * time.Second)
				r, err := l.Reserve(t.Context(), "K", fmt.Sprint(rng.Uint64()), at)
				require.NoError(t, err)
				if r.OK {
					instants = append(instants, at.UnixMicro())
				}
				continue
			}
			with := instants
			for range n - 1 {
				with = append(with[:len(with):len(with)], now)
			}
			want := fits(with, now, cfg.Windows)
			r, err := l.Take(t.Context(), "K", n)
			require.NoError(t, err)
			require.Equal(t, want, r.OK)
			switch {
			case !r.OK:
				require.Positive(t, r.RetryAfter)
			case rng.IntN(5) == 0:
				clock.Add(time.Microsecond)
				require.NoError(t, l.Undo(t.Context(), "K", r))
			default:
				instants = append(with, now)
			}
		}
	}
}

// If the caller's clock is in another day than the server's clock, the call is repeated, and counts in the server's
// day.
func TestATakeCountsInTheServersDay(t *testing.T) {
	t.Parallel()
	cfg := Config{Windows: []Window{{Limit: 1, Per: calendar.Day}}}
	s := shared{engine.NewCommands(limittest.Redis(t), 8), cfg}
	l := &Limiter{cfg, s}
	yesterday := time.Now().Add(-25 * time.Hour).UnixMicro()
	a, err := s.reserve(t.Context(), "K", call{id: "a", n: 1, near: yesterday})
	require.NoError(t, err)
	require.EqualValues(t, codeOtherWindow, a.code)
	for i, want := range []int64{codeDone, codeDenied} {
		a, err = l.ask(t.Context(), "K", call{id: fmt.Sprint(i), n: 1, near: yesterday})
		require.NoError(t, err)
		require.Equal(t, want, a.code)
	}
	_, midnight := cfg.Windows[0].span(a.now)
	require.Equal(t, midnight, a.next)
}

func TestTheEmbeddedStoreRunsTheScripts(t *testing.T) {
	t.Parallel()
	rng := limittest.Rand(t)
	rdb, tick := limittest.Embedded(t, rng)
	tick()
	l, err := New(rdb, Config{Windows: []Window{{Limit: 1, Length: time.Minute}}})
	require.NoError(t, err)
	server, err := rdb.Time(t.Context()).Result()
	require.NoError(t, err)
	for i, ok := range []bool{true, false, true} {
		r, err := l.Reserve(t.Context(), "K", fmt.Sprint(i), server.Add(time.Duration(i)*31*time.Second))
		require.NoError(t, err)
		require.Equal(t, ok, r.OK)
	}
	gone, err := l.Cancel(t.Context(), "K", "2")
	require.NoError(t, err)
	require.True(t, gone)
}

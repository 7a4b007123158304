package window

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/limit/calendar"
	"github.com/tokenrefill/refiller/limit/internal/decide"
	"github.com/tokenrefill/refiller/limit/internal/limittest"
)

// fast are windows that are so short that many of them begin and end during a test.
var fast = []Config{
	{Limit: 10, Window: 5 * time.Millisecond},
	{Limit: 3, Window: time.Millisecond},
	{Limit: 1000, Window: time.Hour},
	{Kind: Sliding, Limit: 10, Window: 5 * time.Millisecond},
	{Kind: Sliding, Limit: 1, Window: time.Millisecond},
	{Kind: Sliding, Limit: 50, Window: 20 * time.Millisecond},
	{Kind: Sliding, Limit: 1000, Window: time.Hour},
}

func agree(t *testing.T, rdb redis.UniversalClient, tick func(), rng *rand.Rand, calls int, configs []Config) {
	t.Helper()
	denied := 0
	for i, cfg := range configs {
		rule, err := cfg.rule()
		require.NoError(t, err)
		if cfg.Kind == Fixed {
			denied += limittest.Agree(t, rdb, tick, rng, rule, newFixed(rule), true, fmt.Sprint(i), calls)
		} else {
			denied += limittest.Agree(t, rdb, tick, rng, rule, newSliding(rule), true, fmt.Sprint(i), calls)
		}
	}
	require.NotZero(t, denied)
}

func TestScriptsAgreeWithTheModels(t *testing.T) {
	t.Parallel()
	agree(t, limittest.Redis(t), func() {}, limittest.Rand(t), 2000, fast)
}

func TestScriptsAgreeWithTheModelsWhenTheClockIsStepped(t *testing.T) {
	t.Parallel()
	rng := limittest.Rand(t)
	rdb, tick := limittest.Stepping(t, rng)
	agree(t, rdb, tick, rng, 500, []Config{
		{Limit: 10, Window: time.Hour},
		{Limit: 10, Per: calendar.Hour},
		{Kind: Sliding, Limit: 10, Window: time.Hour},
		{Kind: Sliding, Limit: 1000, Window: 10 * time.Minute},
	})
}

func TestScriptsAgreeWithTheModelsOnTheEmbeddedStore(t *testing.T) {
	t.Parallel()
	rng := limittest.Rand(t)
	rdb, tick := limittest.Embedded(t, rng)
	agree(t, rdb, tick, rng, 300, fast)
}

// The store's clock is in another year than this process's clock. The store's clock determines the window of the
// calendar.
func TestTheScriptFollowsTheCalendarOfTheServer(t *testing.T) {
	t.Parallel()
	rng := limittest.Rand(t)
	in := testenv.Zone(t, "America/New_York")
	for unit := calendar.Minute; unit <= calendar.Month; unit++ {
		rule, err := Config{Limit: 20, Per: unit, In: in}.rule()
		require.NoError(t, err)
		for _, from := range []time.Time{time.Date(2029, 10, 30, 0, 0, 0, 0, in), time.Date(2040, 12, 30, 23, 0, 0, 0, in)} {
			rdb, tick := limittest.EmbeddedAt(t, rng, from, unit.Usual()/8)
			require.NotZero(t, limittest.Agree(t, rdb, tick, rng, rule, newFixed(rule), true, "K", 300), unit)
		}
	}
}

func slide(t *testing.T, cfg Config) limittest.Program[slots] {
	t.Helper()
	cfg.Kind = Sliding
	rule, err := cfg.rule()
	require.NoError(t, err)
	return limittest.Program[slots]{Rule: rule, Model: newSliding(rule)}
}

func TestScriptAndModelAgreeOnSlidingWindowsOfSeveralLengths(t *testing.T) {
	t.Parallel()
	rng := limittest.Rand(t)
	rdb, tick := limittest.Stepping(t, rng)
	hour := slide(t, Config{Limit: 10, Window: time.Hour})
	require.NotZero(t, limittest.Agree(t, rdb, tick, rng, hour.Rule, hour.Model, true, "K", 1500,
		slide(t, Config{Limit: 30, Window: 10 * time.Minute}), slide(t, Config{Limit: 20, Window: 61*time.Minute + 1e6})))
}

// With windows of several lengths, each take finds at least the takes of the shortest window.
func TestTheShortestWindowAdmitsAtMostTheLargestLimit(t *testing.T) {
	t.Parallel()
	rng := limittest.Rand(t)
	admitted := 0
	for range 200 {
		shortest, largest := time.Hour, int64(0)
		var programs []limittest.Program[slots]
		for range 2 + rng.IntN(2) {
			cfg := Config{Limit: 1 + rng.Int64N(20), Window: time.Duration(1+rng.IntN(500)) * time.Millisecond}
			shortest, largest = min(shortest, cfg.Window), max(largest, cfg.Limit)
			programs = append(programs, slide(t, cfg))
		}
		type take struct{ at, n int64 }
		var takes []take
		var s slots
		now := time.Unix(1_800_000_000, 0).UnixMicro()
		for range 300 {
			now += rng.Int64N(shortest.Microseconds() / 4)
			var o decide.Outcome
			p := programs[rng.IntN(len(programs))]
			n := 1 + rng.Int64N(p.Rule.Limit)
			s, o = p.Model.Step(s, decide.Take, n, 0, now)
			if !o.Fits {
				continue
			}
			admitted++
			takes = append(takes, take{now, n})
			sum := int64(0)
			for _, k := range takes {
				if now-k.at < shortest.Microseconds() {
					sum += k.n
				}
			}
			require.LessOrEqual(t, sum, largest)
		}
	}
	require.Greater(t, admitted, 2000)
}

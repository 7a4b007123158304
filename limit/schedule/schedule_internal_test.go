package schedule

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/limit/internal/limittest"
)

// most counts the instants in the fullest stretch of a window's length.
func most(instants []int64, w Window) int64 {
	best := int64(0)
	for _, begin := range instants {
		n := int64(0)
		for _, at := range instants {
			if begin <= at && at < begin+w.Length.Microseconds() {
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

// Random reservations and cancellations: the script and the memory answer the
// same, admit exactly what counting by hand admits, and Next is the first
// instant that fits.
func TestScriptAndMemoryAgreeWithCountingByHand(t *testing.T) {
	t.Parallel()
	ctx, rdb, rng := t.Context(), limittest.Redis(t), limittest.Rand(t)
	embedded, _ := limittest.Embedded(t, rng)
	now := time.Now()
	require.NoError(t, embedded.Ping(ctx).Err())
	denied := 0
	for history := range 12 {
		cfg := Config{Windows: []Window{
			{Limit: 1 + rng.Int64N(2), Length: time.Minute},
			{Limit: 3 + rng.Int64N(3), Length: time.Hour},
			{Limit: 6 + rng.Int64N(6), Length: 24 * time.Hour},
		}}
		key := fmt.Sprint(history)
		memory := newLocal(cfg, time.Now)
		stores := []store{shared{engine.NewCommands(rdb, 8), cfg}, memory}
		held := map[string]int64{}
		base := now.Add(time.Hour).UnixMicro()
		for i := range 120 {
			id := fmt.Sprint("id", i)
			at := base + rng.Int64N(3*24*60)*time.Minute.Microseconds()
			if rng.IntN(3) == 0 {
				at += rng.Int64N(time.Minute.Microseconds())
			}
			var instants []int64
			for _, x := range held {
				instants = append(instants, x)
			}
			ok := fits(instants, at, cfg.Windows)
			var answers []answer
			for _, s := range stores {
				a, err := s.reserve(ctx, key, id, at)
				require.NoError(t, err)
				a.now = 0
				answers = append(answers, a)
			}
			require.Equal(t, ok, answers[0].code == codeDone, "history %d, call %d", history, i)
			if ok {
				answers[1].next = 0 // a denial's
				held[id] = at
			} else {
				denied++
				if next := answers[0].next; fits(instants, next, cfg.Windows) {
					for range 20 {
						require.False(t, fits(instants, at+rng.Int64N(next-at), cfg.Windows), "an instant before Next fits")
					}
				}
			}
			require.Equal(t, answers[0], answers[1], "history %d, call %d", history, i)
			if rng.IntN(6) == 0 {
				id := fmt.Sprint("id", rng.IntN(i+1))
				_, known := held[id]
				for _, s := range stores {
					ok, err := s.cancel(ctx, key, id)
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
	require.NotZero(t, denied)
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

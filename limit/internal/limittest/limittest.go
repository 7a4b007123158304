// Package limittest has the common parts of the tests of all limiters. It is for tests only.
package limittest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/internal/decide"
)

// Clock is a clock that does not advance until it is set. It is safe for concurrent use.
type Clock struct{ us atomic.Int64 }

// NewClock makes a Clock.
func NewClock(at time.Time) *Clock {
	c := &Clock{}
	c.us.Store(at.UnixMicro())
	return c
}

// Now returns the time.
func (c *Clock) Now() time.Time { return time.UnixMicro(c.us.Load()) }

// Add moves the clock, back if d is negative.
func (c *Clock) Add(d time.Duration) { c.us.Add(d.Microseconds()) }

// Rand returns a source of randomness; REFILLER_SEED repeats a run.
func Rand(t testing.TB) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if v := os.Getenv("REFILLER_SEED"); v != "" {
		n, err := strconv.ParseUint(v, 10, 64)
		require.NoError(t, err)
		seed = n
	}
	t.Logf("REFILLER_SEED=%d repeats this run", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// Embedded starts the embedded store and returns a client of it, and a function
// that moves its clock by up to 3 ms.
func Embedded(t testing.TB, rng *rand.Rand) (rdb *redis.Client, tick func()) {
	t.Helper()
	return EmbeddedAt(t, rng, time.Unix(1_800_000_000, 0), 3*time.Millisecond)
}

// EmbeddedAt is like Embedded, with a clock that begins at now and moves by up to step.
func EmbeddedAt(t testing.TB, rng *rand.Rand, now time.Time, step time.Duration) (rdb *redis.Client, tick func()) {
	t.Helper()
	m := miniredis.RunT(t)
	m.SetTime(now)
	m.ClockTTL(true)
	rdb = redis.NewClient(&redis.Options{Addr: m.Addr()})
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb, func() {
		now = now.Add(time.Duration(rng.Int64N(step.Microseconds())) * time.Microsecond)
		m.SetTime(now)
	}
}

// Program is a rule with its model.
type Program[S any] struct {
	Rule  decide.Rule
	Model decide.Model[S]
}

// Agree makes random calls of a rule's script, and calls tick before each of them. It requires that the model gives the
// same answers at the server's time. If returns is set, some calls return tokens. Some calls are for the rules of
// others, which share the key. Agree returns how many calls were denied.
func Agree[S any](t testing.TB, rdb redis.UniversalClient, tick func(), rng *rand.Rand, rule decide.Rule,
	model decide.Model[S], returns bool, key string, calls int, others ...Program[S]) (denied int) {
	t.Helper()
	ctx := t.Context()
	programs := append(others, Program[S]{rule, model})
	var s, none S
	eras := []int64{0, 1} // of takes; the first ones: unknown, and long over
	for i := range calls {
		p := programs[rng.IntN(len(programs))]
		rule, model := p.Rule, p.Model
		what, n := decide.Take, 1+rng.Int64N(max(1, rule.Limit/2))
		switch rng.IntN(8) {
		case 0:
			n = 1
		case 1:
			what = decide.Peek
		case 2:
			if returns {
				what = decide.Return
			}
		case 3:
			n = rule.Limit
		}
		era := eras[rng.IntN(len(eras))]
		tick()
		got, now, err := decide.NewScript(rdb, rule).Decide(ctx, what, n, decide.Ask{Key: key, Era: era})
		require.NoError(t, err)
		if now/1000 > (model.Until(s)+999)/1000 { // as Redis expires keys
			s = none
		}
		where := fmt.Sprintf("%s %v call %d: what %d, n %d", rule.Kind, rule.Args, i, what, n)
		var want decide.Outcome
		s, want = model.Step(s, what, n, era, now)
		if rule.Era != nil {
			want.Era = rule.Era(now, &want)
		}
		require.Equal(t, want, got[0], where)
		if what == decide.Take && want.Fits {
			eras = append(eras[:min(len(eras), 5)], want.Era)
		}
		if !want.Fits {
			denied++
		}
	}
	return denied
}

// AdmitExactly makes 10,000 concurrent takes of one token on a limit of 1,000
// and requires that exactly 1,000 are admitted.
func AdmitExactly(t testing.TB, take func(context.Context) (fetch.Result, error)) {
	t.Helper()
	const (
		takes   = 10_000
		most    = 1_000
		workers = 200
	)
	ctx := t.Context()
	var left, admitted atomic.Int64
	left.Store(takes)
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				r, err := take(ctx)
				if err != nil {
					t.Error(err)
					return
				}
				if r.OK {
					admitted.Add(1)
				}
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, most, admitted.Load(), "admitted of %d", takes)
}

// BytesPerKey takes from n keys that are named like users. It returns the memory of a key in bytes: according to MEMORY
// USAGE (usage), and according to the growth of used_memory (delta). The latter also counts the tables of keys and of
// expiries, but not the connections. REFILLER_KEYS sets another n.
func BytesPerKey(t testing.TB, rdb *redis.Client, n int, name func(key string) string,
	take func(ctx context.Context, key string) error) (usage, delta float64) {
	t.Helper()
	ctx := t.Context()
	if v := os.Getenv("REFILLER_KEYS"); v != "" {
		k, err := strconv.Atoi(v)
		require.NoError(t, err)
		n = k
	}
	reading := func() int64 {
		m, err := rdb.InfoMap(ctx, "memory").Result()
		require.NoError(t, err)
		number := func(field string) int64 {
			b, err := strconv.ParseInt(m["Memory"][field], 10, 64)
			require.NoError(t, err, field)
			return b
		}
		return number("used_memory") - number("mem_clients_normal") // buffers of connections are no keys
	}
	// used waits until the server has shrunk its buffers and moved its tables.
	used := func() (b int64) {
		require.Eventually(t, func() bool {
			last := b
			b = reading()
			return max(last-b, b-last) < 1024
		}, patience, 300*time.Millisecond, "the server's memory settles")
		return b
	}
	key := func(i int) string { return fmt.Sprintf("user:%d", 100_000+i) }
	const workers = 16
	require.NoError(t, take(ctx, "warm-up")) // so that the memory before includes connections and the script
	all := func(workers int, from, to int) {
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				for i := from + w; i < to; i += workers {
					if err := take(ctx, key(i)); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
	all(workers, 0, workers)
	before := used()
	all(workers, workers, n)
	delta = float64(used()-before) / float64(n-workers)
	const sample = 500
	for i := range sample {
		b, err := rdb.MemoryUsage(ctx, name(key(i*(n/sample)))).Result()
		require.NoError(t, err)
		usage += float64(b) / sample
	}
	t.Logf("%d keys: MEMORY USAGE %.1f bytes, used_memory grew by %.1f bytes per key", n, usage, delta)
	return usage, delta
}

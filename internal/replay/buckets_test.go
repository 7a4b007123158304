package replay

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// continuous is an independent model. Credit flows into each bucket all the time, and credit above the capacity is
// lost. The unit of credit is a token divided by per.
type continuous struct {
	full, tokens, per int64
	level, last       map[string]int64
}

func newContinuous(capacity int64, rate policy.Rate) *continuous {
	per := rate.Per.Microseconds()
	return &continuous{capacity * per, rate.Tokens, per, map[string]int64{}, map[string]int64{}}
}

func (c *continuous) take(key string, now int64) bool {
	level, known := c.level[key]
	if !known {
		level, c.last[key] = c.full, now
	}
	level = min(c.full, level+(now-c.last[key])*c.tokens)
	c.last[key] = now
	ok := level >= c.per
	if ok {
		level -= c.per
	}
	c.level[key] = level
	return ok
}

// TestALogOfAnyTime checks that a log gets the same results whether it begins before 1970, at the first instant of 1970
// or later.
func TestALogOfAnyTime(t *testing.T) {
	t.Parallel()
	for _, start := range []int64{-5, -2, -1, 0, 1, -1e15, 1e16} {
		buckets, err := NewBuckets(1, policy.Rate{Tokens: 1, Per: 2 * time.Microsecond})
		require.NoError(t, err)
		for i, ok := range []bool{true, false, true, false, true} {
			require.Equal(t, ok, buckets.Take([]byte("key"), start+int64(i)).OK, "take %d from %d", i, start)
		}
	}
}

func TestAgreesWithContinuousCredit(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		capacity := rapid.Int64Range(1, 20).Draw(t, "capacity")
		rate := policy.Rate{
			Tokens: rapid.Int64Range(1, 50).Draw(t, "tokens"),
			Per: time.Duration(rapid.SampledFrom([]int64{1, 7, 1000, 1_000_000, 60_000_000}).Draw(t,
				"per")) * time.Microsecond,
		}
		buckets, err := NewBuckets(capacity, rate)
		require.NoError(t, err)
		buckets.sweep, buckets.least = 2, 2
		model := newContinuous(capacity, rate)
		fill := rate.TimeFor(capacity).Microseconds()
		at, clock := rapid.Int64Range(-1e15, 1e16).Draw(t, "start"), int64(0)
		for i := range rapid.IntRange(1, 300).Draw(t, "requests") {
			// The time goes back, stays the same, or advances: by less than a token, by about a token, until the bucket is full,
			// or by far more.
			step := rapid.SampledFrom([]int64{-fill, 0, 0, 1, fill / capacity / 3, fill / capacity, fill, 30 * 86400e6}).Draw(t,
				"step")
			at += rapid.Int64Range(min(step, 0), max(step, 0)).Draw(t, "by")
			if i == 0 {
				clock = at
			}
			clock = max(clock, at)
			key := strconv.Itoa(rapid.IntRange(0, 5).Draw(t, "key"))
			require.Equal(t, model.take(key, clock), buckets.Take([]byte(key), at).OK, "request %d at %d", i, at)
		}
	})
}

// TestAgreesWithTheScripts compares Buckets with the scripts. The scripts run on a real server in real time. Buckets
// get the instants that the server names.
func TestAgreesWithTheScripts(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for _, c := range []struct {
		capacity int64
		rate     policy.Rate
	}{{1, policy.PerSecond(700)}, {3, policy.PerSecond(999)}, {20, policy.Rate{Tokens: 7, Per: 11 * time.Millisecond}}} {
		buckets, err := NewBuckets(c.capacity, c.rate)
		require.NoError(t, err)
		terms := buckets.terms
		fill := c.rate.TimeFor(c.capacity)
		type server struct {
			name    string
			version policy.Version
		}
		servers := map[string]*server{}
		made := 0
		initialise := func(key string) policy.Outcome {
			made++
			s := &server{name: fmt.Sprintf("%s/%d/%d", key, c.capacity, made)}
			servers[key] = s
			out, err := lua.Refill(ctx, rdb, s.name, policy.Call{Create: policy.CreateInitial, Terms: &terms})
			require.NoError(t, err)
			s.version = out.Version
			return out
		}
		admitted := 0
		denied := 0
		credited := int64(0)
		for i := range 300 {
			key := strconv.Itoa(random.IntN(2))
			var out policy.Outcome
			if s := servers[key]; s == nil {
				out = initialise(key)
			} else {
				out, err = lua.Refill(ctx, rdb, s.name, policy.Call{Version: s.version})
				require.NoError(t, err)
				require.Equal(t, policy.StatusApplied, out.Status)
				s.version = out.Version
				credited += out.Added
				if out.Tokens == c.capacity {
					// A full bucket equals a new one: the model forgets it.
					out = initialise(key)
				}
			}
			takes := int64(1)
			if i == 0 || random.IntN(10) == 0 {
				takes = c.capacity + 1 // one of them is denied, however slow the server
			}
			for range takes {
				want, err := lua.Take(ctx, rdb, servers[key].name, 1, false)
				require.NoError(t, err)
				got := buckets.Take([]byte(key), out.Now)
				require.Equal(t, want.OK, got.OK)
				require.Equal(t, want.Remaining, got.Tokens)

				peek, err := lua.Peek(ctx, rdb, servers[key].name, 1)
				require.NoError(t, err)
				state := buckets.held[key].Control
				require.Equal(t, []int64{peek.Carry, peek.Last}, []int64{state.Carry, buckets.start + state.Last - 1})
				if got.OK {
					admitted++
				} else {
					denied++
				}
			}
			if random.IntN(25) == 0 { // time must pass for this test
				time.Sleep(time.Duration(random.Int64N(2 * int64(fill))))
			}
		}
		require.Positive(t, admitted)
		require.Positive(t, denied)
		require.Positive(t, credited)
	}
}

func TestALongGapIsCreditedInFull(t *testing.T) {
	t.Parallel()
	buckets, err := NewBuckets(1000, policy.Rate{Tokens: 1, Per: time.Hour})
	require.NoError(t, err)
	at := int64(0)
	for range 1000 {
		require.True(t, buckets.Take([]byte("k"), at).OK)
	}
	require.False(t, buckets.Take([]byte("k"), at).OK)
	at += (400 * time.Hour).Microseconds()
	for range 400 {
		require.True(t, buckets.Take([]byte("k"), at).OK)
	}
	require.False(t, buckets.Take([]byte("k"), at).OK)
}

func TestATimeBeforeTheClockEarnsNothing(t *testing.T) {
	t.Parallel()
	buckets, err := NewBuckets(1, policy.PerSecond(1))
	require.NoError(t, err)
	require.True(t, buckets.Take([]byte("a"), 5e6).OK)
	require.False(t, buckets.Take([]byte("a"), 1e6).OK)
	require.False(t, buckets.Take([]byte("a"), 5_999_999).OK)
	require.True(t, buckets.Take([]byte("a"), 6e6).OK)
}

func TestFullBucketsAreForgotten(t *testing.T) {
	t.Parallel()
	buckets, err := NewBuckets(10, policy.Rate{Tokens: 10, Per: time.Minute})
	require.NoError(t, err)
	most := 0
	for i := range int64(100_000) {
		require.True(t, buckets.Take([]byte(strconv.FormatInt(i, 10)), i*1e6).OK)
		most = max(most, len(buckets.held))
	}
	require.LessOrEqual(t, most, minSweep)
}

func TestPoliciesOutOfRangeAreRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		capacity int64
		rate     policy.Rate
	}{
		{0, policy.PerSecond(1)}, {-1, policy.PerSecond(1)}, {policy.MaxTokens + 1, policy.PerSecond(1)},
		{1, policy.Rate{}}, {1, policy.PerSecond(-1)}, {policy.MaxTokens, policy.Rate{Tokens: 1, Per: 24 * time.Hour}},
	} {
		_, err := NewBuckets(c.capacity, c.rate)
		require.ErrorIs(t, err, ErrPolicy, "%+v", c)
	}
}

func TestTheLargestPoliciesAreExact(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		capacity int64
		rate     policy.Rate
	}{{policy.MaxTokens, policy.Rate{Tokens: policy.MaxTokens, Per: time.Microsecond}},
		{1 << 20, policy.Rate{Tokens: 1, Per: policy.MaxPer / 32}}, {policy.MaxTokens, policy.PerSecond(1000)}} {
		buckets, err := NewBuckets(c.capacity, c.rate)
		require.NoError(t, err)
		require.Equal(t, c.capacity-1, buckets.Take([]byte("k"), 0).Tokens)
		bucket := buckets.held["k"]
		*bucket.Tokens = 0
		require.Equal(t, c.capacity-1, buckets.Take([]byte("k"), 1<<60).Tokens, "an endless gap fills an empty bucket")
	}
}

func BenchmarkTake(b *testing.B) {
	buckets, err := NewBuckets(10, policy.PerSecond(10))
	require.NoError(b, err)
	keys := make([][]byte, 1000)
	for i := range keys {
		keys[i] = fmt.Appendf(nil, "192.0.2.%d", i)
	}
	b.ReportAllocs()
	at := int64(0)
	for b.Loop() {
		at += 100
		buckets.Take(keys[at%1000], at)
	}
}

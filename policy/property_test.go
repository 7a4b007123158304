package policy_test

import (
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/policy"
)

// policies draws valid smooth policies.
func policies() *rapid.Generator[policy.Policy] {
	return rapid.Custom(func(t *rapid.T) policy.Policy {
		rate := rapid.OneOf(
			rapid.SampledFrom([]policy.Rate{policy.PerSecond(500), policy.PerSecond(999_983),
				{Tokens: 1000, Per: 24 * time.Hour}, {Tokens: 10, Per: time.Minute}, {Tokens: 7, Per: time.Microsecond}}),
			rapid.Custom(func(t *rapid.T) policy.Rate {
				return policy.Rate{Tokens: rapid.Int64Range(1, 1e6).Draw(t, "tokens"),
					Per: time.Duration(rapid.Int64Range(1, 3600e6).Draw(t, "per")) * time.Microsecond}
			}),
		).Draw(t, "rate")
		interval := time.Duration(rapid.Int64Range(1, 1000).Draw(t, "interval")) * time.Millisecond
		p := policy.Policy{
			Capacity: 1 + rate.Over(2*interval) + rapid.Int64Range(0, 1<<30).Draw(t, "spare"), Rate: rate, Interval: interval,
			CarryOver: policy.CarryOver(rapid.IntRange(0, 2).Draw(t, "carry over")),
		}
		if err := p.Validate(); err != nil {
			t.Fatalf("drew a bad policy: %v", err)
		}
		return p
	})
}

// fresh returns a bucket under the terms that holds tokens and was just refilled.
func fresh(terms policy.Terms, tokens int64) policy.Bucket {
	b := buckettest.Bucket(tokens, now, 0)
	b.Control.Terms = terms
	return b
}

// dueIn returns the credit of a stretch at the rate of the terms, in tokens.
func dueIn(terms policy.Terms, us int64) *big.Rat {
	n := new(big.Int).Mul(big.NewInt(us), big.NewInt(terms.Tokens))
	return new(big.Rat).SetFrac(n, big.NewInt(terms.Per))
}

func whole(r *big.Rat) int64 { return new(big.Int).Quo(r.Num(), r.Denom()).Int64() }

// The rules of credit (I5), of the index (I4) and of the capacity hold for any number of refillers, with takes between
// their refills. The time between two refills is anything up to the longest stretch that one refill credits.
func TestAnyRefillersCreditExactlyWhatIsDue(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		terms := policies().Draw(t, "policy").Terms(policy.Fence{Epoch: 1})
		b := fresh(terms, rapid.Int64Range(0, terms.Capacity).Draw(t, "tokens"))
		known := make([]policy.Version, rapid.IntRange(1, 8).Draw(t, "refillers"))
		won := map[policy.Version]bool{}
		at := now
		begin := now
		credited := int64(0)
		clamps := int64(0)
		for range rapid.IntRange(1, 60).Draw(t, "calls") {
			at += rapid.Int64Range(0, terms.MaxElapsed-(at-b.Control.Last)).Draw(t, "pause")
			if rapid.Bool().Draw(t, "take") {
				b.Take(rapid.Int64Range(1, terms.Capacity).Draw(t, "n"), at)
			}
			who := rapid.IntRange(0, len(known)-1).Draw(t, "who")
			repeat := rapid.IntRange(1, 2).Draw(t, "repeat") // a duplicated packet
			call := policy.Call{Version: known[who], Terms: &terms}
			for range repeat {
				out := b.Refill(call, at)
				known[who] = out.Version
				credited += out.Added + out.Clamped
				if out.Status.Wrote() && out.Tokens == terms.Capacity {
					clamps++
				}
				if out.Status.Wrote() {
					require.Equal(t, policy.StatusApplied, out.Status)
					require.False(t, won[out.Version], "index %d is won once", out.Version.Index)
					won[out.Version] = true
				} else {
					require.Zero(t, out.Added+out.Clamped)
				}
				require.GreaterOrEqual(t, *b.Tokens, int64(0))
				require.LessOrEqual(t, *b.Tokens, terms.Capacity)
			}
			if at-b.Control.Last >= terms.MaxElapsed { // the next pause would be beyond the cap
				break
			}
		}
		due := whole(dueIn(terms, b.Control.Last-begin))
		require.LessOrEqual(t, credited, due, "refills credit no more than is due")
		require.GreaterOrEqual(t, credited, due-clamps, "a full bucket drops less than a token of carry")
	})
}

// Many switches of the policy add no more tokens than the rates that were in force, with any carry-over. At one instant
// they add nothing.
func TestAStormOfSwitchesMintsNothing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		still := rapid.Bool().Draw(t, "all at one instant")
		few := rapid.SliceOfN(policies(), 2, 6).Draw(t, "policies")
		steps := policy.Policy{Capacity: 1 << 30, Steps: policy.Every(time.Hour), StepTokens: 1 << 20}
		few = append(few, steps)
		terms := few[0].Terms(policy.Fence{Epoch: 1})
		b := fresh(terms, terms.Capacity/2)
		due := new(big.Rat)
		added := int64(0)
		at := now
		before := *b.Tokens
		for i := range 1000 {
			old, since := b.Control.Terms, b.Control.Last
			if !still {
				at += int64(i*i) % 5_000
			}
			next := few[(i*7+i/3)%len(few)].Terms(policy.Fence{Epoch: 1, Seq: int64(i + 1)})
			out := b.Refill(policy.Call{Version: policy.Version{Era: b.Control.Era, Index: *b.Index}, Terms: &next}, at)
			require.Equal(t, policy.StatusApplied, out.Status)
			require.Equal(t, next, b.Control.Terms)
			added += out.Added
			if old.Kind == policy.Smooth {
				due.Add(due, dueIn(old, at-since))
			}
			require.LessOrEqual(t, *b.Tokens, before+out.Added, "a switch itself adds no tokens")
			require.LessOrEqual(t, *b.Tokens, next.Capacity)
			require.GreaterOrEqual(t, b.Control.Carry, int64(0))
			require.True(t, next.Kind == policy.Stepped || b.Control.Carry < next.Per, "the carry is less than a token")
			before = *b.Tokens
		}
		require.LessOrEqual(t, added, whole(due))
	})
}

func TestTakesAndReturnsConserveTokens(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		terms := policies().Draw(t, "policy").Terms(policy.Fence{Epoch: 1})
		b := fresh(terms, terms.Capacity)
		out, at := int64(0), now // tokens that takers hold
		for range rapid.IntRange(1, 60).Draw(t, "operations") {
			before := *b.Tokens + out
			switch rapid.IntRange(0, 2).Draw(t, "operation") {
			case 0:
				n := rapid.Int64Range(1, terms.Capacity).Draw(t, "n")
				held := *b.Tokens
				took := b.Take(n, at)
				require.Equal(t, held >= n, took.OK, "a take gets all of its tokens or none")
				require.Equal(t, took.OK, took.Taken == n)
				require.Equal(t, *b.Tokens, took.Tokens)
				out += took.Taken
				require.Equal(t, before, *b.Tokens+out)
			case 1:
				if out == 0 {
					continue
				}
				n := rapid.Int64Range(1, out).Draw(t, "n")
				clamped, known := b.Return(n)
				require.True(t, known)
				out -= n
				require.Equal(t, before, *b.Tokens+out+clamped)
				require.True(t, clamped == 0 || *b.Tokens == terms.Capacity, "only returns to a full bucket are clamped")
			case 2:
				at += rapid.Int64Range(0, terms.MaxElapsed).Draw(t, "pause")
				o := b.Refill(policy.Call{Version: policy.Version{Era: b.Control.Era, Index: *b.Index}}, at)
				require.Equal(t, before+o.Added, *b.Tokens+out)
			}
			require.GreaterOrEqual(t, *b.Tokens, int64(0))
			require.LessOrEqual(t, *b.Tokens, terms.Capacity)
		}
	})
}

// If the bucket is refilled each interval, it holds the tokens after the time that Wait returns, and not an interval
// earlier.
func TestWaitIsTheTimeOfTheRefillThatBringsTheTokens(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		terms := policies().Draw(t, "policy").Terms(policy.Fence{Epoch: 1})
		b := fresh(terms, rapid.Int64Range(0, terms.Capacity).Draw(t, "tokens"))
		b.Control.Carry = rapid.Int64Range(0, terms.Per-1).Draw(t, "carry")
		if rapid.Bool().Draw(t, "granted") {
			terms.GrantTokens, terms.GrantEra = terms.Tokens*2, b.Control.Era
			terms.GrantEnd = now + rapid.Int64Range(0, 20*terms.Interval).Draw(t, "end")
			b.Control.Terms = terms
		}
		// n is a number of tokens that one of the next refills brings.
		n := *b.Tokens + 1 + whole(dueIn(terms, rapid.Int64Range(0, 50*terms.Interval).Draw(t, "ahead")))
		if n > terms.Capacity {
			require.EqualValues(t, -1, b.Wait(n, now))
			return
		}
		wait := b.Wait(n, now)
		require.Positive(t, wait)
		require.Zero(t, wait%terms.Interval, "the wait ends with a refill interval")
		if wait/terms.Interval > 2000 {
			return // a slow rate
		}
		for at := now + terms.Interval; at <= now+wait; at += terms.Interval {
			require.Less(t, *b.Tokens, n, "the bucket lacks tokens until the wait ends")
			b.Refill(policy.Call{Version: policy.Version{Era: b.Control.Era, Index: *b.Index}}, at)
		}
		require.GreaterOrEqual(t, *b.Tokens, n)
		require.Zero(t, b.Wait(n, now+wait))
	})
}

func TestWaitEdges(t *testing.T) {
	t.Parallel()
	terms := buckettest.Terms()
	b := fresh(terms, 10)
	require.EqualValues(t, 50_000, b.Wait(11, now+200_000), "an overdue refill is expected in half an interval")
	require.EqualValues(t, -1, b.Wait(terms.Capacity+1, now), "the bucket never holds more than its capacity")
	b.Control.Terms.Tokens = 0
	require.EqualValues(t, -1, b.Wait(11, now), "a bucket with a rate of zero gets no tokens")
	b.Control.Terms.Kind, b.Control.Terms.Tokens = policy.Stepped, 300
	require.EqualValues(t, -1, b.Wait(11, now), "the next step is unknown")
	b.Control.Step, b.Control.Next = now, now+3_600_000_000
	require.EqualValues(t, 3_600_000_000, b.Wait(310, now), "one step is needed")
	require.EqualValues(t, 7_200_000_000, b.Wait(311, now), "two steps are needed")
	require.EqualValues(t, -1, (&policy.Bucket{Tokens: of(int64(1))}).Wait(2, now), "the bucket's policy is unknown")
	require.Zero(t, (&policy.Bucket{Tokens: of(int64(1))}).Wait(1, now))
}

// Within one era the fence never falls (I6) and no call that writes leaves the
// index as it was, whatever happens to the bucket.
func TestFencesAndErasOnlyRise(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		h := buckettest.NewHistory(rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0)))
		var b policy.Bucket
		at := now
		for range 100 {
			h.Disturb(&b)
			var before policy.Bucket
			if b.Control != nil {
				c := *b.Control
				before.Control = &c
			}
			call := h.Call(at)
			out := b.Refill(call, at)
			h.Remember(out.Version)
			if !out.Status.Wrote() {
				continue
			}
			require.True(t, call.Version.Before(out.Version), "the version of a write is later than the caller's")
			require.LessOrEqual(t, *b.Tokens, b.Control.Terms.Capacity)
			if before.Control == nil {
				continue
			}
			was, is := before.Control.Terms, b.Control.Terms
			require.False(t, was.Pool == is.Pool && is.Fence.Before(was.Fence))
			require.GreaterOrEqual(t, is.FileVersion(), was.FileVersion())
			require.GreaterOrEqual(t, out.Version.Era, before.Control.Era)
			if out.Version.Era == before.Control.Era {
				require.Greater(t, out.Version.Index, before.Control.Index)
			} else {
				require.Contains(t, []policy.Status{policy.StatusRolledBack, policy.StatusClock}, out.Status)
			}
			at += 100_000
		}
	})
}

func TestStatusNamesAreThoseOfLogsAndMetrics(t *testing.T) {
	t.Parallel()
	wrote := map[string]bool{
		"applied": true, "switched": true, "stale": false, "early": false, "foreign": true, "initialised": true,
		"unknown": false, "rolled_back": true, "clock": true, "malformed": false, "conflict": false,
	}
	for s := policy.StatusApplied; s <= policy.StatusConflict; s++ {
		want, named := wrote[s.String()]
		require.True(t, named, s.String())
		require.Equal(t, want, s.Wrote(), s.String())
		delete(wrote, s.String())
	}
	require.Empty(t, wrote)
	require.Equal(t, "invalid", policy.Status(0).String())
	require.Equal(t, "invalid", (policy.StatusConflict + 1).String())
	require.False(t, policy.Status(99).Wrote())
}

func TestBucketWithoutStateTakesButTakesNothingBack(t *testing.T) {
	t.Parallel()
	b := policy.Bucket{Tokens: of(int64(3))}
	require.Equal(t, policy.Taking{OK: true, Known: true, Taken: 2, Tokens: 1}, b.Take(2, now))
	require.Equal(t, policy.Taking{Known: true, Tokens: 1, Wait: -1}, b.Take(2, now))
	_, known := b.Return(2)
	require.False(t, known, "the bucket's capacity is unknown")
	require.Equal(t, policy.Taking{}, (&policy.Bucket{}).Take(1, now))
}

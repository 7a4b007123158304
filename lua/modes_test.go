package lua_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// The test makes the same random takes from a refilled bucket and from a lazy bucket with the same policy. The lazy
// bucket gets its credit at once, and the refilled bucket with its next refill. The refilled bucket doesn't lose the
// credit between a refill and the moment at which the lazy bucket was full. So the two differ by at most the credit of
// the time between two refills, and a token.
func TestLazyAndRefilledBucketsAdmitTheSameWithinOneRefill(t *testing.T) {
	t.Parallel()
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	m, rdb := embedded(t)
	m.ClockTTL(true)
	now := time.UnixMicro(embeddedNow)
	var same, ahead, behind int
	for i := range 12 {
		p := policy.Policy{
			Capacity: 2 + rng.Int64N(200),
			Rate:     policy.Rate{Tokens: 1 + rng.Int64N(20), Per: time.Duration(1+rng.IntN(20_000)) * time.Millisecond},
			Interval: time.Duration(100+rng.IntN(3000)) * time.Millisecond,
		}
		if (policy.Template{Policy: p, Enforce: policy.EnforceLazy}).Validate() != nil {
			continue // the rate is too fast for its interval and capacity
		}
		terms, key := p.Terms(policy.Fence{Epoch: 1}), fmt.Sprintf("user:%d", i)
		where := fmt.Sprintf("%s, %d tokens at %s, refilled every %s", key, p.Capacity, p.Rate, p.Interval)
		call := templateCall{Prefix: "user:", Terms: terms.Encode(), Capacity: p.Capacity}
		longest := p.Interval * 3 / 2
		credit := func(d time.Duration) int64 { return p.Rate.Over(d) + 1 }

		var version policy.Version
		due := now // the next refill
		refill := func() {
			last := now
			for range 2 { // the first call may only read the index
				calls := []lua.RefillCall{{Key: key, Call: policy.Call{Version: version, Terms: &terms}}}
				r := lua.RefillActive(ctx, rdb, shardOf(key), calls, 1)[0]
				require.NoError(t, r.Err, where)
				version = r.Version
				if r.Status == policy.StatusEarly {
					last = time.UnixMicro(r.Last) // a take from the full bucket came just before
				}
				if r.Status != policy.StatusStale {
					break
				}
			}
			due = last.Add(p.Interval + time.Duration(rng.Int64N(int64(p.Interval/2))))
		}
		until := func(at time.Time) { // makes the refills that are due before an instant
			for due.Before(at) {
				now = due
				m.SetTime(now)
				refill()
			}
			now = at
			m.SetTime(now)
		}
		for range 50 {
			until(now.Add(time.Duration(rng.ExpFloat64() * float64(p.Interval))))
			n := 1 + rng.Int64N(max(1, p.Capacity/4))
			if rng.IntN(5) == 0 {
				n = 1 + rng.Int64N(p.Capacity+p.Capacity/4)
			}
			lazy, err := lua.LazyTake(ctx, rdb, key, &terms, one(n), false)
			require.NoError(t, err, where)
			r, err := takeTemplate(ctx, rdb, key, call, one(n), true, false)
			require.NoError(t, err, where)
			peek, err := lua.Peek(ctx, rdb, key, 1)
			if err != nil { // more than the capacity, from a missing bucket
				require.ErrorIs(t, err, lua.ErrUnknownBucket, where)
				require.Greater(t, n, p.Capacity, where)
				continue
			}
			since := now.Sub(time.UnixMicro(peek.Last))
			require.LessOrEqual(t, since, longest, where)
			switch {
			case lazy.OK == r.OK:
				same++
				require.LessOrEqual(t, lazy.Remaining-r.Remaining, credit(since), where)
				require.LessOrEqual(t, r.Remaining-lazy.Remaining, credit(longest), where)
				if !r.OK && n <= p.Capacity {
					require.LessOrEqual(t, lazy.Runs[0].Wait, r.Runs[0].Wait+p.Rate.TimeFor(credit(longest)), where)
					require.LessOrEqual(t, r.Runs[0].Wait, lazy.Runs[0].Wait+longest, where)
				} else if !r.OK {
					require.Equal(t, lazy.Runs[0].Wait, r.Runs[0].Wait, "%s: both modes never have so many tokens", where)
				}
			case lazy.OK: // its credit comes with the next refill
				ahead++
				require.LessOrEqual(t, n-r.Remaining, credit(since), where)
				require.LessOrEqual(t, r.Runs[0].Wait, longest, where)
				require.NoError(t, lua.LazyReturn(ctx, rdb, key, &terms, n), where)
			default:
				behind++
				require.LessOrEqual(t, n-lazy.Remaining, credit(longest), where)
				_, err := lua.Return(ctx, rdb, key, n, 0)
				require.NoError(t, err, where)
			}
		}
	}
	t.Logf("%d takes had the same reply, only the lazy bucket granted %d, only the refilled one %d", same, ahead, behind)
	require.Positive(t, same)
}

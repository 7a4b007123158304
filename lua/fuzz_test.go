package lua_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// bit reports whether a bit of the choices is set.
func bit(choices uint32, n int) bool { return choices>>n&1 == 1 }

// fuzzedTerms returns the terms of a policy that is built from the input, and whether the policy is valid.
func fuzzedTerms(rate string, capacity, interval int64, choices uint32) (policy.Terms, bool) {
	p := policy.Policy{
		Capacity: capacity, Interval: time.Duration(interval) * time.Microsecond,
		OnLoss: policy.Loss(choices & 1), OnRollback: policy.Rollback(choices >> 1 & 1),
		CarryOver: policy.CarryOver(choices >> 2 & 3),
		Degraded:  policy.Degraded(choices >> 4 & 3), Strict: bit(choices, 6), Shadow: bit(choices, 7),
	}
	r, err := policy.ParseRate(rate)
	if err != nil {
		return policy.Terms{}, false
	}
	p.Rate = r
	if bit(choices, 8) {
		p.Rate = policy.Rate{}
		p.Steps = policy.Every(max(r.Per, policy.MinInterval))
		p.StepTokens = r.Tokens
	}
	return p.Terms(policy.Fence{Epoch: int64(choices >> 9 & 3), Seq: int64(choices >> 11 & 3)}), p.Validate() == nil
}

// FuzzRefill calls the refill script for a bucket in any state, with any arguments that validation accepts. It compares
// the reply and the written state with the model.
func FuzzRefill(f *testing.F) {
	rdb := testenv.Redis(f).Client()
	const at, seen = 1_000_000, 7 // era and index of the bucket
	f.Add("500/s", "500/s", int64(1000), int64(1000), int64(100_000), uint32(0), uint32(0), uint32(0), int64(10),
		int64(seen), int64(at), int64(100_000), int64(0), int64(0))
	f.Add("1000/24h", "7/s", int64(1000), int64(50), int64(1_000_000), uint32(0x200), uint32(0x400), uint32(1),
		int64(1000), int64(seen), int64(at), int64(1_000_000), int64(17), int64(0))
	f.Add("999983/s", "1/366d", int64(4_000_000), int64(1), int64(1000), uint32(0x4b), uint32(0x80c), uint32(2), int64(-3),
		int64(seen-1), int64(at), int64(-200_000), int64(5), int64(3))
	f.Add("1000/h", "10/m", int64(1000), int64(20), int64(100_000), uint32(0x100), uint32(0x300), uint32(4), int64(0),
		int64(seen+2), int64(at), int64(3_700_000_000), int64(0), int64(-60_000_000))
	f.Add("1099511627775/1h", "1099511627775/1h", int64(1<<50), int64(1<<50), int64(1000), uint32(0), uint32(0), uint32(0),
		int64(1<<50), int64(seen), int64(at), int64(2_000_000), int64(1), int64(0))
	f.Add("5/s", "5/s", int64(10), int64(10), int64(100_000), uint32(0x40), uint32(0x40), uint32(8), int64(9), int64(0),
		int64(0), int64(100_000), int64(0), int64(0))
	f.Fuzz(func(t *testing.T, rate, other string, capacity, otherCapacity, interval int64, choices, otherChoices,
		parts uint32,
		tokens, index, era, age, carry, step int64,
	) {
		if interval < 0 || interval > policy.MaxInterval.Microseconds() ||
			max(index, era, tokens, -tokens) > policy.MaxTokens || min(index, era) < 0 {
			return
		}
		terms, ok := fuzzedTerms(rate, capacity, interval, choices)
		if !ok {
			return
		}
		ctx, now := t.Context(), serverTime(t.Context(), t, rdb)
		if age < -int64(time.Hour/time.Microsecond) || age > now || step < -now || step > now {
			return
		}
		own := int64(seen)
		c := &policy.Control{Terms: terms, Era: at, Index: own, Last: now - age}
		if terms.Per > 0 && carry > 0 {
			c.Carry = carry % terms.Per
		}
		if terms.Kind == policy.Stepped && age > 0 {
			c.Step, c.Next = now-age, now-age+terms.Interval
		}
		if bit(parts, 3) {
			c.Outstanding = int64(parts >> 8 & 0xff)
			c.Due = now + 1_000_000
			c.Debt = int64(parts >> 16 & 0xff)
		}
		b := policy.Bucket{Tokens: &tokens, Index: &own, Control: c}
		if bit(parts, 0) {
			b.Tokens = nil
		}
		if bit(parts, 1) {
			b.Index = nil
		}
		if bit(parts, 2) {
			b.Control = nil
		}
		call := policy.Call{Version: policy.Version{Era: era, Index: index}, Create: policy.Create(parts >> 4 & 3 % 3)}
		if t, ok := fuzzedTerms(other, otherCapacity, interval, otherChoices); ok {
			call.Terms = &t
		}
		if step != 0 {
			call.Step, call.Next = now+step, now+step+60_000_000
		}

		const key = "bucket"
		store(ctx, t, rdb, key, b)
		got, err := lua.Refill(ctx, rdb, key, call)
		require.NoError(t, err)
		require.Equal(t, b.Refill(call, got.Now), got)
		require.Equal(t, b, load(ctx, t, rdb, key))
	})
}

package lua_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/policy"
)

// If a take comes with a template of a later version, it credits and switches the bucket as a refill does. This holds
// for any state of the bucket, and for lost keys.
func TestATakeFollowsALaterTemplateAsARefillDoes(t *testing.T) {
	t.Parallel()
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	m, rdb := embedded(t)
	history := buckettest.NewHistory(rng)
	terms := func(template bool, version int64) policy.Terms {
		p := history.Terms()
		for p.Pool || template && p.Kind != policy.Smooth {
			p = history.Terms()
		}
		p.Template = template || p.Kind == policy.Smooth && rng.IntN(2) == 0
		p.Fence = policy.Fence{Epoch: version}
		return p
	}
	steps := 0
	for i := range 500 {
		key, where := fmt.Sprintf("user:%d", i), fmt.Sprintf("bucket %d", i)
		before, later := terms(false, 7), terms(true, 8)
		now := embeddedNow + int64(i)*10_000_000
		m.SetTime(time.UnixMicro(now))
		tokens, index := rng.Int64N(before.Capacity+5)-2, 5+rng.Int64N(100)
		model := policy.Bucket{Tokens: &tokens, Index: &index, Control: &policy.Control{
			Terms: before, Era: now - 1_000_000_000, Index: index - rng.Int64N(5)/4, Last: now - rng.Int64N(4_000_000),
			Outstanding: rng.Int64N(3) * rng.Int64N(before.Capacity), Due: rng.Int64N(2) * now,
			Debt: rng.Int64N(3) * rng.Int64N(10),
		}}
		if rng.IntN(5) == 0 {
			model.Control.Last = now + rng.Int64N(40_000)
		}
		if before.Kind == policy.Stepped {
			model.Control.Next = now + rng.Int64N(120_000_000) - 60_000_000
			model.Control.Step = model.Control.Next - 60_000_000
		} else {
			model.Control.Carry = rng.Int64N(before.Per)
		}
		switch rng.IntN(10) {
		case 0:
			model.Tokens = nil
		case 1:
			model.Index = nil
		}
		store(ctx, t, rdb, key, model)
		_, err := takeTemplate(ctx, rdb, key, templateCall{Prefix: "user:", Terms: later.Encode()}, nil, true, false)
		require.NoError(t, err, where)
		version := policy.Version{Era: model.Control.Era, Index: model.Control.Index}
		out := model.Refill(policy.Call{Version: version, Terms: &later}, now)
		if before.Kind == policy.Stepped && out.Added > 0 {
			steps++
		}
		require.Equal(t, model, load(ctx, t, rdb, key), "%s: %+v", where, before)
	}
	require.NotZero(t, steps)
}

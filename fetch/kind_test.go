package fetch

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// A bucket of 60 tokens that gains ten an hour holds 20 and was refilled 90 minutes ago, under version 5 of the
// template. Its next take finds 35, of which the policy of a later version keeps some.
func TestPeekShowsWhatATakeUnderALaterTemplateFinds(t *testing.T) {
	t.Parallel()
	const key = "user:1"
	rdb := testenv.Redis(t).Client()
	template := func(capacity int64, carry policy.CarryOver) policy.Template {
		return policy.Template{Prefix: "user:", Policy: policy.Policy{Capacity: capacity, CarryOver: carry,
			Rate: policy.Rate{Tokens: 10, Per: time.Hour}, Interval: time.Hour}}
	}
	inForce := template(60, policy.CarryKeep).Terms(policy.Fence{Epoch: 5})
	own := inForce
	own.Fence = policy.Fence{Epoch: policy.OwnEpoch, Seq: 1}
	configured := inForce
	configured.Template = false
	pool := configured
	pool.Pool = true
	pool.Version = 5
	pool.PoolsVersion = 5
	for name, tc := range map[string]struct {
		inForce         policy.Terms
		template        policy.Template
		version         int64
		tokens, limit   int64
		waits, switches bool
	}{
		"kept":                  {inForce, template(100, policy.CarryKeep), 6, 35, 100, false, true},
		"clamped":               {inForce, template(30, policy.CarryKeep), 6, 30, 30, false, true},
		"in proportion":         {inForce, template(30, policy.CarryProportional), 6, 17, 30, false, true},
		"dropped":               {inForce, template(30, policy.CarryReset), 6, 0, 30, true, true},
		"the same policy":       {inForce, template(60, policy.CarryKeep), 6, 35, 60, false, true},
		"under its version":     {inForce, template(100, policy.CarryKeep), 5, 20, 60, false, false},
		"an older template":     {inForce, template(100, policy.CarryKeep), 4, 20, 60, false, false},
		"an override":           {own, template(100, policy.CarryKeep), 6, 20, 60, false, false},
		"a configured bucket":   {configured, template(100, policy.CarryKeep), 6, 35, 100, false, true},
		"a bucket of some pool": {pool, template(100, policy.CarryKeep), 6, 20, 60, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			require.NoError(t, rdb.FlushAll(ctx).Err())
			_, err := lua.Refill(ctx, rdb, key, policy.Call{Create: policy.CreateInitial, Terms: &tc.inForce})
			require.NoError(t, err)
			require.NoError(t, rdb.Set(ctx, key, 20, 0).Err())
			refilled90MinutesAgo := time.Now().Add(-90 * time.Minute).UnixMicro()
			st := fmt.Sprintf("%16d %16d 1 0", refilled90MinutesAgo, refilled90MinutesAgo)
			require.NoError(t, rdb.HSet(ctx, lua.ControlKey(key), "st", st).Err())
			before := rdb.HGetAll(ctx, lua.ControlKey(key)).Val()

			set, err := policy.NewTemplates(tc.version, []policy.Template{tc.template}, nil)
			require.NoError(t, err)
			reply, err := kindOf(set.Of(key), false).peek(ctx, rdb, key)
			require.NoError(t, err)
			require.Equal(t, tc.tokens, reply.Tokens)
			require.Equal(t, tc.limit, reply.Terms.Capacity)
			require.Equal(t, tc.waits, reply.Wait > 0)
			require.Equal(t, tc.switches, reply.Last > refilled90MinutesAgo)

			require.Equal(t, before, rdb.HGetAll(ctx, lua.ControlKey(key)).Val(), "nothing is written")
			require.EqualValues(t, 20, tokens(t, rdb, key))
		})
	}
}

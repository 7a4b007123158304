package lua_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// A change of the options for consumers, or of the way in which the same rate is written, changes no amount. So it does
// not empty the bucket.
func TestAVersionThatChangesNoAmountEmptiesNoBucket(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	base := policy.Policy{Capacity: 1000, Rate: policy.Rate{Tokens: 1, Per: time.Hour}, CarryOver: policy.CarryReset}
	for name, change := range map[string]func(p *policy.Policy){
		"nothing":       func(p *policy.Policy) {},
		"degraded":      func(p *policy.Policy) { p.Degraded = policy.DegradedOpen },
		"shadow":        func(p *policy.Policy) { p.Shadow = true },
		"on_loss":       func(p *policy.Policy) { p.OnLoss = policy.LossFull },
		"strict":        func(p *policy.Policy) { p.Strict = true },
		"rate in words": func(p *policy.Policy) { p.Rate = policy.Rate{Tokens: 2, Per: 2 * time.Hour} },
	} {
		one, two := base.Terms(policy.Fence{Epoch: 1}), base
		o, err := lua.Refill(ctx, rdb, name, policy.Call{Terms: &one, Create: policy.CreateInitial})
		assert.NoError(t, err)
		change(&two)
		later := two.Terms(policy.Fence{Epoch: 2})
		after, err := lua.Refill(ctx, rdb, name, policy.Call{Version: o.Version, Terms: &later})
		assert.NoError(t, err)
		assert.EqualValues(t, 1000, after.Tokens, "%s: %d before", name, o.Tokens)
	}
}

package model_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/model"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// If a bucket lost the key with its tokens, returned tokens are dropped. Only a refill restores the key, according to
// the bucket's on_loss.
func TestAReturnToABucketThatLostItsTokensLeavesNone(t *testing.T) {
	t.Parallel()
	terms := policy.Policy{Capacity: 300, Rate: policy.PerSecond(300)}.Terms(policy.Fence{Epoch: 1})
	_, s := model.Step(model.State{}, model.Input{Refill: &model.Refill{
		Call: policy.Call{Create: policy.CreateInitial, Terms: &terms}, Now: 1_800_000_000_000_000}})
	require.EqualValues(t, 300, s.Tokens)
	_, s = model.Step(s, model.Input{Lose: "tokens"})
	returns := func(left, clamped int64) bool {
		ok, after := model.Step(s, model.Input{Op: &record.Op{Kind: record.Return, N: 24, Result: record.Done, Left: left,
			Clamped: clamped}})
		require.Equal(t, s, after)
		return ok
	}
	require.True(t, returns(0, 24))
	require.False(t, returns(24, 0))
	require.False(t, returns(24, 24))
}

package lua

import (
	"context"

	"github.com/tokenrefill/refiller/policy"
)

// OperatorReply is the reply to an operator's action.
type OperatorReply struct {
	Tokens  int64 // in the bucket after it
	Clamped int64 // tokens asked for that the capacity could not hold
	Version policy.Version
}

// Grant adds n tokens to the bucket, up to its capacity. n is 1 to policy.MaxTokens.
func Grant(ctx context.Context, c Client, key string, n int64) (OperatorReply, error) {
	if err := checkAmount(n); err != nil {
		return OperatorReply{}, err
	}
	return grantScript.operate(ctx, c, key, n)
}

// Reset sets the number of the bucket's tokens, at most to its capacity. A negative number means the capacity. Reset
// also drops the credit of the time up to now.
func Reset(ctx context.Context, c Client, key string, tokens int64) (OperatorReply, error) {
	return resetScript.operate(ctx, c, key, max(-1, tokens))
}

func (s *script) operate(ctx context.Context, c Client, key string, n int64) (OperatorReply, error) {
	r, _, err := s.ask(ctx, c, bucketKeys(key), []any{n}, codeDone)
	if err != nil {
		return OperatorReply{}, err
	}
	reply := OperatorReply{Tokens: r.Int(), Clamped: r.Int(), Version: policy.Version{Era: r.Int(), Index: r.Int()}}
	return reply, r.End()
}

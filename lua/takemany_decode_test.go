package lua

import (
	"context"

	"github.com/tokenrefill/refiller/policy"
)

func init() {
	calls["TakeMany"] = struct {
		good any
		call func(context.Context, Client) (any, error)
	}{
		[]any{int64(0), int64(5), int64(1), int64(2), int64(3), int64(4), "", int64(1), int64(7)},
		func(ctx context.Context, c Client) (any, error) {
			return TakeMany(ctx, c, "b", []policy.Run{{N: 1, Count: 2}}, true)
		},
	}
}

package traffic

import (
	"context"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/override"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// Own is the override that an operator sets for one key of a template.
var Own = policy.Override{Capacity: 260, Rate: policy.PerSecond(400)}

// intervene is the mean pause between two operations of an operator.
const intervene = 700 * time.Millisecond

// operate grants tokens to a bucket or resets it, again and again.
func (c *caller) operate(ctx context.Context) {
	for c.pause(ctx, intervene) {
		callCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.t.deadline())
		n := 1 + c.rng.Int64N(100)
		op := c.begin(record.Grant, n)
		var err error
		if c.rng.IntN(2) == 0 {
			var reply lua.OperatorReply
			reply, err = lua.Grant(callCtx, c.rdb, c.key, n)
			op.Clamped = reply.Clamped
		} else {
			op.Kind = record.Reset
			_, err = lua.Reset(callCtx, c.rdb, c.key, n)
		}
		cancel()
		c.finish(&op, err == nil, err)
		c.t.ops.Add(op)
	}
}

// override sets an override for a key of a template, removes it, and so on. It ignores errors: a later round repeats
// the operation.
func (c *caller) override(ctx context.Context) {
	store := override.New(c.rdb)
	for own := true; c.pause(ctx, intervene); own = !own {
		callCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 4*c.t.deadline()) // several calls
		if own {
			_, _ = store.Set(callCtx, c.key, Own)
		} else {
			_, _ = store.Unset(callCtx, c.key)
		}
		cancel()
	}
}

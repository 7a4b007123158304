package fetch

import (
	"context"
	"errors"
	"sync"

	"github.com/tokenrefill/refiller/lua"
)

// Return gives n tokens back, up to the bucket's capacity. Tokens for which the bucket has no room are dropped. n is 1
// to policy.MaxTokens. Use it if the Result of the take was not kept. Return doesn't check where the tokens are from:
// after a take or a Wait that a degraded mode admitted, it would add tokens that no bucket gave. Undo returns only
// tokens that a bucket gave, and only in the same era.
//
// If the bucket has no policy, the error is ErrUnknownBucket. After ErrUnavailable the tokens may have been returned,
// so don't return them again. Return has no degraded mode.
func (c *Client) Return(ctx context.Context, key string, n int64, opts ...CallOption) error {
	return c.putBack(ctx, Call{Op: OpReturn, Key: key, Tokens: n}, n, nil, opts)
}

// Undo gives back the tokens of r, the result of a take or a Wait, to the era of the bucket from which they came
// (Result.Era). If that era is over, they are dropped. In the first ten seconds of a new era, tokens that were taken
// from it may be dropped, too, because Result.Era may be the earlier era. The flow that paid for the tokens gets its
// right back (WithFlow).
//
// Tokens that no bucket gave do not go back to the bucket: those that a degraded mode granted (SourceFallback), and
// those that a bucket in shadow mode lacked. Tokens that this Client granted in degraded mode policy.DegradedLocal go
// back to its part of the bucket, unless the bucket has answered a take since. Undo makes no call for them.
//
// For a denial Undo does nothing. It is not for a Reservation, which Settle ends. The errors are those of Return. Call
// Undo only once for a Result, and only once for a request id: after the Undo, the bucket still remembers the request
// as charged.
func (c *Client) Undo(ctx context.Context, key string, r Result) error {
	n := r.Taken - r.lacked
	if r.Source.Kind == SourceFallback || !r.OK {
		n = 0
	}
	err := c.putBack(ctx, Call{Op: OpReturn, Key: key, Tokens: n}, max(n, 1), &r, nil)
	if err == nil {
		c.giveToShare(key, r.loan, r.Taken-r.lacked)
	}
	return err
}

// giveToShare returns n tokens of a loan to the share of a bucket. It reports how many it returned.
func (c *Client) giveToShare(key string, l *loan, n int64) (returned int64) {
	returned = l.giveBack(n)
	if returned > 0 {
		c.moreTokens(key)
	}
	return returned
}

// UndoAll gives back the tokens of all, the result of a TakeAll. For each of its requests it returns the tokens that
// Undo would return, all at once. For a denial it does nothing. If one bucket's server is unavailable, the others still
// get their tokens; the errors are joined. Call it once.
func (c *Client) UndoAll(ctx context.Context, all AllResult) error {
	errs := make([]error, len(all.keys))
	var wg sync.WaitGroup
	for i, key := range all.keys {
		wg.Go(func() { errs[i] = c.Undo(ctx, key, all.Results[i]) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// moreTokens is called when a bucket has more tokens than its last reply reported. It forgets the bucket's denial, and
// makes the waiters of the bucket ask at once.
func (c *Client) moreTokens(key string) {
	if ls := c.buckets.forgive(key).lines.Load(); ls != nil {
		ls.wake()
	}
}

// putBack makes a call that returns tokens, if there are any. If of is a result, the tokens are returned to its era,
// with the right that its flow paid. If of is nil, they are returned to any era.
func (c *Client) putBack(ctx context.Context, call Call, amount int64, of *Result, opts []CallOption) error {
	_, err := c.call(ctx, call, amount, opts, func(ctx context.Context, cfg *callConfig) (Result, error) {
		key, n := call.Key, call.Tokens
		if n == 0 {
			return Result{OK: true}, nil
		}
		t := c.begin(budgetOf(ctx, cfg), key)
		if of != nil && !t.kind.has(of.Era) { // the template's enforce has changed, so that bucket no longer exists
			c.stats.clamped.Add(n)
			return Result{OK: true}, nil
		}
		back := lua.ReturnCall{N: n}
		if of != nil {
			back.Era = of.Era
		}
		if of != nil && of.paid != nil {
			back.Flow, back.Paid = of.paid.flow, min(n, of.paid.tokens)
		}
		var reply lua.ReturnReply
		err := t.attempt(false, func() (err error) {
			reply, err = t.kind.giveBack(t.ctx, t, key, back)
			return err
		})
		c.moreTokens(key)
		if errors.Is(err, lua.ErrOtherEra) {
			reply, err = lua.ReturnReply{Clamped: n}, nil
		}
		c.stats.clamped.Add(reply.Clamped)
		return Result{OK: err == nil}, err
	})
	return err
}

package fetch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Op is the kind of a call of a Client.
type Op uint8

// The kinds of calls.
const (
	OpTake Op = iota
	OpTakeUpTo
	OpTakeAll
	OpWait
	OpPeek
	OpReturn // also the calls of Undo
	OpReserve
	OpSettle
)

// String names the call as logs and metrics do.
func (o Op) String() string {
	names := [...]string{"take", "take_up_to", "take_all", "wait", "peek", "return", "reserve", "settle"}
	if int(o) >= len(names) {
		return "invalid"
	}
	return names[o]
}

// Call is a call of a Client's method.
type Call struct {
	Op       Op
	Key      string    // of the bucket; of the first bucket of a TakeAll
	Tokens   int64     // asked for, in all buckets together; for a Settle the tokens used, for a Peek 0
	Requests []Request // of a TakeAll
}

// Outcome is how a call ended.
type Outcome struct {
	// Result is the result of the call. For Return and Settle only OK is set. For TakeAll OK, RetryAfter and Shadow are
	// set, Taken is the sum, and Source is the Source with the highest Kind among its results.
	Result Result
	// Results has the result of each request of a TakeAll, in the order of the requests; nil for other calls.
	Results []Result
	Err     error
	// Reason is the reason for which the bucket's server did not answer, even if the degraded mode then granted the call.
	// If the server answered, it is ReasonNone.
	Reason   Reason
	Duration time.Duration
}

// Name returns the name of the outcome in logs, metrics and traces. It is taken, denied or done. If the call failed it
// is unavailable, deadline, cancelled, unknown_bucket, exceeds_capacity or refused.
func (o Outcome) Name(op Op) string {
	for _, e := range []struct {
		err  error
		name string
	}{
		{ErrUnavailable, "unavailable"}, {context.DeadlineExceeded, "deadline"}, {context.Canceled, "cancelled"},
		{ErrUnknownBucket, "unknown_bucket"}, {ErrExceedsCapacity, "exceeds_capacity"},
	} {
		if errors.Is(o.Err, e.err) {
			return e.name
		}
	}
	switch {
	case o.Err != nil:
		return "refused"
	case op == OpPeek || op == OpReturn || op == OpSettle:
		return "done"
	case o.Result.OK:
		return "taken"
	}
	return "denied"
}

// Hook observes every call of a Client. Its methods run in the caller's goroutine; they must be fast and safe for
// concurrent use. Packages fetchprom and fetchotel have hooks that make metrics and traces for Prometheus and
// OpenTelemetry.
type Hook interface {
	// Begin is called before a call. The call continues with the returned context, which is ctx or derived from it.
	Begin(ctx context.Context, call Call) context.Context
	// End is called after a call, with the context that this hook's Begin returned.
	End(ctx context.Context, call Call, outcome Outcome)
}

// BreakerHook is a Hook that also observes the breakers, which stop calls to servers that don't answer.
type BreakerHook interface {
	Hook
	// Breaker is called when the breaker of a server opens, and when it closes. why is the reason for which calls failed,
	// or ReasonNone if the breaker closes. server is the address of the server. It is empty if the SDK doesn't know the
	// type of the Redis client, and for a Cluster that was never reached. Breaker runs in a goroutine of the Client. The
	// probes of that server wait until it returns.
	Breaker(server string, why Reason)
}

// WithHook adds a hook that observes every call. If there are several hooks, Begin of the first one is called first,
// and its End last.
func WithHook(h Hook) Option {
	return clientOption(func(c *config) error {
		if h == nil {
			return fmt.Errorf("%w: the hook is nil", ErrInvalidOption)
		}
		c.hooks = append(c.hooks, h)
		return nil
	})
}

// breakerChanged records that the breaker of a server has opened or closes. If it has opened, the lines of the server's
// buckets ask at once, so that the degraded mode decides about their waiters, and about the takes that they hold back.
func (c *Client) breakerChanged(s *node, open bool) {
	why := ReasonNone
	if open {
		c.stats.opened.Add(1)
		why = s.why()
		for _, b := range c.buckets.waited() {
			if c.nodes.of(b.key) == s {
				b.lines.Load().wake()
			}
		}
	}
	for _, h := range c.config.hooks {
		if b, ok := h.(BreakerHook); ok {
			b.Breaker(s.addr, why)
		}
	}
}

// call makes a call for a bucket and an amount of tokens, with its options, while the hooks observe it.
func (c *Client) call(ctx context.Context, call Call, amount int64, opts []CallOption,
	do func(context.Context, *callConfig) (Result, error)) (Result, error) {
	cfg, invalid := c.with(call.Op, opts)
	if len(c.config.hooks) == 0 {
		if err := cmp.Or(invalid, c.check(ctx, call.Key, amount)); err != nil {
			return Result{}, err
		}
		return do(ctx, cfg)
	}
	o := c.observe(ctx, call, func(ctx context.Context, o *Outcome) {
		o.Err = cmp.Or(invalid, c.check(ctx, call.Key, amount))
		if o.Err == nil {
			o.Result, o.Err = do(ctx, cfg)
		}
	})
	return o.Result, o.Err
}

// observe makes a call that fills in its outcome, while the hooks observe it.
func (c *Client) observe(ctx context.Context, call Call, do func(context.Context, *Outcome)) (o Outcome) {
	hooks := c.config.hooks
	var few [2]context.Context
	begun := few[:0]
	for _, h := range hooks {
		ctx = h.Begin(ctx, call)
		begun = append(begun, ctx)
	}
	began := time.Now()
	do(ctx, &o)
	o.Duration, o.Reason = time.Since(began), o.Result.Source.Reason
	if o.Err != nil {
		o.Reason = ReasonOf(o.Err)
	}
	for i, h := range slices.Backward(hooks) {
		h.End(begun[i], call, o)
	}
	return o
}

package call

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/answer"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Wait takes tokens within timeout and returns the time that it waited. If the tokens aren't due in time, the result is
// a denial, which is an empty Result.
func Wait(
	ctx context.Context, c *fetch.Client, key string, n int64, timeout time.Duration, opts []fetch.CallOption,
) (r fetch.Result, waited time.Duration, err error) {
	began := time.Now()
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	r, err = c.Wait(within, key, n, opts...)
	if Late(ctx, err) {
		r, err = fetch.Result{}, nil
	}
	return r, time.Since(began), err
}

// Late reports whether err means that the tokens of a Wait were not due in time. It returns false if Redis was
// unavailable, or if the caller's ctx has ended.
func Late(ctx context.Context, err error) bool {
	return errors.Is(err, fetch.ErrDeadline) ||
		errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, fetch.ErrUnavailable) && ctx.Err() == nil
}

// Returnable returns an error if source is a degraded mode or shadow mode. Such tokens came from no bucket, so their
// return would create tokens. source is from the reply that granted the tokens. An empty source is accepted.
func Returnable(source string) error {
	kind, _, _ := strings.Cut(source, ":")
	if kind == fetch.SourceFallback.String() || kind == answer.SourceShadow {
		return fmt.Errorf("%w: source: tokens of %q came from no bucket, so they can't be returned", ErrBadRequest, source)
	}
	return nil
}

// Leave returns the option for the tokens that a call must leave. It returns no option if s is empty.
func Leave(s string) ([]fetch.CallOption, error) {
	if s == "" {
		return nil, nil
	}
	l, err := policy.ParseLeave(s)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadRequest, err)
	}
	return []fetch.CallOption{LeaveOption(l)}, nil
}

// Options returns the options of a take from the fields of its request: the tokens that it must leave, its flow, and
// its request id. An empty leave and a nil flow or id add no option.
func Options(leave string, flow, requestID *string) ([]fetch.CallOption, error) {
	opts, err := Leave(leave)
	if err != nil {
		return nil, err
	}
	inFlow, err := Flow(flow)
	if err != nil {
		return nil, err
	}
	opts = append(opts, inFlow...)
	if requestID == nil {
		return opts, nil
	}
	if err := lua.CheckRequestID(*requestID); err != nil {
		return nil, fmt.Errorf("%w: request_id: %w", ErrBadRequest, err)
	}
	return append(opts, fetch.WithRequestID(*requestID)), nil
}

// Flow returns the option for the flow of a take. It returns no option if flow is nil.
func Flow(flow *string) ([]fetch.CallOption, error) {
	name, err := FlowName(flow)
	if err != nil || flow == nil {
		return nil, err
	}
	return []fetch.CallOption{fetch.WithFlow(name)}, nil
}

// FlowName returns the name of a flow in a request. It is empty if flow is nil.
func FlowName(flow *string) (string, error) {
	if flow == nil {
		return "", nil
	}
	if *flow == "" {
		return "", fmt.Errorf("%w: flow: it is empty; want 1 to %d bytes", ErrBadRequest, policy.MaxFlowLen)
	}
	if err := policy.CheckFlow(*flow); err != nil {
		return "", fmt.Errorf("%w: flow: %w", ErrBadRequest, err)
	}
	return *flow, nil
}

// LeaveOption returns the option of a call that must leave l.
func LeaveOption(l policy.Leave) fetch.CallOption {
	if l.Percent > 0 {
		return fetch.WithLeavePercent(l.Percent)
	}
	return fetch.WithLeave(l.Tokens)
}

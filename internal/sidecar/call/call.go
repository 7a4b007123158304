package call

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/policy"
)

// Wait takes tokens within timeout and tells whether it did and how long it
// took. Tokens that aren't due in time are a denial.
func Wait(
	ctx context.Context, c *fetch.Client, key string, n int64, timeout time.Duration, opts []fetch.CallOption,
) (ok bool, waited time.Duration, err error) {
	began := time.Now()
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	_, err = c.Wait(within, key, n, opts...)
	// A Redis that is away is an error, and so is the end of the caller's own time.
	late := errors.Is(err, fetch.ErrDeadline) ||
		errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, fetch.ErrUnavailable) && ctx.Err() == nil
	if late {
		err = nil
	} else {
		ok = err == nil
	}
	return ok, time.Since(began), err
}

// Leave is what a call must leave, as a request says it; nothing if that is empty.
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

// LeaveOption returns the option of a call that must leave l.
func LeaveOption(l policy.Leave) fetch.CallOption {
	if l.Percent > 0 {
		return fetch.WithLeavePercent(l.Percent)
	}
	return fetch.WithLeave(l.Tokens)
}

package limit

import (
	"context"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/schedule"
)

// Limiter has tokens to take. A fetch.Client, Many and every limiter below this package are Limiters.
type Limiter interface {
	// Take takes n tokens, all or nothing. A denial is a result, not an error. Every Limiter accepts fetch.WithTimeout.
	// For an option that it doesn't accept, it returns fetch.ErrInvalidOption.
	Take(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error)
}

// Undoer is a Limiter to which the tokens of a Take can be returned. A pacing.Limiter is no Undoer, because its places
// can't be returned. Many is no Undoer, because its Undo needs a Decision.
type Undoer interface {
	// Undo returns the tokens of r to the bucket, window or schedule from which they were taken.
	Undo(ctx context.Context, key string, r fetch.Result) error
}

var (
	_ Limiter = (*fetch.Client)(nil)
	_ Undoer  = (*fetch.Client)(nil)
	_ Undoer  = (*schedule.Limiter)(nil)
	_ Limiter = (*Many)(nil)
	_ Limiter = (*schedule.Limiter)(nil)
)

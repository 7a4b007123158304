package limit

import (
	"context"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/schedule"
)

// Limiter is what takes tokens: a fetch.Client, any limiter below this package, and Many.
type Limiter interface {
	// Take takes n tokens, all or nothing. A denial is a result. Every Limiter knows fetch.WithTimeout; an option that
	// it doesn't know is fetch.ErrInvalidOption.
	Take(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error)
}

// Undoer is a Limiter that takes back what a Take took. Pacing's places can't be given back, and Many takes back a
// Decision.
type Undoer interface {
	// Undo gives back what r took, to where it came from.
	Undo(ctx context.Context, key string, r fetch.Result) error
}

var (
	_ Limiter = (*fetch.Client)(nil)
	_ Undoer  = (*fetch.Client)(nil)
	_ Undoer  = (*schedule.Limiter)(nil)
	_ Limiter = (*Many)(nil)
	_ Limiter = (*schedule.Limiter)(nil)
)

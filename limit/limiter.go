package limit

import (
	"context"

	"github.com/tokenrefill/refiller/fetch"
)

// Limiter is what takes tokens: a fetch.Client, any limiter below this package, and Many.
type Limiter interface {
	// Take takes n tokens, all or nothing. A denial is a result. Every Limiter knows fetch.WithTimeout; an option that
	// it doesn't know is fetch.ErrInvalidOption.
	Take(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error)
}

// Undoer is a Limiter that takes back what a Take took: all but those of pacing, and Many, whose Decision tells it.
type Undoer interface {
	// Undo gives back what r took, to where it came from.
	Undo(ctx context.Context, key string, r fetch.Result) error
}

var (
	_ Limiter = (*fetch.Client)(nil)
	_ Undoer  = (*fetch.Client)(nil)
	_ Limiter = (*Many)(nil)
)

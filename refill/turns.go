package refill

import (
	"context"
	"time"
)

// source returns the next call for some work; nil if none is due.
type source func(ctx context.Context, now time.Time) call

// turns lets two sources take turns. Neither makes two calls in a row while a call of the other one is due. Otherwise
// one source would stop the other, if a call took longer than the time until its own next call is due.
type turns struct {
	first bool // the last call was the first source's
}

// next returns the next call of two sources; nil if none is due. Before the first call, it is the first source's turn.
func (t *turns) next(ctx context.Context, now time.Time, first, second source) call {
	if t.first {
		if c := second(ctx, now); c != nil {
			t.first = false
			return c
		}
		return first(ctx, now)
	}
	if c := first(ctx, now); c != nil {
		t.first = true
		return c
	}
	return second(ctx, now)
}

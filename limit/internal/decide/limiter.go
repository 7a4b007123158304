package decide

import (
	"context"

	"github.com/tokenrefill/refiller/fetch"
)

// Limiter is a rule with what answers for it.
type Limiter struct {
	Rule   Rule
	Engine Engine
}

// Do makes one call.
func (l *Limiter) Do(ctx context.Context, key string, what What, n int64) (fetch.Result, error) {
	o, err := l.Engine.Do(ctx, key, what, n)
	if err != nil {
		return fetch.Result{}, err
	}
	return o.Result(l.Rule.Limit, n, what), nil
}

// Return gives tokens back.
func (l *Limiter) Return(ctx context.Context, key string, n int64) error {
	_, err := l.Engine.Do(ctx, key, Return, n)
	return err
}

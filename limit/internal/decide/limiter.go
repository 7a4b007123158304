package decide

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
)

// Limiter is a rule with what answers for it.
type Limiter struct {
	Rule   Rule
	Engine Engine
}

// OnRedis makes the Limiter of a config's rule that asks Redis.
func OnRedis(rdb redis.UniversalClient, config func() (Rule, error)) (Limiter, error) {
	if rdb == nil {
		return Limiter{}, errNoRedis
	}
	r, err := config()
	if err != nil {
		return Limiter{}, err
	}
	return Limiter{r, NewScript(rdb, r)}, nil
}

// InProcess makes the Limiter of a config's rule that asks this process's memory,
// on the clock now.
func InProcess(now func() time.Time, config func() (Rule, error)) (Limiter, error) {
	if now == nil {
		return Limiter{}, errNoClock
	}
	r, err := config()
	if err != nil {
		return Limiter{}, err
	}
	return Limiter{r, NewMemory(now, r)}, nil
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

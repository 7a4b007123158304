package decide

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/redisclient"
)

// Limiter is a rule with the Engine that decides by it.
type Limiter struct {
	Rule   Rule
	Engine Engine
}

// OnRedis makes a Limiter for the rule of a config. Its state is in Redis.
func OnRedis(rdb redis.UniversalClient, config func() (Rule, error)) (Limiter, error) {
	if redisclient.IsNil(rdb) {
		return Limiter{}, errNoRedis
	}
	r, err := config()
	if err != nil {
		return Limiter{}, err
	}
	return Limiter{r, NewScript(rdb, r)}, nil
}

// InProcess makes a Limiter for the rule of a config. Its state is in this process's memory, and now is its clock.
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

// Ask makes one call. The only option is fetch.WithTimeout.
func (l *Limiter) Ask(ctx context.Context, what What, n int64, of Ask, opts []fetch.CallOption) (Outcome, error) {
	ctx, cancel, err := Within(ctx, opts)
	if err != nil {
		return Outcome{}, err
	}
	defer cancel()
	return l.Engine.Do(ctx, what, n, of)
}

// Do makes one call and returns its outcome as a Result.
func (l *Limiter) Do(ctx context.Context, key string, what What, n int64, opts []fetch.CallOption) (fetch.Result,
	error) {
	o, err := l.Ask(ctx, what, n, Ask{Key: key}, opts)
	if err != nil {
		return fetch.Result{}, err
	}
	return o.Result(l.Rule.Limit, n, what), nil
}

// Undo returns the tokens of a take with the result r.
func (l *Limiter) Undo(ctx context.Context, key string, r fetch.Result) error {
	if r.Taken == 0 {
		return nil
	}
	_, err := l.Engine.Do(ctx, Return, r.Taken, Ask{key, r.Era})
	return err
}

// Reset drops what is stored for a key.
func (l *Limiter) Reset(ctx context.Context, key string) error {
	return l.Engine.Reset(ctx, Ask{Key: key})
}

// Within returns ctx with the timeout that the options of a call set.
func Within(ctx context.Context, opts []fetch.CallOption) (context.Context, context.CancelFunc, error) {
	d := time.Duration(0)
	for _, o := range opts {
		timed, ok := o.(interface{ Timeout() (time.Duration, error) })
		if !ok {
			return ctx, nil, fmt.Errorf("%w: an option is %v; want fetch.WithTimeout", fetch.ErrInvalidOption, o)
		}
		var err error
		d, err = timed.Timeout()
		if err != nil {
			return ctx, nil, err
		}
	}
	if d == 0 {
		return ctx, func() {}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, d)
	return ctx, cancel, nil
}

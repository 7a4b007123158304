package pacing

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/internal/decide"
	"github.com/tokenrefill/refiller/policy"
)

//go:embed pacing.lua
var source string

// ErrConfig is returned for a Config that is out of range; the error names the
// field.
var ErrConfig = errors.New("pacing: bad config")

// Config is the interval between places, and the length of the queue.
type Config struct {
	// Name distinguishes limits that share their keys: at most 64 letters, digits and _ . - / :. With a name, {K}:pace
	// becomes {K}:pace:name.
	Name string
	// Rate is the number of places per time.
	Rate policy.Rate
	// MaxWait is the longest time that a take may have to wait for its place, in whole microseconds. With 0, a take is
	// admitted only if its place is free now. A queue has at most policy.MaxTokens places.
	MaxWait time.Duration
}

func init() { decide.Define(Config.rule) }

// Validate reports whether the Config is in range; the error names the field.
func (c Config) Validate() error {
	_, err := c.rule()
	return err
}

// rule returns the limit as a Rule. limit.Many makes one decision by the Rules of several limits.
func (c Config) rule() (decide.Rule, error) {
	if err := decide.CheckName(c.Name); err != nil {
		return decide.Rule{}, err
	}
	if c.MaxWait < 0 || c.MaxWait > policy.MaxPer || c.MaxWait%time.Microsecond != 0 {
		return decide.Rule{}, fmt.Errorf("max wait: %s is not from 0 to %s in whole microseconds", c.MaxWait, policy.MaxPer)
	}
	if err := decide.CheckRate(c.Rate); err != nil {
		return decide.Rule{}, err
	}
	places := c.Rate.Over(c.MaxWait) + 1
	if places > policy.MaxTokens {
		return decide.Rule{}, fmt.Errorf("max wait: at %s, %s has more than %d places; want at most %s", c.Rate, c.MaxWait,
			int64(policy.MaxTokens), c.Rate.TimeFor(policy.MaxTokens)-time.Microsecond)
	}
	s, err := decide.NewSpacing(c.Rate, 2*places) // a take of all places may begin at the last place
	if err != nil {
		return decide.Rule{}, err
	}
	r := decide.Rule{
		Name: c.Name, Kind: "pacing", Suffix: "pace", Source: source,
		Args:  [3]int64{s.Tokens, s.Per, c.MaxWait.Microseconds()},
		Limit: places, Window: s.For(places), Text: fmt.Sprintf("%s, evenly, waiting %s at most", c.Rate, c.MaxWait),
	}
	return decide.WithModel(r, newModel(r)), nil
}

// Limiter limits any number of queues with one Config. It is safe for concurrent use.
type Limiter struct{ core decide.Limiter }

// New makes a Limiter on Redis. It sends nothing. Its errors match ErrConfig.
func New(rdb redis.UniversalClient, cfg Config) (*Limiter, error) {
	return newLimiter(decide.OnRedis(rdb, cfg.rule))
}

// NewLocal makes a Limiter that keeps its state in this process, on the clock now, such as time.Now. Its errors match
// ErrConfig.
func NewLocal(cfg Config, now func() time.Time) (*Limiter, error) {
	return newLimiter(decide.InProcess(now, cfg.rule))
}

func newLimiter(core decide.Limiter, err error) (*Limiter, error) {
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	return &Limiter{core}, nil
}

// Place is a place in a queue.
type Place struct {
	// OK reports whether there was a place. Limit is the number of places in an empty queue, and Remaining is the number
	// of places that are left. RetryAfter is the time until there is a place. ResetAfter is the time until the queue is
	// empty.
	fetch.Result
	// Wait is the time until the place; 0 if there was none.
	Wait time.Duration
}

// Reserve takes n places in a row, 1 to the number of places, and returns at once. Its option is fetch.WithTimeout. The
// work of n tokens may begin after Place.Wait. A denial is a result.
func (l *Limiter) Reserve(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (Place, error) {
	o, err := l.core.Ask(ctx, decide.Take, n, decide.Ask{Key: key}, opts)
	if err != nil {
		return Place{}, err
	}
	p := Place{Result: o.Result(l.core.Rule.Limit, n, decide.Take)}
	if p.OK {
		p.Wait = o.Start()
	}
	return p, nil
}

// Take takes n places in a row and waits for the first of them. fetch.WithTimeout bounds the call, not the wait. If the
// wait would be longer than MaxWait, Take returns a denial at once. If ctx ends before the place, the place remains
// unused and the error is that of ctx.
func (l *Limiter) Take(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error) {
	p, err := l.Reserve(ctx, key, n, opts...)
	if err == nil {
		err = decide.Wait(ctx, p.Wait)
	}
	if err != nil {
		return fetch.Result{}, err
	}
	return p.Result, nil
}

// Peek returns how many places are left and takes none. The result is OK if there is a place.
func (l *Limiter) Peek(ctx context.Context, key string, opts ...fetch.CallOption) (fetch.Result, error) {
	return l.core.Do(ctx, key, decide.Peek, 1, opts)
}

// Reset empties a key's queue. Callers that already have a place keep it.
func (l *Limiter) Reset(ctx context.Context, key string) error { return l.core.Reset(ctx, key) }

// String describes the limit, such as "10/s, evenly, waiting 2s at most".
func (l *Limiter) String() string { return l.core.Rule.Text }

// Window returns the time that the places of an empty queue span.
func (l *Limiter) Window() time.Duration { return l.core.Rule.Window }

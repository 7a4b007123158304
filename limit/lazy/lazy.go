package lazy

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

//go:embed lazy.lua
var source string

// ErrConfig is returned for a Config that is out of range; the error names the
// field.
var ErrConfig = errors.New("lazy: bad config")

// Config is the capacity and the rate of a bucket.
type Config struct {
	// Name distinguishes limits that share their keys: at most 64 letters, digits and _ . - / :. With a name, {K}:lazy
	// becomes {K}:lazy:name.
	Name string
	// Capacity is the largest number of tokens that a bucket holds, at least 1. The product of Capacity and Rate.Per, in
	// µs and with the rate in lowest terms, is at most 2^52. So a million tokens are possible at 1/h, but not at 1/d.
	Capacity int64
	// Rate is the number of tokens that a bucket earns per time.
	Rate policy.Rate
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
	if c.Capacity < 1 || c.Capacity > policy.MaxTokens {
		return decide.Rule{}, fmt.Errorf("capacity: %d is not a whole number from 1 to %d; to have no limit, use no limiter",
			c.Capacity, int64(policy.MaxTokens))
	}
	s, err := decide.NewSpacing(c.Rate, c.Capacity)
	if err != nil {
		return decide.Rule{}, err
	}
	r := decide.Rule{
		Name: c.Name, Kind: "lazy", Suffix: "lazy", Source: source, Args: [3]int64{s.Tokens, s.Per, c.Capacity},
		Limit: c.Capacity, Window: s.For(c.Capacity), Text: fmt.Sprintf("%d, then %s", c.Capacity, c.Rate),
	}
	return decide.WithModel(r, newModel(r)), nil
}

// DrainTime returns the time in which an empty bucket fills. The key of an idle bucket expires after that time at the
// latest. For a Config that is out of range, DrainTime returns 0.
func (c Config) DrainTime() time.Duration {
	r, err := c.rule()
	if err != nil {
		return 0
	}
	return r.Window
}

// Limiter limits any number of buckets with one Config. It is safe for concurrent use.
type Limiter struct {
	core decide.Limiter
	fill time.Duration // time from one token to all tokens, rounded down
}

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
	a := core.Rule.Args
	return &Limiter{core, time.Duration((a[2]-1)*a[1]/a[0]) * time.Microsecond}, nil
}

// Take takes n tokens, 1 to the capacity, all or nothing. Its option is fetch.WithTimeout. A denial is a Result whose
// OK is false; it charges nothing. RetryAfter is exact if no other caller takes tokens meanwhile.
func (l *Limiter) Take(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error) {
	return l.core.Do(ctx, key, decide.Take, n, opts)
}

// Peek returns the state of a bucket and takes nothing. The result is OK if there is a token.
func (l *Limiter) Peek(ctx context.Context, key string, opts ...fetch.CallOption) (fetch.Result, error) {
	return l.core.Do(ctx, key, decide.Peek, 1, opts)
}

// Undo returns the tokens of a take with the result r. Call it once for a Result.
func (l *Limiter) Undo(ctx context.Context, key string, r fetch.Result) error {
	return l.core.Undo(ctx, key, r)
}

// Return gives n tokens back, up to the capacity. Use it if the Result of the take was not kept. It doesn't check where
// the tokens are from.
func (l *Limiter) Return(ctx context.Context, key string, n int64, opts ...fetch.CallOption) error {
	_, err := l.core.Do(ctx, key, decide.Return, n, opts)
	return err
}

// Next returns the time until a bucket has a token again, if no other caller takes any. r is the result of a take or
// peek. Next returns 0 if the bucket has a token. It is for callers that were admitted. After a denial, RetryAfter is
// the time to wait.
func (l *Limiter) Next(r fetch.Result) time.Duration {
	if r.Remaining > 0 {
		return 0
	}
	return max(0, r.ResetAfter-l.fill)
}

// Reset makes the bucket of a key full.
func (l *Limiter) Reset(ctx context.Context, key string) error { return l.core.Reset(ctx, key) }

// String describes the limit, such as "60, then 10/s".
func (l *Limiter) String() string { return l.core.Rule.Text }

// Window returns the time in which an empty bucket fills.
func (l *Limiter) Window() time.Duration { return l.core.Rule.Window }

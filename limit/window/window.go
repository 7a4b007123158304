package window

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/calendar"
	"github.com/tokenrefill/refiller/limit/internal/decide"
	"github.com/tokenrefill/refiller/policy"
)

//go:embed fixed.lua
var fixedSource string

//go:embed sliding.lua
var slidingSource string

// ErrConfig is returned for a Config that is out of range; the error names the
// field.
var ErrConfig = errors.New("window: bad config")

// Kind determines when windows begin and end.
type Kind int

// Kinds of windows.
const (
	Fixed   Kind = iota // from the first take on, or those of the calendar
	Sliding             // any stretch of time of the window's length
)

// Slots is the number of slots in a sliding window.
const Slots = 10

// Config is the number of tokens in a window, and its length.
type Config struct {
	// Name distinguishes limits that share their keys: at most 64 letters, digits and _ . - / :. With a name, {K}:win
	// becomes {K}:win:name.
	Name string
	// Kind is Fixed, the default, or Sliding.
	Kind Kind
	// Limit is the largest number of tokens in one window, 1 to policy.MaxTokens. A changed limit is in force at once, and
	// earlier takes of the window count.
	Limit int64
	// Window is the length of the window: whole milliseconds, 1ms to policy.MaxPer.
	Window time.Duration
	// Per makes a Fixed window a unit of the calendar, such as a day from midnight to midnight. Window is then 0.
	Per calendar.Unit
	// In is the time zone of the calendar; nil is UTC.
	In *time.Location
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
	if c.Limit < 1 || c.Limit > policy.MaxTokens {
		return decide.Rule{}, fmt.Errorf("limit: %d is not a whole number from 1 to %d; to have no limit, use no limiter",
			c.Limit, int64(policy.MaxTokens))
	}
	if err := c.checkLength(); err != nil {
		return decide.Rule{}, err
	}
	r := decide.Rule{Name: c.Name, Limit: c.Limit, Window: c.Window, Text: fmt.Sprintf("%d per %s", c.Limit, c.Window)}
	switch c.Kind {
	case Fixed:
		r.Kind = "fixed"
		r.Suffix = "win"
		r.Source = fixedSource
		r.Args = [3]int64{c.Limit, c.Window.Milliseconds()}
		if c.Per.Valid() {
			r.Window = c.Per.Usual()
			r.Text = fmt.Sprintf("%d per %s", c.Limit, c.Per)
			r.Span = c.span
		}
		r.Era = func(now int64, o *decide.Outcome) int64 { return (now + o.Reset) / 1000 }
		return decide.WithModel(r, newFixed(r)), nil
	case Sliding:
		r.Kind = "sliding"
		r.Suffix = "sld"
		r.Source = slidingSource
		r.Args = [3]int64{c.Limit, c.Window.Microseconds() / Slots, Slots}
		r.Era = func(now int64, _ *decide.Outcome) int64 { return now / r.Args[1] }
		return decide.WithModel(r, newSliding(r)), nil
	}
	return decide.Rule{}, fmt.Errorf("kind: %d is neither Fixed nor Sliding", c.Kind)
}

// checkLength reports whether the window has a length, or is one of the calendar.
func (c Config) checkLength() error {
	switch {
	case c.Per != 0 && !c.Per.Valid():
		return fmt.Errorf("per: %s; want calendar.Minute to calendar.Month", c.Per)
	case c.Per.Valid() && c.Window != 0:
		return fmt.Errorf("window: it excludes per, %s", c.Per)
	case c.Per.Valid() && c.Kind == Sliding:
		return errors.New("per: a sliding window follows no calendar")
	case c.Per.Valid():
		return nil
	case c.In != nil:
		return errors.New("in: only a window of the calendar has a time zone")
	case c.Window < time.Millisecond || c.Window > policy.MaxPer || c.Window%time.Millisecond != 0:
		return fmt.Errorf("window: %s is not from 1ms to %s in whole milliseconds", c.Window, policy.MaxPer)
	}
	return nil
}

// span returns the window of the calendar that contains an instant; instants are Unix µs.
func (c Config) span(at int64) (begin, end int64) {
	b, e := c.Per.Span(time.UnixMicro(at), c.In)
	return b.UnixMicro(), e.UnixMicro()
}

// Limiter limits any number of keys with one Config. It is safe for concurrent use.
//
// # A length that changes
//
// If the length changes, earlier takes still count. That is also true while programs with the old and the new length
// share a key, as in a rolling deployment. A fixed window then ends no later than the shorter length allows. If sliding
// windows of several lengths share a key, they admit at most the largest limit in any stretch as long as the shortest
// window. A take counts for at least the shortest length. After that, the longer windows may forget it.
//
// # What is stored
//
// A fixed window K is one integer at {K}:win, the number of tokens taken, which expires with the window. A client that
// uses only INCR and PTTL can share the key. INCR returns the number of tokens taken, and PTTL returns the time to the
// reset. A number above the limit is a denial. If the key expires between the two commands of such a client, INCR
// creates a key that never expires. A Limiter treats a key without an expiry as missing, so a window always ends.
//
// A sliding window is one short string at {K}:sld. It has the newest slot with a take, the length of slots in µs, and
// the number of tokens of this slot and of each before it. It expires when its last take no longer counts. The clock is
// the server's.
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

// Take takes n tokens, 1 to the limit, all or nothing. Its option is fetch.WithTimeout. A denial is a Result whose OK
// is false; it is not counted. ResetAfter is the time until the window ends. RetryAfter is exact if no other caller
// takes tokens meanwhile.
func (l *Limiter) Take(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error) {
	return l.core.Do(ctx, key, decide.Take, n, opts)
}

// Peek returns the state of a window and takes nothing. The result is OK if there is a token.
func (l *Limiter) Peek(ctx context.Context, key string, opts ...fetch.CallOption) (fetch.Result, error) {
	return l.core.Do(ctx, key, decide.Peek, 1, opts)
}

// Undo returns the tokens of a take with the result r, if its window has not ended yet. Otherwise it does nothing. If
// the clock went back so far that the window has not begun, the tokens go back to the present window. Call Undo once
// for a Result.
func (l *Limiter) Undo(ctx context.Context, key string, r fetch.Result) error {
	return l.core.Undo(ctx, key, r)
}

// Return gives n tokens back to the present window, if there is one, up to the limit. Use it if the Result of the take
// was not kept. It doesn't check where the tokens are from.
func (l *Limiter) Return(ctx context.Context, key string, n int64, opts ...fetch.CallOption) error {
	_, err := l.core.Do(ctx, key, decide.Return, n, opts)
	return err
}

// String describes the limit, such as "100 per 1m0s".
func (l *Limiter) String() string { return l.core.Rule.Text }

// Reset begins a key's window anew, with nothing taken.
func (l *Limiter) Reset(ctx context.Context, key string) error { return l.core.Reset(ctx, key) }

// Window returns the length of the window. For a window of the calendar it is the usual length.
func (l *Limiter) Window() time.Duration { return l.core.Rule.Window }

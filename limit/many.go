package limit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/internal/decide"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/lua"
)

// MaxLimits is the most limits in one decision.
const MaxLimits = 16

// Errors of Many, to be matched with errors.Is.
var (
	// ErrConfig is returned for limits that can't be decided together.
	ErrConfig = errors.New("limit: bad config")
	// ErrSlots is returned for keys that a Cluster keeps in different slots, so
	// that no script can see them together. One key for all limits always works.
	ErrSlots = errors.New("limit: keys are in different cluster slots")
)

// Config is a limit that can be one of many: a lazy.Config or a window.Config.
type Config interface {
	Rule() (decide.Rule, error)
}

var (
	_ Config = lazy.Config{}
	_ Config = window.Config{}
)

// Many decides by several limits at once, such as 10 a second and 1,000 a day:
// it takes from all of them or, if one denies, from none. It is safe for
// concurrent use. A decision is one script call, whatever the number of limits.
type Many struct {
	rules  []decide.Rule
	script *decide.Script
	single bool // one server holds all keys
}

// NewMany makes a Many of 1 to MaxLimits limits. Their names, which may not be
// repeated, tell which one denied, and keep limits on the same key apart. The
// errors are ErrConfig.
func NewMany(rdb redis.UniversalClient, limits ...Config) (*Many, error) {
	if rdb == nil {
		return nil, fmt.Errorf("%w: the redis client is nil", ErrConfig)
	}
	if len(limits) < 1 || len(limits) > MaxLimits {
		return nil, fmt.Errorf("%w: %d limits; want 1 to %d", ErrConfig, len(limits), MaxLimits)
	}
	m := &Many{rules: make([]decide.Rule, len(limits))}
	names := map[string]bool{}
	for i, c := range limits {
		if c == nil {
			return nil, fmt.Errorf("%w: limit %d is nil", ErrConfig, i)
		}
		r, err := c.Rule()
		if err != nil {
			return nil, fmt.Errorf("%w: limit %d: %w", ErrConfig, i, err)
		}
		if names[r.Name] {
			return nil, fmt.Errorf("%w: limit %d: the name %q is taken", ErrConfig, i, r.Name)
		}
		names[r.Name], m.rules[i] = true, r
	}
	_, m.single = rdb.(*redis.Client)
	m.script = decide.NewScript(rdb, m.rules...)
	return m, nil
}

// Decision is the answer of several limits.
type Decision struct {
	// Result is that of the strictest limit: of those that denied, the one with
	// the longest RetryAfter; else the one with the fewest tokens left.
	fetch.Result
	// DeniedBy names the limits that denied, in the order of the limits.
	DeniedBy []string
	// Limits are the answers, in the order of the limits. If one denied, the
	// others' OK says that they would not have, and nothing was taken from any.
	Limits []LimitResult
}

// LimitResult is the answer of one limit of a decision.
type LimitResult struct {
	Name string
	// Window is the time for which the limit speaks: a window's length, or the
	// time in which an empty bucket fills.
	Window time.Duration
	fetch.Result
}

// Decide takes n tokens from every limit or from none. keys are one for all
// limits, or one for each: then, on a Cluster, they must be in one slot.
func (m *Many) Decide(ctx context.Context, n int64, keys ...string) (Decision, error) {
	return m.do(ctx, decide.Take, n, keys)
}

// Take is Decide with one key.
func (m *Many) Take(ctx context.Context, key string, n int64) (fetch.Result, error) {
	d, err := m.Decide(ctx, n, key)
	return d.Result, err
}

// Peek tells what is left and takes nothing; OK if every limit has a token.
func (m *Many) Peek(ctx context.Context, keys ...string) (Decision, error) {
	return m.do(ctx, decide.Peek, 1, keys)
}

// Return gives n tokens back to every limit.
func (m *Many) Return(ctx context.Context, key string, n int64) error {
	_, err := m.do(ctx, decide.Return, n, []string{key})
	return err
}

func (m *Many) do(ctx context.Context, what decide.What, n int64, keys []string) (Decision, error) {
	all := keys
	switch len(keys) {
	case len(m.rules):
	case 1:
		all = make([]string, len(m.rules))
		for i := range all {
			all[i] = keys[0]
		}
	default:
		return Decision{}, fmt.Errorf("%w: %d keys; want 1 or %d", ErrConfig, len(keys), len(m.rules))
	}
	if !m.single {
		for _, k := range all[1:] {
			if lua.Slot(k) != lua.Slot(all[0]) {
				return Decision{}, fmt.Errorf("%w: %q and %q", ErrSlots, all[0], k)
			}
		}
	}
	outcomes, _, err := m.script.Decide(ctx, what, n, all...)
	if err != nil {
		return Decision{}, err
	}
	return m.decision(what, n, outcomes), nil
}

func (m *Many) decision(what decide.What, n int64, outcomes []decide.Outcome) Decision {
	d := Decision{Limits: make([]LimitResult, len(outcomes))}
	for i, o := range outcomes {
		r := m.rules[i]
		if d.Limits[i] = (LimitResult{r.Name, r.Window, o.Result(r.Limit, n, what)}); !o.Fits {
			d.DeniedBy = append(d.DeniedBy, r.Name)
		}
	}
	strictest := d.Limits[0].Result
	for i := range d.Limits {
		l := &d.Limits[i]
		if len(d.DeniedBy) > 0 {
			l.Taken = 0
		}
		switch {
		case l.OK && strictest.OK && l.Remaining < strictest.Remaining,
			!l.OK && (strictest.OK || l.RetryAfter > strictest.RetryAfter):
			strictest = l.Result
		}
	}
	d.Result = strictest
	return d
}

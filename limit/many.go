package limit

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/redisclient"
	"github.com/tokenrefill/refiller/limit/internal/decide"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/pacing"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/lua"
)

// MaxLimits is the largest number of limits in one decision.
const MaxLimits = 16

// CheckName reports whether a limit can have a name: 0 to 64 letters, digits and _ . - / :.
func CheckName(name string) error { return decide.CheckName(name) }

// Errors of Many, to be matched with errors.Is.
var (
	// ErrConfig is returned for limits that can't be decided together.
	ErrConfig = errors.New("limit: bad config")
	// ErrSlots is returned for keys that a Cluster keeps in different slots, so that one script can't use all of them. One
	// key for all limits always works.
	ErrSlots = errors.New("limit: keys are in different cluster slots")
)

// Config is a limit that can be one of many: a lazy.Config, a window.Config or a
// pacing.Config.
type Config interface {
	// Validate reports whether the limit is in range; the error names the field.
	Validate() error
}

var (
	_ Config = lazy.Config{}
	_ Config = window.Config{}
	_ Config = pacing.Config{}
)

// Many decides by several limits at once, such as 10 a second and 1,000 a day. It takes from all of them, or from none
// if one of them denies. It is safe for concurrent use. On Redis a decision is one script call, whatever the number of
// limits.
type Many struct {
	rules  []decide.Rule
	engine decide.Engine
	slots  bool // keys that are decided together must be in one slot
}

// NewMany makes a Many of 1 to MaxLimits limits on Redis. Each limit must have a different name. The name identifies a
// limit that denied, and separates limits on the same key. Its errors match ErrConfig.
func NewMany(rdb redis.UniversalClient, limits ...Config) (*Many, error) {
	if redisclient.IsNil(rdb) {
		return nil, fmt.Errorf("%w: the redis client is nil", ErrConfig)
	}
	rules, err := rulesOf(limits)
	if err != nil {
		return nil, err
	}
	_, single := rdb.(*redis.Client)
	return &Many{rules, decide.NewScript(rdb, rules...), !single}, nil
}

// NewManyLocal makes a Many that keeps its state in this process, on the clock now, such as time.Now. Otherwise it is
// like NewMany.
func NewManyLocal(now func() time.Time, limits ...Config) (*Many, error) {
	if now == nil {
		return nil, fmt.Errorf("%w: the clock is nil", ErrConfig)
	}
	rules, err := rulesOf(limits)
	if err != nil {
		return nil, err
	}
	return &Many{rules, decide.NewMemory(now, rules...), false}, nil
}

func rulesOf(limits []Config) ([]decide.Rule, error) {
	if len(limits) < 1 || len(limits) > MaxLimits {
		return nil, fmt.Errorf("%w: %d limits; want 1 to %d", ErrConfig, len(limits), MaxLimits)
	}
	rules := make([]decide.Rule, len(limits))
	names := map[string]bool{}
	for i, c := range limits {
		if c == nil {
			return nil, fmt.Errorf("%w: limit %d is nil", ErrConfig, i)
		}
		r, err := decide.RuleOf(c)
		if err != nil {
			return nil, fmt.Errorf("%w: limit %d: %w", ErrConfig, i, err)
		}
		if names[r.Name] {
			return nil, fmt.Errorf("%w: limit %d: the name %q is taken", ErrConfig, i, r.Name)
		}
		names[r.Name], rules[i] = true, r
	}
	return rules, nil
}

// Decision is the joint decision of several limits.
type Decision struct {
	// Result is the result of the strictest limit. If some limits denied, the strictest is the one of them with the
	// longest RetryAfter. Otherwise it is the limit with the fewest tokens left.
	fetch.Result
	// DeniedBy names the limits that denied, in the order of the limits.
	DeniedBy []string
	// Wait is the time until the tokens may be used: the longest wait of the pacing limits; 0 for a denial.
	Wait time.Duration
	// Limits has the result of each limit, in their order. If one limit denied, nothing was taken from any of them, and OK
	// of the others reports that they would have admitted the call.
	Limits []LimitResult
}

// LimitResult is the result of one limit of a decision.
type LimitResult struct {
	Name string
	// Window is the time to which the limit refers: a window's length, or the time in which an empty bucket fills.
	Window time.Duration
	fetch.Result
	// Wait is, for a limit of pacing, the time until the place that was taken.
	Wait time.Duration
}

// Decide takes n tokens from every limit or from none, and returns at once. If a limit of pacing is among them, the
// work may begin after Decision.Wait. keys has one key for all limits, or one key for each limit. On a Cluster all keys
// must be in one slot.
func (m *Many) Decide(ctx context.Context, n int64, keys ...string) (Decision, error) {
	return m.do(ctx, decide.Take, n, keys, nil)
}

// Undo returns the tokens of a decision. keys are those of the decision. Windows that have ended since get no tokens
// back, and places of pacing can't be returned. Call it once for a Decision. If the decision is of another number of
// limits, the error is ErrConfig.
func (m *Many) Undo(ctx context.Context, d Decision, keys ...string) error {
	if d.Taken == 0 {
		return nil
	}
	if len(d.Limits) != len(m.rules) {
		return fmt.Errorf("%w: undo: the decision is of %d limits; want %d", ErrConfig, len(d.Limits), len(m.rules))
	}
	_, err := m.do(ctx, decide.Return, d.Taken, keys, d.Limits)
	return err
}

// Take decides as Decide does, with one key for all limits, and then waits until the tokens may be used. Its option is
// fetch.WithTimeout, which bounds the call, not the wait. If ctx ends during the wait, the tokens stay taken and the
// error is that of ctx.
func (m *Many) Take(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error) {
	within, cancel, err := decide.Within(ctx, opts)
	if err != nil {
		return fetch.Result{}, err
	}
	d, err := m.Decide(within, n, key)
	cancel()
	if err == nil {
		err = decide.Wait(ctx, d.Wait)
	}
	if err != nil {
		return fetch.Result{}, err
	}
	return d.Result, nil
}

// Peek returns the state of the limits and takes nothing. The decision is OK if every limit has a token.
func (m *Many) Peek(ctx context.Context, keys ...string) (Decision, error) {
	return m.do(ctx, decide.Peek, 1, keys, nil)
}

// Return gives n tokens back to every limit. Limits with windows return them to the present window, and a limit of
// pacing takes no place back. It is for tokens without a Decision.
func (m *Many) Return(ctx context.Context, key string, n int64) error {
	_, err := m.do(ctx, decide.Return, n, []string{key}, nil)
	return err
}

// Reset drops what every limit stores for its key, so that all tokens are available. The limits are reset one after the
// other.
func (m *Many) Reset(ctx context.Context, keys ...string) error {
	all, err := m.asks(keys)
	if err != nil {
		return err
	}
	return m.engine.Reset(ctx, all...)
}

// String describes the limits.
func (m *Many) String() string {
	texts := make([]string, len(m.rules))
	for i, r := range m.rules {
		texts[i] = r.Text
		if r.Name != "" {
			texts[i] = r.Name + ": " + r.Text
		}
	}
	return strings.Join(texts, "; ")
}

// asks returns the Ask of each rule. keys has one key for all rules, or one key for each rule.
func (m *Many) asks(keys []string) ([]decide.Ask, error) {
	if len(keys) != 1 && len(keys) != len(m.rules) {
		return nil, fmt.Errorf("%w: %d keys; want 1 or %d", ErrConfig, len(keys), len(m.rules))
	}
	all := make([]decide.Ask, len(m.rules))
	for i := range all {
		all[i].Key = keys[min(i, len(keys)-1)]
	}
	return all, nil
}

// do makes a call. If the call returns the tokens of a decision, taken has the results of that decision. Otherwise
// taken is nil.
func (m *Many) do(
	ctx context.Context, what decide.What, n int64, keys []string, taken []LimitResult,
) (Decision, error) {
	all, err := m.asks(keys)
	if err != nil {
		return Decision{}, err
	}
	for i := range all {
		if taken != nil {
			all[i].Era = taken[i].Era
		}
		if m.slots && lua.Slot(all[i].Key) != lua.Slot(keys[0]) {
			return Decision{}, fmt.Errorf("%w: %q and %q", ErrSlots, keys[0], all[i].Key)
		}
	}
	outcomes, _, err := m.engine.Decide(ctx, what, n, all...)
	if err != nil {
		return Decision{}, err
	}
	return m.decision(what, n, outcomes), nil
}

func (m *Many) decision(what decide.What, n int64, outcomes []decide.Outcome) Decision {
	d := Decision{Limits: make([]LimitResult, len(outcomes))}
	for i, o := range outcomes {
		r := m.rules[i]
		d.Limits[i] = LimitResult{Name: r.Name, Window: r.Window, Result: o.Result(r.Limit, n, what)}
		if !o.Fits {
			d.DeniedBy = append(d.DeniedBy, r.Name)
		}
	}
	strictest := d.Limits[0].Result
	for i := range d.Limits {
		l := &d.Limits[i]
		switch {
		case len(d.DeniedBy) > 0:
			l.Taken = 0
		case what == decide.Take:
			l.Wait = outcomes[i].Start()
			d.Wait = max(d.Wait, l.Wait)
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

// Package limits serves limiters by the names that a file gives them: refilled and lazy buckets, windows, pacing,
// schedules, and several at once. So programs in any language can use the limiters of package limit. Requests are not
// decoded here: see packages httpapi and grpcapi.
package limits

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/flowname"
	"github.com/tokenrefill/refiller/internal/limitcall"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/schedule"
)

// Set has the limits of a file.
type Set struct {
	names  []string
	limits map[string]*Limit
}

// Names returns the names of the limits, in the order of the file.
func (s *Set) Names() []string { return slices.Clone(s.names) }

// Get returns the limit with a name, or call.ErrUnknownLimit. A nil Set has no limits.
func (s *Set) Get(name string) (*Limit, error) {
	if s != nil {
		if l := s.limits[name]; l != nil {
			return l, nil
		}
	}
	return nil, fmt.Errorf("%w: %q", call.ErrUnknownLimit, name)
}

// Access gives the server of a protocol access to limits.
type Access struct {
	InForce  func() *Set
	Deadline func() time.Duration // of a call
}

// Open returns the limit with a name, and a context for one call to it.
func (a Access) Open(ctx context.Context, name string) (*Limit, context.Context, context.CancelFunc, error) {
	l, err := a.InForce().Get(name)
	if err != nil {
		return nil, nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, l.Timeout(a.Deadline()))
	return l, ctx, cancel, nil
}

// Limit is a limit for any number of keys.
type Limit struct {
	name     string
	prefix   string // the beginning of a bucket's name, before the key
	bucket   string // a single bucket for all keys; empty if each key has its own
	flow     string // names a key's flow in the single bucket, with keyOfFlow; empty if the request does
	limiter  limiter
	wait     time.Duration     // the longest time until the tokens of a take may be used
	schedule *schedule.Limiter // nil if the limiter isn't a schedule
}

// limiter has the methods that all limiters have.
type limiter = limit.Limiter

// Answer is the decision of a limit.
type Answer struct {
	fetch.Result
	// Window is the length of the limit's window; 0 if it isn't known.
	Window time.Duration
	// Wait is the time that the caller has to wait before it may proceed.
	Wait time.Duration
	// DeniedBy has the names of the limits that denied, if there are several limits.
	DeniedBy []string
	// Next is the time until a lazy bucket has a token again; nil if it isn't known.
	Next *time.Duration
	// Undo is the argument of Limit.Undo; empty if there is nothing to undo.
	Undo string
}

// Name returns the name of the limit.
func (l *Limit) Name() string { return l.name }

// Take takes n tokens, all or nothing. It doesn't wait for tokens. flow is as in For.
func (l *Limit) Take(ctx context.Context, key string, flow *string, n int64) (Answer, error) {
	taker, err := l.For(key, flow)
	if err != nil {
		return Answer{}, err
	}
	d, err := limitcall.Take(ctx, taker, l.Key(key), n)
	if d.Limits != nil {
		return decided(d), err
	}
	a := l.answer(d.Result)
	a.Wait = d.Wait
	// In shadow mode or in a degraded mode, not all tokens came from the bucket, so there is nothing to undo.
	if a.Taken > 0 && !a.Shadow && a.Source.Kind != fetch.SourceFallback && limitcall.Returns(taker) {
		a.Undo = undo(a.Result)
	}
	return a, err
}

// Peek returns the remaining tokens and takes none.
func (l *Limit) Peek(ctx context.Context, key string) (Answer, error) {
	switch p := l.limiter.(type) {
	case *limit.Many:
		d, err := p.Peek(ctx, key)
		return decided(d), err
	case interface {
		Peek(ctx context.Context, key string, opts ...fetch.CallOption) (fetch.Result, error)
	}:
		r, err := p.Peek(ctx, l.Key(key))
		return l.answer(r), err
	}
	return Answer{}, errors.ErrUnsupported
}

// Undo returns the tokens of a take. text is Undo in the Answer to that take.
func (l *Limit) Undo(ctx context.Context, key, text string) error {
	results, err := undone(text)
	if err != nil {
		return err
	}
	switch u := l.limiter.(type) {
	case *limit.Many:
		d := limit.Decision{Result: results[0]}
		for _, r := range results {
			d.Limits = append(d.Limits, limit.LimitResult{Result: r})
		}
		if err := u.Undo(ctx, d, key); !errors.Is(err, limit.ErrConfig) {
			return err
		}
		return badUndo(text)
	case limit.Undoer:
		if len(results) > 1 {
			return badUndo(text)
		}
		return u.Undo(ctx, l.Key(key), results[0])
	}
	return fmt.Errorf("%w: takes of %s can't be undone", call.ErrBadRequest, l.name)
}

// Schedule returns the limit as a schedule, or call.ErrBadRequest if it isn't one.
func (l *Limit) Schedule() (*schedule.Limiter, error) {
	if l.schedule == nil {
		return nil, fmt.Errorf("%w: %s is not a schedule", call.ErrBadRequest, l.name)
	}
	return l.schedule, nil
}

// Wait returns the longest time for which a caller may have to wait after a take. It is 0 if the limit has no pacing.
func (l *Limit) Wait() time.Duration { return l.wait }

// Timeout returns the time for a call to the limit. The client of buckets observes the deadline itself. Its calls get
// more time, so that it can still decide according to the bucket's degraded mode.
func (l *Limit) Timeout(deadline time.Duration) time.Duration {
	if _, ok := l.limiter.(*fetch.Client); ok {
		return 2*deadline + time.Second
	}
	return deadline
}

// For returns the limiter for a key. The limiter knows the key by the name that Key returns. flow is the flow that the
// request names; nil if it names none.
func (l *Limit) For(key string, flow *string) (limit.Limiter, error) {
	client, isBuckets := l.limiter.(*fetch.Client)
	opts, err := call.Flow(flow)
	switch {
	case err != nil:
		return nil, err
	case flow != nil && !isBuckets:
		return nil, fmt.Errorf("%w: flow: %s does not use refilled buckets", call.ErrBadRequest, l.name)
	case flow != nil && l.flow != "":
		return nil, fmt.Errorf("%w: flow: %s makes the flow from the key", call.ErrBadRequest, l.name)
	case flow == nil && l.flow != "":
		name := flowname.Fit(strings.ReplaceAll(l.flow, keyOfFlow, flowname.Level(key)))
		opts = []fetch.CallOption{fetch.WithFlow(name)}
	}
	if opts == nil {
		return l.limiter, nil
	}
	return inFlow{client, opts}, nil
}

// inFlow takes from buckets for one flow.
type inFlow struct {
	*fetch.Client
	opts []fetch.CallOption
}

// Take implements limit.Limiter.
func (f inFlow) Take(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error) {
	return f.Client.Take(ctx, key, n, append(opts, f.opts...)...)
}

// Key returns the name of a key at the limiter. An empty key stays empty, so that the limiter refuses it.
func (l *Limit) Key(key string) string {
	switch {
	case key == "":
		return ""
	case l.bucket != "":
		return l.bucket
	}
	return l.prefix + key
}

func (l *Limit) window() time.Duration {
	if w, ok := l.limiter.(interface{ Window() time.Duration }); ok {
		return w.Window()
	}
	return 0
}

func (l *Limit) answer(r fetch.Result) Answer {
	a := Answer{Result: r, Window: l.window()}
	if bucket, ok := l.limiter.(*lazy.Limiter); ok {
		next := bucket.Next(r)
		a.Next = &next
	}
	return a
}

func decided(d limit.Decision) Answer {
	a := Answer{Result: d.Result, Wait: d.Wait, DeniedBy: d.DeniedBy}
	var parts []string
	for _, l := range d.Limits {
		if l.Taken > 0 {
			parts = append(parts, undo(l.Result))
		}
	}
	a.Undo = strings.Join(parts, ",")
	return a
}

// undo formats the parts of a result that Undo needs.
func undo(r fetch.Result) string {
	return strconv.FormatInt(r.Taken, 10) + "-" + strconv.FormatInt(r.Era, 36)
}

// undone parses a text from undo, or several such texts with commas between.
func undone(text string) ([]fetch.Result, error) {
	var results []fetch.Result
	for part := range strings.SplitSeq(text, ",") {
		n, era, _ := strings.Cut(part, "-")
		taken, err1 := strconv.ParseInt(n, 10, 64)
		in, err2 := strconv.ParseInt(era, 36, 64)
		if err1 != nil || err2 != nil || taken < 1 {
			return nil, badUndo(text)
		}
		results = append(results, fetch.Result{OK: true, Taken: taken, Era: in})
	}
	return results, nil
}

func badUndo(text string) error {
	return fmt.Errorf("%w: undo: %q is not from the answer to a take of this limit", call.ErrBadRequest, text)
}

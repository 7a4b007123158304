package decide

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
)

// What is the operation of a call.
type What int64

// The operations of calls.
const (
	Return What = -1
	Peek   What = 0
	Take   What = 1
)

// Outcome is the answer of one limit; times are in µs.
type Outcome struct {
	Fits  bool  // n tokens fit
	Left  int64 // tokens left
	Wait  int64 // until n tokens fit, if they don't
	Reset int64 // until the limit is as if it had never been used
	More  int64 // until more than Left tokens are left; 0 if Left is the most that there can be
	Delay int64 // before the tokens may be used
	Era   int64 // of a take: the number of its window, which a return of the tokens names; 0: none
}

// Result converts the outcome of a call for n tokens to a fetch.Result.
func (o Outcome) Result(limit, n int64, what What) fetch.Result {
	r := fetch.Result{OK: o.Fits, Remaining: o.Left, Limit: limit, RetryAfter: micros(o.Wait), ResetAfter: micros(o.Reset)}
	if o.Fits {
		r.MoreAfter = micros(o.More)
	}
	if what == Take && o.Fits {
		r.Taken, r.Era = n, o.Era
	}
	return r
}

// Start returns how long the caller must wait before it may use the tokens.
func (o Outcome) Start() time.Duration { return micros(o.Delay) }

// Wait waits for d. If ctx ends before, it returns the error of ctx and the cause.
func Wait(ctx context.Context, d time.Duration) error {
	if d <= 0 || timing.Sleep(ctx.Done(), d) {
		return nil
	}
	if cause := context.Cause(ctx); !errors.Is(cause, ctx.Err()) {
		return fmt.Errorf("limit: wait for a place: %w: %w", ctx.Err(), cause)
	}
	return fmt.Errorf("limit: wait for a place: %w", ctx.Err())
}

func micros(us int64) time.Duration { return time.Duration(us) * time.Microsecond }

// Ask is the part of a call that is about one rule.
type Ask struct {
	Key string
	Era int64 // of a return: Outcome.Era of the take; 0: not known
}

// Engine decides by one or more rules.
type Engine interface {
	// Do makes a call for the first rule.
	Do(ctx context.Context, what What, n int64, ask Ask) (Outcome, error)
	// Decide makes one call for all rules. asks has one Ask for each rule. Decide returns the outcomes of the rules, and
	// the time of the decision in Unix µs on the engine's clock. If one rule denies, nothing was taken, and each outcome
	// shows the state before the call.
	Decide(ctx context.Context, what What, n int64, asks ...Ask) (outcomes []Outcome, now int64, err error)
	// Reset drops the state of the rules. asks has the key for each rule.
	Reset(ctx context.Context, asks ...Ask) error
}

var (
	_ Engine = (*Script)(nil)
	_ Engine = (*Memory)(nil)
)

var (
	errNoRedis  = errors.New("the redis client is nil")
	errNoClock  = errors.New("the clock is nil")
	errNoWindow = errors.New("each call reached Redis in another window of the calendar than expected")
)

// MostCalls bounds the round trips of a limiter to a server that are under way.
const MostCalls = 256

// Script is the Engine that decides in Redis. A call returns when its context ends, even if the socket timeouts of the
// Redis client are longer.
type Script struct {
	rdb    lua.Client
	rules  []Rule
	script *lua.Script
}

// NewScript makes the Script of one or more rules.
func NewScript(rdb redis.UniversalClient, rules ...Rule) *Script {
	return &Script{rdb: engine.NewCommands(rdb, MostCalls), rules: rules, script: compile(rules)}
}

// Do implements Engine.
func (s *Script) Do(ctx context.Context, what What, n int64, ask Ask) (Outcome, error) {
	outcomes, _, err := s.Decide(ctx, what, n, ask)
	if err != nil {
		return Outcome{}, err
	}
	return outcomes[0], nil
}

// Codes of the script's replies.
const (
	codeDenied      = 0
	codeDone        = 1
	codeMalformed   = 3
	codeOtherWindow = 4 // the present time is in another window of the calendar
)

// rounds bounds the calls of one decision. A second call is needed if the server's clock is in another window of the
// calendar than this process's. The next window may begin before that call arrives.
const rounds = 8

// Decide implements Engine.
func (s *Script) Decide(ctx context.Context, what What, n int64, asks ...Ask) ([]Outcome, int64, error) {
	names := make([]string, len(s.rules))
	for i, r := range s.rules {
		if err := r.Check(asks[i].Key, n, what); err != nil {
			return nil, 0, err
		}
		names[i] = r.Key(asks[i].Key)
	}
	near := time.Now().UnixMicro()
	for range rounds {
		reply, err := s.script.Run(ctx, s.rdb, names, s.args(near, what, n, asks)...)
		if err != nil {
			return nil, 0, Unavailable(err)
		}
		switch code := reply.Int(); code {
		case codeOtherWindow:
			near = reply.Int()
			if err := reply.End(); err != nil {
				return nil, 0, err
			}
		case codeMalformed:
			return nil, 0, malformed(reply, names, asks)
		default:
			return s.outcomes(reply, code)
		}
	}
	return nil, 0, Unavailable(errNoWindow)
}

// args returns the arguments of a call. near is about the time of the call, in Unix µs. It selects the window of a
// calendar.
func (s *Script) args(near int64, what What, n int64, asks []Ask) []any {
	args := make([]any, 0, 2+5*len(s.rules))
	args = append(args, int64(what), n)
	for i, r := range s.rules {
		numbers := r.numbers(near)
		args = append(args, r.Kind, numbers[0], numbers[1], numbers[2], asks[i].Era)
	}
	return args
}

// malformed decodes the reply for a key that holds something else, and returns the error.
func malformed(reply *lua.Reply, names []string, asks []Ask) error {
	i := reply.Int()
	if err := reply.End(); err != nil {
		return err
	}
	if i < 1 || int(i) > len(names) {
		return fmt.Errorf("%w: key number %d", lua.ErrBadReply, i)
	}
	return Malformed(asks[i-1].Key, names[i-1])
}

// outcomes decodes the answers of the rules.
func (s *Script) outcomes(reply *lua.Reply, code int64) ([]Outcome, int64, error) {
	now := reply.Int()
	outcomes := make([]Outcome, len(s.rules))
	for i := range outcomes {
		outcomes[i] = Outcome{Fits: reply.Int() == 1, Left: reply.Int(), Wait: reply.Int(), Reset: reply.Int(),
			Delay: reply.Int(), More: reply.Int()}
		outcomes[i].Era = s.rules[i].era(now, &outcomes[i])
	}
	if err := reply.End(); err != nil {
		return nil, 0, err
	}
	if code != codeDenied && code != codeDone {
		return nil, 0, fmt.Errorf("%w: code %d", lua.ErrBadReply, code)
	}
	return outcomes, now, nil
}

// Reset implements Engine. It sends a command for each rule, since keys may be in different slots.
func (s *Script) Reset(ctx context.Context, asks ...Ask) error {
	for i, r := range s.rules {
		if err := r.Check(asks[i].Key, 1, Return); err != nil {
			return err
		}
		if err := Unlink(ctx, s.rdb, r.Key(asks[i].Key)); err != nil {
			return err
		}
	}
	return nil
}

// Unlink drops a key of Redis.
func Unlink(ctx context.Context, rdb lua.Client, name string) error {
	if err := rdb.Process(ctx, redis.NewIntCmd(ctx, "unlink", name)); err != nil {
		return Unavailable(err)
	}
	return nil
}

// Unavailable returns the error of a call to which Redis gave no valid reply.
func Unavailable(err error) error { return fmt.Errorf("%w: %w", fetch.ErrUnavailable, err) }

// Malformed returns the error of a key that holds something other than the state of a limit.
func Malformed(key, name string) error {
	return fmt.Errorf("%w %q: the key %q holds something else", lua.ErrMalformedBucket, key, name)
}

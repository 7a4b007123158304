package grpclimit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/internal/limitcall"
	"github.com/tokenrefill/refiller/limit"
)

// ErrConfig is returned for a Config that can't be used; the error names the
// field.
var ErrConfig = errors.New("grpclimit: bad config")

// Timeouts of Config.
const (
	DefaultTimeout = 150 * time.Millisecond
	MaxTimeout     = time.Minute
)

// Config says what a Middleware limits, and how. Limiter and Key are required.
type Config struct {
	// Limiter has the tokens.
	Limiter limit.Limiter
	// Key says whose tokens a call takes.
	Key KeyFunc
	// Weight is the tokens that a call takes, at least 1; nil means 1. A weight of
	// 0 lets the call pass.
	Weight func(context.Context, Call) int64
	// PerMessage makes a stream take tokens for each message that the handler receives, and none when it begins. A denied
	// message ends the stream.
	PerMessage bool
	// SkipFailed gives tokens back when a unary call, or a stream without PerMessage, ends with an error or a panic before
	// its client's time is over. A client that disconnects has used its tokens. The Limiter must be a limit.Undoer or a
	// limit.Many.
	SkipFailed bool
	// Shadow denies nothing; OnLimit is still called.
	Shadow bool
	// FailOpen lets calls pass if the Limiter can't answer, or if there is no bucket of their key. So declare a template
	// for keys that clients choose. Errors that the call itself has caused, and a flood of new keys, are still refused:
	// see limit.Outcome.
	FailOpen bool
	// Timeout bounds the wait for the Limiter's answer, at most MaxTimeout. 0 means what a fetch.Client has itself,
	// which follows the measured distance of its server, and DefaultTimeout for any other Limiter. Set it if a
	// server is more than 30 ms away. A Timeout above 0 must be more than twice that of a fetch.Client: the client
	// doubles its own at most while this process is starved, and if it is cut off before it doesn't answer as a
	// bucket's degraded mode says. The wait for a place, of a limit of pacing, comes after it and is bounded by the
	// limit and the call's own deadline.
	Timeout time.Duration
	// OnLimit is called for each denial before it is answered, in shadow mode too. It must not block.
	OnLimit func(context.Context, Call, Decision)
	// OnError is called for each call that could not be decided, and for tokens that could not be given back. It must not
	// block.
	OnError func(context.Context, Call, error)
}

// New makes a Middleware. It sends nothing. The errors are ErrConfig.
func New(cfg Config) (*Middleware, error) {
	if cfg.Limiter == nil {
		return nil, fmt.Errorf("%w: Limiter: it is nil", ErrConfig)
	}
	if cfg.Key == nil {
		return nil, fmt.Errorf("%w: Key: it is nil", ErrConfig)
	}
	if cfg.Timeout < 0 || cfg.Timeout > MaxTimeout {
		return nil, fmt.Errorf("%w: Timeout: %s is not from 0 (the default) to %s", ErrConfig, cfg.Timeout, MaxTimeout)
	}
	if cfg.SkipFailed && !limitcall.Returns(cfg.Limiter) {
		return nil, fmt.Errorf("%w: SkipFailed: the Limiter takes no tokens back", ErrConfig)
	}
	return &Middleware{config: cfg}, nil
}

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

// Config determines what a Middleware limits, and how. Limiter and Key are required.
type Config struct {
	// Limiter has the tokens.
	Limiter limit.Limiter
	// Key returns the key whose tokens a call takes.
	Key KeyFunc
	// Weight returns the number of tokens that a call takes. If it returns 0, the call passes. If Weight is nil, a call
	// takes one token.
	Weight func(context.Context, Call) int64
	// PerMessage makes a stream take tokens for each message that the handler receives, and none when it begins. A denied
	// message ends the stream.
	PerMessage bool
	// SkipFailed gives tokens back when a unary call, or a stream without PerMessage, ends with an error or a panic before
	// the client's deadline. A client that disconnects has used its tokens. The Limiter must be a limit.Undoer or a
	// limit.Many.
	SkipFailed bool
	// Shadow makes the Middleware deny nothing. OnLimit is still called.
	Shadow bool
	// FailOpen lets calls pass if the Limiter can't answer, or if their key has no bucket. So declare a template for keys
	// that clients choose. Errors that the call itself has caused, and a flood of new keys, are still refused: see
	// limit.Outcome.
	FailOpen bool
	// Timeout bounds the wait for the Limiter's answer. It is at most MaxTimeout. If it is 0, a fetch.Client uses its own
	// timeout, which depends on the measured distance to its server. Any other Limiter then has DefaultTimeout, so set
	// Timeout if its server is more than 30 ms away.
	//
	// If the Limiter is a fetch.Client, a Timeout above 0 must be more than twice the Client's own timeout. While this
	// process lacks processor time, the Client extends its timeout, at most to twice its length. If the Timeout ends
	// before, the bucket's degraded mode does not apply.
	//
	// If a limit of pacing makes the call wait for its place, that wait comes after the Timeout. The limit and the call's
	// own deadline bound it.
	Timeout time.Duration
	// OnLimit is called for each denial before it is answered, in shadow mode too. It must not block.
	OnLimit func(context.Context, Call, Decision)
	// OnError is called for each call that could not be decided, and for tokens that could not be given back. It must not
	// block.
	OnError func(context.Context, Call, error)
}

// New makes a Middleware. It sends nothing. Its errors match ErrConfig.
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

package engine

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

const (
	// A breaker opens when at least half of the calls in a window failed. The window is as long as it takes for
	// fewestCalls, at least shortest, since in a moment many calls may fail together, and at most longest. It also
	// opens when all calls failed for clearTime, if they were at least fewestClear: few callers with long timeouts make
	// few calls.
	fewestCalls = 10
	shortest    = 250 * time.Millisecond
	longest     = 10 * time.Second
	fewestClear = 2
	clearTime   = time.Second

	// For excuseTime after the last answer silence is excused while calls wait for connections.
	excuseTime = time.Second
)

var (
	// ErrNoEvidence is what a Sender returns, or wraps, of a call that shows nothing of the server.
	ErrNoEvidence = errors.New("engine: the call was not made")
	// ErrSilent is why a breaker is open whose server let calls go unanswered.
	ErrSilent = fmt.Errorf("engine: the server is silent: %w", context.DeadlineExceeded)
)

// Breaker says whether a server is worth asking. It judges the server alone: what failed there, and what the server was
// silent about while it could have answered and nothing else was heard from it. While it is open its queue probes the
// server.
type Breaker struct {
	// Patience is the least time that the server has for an answer before its silence counts. Known round trips make it
	// longer.
	Patience time.Duration
	// Probe makes a call that shows whether the server answers.
	Probe func(ctx context.Context) error
	// Excuse, if it isn't nil, reports that calls wait for connections, so that a call without an answer may not have been
	// sent. Its silence is then no evidence for excuseTime, longer than a server takes to accept a connection.
	Excuse func() bool
	// Opened, if it isn't nil, is called when the breaker opens.
	Opened func()

	cause atomic.Pointer[error]

	// The lock of the queue guards these.
	began         time.Time
	calls, failed int
	excused       time.Time // since when silence was excused; zero: it wasn't since the last answer
}

// Open is why no call is to be made; nil while the breaker is closed.
func (b *Breaker) Open() error {
	if cause := b.cause.Load(); cause != nil {
		return *cause
	}
	return nil
}

// record counts a call, and reports whether that opens the breaker.
func (b *Breaker) record(now time.Time, err error) bool {
	if now.Sub(b.began) > longest {
		b.began, b.calls, b.failed = now, 0, 0
	}
	b.calls++
	if err != nil {
		b.failed++
	}
	age := now.Sub(b.began)
	enough := b.calls >= fewestCalls && age >= shortest
	allFailed := b.failed == b.calls && b.calls >= fewestClear && age >= clearTime
	if !enough && !allFailed {
		return false
	}
	opens := err != nil && 2*b.failed >= b.calls && b.cause.CompareAndSwap(nil, &err)
	if b.calls, b.failed = 0, 0; opens && b.Opened != nil {
		b.Opened()
	}
	b.began = now
	return opens
}

// recordSilence counts a call that the server is silent about, and reports whether it counts and whether that opens the
// breaker.
func (b *Breaker) recordSilence(now time.Time) (counts, opens bool) {
	if b.Excuse != nil && b.Excuse() {
		if now.Sub(b.excused) > longest {
			b.excused = now
		}
		if now.Sub(b.excused) < excuseTime {
			return false, false
		}
	}
	return true, b.record(now, ErrSilent)
}

// recordEnd counts a call that ended with err, unless its silence was counted before; if it is answered after all, that
// is taken back. It reports whether that opens the breaker.
func (b *Breaker) recordEnd(now time.Time, silent bool, err error) bool {
	if err == nil {
		b.excused = time.Time{}
	}
	switch {
	case errors.Is(err, ErrNoEvidence):
	case !silent:
		return b.record(now, err)
	case err == nil && b.failed > 0:
		b.failed--
	}
	return false
}

// close closes the breaker, since the server answers.
func (b *Breaker) close() {
	b.began, b.calls, b.failed = time.Time{}, 0, 0
	b.cause.Store(nil)
}

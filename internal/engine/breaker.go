package engine

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

const (
	// A breaker opens at a failure when at least half of the calls in a window failed. A window begins with a call and is
	// as long as it takes for fewestCalls, at least shortest, since in a moment many calls may fail together, and at most
	// longest. The breaker also opens when all calls failed for clearTime, if they were at least fewestClear: few callers
	// with long timeouts make few calls.
	fewestCalls = 10
	shortest    = 250 * time.Millisecond
	longest     = 10 * time.Second
	fewestClear = 2
	clearTime   = time.Second

	// While calls wait for connections silence is excused for excuseTime, which begins with the first since an answer, and
	// again after longest.
	excuseTime = time.Second
)

var (
	// ErrNoEvidence is what a Sender returns, or wraps, of a call that shows nothing of the server.
	ErrNoEvidence = errors.New("engine: the call was not made")
	// ErrSilent is why a breaker is open whose server let calls go unanswered.
	ErrSilent = fmt.Errorf("engine: the server is silent: %w", context.DeadlineExceeded)
)

// Breaker decides whether a server may be called. It judges the server only: the calls that failed there, and its
// silence while it could have answered and sent nothing else. While the breaker is open, its queue probes the server.
type Breaker struct {
	// Patience is the least time that the server has for an answer before its silence counts. The server has longer where
	// round trips are long, and before its first answer, while they are unknown.
	Patience time.Duration
	// Probe makes a call that shows whether the server answers.
	Probe func(ctx context.Context) error
	// Excuse, if it isn't nil, reports that calls wait for connections, so that a call without an answer may not have been
	// sent. Its silence is then no evidence for excuseTime, longer than a server takes to accept a connection.
	Excuse func() bool
	// Silent is called when the server was silent about a call, excused or not.
	Silent func()
	// Changed is called when the breaker has opened, and when it is about to close. It delays the probes.
	Changed func(open bool)

	cause atomic.Pointer[error]

	// The lock of the queue guards these.
	window        uint64    // counts the windows
	began         time.Time // the window
	calls, failed int
	excused       time.Time // since when silence is excused; zero: it wasn't since the last answer
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
	if b.calls == 0 || now.Sub(b.began) > longest {
		b.window++
		b.began = now
		b.calls = 0
		b.failed = 0
	}
	b.calls++
	if err != nil {
		b.failed++
	}
	age := now.Sub(b.began)
	enough := b.calls >= fewestCalls && age >= shortest
	allFailed := b.failed == b.calls && b.calls >= fewestClear && age >= clearTime
	half := 2*b.failed >= b.calls
	if !enough && !allFailed || half && err == nil {
		return false
	}
	b.calls = 0
	return half && b.open(err)
}

// open opens the breaker unless it is open, and reports whether it did.
func (b *Breaker) open(cause error) bool {
	return b.cause.CompareAndSwap(nil, &cause)
}

// recordSilence counts a call that the server is silent about. It returns the window in which that counts, 0 for none,
// and reports whether it opens the breaker.
func (b *Breaker) recordSilence(now time.Time) (window uint64, opens bool) {
	b.Silent()
	if b.Excuse != nil && b.Excuse() {
		if now.Sub(b.excused) > longest {
			b.excused = now
		}
		if now.Sub(b.excused) < excuseTime {
			return 0, false
		}
	}
	opens = b.record(now, ErrSilent)
	return b.window, opens
}

// recordEnd counts a call that ended with err, unless its silence was counted in a window before; if it is answered
// after all, that is taken back. It reports whether that opens the breaker.
func (b *Breaker) recordEnd(now time.Time, silent uint64, err error) bool {
	if err == nil {
		b.excused = time.Time{}
	}
	switch {
	case errors.Is(err, ErrNoEvidence):
	case silent == 0:
		return b.record(now, err)
	case err == nil && silent == b.window:
		b.failed--
	}
	return false
}

// close closes the breaker, since the server answers.
func (b *Breaker) close() {
	b.calls, b.excused = 0, time.Time{}
	b.cause.Store(nil)
}

package engine

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

const (
	// A breaker opens at a failure when at least half of the calls in a window failed. A window begins with a call. It
	// ends when it has fewestCalls calls and is at least as old as shortest, since many calls may fail together in one
	// moment. After longest a new window begins in any case. The breaker also opens when all calls failed for clearTime
	// and there were at least fewestClear calls, since a few callers with long timeouts make only a few calls.
	fewestCalls = 10
	shortest    = 250 * time.Millisecond
	longest     = 10 * time.Second
	fewestClear = 2
	clearTime   = time.Second

	// While calls wait for connections, silence is excused for excuseTime. That time begins with the first silence after
	// an answer. After longest without an answer it may begin again.
	excuseTime = time.Second
)

var (
	// ErrNoEvidence is returned by a Sender, possibly wrapped, for a call that shows nothing about the server.
	ErrNoEvidence = errors.New("engine: the call was not made")
	// ErrSilent is the cause for which a breaker is open if its server did not answer calls.
	ErrSilent = fmt.Errorf("engine: the server is silent: %w", context.DeadlineExceeded)
)

// Breaker decides whether a server may be called. Only two facts are evidence: calls that failed at the server, and its
// silence while it could have answered and sent nothing else. While the breaker is open, its queue probes the server.
type Breaker struct {
	// Patience is the least time that the server has for an answer before its silence counts. The server has more time if
	// round trips are long. It also has more time before its first answer, when the length of a round trip is unknown.
	Patience time.Duration
	// Probe makes a call that shows whether the server answers.
	Probe func(ctx context.Context) error
	// Excuse, if it isn't nil, reports whether calls wait for connections. If they do, a call without an answer may not
	// have been sent, so silence is no evidence for excuseTime. That is longer than a server takes to accept a connection.
	Excuse func() bool
	// Silent is called when the server was silent about a call, excused or not.
	Silent func()
	// Changed is called when the breaker has opened, and when it is about to close. The probes wait until it returns.
	Changed func(open bool)

	cause atomic.Pointer[error]

	// The lock of the queue guards these.
	window        uint64    // the number of the current window
	began         time.Time // when the window began
	calls, failed int
	excused       time.Time // since when silence is excused; zero: not since the last answer
}

// Open returns the cause for which the breaker is open, nil while it is closed.
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

// recordSilence counts a call that the server is silent about. It returns the window in which the silence counts, 0 if
// it is excused, and reports whether the breaker opens.
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

// recordEnd counts a call that ended with err, and reports whether the breaker opens. If the silence of the call was
// counted before, in the window silent, the call is not counted again. If the call is answered after all, its silence
// no longer counts as a failure.
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

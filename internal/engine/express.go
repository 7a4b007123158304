package engine

import (
	"context"
	"time"
)

const (
	// shortRTT is the longest round trip for which the caller of a lone request makes its call itself. To hand a call to
	// another goroutine and to be woken again takes about as long as a round trip on the same machine. It takes much less
	// than a round trip over a network.
	shortRTT = time.Millisecond
	// openPause is the time after which a connection that could not be opened is tried again.
	openPause = time.Second
)

// Express lets the caller of a lone request make its call, on a connection that is used for nothing else. It makes one
// call at a time. Without it, a single goroutine takes tokens at 0.7 times the rate, and each take costs twice the
// processor time.
type Express[T any] struct {
	Send Sender[T]
	// Interrupt ends the call under way when its caller stops waiting. The answer is then lost.
	Interrupt func()
	// Alive reports whether the connection is open. While it isn't, all calls use the other connections.
	Alive func() bool
	// Open opens the connection. If it fails, that is no evidence about the server, which may only accept no further
	// connections.
	Open func(ctx context.Context) error
}

// short reports whether the caller of a lone request makes its call itself. It does if round trips are short and the
// connection for such calls is open. If the connection isn't open, short has it opened for later calls. The lock is
// held.
func (q *Queue[T]) short(now time.Time) bool {
	switch {
	case q.express == nil || q.opening || q.failed || q.rtt == 0 || q.rtt >= shortRTT:
		return false
	case q.express.Alive():
		return true
	case now.Before(q.opens):
		return false
	}
	q.opening = true
	go q.open()
	return false
}

// open opens the connection for lone calls.
func (q *Queue[T]) open() {
	ctx, cancel := context.WithTimeout(context.Background(), FirstTime)
	defer cancel()
	err := q.express.Open(ctx)
	q.mu.Lock()
	defer q.mu.Unlock()
	q.opening = false
	if err != nil {
		q.opens = time.Now().Add(openPause)
	}
	q.settle()
}

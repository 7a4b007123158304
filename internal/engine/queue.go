package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// Trips is the number of round trips that a server has for an answer before its silence counts. It applies where round
	// trips are long.
	Trips = 4
	// FirstTime is the least time that a server has for its first answer. Until then the length of a round trip is
	// unknown.
	FirstTime = time.Second
	// leastSpacing is the least time between two departures while a call is under way.
	leastSpacing = time.Millisecond
	// mostRequests is the largest number of requests of one call. Further requests go with the next call.
	mostRequests = 1024
	// mostWaiting bounds the requests that wait for a departure.
	mostWaiting = 1 << 16
)

// Do returns these errors in addition to that of its context.
var (
	// ErrClosed is returned once Close was called.
	ErrClosed = errors.New("engine: closed")
	// ErrFull is returned when more requests wait than a Queue holds. Nothing was sent.
	ErrFull = fmt.Errorf("engine: more than %d requests wait", mostWaiting)
	// ErrNoAnswer is returned when the deadline passed without an answer.
	ErrNoAnswer = fmt.Errorf("engine: no answer in time: %w", context.DeadlineExceeded)
)

// Sender makes a call for a batch of requests, in their order, and calls Answer once for each of them. It returns when
// all of them are answered, because further work would delay the caller that makes its call itself.
//
// trip is the time of a round trip. It is shorter than the call if the call needs several of them, and 0 if nothing was
// sent to the server. The error is evidence about the server. If it is nil, the server answers. ErrNoEvidence shows
// nothing about the server, and any other error shows that the server failed.
//
// The deadline of ctx is Grace after the last instant at which a reply has a use. That is the latest deadline of a
// request, postponed as far as its Wait allows, or the end of the breaker's patience if that is later. The deadline
// of ctx is at most a minute after the departure. ctx is cancelled when no caller waits for a reply any more. Requests
// that are not sent by then need not be sent.
type Sender[T any] func(ctx context.Context, batch []*Request[T]) (trip time.Duration, err error)

// Queue sends requests to a server. Its methods are safe for concurrent use.
type Queue[T any] struct {
	// Sockets make the connections that calls use, except for the one of Express; nil: others make them. The field is set
	// before the first request.
	Sockets *Sockets

	send     Sender[T]
	most     int         // calls under way at once, at most
	breaker  *Breaker    // nil: none
	express  *Express[T] // nil: none
	requests sync.Pool
	trip     atomic.Int64 // copy of rtt, which RoundTrip reads without the lock

	mu       sync.Mutex
	ends     Request[T]    // both ends of the list of requests that wait for a departure
	waiters  int           // requests that wait for a departure
	calls    []*call[T]    // under way
	departed time.Time     // when the last call departed
	answered time.Time     // time of the server's last answer
	rtt      time.Duration // round trip of the last calls; 0: not known
	failed   bool          // the last call failed
	due      time.Time     // no deadline is earlier; zero: there is none
	timer    *time.Timer   // calls tick
	at       time.Time     // when the timer fires; zero: it is not set
	stalled  time.Duration // for how long this process did not run while callers waited, in total
	probing  bool
	opening  bool      // the connection for lone calls is being opened
	opens    time.Time // before this instant it isn't opened again
	closed   bool
	quit     chan struct{} // closed by Close
	drained  chan struct{} // closed once quit is, and no request waits or is under way
}

// NewQueue makes a Queue with at most most calls under way at once. The calls are evidence for the breaker, which may
// be nil. If express is not nil, the caller of a lone request may make its call with it.
func NewQueue[T any](send Sender[T], most int, breaker *Breaker, express *Express[T]) *Queue[T] {
	q := &Queue[T]{send: send, most: most, breaker: breaker, express: express,
		quit: make(chan struct{}), drained: make(chan struct{})}
	q.ends.prev, q.ends.next = &q.ends, &q.ends
	q.requests.New = func() any { return &Request[T]{signal: make(chan struct{}, 1)} }
	q.timer = time.AfterFunc(time.Hour, q.tick)
	q.timer.Stop()
	return q
}

// Request makes a request for Do.
func (q *Queue[T]) Request() *Request[T] { return q.requests.Get().(*Request[T]) }

// Release returns a request for reuse. The caller must have read the answer before.
func (q *Queue[T]) Release(r *Request[T]) {
	var empty T
	r.Body = empty
	q.requests.Put(r)
}

// Do sends r to the server and waits for the answer. It waits until the deadline or until ctx is cancelled. The wait
// begins now. After an error r must not be used any more.
func (q *Queue[T]) Do(ctx context.Context, r *Request[T], w Wait) error {
	q.mu.Lock()
	if q.closed || q.waiters >= mostWaiting {
		defer q.mu.Unlock()
		if q.closed {
			return ErrClosed
		}
		return ErrFull
	}
	r.state.Store(waiting)
	r.unclaimed.Store(false)
	r.uses++
	r.wait = w
	r.deadline = newDeadline(w.Began, w.Deadline, q.stalled)
	r.call = nil
	q.push(r)
	q.due = earlier(q.due, w.Deadline)
	c := q.depart(w.Began)
	q.arm(w.Began)
	if c != nil && len(c.batch) == 1 && len(q.calls) == 1 && q.short(w.Began) {
		c.inline = true
		q.mu.Unlock()
		q.workAlone(ctx, r, c)
		return q.result(ctx, r)
	}
	if c != nil {
		go q.work(c)
	}
	q.mu.Unlock()
	return q.wait(ctx, r)
}

// wait waits until a request is answered or given up.
func (q *Queue[T]) wait(ctx context.Context, r *Request[T]) error {
	done := ctx.Done()
	if done == nil { // a select would cost a tenth of a take
		<-r.signal
		return q.result(ctx, r)
	}
	select {
	case <-r.signal:
	case <-done:
		q.leave(ctx, r, r.uses)
		if r.state.Load() != left {
			<-r.signal
		}
	}
	return q.result(ctx, r)
}

// leave records that the context of a request's caller was cancelled. If the context ended at its deadline, leave does
// nothing: tick gives up the request, because it knows for how long this process did not run.
func (q *Queue[T]) leave(ctx context.Context, r *Request[T], use uint64) {
	if _, timed := ctx.Deadline(); timed && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if r.uses != use || !r.state.CompareAndSwap(waiting, left) {
		return
	}
	if c := r.call; c != nil && c.inline { // its answer comes in a moment, and shows which tokens to return
		now := time.Now()
		c.deadline, c.abandoned = newDeadline(now, now, q.stalled), true
		q.due = earlier(q.due, now)
		q.arm(now)
		return
	}
	q.dropped(r)
}

// result returns the error of a request that isn't waiting any more, nil if it was answered.
func (q *Queue[T]) result(ctx context.Context, r *Request[T]) error {
	if r.state.Load() == answered {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return ErrNoAnswer
}

// dropped records that the caller of a request has left. The lock is held.
func (q *Queue[T]) dropped(r *Request[T]) {
	c := r.call
	if c == nil {
		q.remove(r)
		return
	}
	c.waiters--
	if c.waiters == 0 {
		c.interrupt(q.express)
	}
}

// depart makes a call of the waiting requests. It returns nil if no request waits, if the maximum number of calls is
// under way, or if the last departure was too short a time ago. The lock is held.
func (q *Queue[T]) depart(now time.Time) *call[T] {
	if q.waiters == 0 || len(q.calls) >= q.most || now.Sub(q.departed) < q.spacing() {
		return nil
	}
	c := &call[T]{batch: make([]*Request[T], 0, min(q.waiters, mostRequests))}
	for q.waiters > 0 && len(c.batch) < mostRequests {
		r := q.ends.next
		q.remove(r)
		c.add(r)
	}
	c.begin(now, q.patience(), q.stalled)
	q.due = earlier(q.due, c.deadline.at)
	q.calls = append(q.calls, c)
	q.departed = now
	return c
}

// spacing returns the least time between the last departure and the next one. It grows while the server answers more
// slowly than before. Further calls would only wait at the server, so fewer of them depart, each with more requests.
// The lock is held.
func (q *Queue[T]) spacing() time.Duration {
	if len(q.calls) == 0 {
		return 0
	}
	if q.rtt == 0 {
		return leastSpacing
	}
	return leastSpacing * time.Duration(max(1, len(q.calls)-int(q.rtt/leastSpacing)))
}

// patience returns for how long the server may be silent about a call before its silence is evidence. 0 means for ever.
// The lock is held.
func (q *Queue[T]) patience() time.Duration {
	if q.breaker == nil {
		return 0
	}
	return q.atLeast(q.breaker.Patience)
}

// atLeast returns d, or a longer time for an answer if round trips are long or unknown. The lock is held.
func (q *Queue[T]) atLeast(d time.Duration) time.Duration {
	if q.rtt == 0 {
		return max(d, FirstTime)
	}
	return max(d, Trips*q.rtt)
}

// RoundTrip returns the smoothed time of a round trip, 0 before the first answer.
func (q *Queue[T]) RoundTrip() time.Duration { return time.Duration(q.trip.Load()) }

// PutOff returns the deadline of a wait. If connections were opened since the wait began, it counts from the time when
// the last one was opened, but the deadline is never later than w.Latest.
func (q *Queue[T]) PutOff(w Wait) time.Time {
	if w.Latest.IsZero() || q.Sockets == nil {
		return w.Deadline
	}
	end := w.Deadline
	if at := q.Sockets.opened().Add(w.Deadline.Sub(w.Began)); at.After(end) {
		end = at
	}
	if end.After(w.Latest) && w.Latest.After(w.Deadline) {
		return w.Latest
	}
	return end
}

// push adds a request to those that wait for a departure. The lock is held.
func (q *Queue[T]) push(r *Request[T]) {
	r.prev, r.next = q.ends.prev, &q.ends
	r.prev.next, r.next.prev = r, r
	q.waiters++
}

// remove removes a request from those that wait for a departure. The lock is held.
func (q *Queue[T]) remove(r *Request[T]) {
	r.prev.next, r.next.prev = r.next, r.prev
	r.prev, r.next = nil, nil
	q.waiters--
}

// settle ends a closed queue when it is empty. The lock is held.
func (q *Queue[T]) settle() {
	if !q.closed || q.waiters > 0 || len(q.calls) > 0 || q.probing || q.opening {
		return
	}
	select {
	case <-q.drained:
	default:
		q.timer.Stop()
		close(q.drained)
	}
}

// Close makes the Queue refuse further requests. It waits until the earlier requests are answered or given up and the
// Queue's goroutines have ended, or until ctx ends. A second Close waits in the same way.
func (q *Queue[T]) Close(ctx context.Context) error {
	q.mu.Lock()
	if !q.closed {
		q.closed = true
		close(q.quit)
	}
	q.settle()
	q.mu.Unlock()
	select {
	case <-q.drained:
		return nil
	default:
	}
	select {
	case <-q.drained:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("calls are still under way: %w", ctx.Err())
	}
}

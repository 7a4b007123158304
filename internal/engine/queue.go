package engine

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// spacing is the least time between two departures while a call is under way.
	spacing = time.Millisecond
	// mostDoubled is how often that is doubled while the server is slower than it was.
	mostDoubled = 5
	// linger is how long an idle worker stays: a new one has to grow its stack.
	linger = time.Second
	// mostRequests is the most requests of one call: further ones go with the next.
	mostRequests = 1024
	// mostWaiting bounds the requests that wait for a departure.
	mostWaiting = 1 << 16
)

// Errors of Do, beside the context's own.
var (
	// ErrClosed is returned once Close was called.
	ErrClosed = errors.New("engine: closed")
	// ErrFull is returned when more requests wait than a Queue holds. Nothing was sent.
	ErrFull = fmt.Errorf("engine: more than %d requests wait", mostWaiting)
	// ErrNoAnswer is returned when the deadline passed without an answer.
	ErrNoAnswer = fmt.Errorf("engine: no answer in time: %w", context.DeadlineExceeded)
)

// States of a request. Whoever changes it from waiting owns what follows.
const (
	waiting  int32 = iota
	answered       // the answer is there
	expired        // the deadline passed
	left           // the caller's context was cancelled
)

// Request is something that is asked of a server. Its caller writes Body before Do and reads it after Do returned nil;
// in between it is the Sender's.
type Request[T any] struct {
	Body T

	state  atomic.Int32
	late   atomic.Bool   // the answer came, and nobody waited
	signal chan struct{} // gets one value when the state becomes answered or expired

	// The lock of the queue guards these.
	clock clock
	call  *call[T] // once it is under way
	next  *Request[T]
	uses  uint64 // how often it was given to Do
}

// Answer tells the caller that Body is complete. It reports whether the caller still waits; if not, the request is the
// Sender's to deal with. If so, it must not be used any more.
func (r *Request[T]) Answer() bool {
	if !r.state.CompareAndSwap(waiting, answered) {
		r.late.Store(true)
		return false
	}
	r.signal <- struct{}{}
	return true
}

// Sender makes one round trip for requests in their order, and calls Answer for each of them once. The error says what
// that showed of the server: nil that it answers, ErrNoEvidence nothing, any other that it failed.
//
// ctx has a deadline if all requests have one: Grace after the last of these. It is cancelled when nobody waits for an
// answer any more: what isn't sent by then need not be.
type Sender[T any] func(ctx context.Context, batch []*Request[T]) error

// Queue brings requests to a server. Its methods are safe for concurrent use.
type Queue[T any] struct {
	send     Sender[T]
	slots    *Slots
	breaker  *Breaker    // nil: none
	express  *Express[T] // nil: none
	requests sync.Pool

	mu          sync.Mutex
	first, last *Request[T]
	size        int        // requests from first to last that somebody waits for
	calls       []*call[T] // under way
	free        []*call[T] // to be used again
	departed    time.Time  // the last call
	heard       time.Time  // the last answer of the server
	trip        time.Duration
	due         time.Time     // no deadline is earlier; zero: there is none
	timer       *time.Timer   // calls tick
	at          time.Time     // when the timer fires; zero: it doesn't
	late        time.Duration // for how long this process did not run while somebody waited, all together
	jobs        chan *call[T] // to workers that are idle
	workers     int
	probing     bool
	closed      bool
	quit        chan struct{} // closed when the queue is
	drained     chan struct{} // closed when it is, and nothing waits or is under way
}

// NewQueue makes a Queue whose calls count among the slots, and are evidence for the breaker unless that is nil.
func NewQueue[T any](send Sender[T], slots *Slots, breaker *Breaker, express *Express[T]) *Queue[T] {
	q := &Queue[T]{send: send, slots: slots, breaker: breaker, express: express, jobs: make(chan *call[T]), quit: make(chan struct{}), drained: make(chan struct{})}
	q.requests.New = func() any { return &Request[T]{signal: make(chan struct{}, 1)} }
	q.timer = time.AfterFunc(time.Hour, q.tick)
	q.timer.Stop()
	return q
}

// Request makes a request for Do.
func (q *Queue[T]) Request() *Request[T] { return q.requests.Get().(*Request[T]) }

// Release takes a request back whose answer was read, or that nobody waits for.
func (q *Queue[T]) Release(r *Request[T]) {
	var empty T
	r.Body = empty
	q.requests.Put(r)
}

// Do asks r of the server and waits for the answer until the deadline (zero: none), which is no later than that of ctx,
// or until ctx is cancelled. After an error r must not be used any more.
func (q *Queue[T]) Do(ctx context.Context, r *Request[T], now, deadline time.Time) error {
	q.mu.Lock()
	if q.closed || q.size >= mostWaiting {
		defer q.mu.Unlock()
		if q.closed {
			return ErrClosed
		}
		return ErrFull
	}
	r.state.Store(waiting)
	r.late.Store(false)
	r.uses++
	r.clock, r.call, r.next = newClock(now, deadline, q.late), nil, nil
	if q.first == nil {
		q.first = r
	} else {
		q.last.next = r
	}
	q.last = r
	q.size++
	q.due = earlier(q.due, deadline)
	c := q.depart(now, nil)
	q.arm(now)
	if c != nil && q.express != nil && len(c.batch) == 1 && len(q.calls) == 1 && q.trip > 0 && q.trip < shortTrip {
		c.alone = true
		q.mu.Unlock()
		q.workAlone(ctx, r, c)
		return q.result(ctx, r)
	}
	if c != nil {
		q.start(c)
	}
	q.mu.Unlock()
	return q.wait(ctx, r)
}

// wait waits until a request is answered or given up.
func (q *Queue[T]) wait(ctx context.Context, r *Request[T]) error {
	select {
	case <-r.signal:
	case <-ctx.Done():
		q.leave(ctx, r, r.uses)
		if r.state.Load() != left {
			<-r.signal
		}
	}
	return q.result(ctx, r)
}

// leave notes that the context of a request's caller has ended. Whether its deadline has passed is judged by tick,
// which knows if this process was late.
func (q *Queue[T]) leave(ctx context.Context, r *Request[T], use uint64) {
	if _, timed := ctx.Deadline(); timed && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if r.uses != use || !r.state.CompareAndSwap(waiting, left) {
		return
	}
	if c := r.call; c != nil && c.alone { // its answer is a moment away, and says what is to be given back
		now := time.Now()
		c.clock, c.left = clock{deadline: now, late: q.late, most: q.late + mostStarved}, true
		q.due = earlier(q.due, now)
		q.arm(now)
		return
	}
	q.dropped(r)
}

// result is what became of a request that isn't waiting any more.
func (q *Queue[T]) result(ctx context.Context, r *Request[T]) error {
	if r.state.Load() == answered {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return ErrNoAnswer
}

// dropped notes that nobody waits for a request any more. The lock is held.
func (q *Queue[T]) dropped(r *Request[T]) {
	c := r.call
	if c == nil { // it stays where it is until a departure
		q.size--
		return
	}
	if c.waiting--; c.waiting == 0 {
		c.cancel()
		if c.alone {
			c.interrupt(q.express)
		}
	}
}

// depart makes a call of what waits if one may depart: none is under way, or the last departure was a while ago, and
// there is a slot. That of a call that has ended is used, or given up. The lock is held.
func (q *Queue[T]) depart(now time.Time, ended *call[T]) *call[T] {
	c := ended
	if q.first != nil && now.Sub(q.departed) >= q.spacing() && (c != nil || q.slots.take()) {
		if c == nil {
			c = q.unused()
		}
		for q.first != nil && len(c.batch) < mostRequests {
			if r := q.pop(); r.state.Load() == waiting {
				q.size--
				c.add(r)
			}
		}
		if c.waiting > 0 {
			c.begin(now, q.patience(), q.late)
			q.due = earlier(q.due, c.clock.deadline)
			q.calls = append(q.calls, c)
			q.departed = now
			return c
		}
	}
	if c != nil {
		q.slots.give()
		q.free = append(q.free, c)
	}
	return nil
}

// spacing is how long after the last departure the next one is. While the server answers more slowly than it did,
// further calls would only wait there: they are fewer and fewer, and take along more and more. The lock is held.
func (q *Queue[T]) spacing() time.Duration {
	if len(q.calls) == 0 {
		return 0
	}
	return spacing << min(max(0, len(q.calls)-1-int(q.trip/spacing)), mostDoubled)
}

func (q *Queue[T]) pop() *Request[T] {
	r := q.first
	q.first, r.next = r.next, nil
	return r
}

// unused is a call that isn't under way. The lock is held.
func (q *Queue[T]) unused() *call[T] {
	if last := len(q.free) - 1; last >= 0 {
		c := q.free[last]
		q.free = q.free[:last]
		return c
	}
	return &call[T]{}
}

// start has a call made, by a worker that is idle if there is one. The lock is held.
func (q *Queue[T]) start(c *call[T]) {
	select {
	case q.jobs <- c:
	default:
		q.workers++
		go q.work(c)
	}
}

// work makes a call, and further ones until there have been none for a while.
func (q *Queue[T]) work(c *call[T]) {
	timer := time.NewTimer(linger)
	defer timer.Stop()
	for {
		for c != nil {
			c = q.next(c, q.send(c.ctx, c.batch))
		}
		timer.Reset(linger)
		select {
		case c = <-q.jobs:
			continue
		case <-timer.C:
		case <-q.quit:
		}
		q.mu.Lock()
		defer q.mu.Unlock()
		q.workers--
		q.settle()
		return
	}
}

// next notes how a call ended, and has the next one depart if one may.
func (q *Queue[T]) next(c *call[T], err error) *call[T] {
	runtime.Gosched()
	now := time.Now()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended(c, now, err)
	c = q.depart(now, c)
	q.arm(now)
	q.settle()
	return c
}

// workAlone makes the call of a lone request in the goroutine of its caller.
func (q *Queue[T]) workAlone(ctx context.Context, r *Request[T], c *call[T]) {
	stop := func() bool { return true }
	if ctx.Done() != nil {
		use := r.uses // this may run late, when the request is another's
		stop = context.AfterFunc(ctx, func() { q.leave(ctx, r, use) })
	}
	err := q.express.Send(c.ctx, c.batch)
	stop()
	state := r.state.Load()
	if state != left {
		<-r.signal
	}
	if state != answered { // the connection was closed: that shows something only if there was time for an answer
		if err = ErrNoEvidence; time.Since(c.sent) >= enough {
			err = ErrSilent
		}
	}
	if c = q.next(c, err); c != nil {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.start(c)
	}
}

// ended notes how a call ended. The lock is held.
func (q *Queue[T]) ended(c *call[T], now time.Time, err error) {
	for i := range q.calls {
		if q.calls[i] == c {
			last := len(q.calls) - 1
			q.calls[i], q.calls[last] = q.calls[last], nil
			q.calls = q.calls[:last]
			break
		}
	}
	if err == nil {
		q.heard = now
		switch d := now.Sub(c.sent); { // what is slow for once counts little
		case q.trip == 0:
			q.trip = d
		case d < q.trip:
			q.trip = (q.trip + d) / 2
		default:
			q.trip += (d - q.trip) / 16
		}
	} else {
		q.trip = 0 // not known any more: workers make the calls, whose connections may have to be opened first
	}
	if q.breaker != nil {
		q.opened(q.breaker.ended(now, c.silent, err))
	}
	c.end()
}

// tick does what is due: it has a call depart, and gives up what has waited for too long.
func (q *Queue[T]) tick() {
	now := time.Now()
	q.mu.Lock()
	defer q.mu.Unlock()
	if late := now.Sub(q.at); late >= lateness && !q.at.IsZero() {
		q.late += late
	}
	q.at = time.Time{}
	for q.first != nil && q.first.state.Load() != waiting {
		q.pop()
	}
	if c := q.depart(now, nil); c != nil {
		q.start(c)
	}
	if !q.due.IsZero() && !now.Before(q.due) {
		q.expire(now)
	}
	q.arm(now)
	q.settle()
}

// expire gives up requests whose time is over, and finds calls that the server is silent about. The lock is held.
func (q *Queue[T]) expire(now time.Time) {
	q.due = time.Time{}
	for r := q.first; r != nil; r = r.next {
		q.look(r, now)
	}
	for _, c := range q.calls {
		for _, r := range c.batch {
			q.look(r, now)
		}
		if c.clock.deadline.IsZero() {
			continue
		}
		if !c.clock.over(now, q.late) {
			q.due = earlier(q.due, c.clock.deadline)
			continue
		}
		c.clock = clock{}
		if c.left {
			c.interrupt(q.express)
		} else if !q.heard.After(c.sent) {
			counts, opens := q.breaker.silent(now)
			c.silent = counts
			q.opened(opens)
		}
	}
}

// opened has the server probed if the breaker has opened. The lock is held.
func (q *Queue[T]) opened(yes bool) {
	if yes {
		q.probing = true
		go q.probe()
	}
}

// look gives up a request if its time is over. The lock is held.
func (q *Queue[T]) look(r *Request[T], now time.Time) {
	switch {
	case r.state.Load() != waiting:
	case !r.clock.over(now, q.late):
		q.due = earlier(q.due, r.clock.deadline)
	case r.state.CompareAndSwap(waiting, expired):
		q.dropped(r)
		r.signal <- struct{}{}
	}
}

// arm sets the timer to what is due next. The lock is held.
func (q *Queue[T]) arm(now time.Time) {
	next := q.due
	if q.first != nil {
		d := q.departed.Add(q.spacing())
		if !d.After(now) { // there is no slot
			d = now.Add(spacing)
		}
		next = earlier(next, d)
	}
	if q.first != nil || len(q.calls) > 0 {
		next = earlier(next, now.Add(pulse))
	}
	if !next.IsZero() && (q.at.IsZero() || next.Before(q.at)) {
		q.at = next
		q.timer.Reset(next.Sub(now))
	}
}

// patience is how long the server may be silent about a call before that is evidence. The lock is held.
func (q *Queue[T]) patience() time.Duration {
	if q.breaker == nil {
		return 0
	}
	return min(max(q.breaker.Patience, 4*q.trip), Grace)
}

// settle ends a closed queue when it is empty. The lock is held.
func (q *Queue[T]) settle() {
	if !q.closed || q.first != nil || len(q.calls) > 0 || q.workers > 0 || q.probing {
		return
	}
	select {
	case <-q.drained:
	default:
		q.timer.Stop()
		close(q.drained)
	}
}

// Close refuses further requests, and waits until those under way are answered or given up and the queue's goroutines
// have ended, or until ctx ends. Closing again waits again.
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

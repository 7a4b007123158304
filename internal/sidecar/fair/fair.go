// Package fair shares a bounded number of calls among clients. Further calls wait in a bounded queue, from which the
// clients are served in turns. The package limits calls of a process, not rates: see package limit.
package fair

import (
	"container/list"
	"context"
	"errors"
	"sync"
	"time"
)

// Enter returns these errors for a call that may not run.
var (
	ErrFull   = errors.New("fair: the queue is full")
	ErrLate   = errors.New("fair: the call waited too long")
	ErrClosed = errors.New("fair: the queue is closed")
)

// Bounds are the sizes of a Queue.
type Bounds struct {
	Running int // calls that run at once
	Client  int // calls of one client that run at once
	Waiting int // places of calls that wait
}

// Queue admits calls. It is safe for concurrent use.
type Queue struct {
	bounds Bounds

	mu      sync.Mutex
	running int
	waiting int // places
	calls   int // number of calls that run or wait
	clients map[string]*client
	turns   list.List // of *client: clients that have a waiting call and may run one more
	closed  bool
	idle    chan struct{} // closed as soon as closed is set and calls is 0
}

// client is a client that has a call that runs or waits.
type client struct {
	name    string
	running int
	places  int           // places of its waiting calls
	waiting list.List     // of *turn
	turn    *list.Element // in Queue.turns; nil if the client isn't in it
}

// turn is a call that waits.
type turn struct {
	places  int
	at      *list.Element // in client.waiting
	granted chan struct{}
}

// New makes a Queue.
func New(b Bounds) *Queue {
	return &Queue{bounds: b, clients: make(map[string]*client), idle: make(chan struct{})}
}

// Enter waits until a call of the client may run. It returns an error if ctx ends or patience expires before that. A
// patience of 0 never expires. If Enter returns nil, Leave must be called.
//
// A waiting call needs a number of places in the queue, at least 1. The waiting calls of a client, with this one, may
// need no more places than are free before this call. So there is always room for another client.
func (q *Queue) Enter(ctx context.Context, name string, places int, patience time.Duration) error {
	q.mu.Lock()
	c, t, err := q.arrive(name, places)
	q.mu.Unlock()
	if t == nil {
		return err
	}
	if patience > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, patience, ErrLate)
		defer cancel()
	}
	select {
	case <-t.granted:
		return nil
	case <-ctx.Done():
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	select {
	case <-t.granted: // the call was granted at the last moment
		return nil
	default:
	}
	q.giveUp(c, t)
	return context.Cause(ctx)
}

// arrive lets a call run at once, refuses it, or queues it and returns its turn.
func (q *Queue) arrive(name string, places int) (*client, *turn, error) {
	if q.closed {
		return nil, nil, ErrClosed
	}
	c := q.clients[name]
	if c == nil {
		c = &client{name: name}
	}
	if q.running < q.bounds.Running && c.running < q.bounds.Client && c.waiting.Len() == 0 {
		q.clients[name] = c
		q.calls++
		q.run(c)
		return c, nil, nil
	}
	if c.places+places > q.bounds.Waiting-q.waiting {
		return nil, nil, ErrFull
	}
	t := &turn{places: places, granted: make(chan struct{})}
	q.clients[name] = c
	q.calls++
	q.waiting += places
	c.places += places
	t.at = c.waiting.PushBack(t)
	q.place(c)
	return c, t, nil
}

func (q *Queue) run(c *client) {
	q.running++
	c.running++
}

// place adds a client to turns or removes it. A client is in turns exactly while it has a waiting call and may run one
// more.
func (q *Queue) place(c *client) {
	ready := c.waiting.Len() > 0 && c.running < q.bounds.Client
	switch {
	case ready && c.turn == nil:
		c.turn = q.turns.PushBack(c)
	case !ready && c.turn != nil:
		q.turns.Remove(c.turn)
		c.turn = nil
	}
}

// Leave ends a call that Enter has admitted.
func (q *Queue) Leave(name string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	c := q.clients[name]
	q.running--
	c.running--
	q.place(c)
	q.end(c)
	for q.running < q.bounds.Running && q.turns.Len() > 0 {
		q.grant(q.turns.Front().Value.(*client))
	}
}

// grant runs the first waiting call of a client. The client's next turn comes after those of the others.
func (q *Queue) grant(c *client) {
	t := c.waiting.Remove(c.waiting.Front()).(*turn)
	q.leavePlaces(c, t)
	q.run(c)
	q.turns.MoveToBack(c.turn)
	q.place(c)
	close(t.granted)
}

func (q *Queue) leavePlaces(c *client, t *turn) {
	q.waiting -= t.places
	c.places -= t.places
}

// giveUp removes a waiting call.
func (q *Queue) giveUp(c *client, t *turn) {
	c.waiting.Remove(t.at)
	q.leavePlaces(c, t)
	q.place(c)
	q.end(c)
}

// end records the end of a call of a client.
func (q *Queue) end(c *client) {
	q.calls--
	if c.running == 0 && c.waiting.Len() == 0 {
		delete(q.clients, c.name)
	}
	q.checkIdle()
}

func (q *Queue) checkIdle() {
	if q.closed && q.calls == 0 {
		close(q.idle)
	}
}

// Close makes Enter refuse further calls. It waits until the calls that run or wait have ended.
func (q *Queue) Close() {
	q.mu.Lock()
	if !q.closed {
		q.closed = true
		q.checkIdle()
	}
	q.mu.Unlock()
	<-q.idle
}

// Load returns the number of calls that run, and the number of calls that run or wait.
func (q *Queue) Load() (running, calls int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.running, q.calls
}

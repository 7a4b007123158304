package engine

import (
	"context"
	"time"
)

const (
	// Grace is how long a reply is still awaited after its last caller has left, so that tokens without an owner can be
	// returned.
	Grace = time.Second
	// mostTrip is how long a reply is awaited at most, whether or not it has callers: a connection can be dead without an
	// error.
	mostTrip = time.Minute
)

// call is a batch of requests that is under way.
type call[T any] struct {
	batch     []*Request[T]
	ctx       context.Context
	cancel    context.CancelFunc
	waiters   int // requests with a waiting caller
	sent      time.Time
	deadline  deadline // of the server's silence, or of a caller who makes the call and has left
	silent    uint64   // the breaker's window in which its silence counts; 0: none
	inline    bool     // its caller makes it
	abandoned bool     // and has left
}

func (c *call[T]) add(r *Request[T]) {
	r.call = c
	c.batch = append(c.batch, r)
	c.waiters++
}

// begin starts the call.
func (c *call[T]) begin(now time.Time, patience, stalled time.Duration) {
	end, latest := now.Add(mostTrip), now.Add(patience)
	for _, r := range c.batch {
		d := r.deadline.at
		if r.Latest.After(d) {
			d = r.Latest
		}
		if d.IsZero() {
			latest = end
		} else if d.After(latest) {
			latest = d
		}
	}
	latest = earlier(latest.Add(Grace), end)
	inner, cancel := context.WithCancel(context.Background())
	c.ctx, c.cancel = callContext{inner, latest}, cancel
	c.sent = now
	if patience > 0 {
		c.deadline = newDeadline(now, now.Add(patience), stalled)
	}
}

// interrupt prevents sending a call without a waiting caller. If the call's own caller makes it, interrupt ends the
// exchange as well, unless the reply has come and is being read.
func (c *call[T]) interrupt(e *Express[T]) {
	c.cancel()
	if c.inline && !c.batch[0].unclaimed.Load() {
		e.Interrupt()
	}
}

func (c *call[T]) end() {
	c.cancel()
	for _, r := range c.batch {
		if r.call == c { // it isn't used again yet
			r.call = nil
		}
	}
}

// callContext gives go-redis the deadline of the socket, as Sender describes it. It ends only when it is cancelled.
// Callers with an expired deadline are released by tick.
type callContext struct {
	context.Context
	deadline time.Time
}

// Deadline implements context.Context.
func (c callContext) Deadline() (time.Time, bool) { return c.deadline, true }

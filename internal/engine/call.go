package engine

import (
	"context"
	"time"
)

const (
	// Grace is how long a reply is still awaited after the last caller stopped waiting for it, so that what was taken
	// for nobody can be given back.
	Grace = time.Second
	// mostTrip is how long a reply is awaited at most, whoever waits: a connection can be dead without saying so.
	mostTrip = time.Minute
)

// call is a batch of requests that is under way.
type call[T any] struct {
	batch     []*Request[T]
	ctx       context.Context
	cancel    context.CancelFunc
	waiters   int // requests that somebody waits for
	sent      time.Time
	deadline  deadline // of the server's silence, or of a caller who makes the call and has left
	silent    uint64   // the breaker's window in which its silence counts; 0: none
	alone     bool     // its caller makes it
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

// interrupt keeps a call that nobody waits for from being sent. If the call's own caller makes it, interrupt ends the
// exchange as well, unless the answer has come and is being dealt with.
func (c *call[T]) interrupt(e *Express[T]) {
	c.cancel()
	if c.alone && !c.batch[0].unclaimed.Load() {
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

// callContext tells go-redis what to set on the socket: the deadline that Sender describes. It ends only when it is
// cancelled; callers whose time is up are released by tick.
type callContext struct {
	context.Context
	deadline time.Time
}

// Deadline implements context.Context.
func (c callContext) Deadline() (time.Time, bool) { return c.deadline, true }

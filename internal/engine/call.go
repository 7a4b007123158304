package engine

import (
	"context"
	"time"
)

const (
	// Grace is how long a call still waits for its reply after its last caller has left. The tokens of such a reply can
	// then be returned.
	Grace = time.Second
	// mostTrip is the longest time for which a reply is awaited, even if callers still wait. A connection can be dead
	// without an error.
	mostTrip = time.Minute
)

// call is a batch of requests that is under way.
type call[T any] struct {
	batch     []*Request[T]
	ctx       context.Context
	cancel    context.CancelFunc
	waiters   int // requests with a waiting caller
	sent      time.Time
	deadline  deadline // after which silence counts, or an abandoned call is interrupted
	silent    uint64   // the breaker's window in which its silence counts; 0: none
	inline    bool     // the caller of its only request makes it
	abandoned bool     // that caller has left
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
		if r.wait.Latest.After(d) {
			d = r.wait.Latest
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

// interrupt cancels a call that has no waiting caller any more. If the call was not sent yet, it is not sent at all. If
// the caller makes the call itself, interrupt also closes the connection, unless the reply has come and is being read.
func (c *call[T]) interrupt(e *Express[T]) {
	c.cancel()
	if c.inline && !c.batch[0].unclaimed.Load() {
		e.Interrupt()
	}
}

func (c *call[T]) end() {
	c.cancel()
	for _, r := range c.batch {
		if r.call == c { // the request is not in another call yet
			r.call = nil
		}
	}
}

// callContext is the context of a call. go-redis sets its deadline, which Sender describes, on the socket. The context
// ends only when it is cancelled, because tick gives up the requests whose deadlines have passed.
type callContext struct {
	context.Context
	deadline time.Time
}

// Deadline implements context.Context.
func (c callContext) Deadline() (time.Time, bool) { return c.deadline, true }

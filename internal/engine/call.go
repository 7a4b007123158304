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
	// secondLook is how much longer a caller waits when its time is over: a reply may have come while this process did
	// not run, and is read first.
	secondLook = 5 * time.Millisecond
	// Stall is the least delay of a timer that means that this process did not run, and pulse how often that is looked
	// at while somebody waits.
	Stall = time.Millisecond
	pulse = 5 * time.Millisecond
)

// clock says how long somebody waits for an answer.
type clock struct {
	deadline time.Time     // zero: none
	stalled  time.Duration // as in Queue, as far as the deadline was put off for it
	most     time.Duration // of that
	looked   bool
}

// newClock measures a wait from an instant until the deadline; stalled is for how long this process did not run before.
func newClock(now, deadline time.Time, stalled time.Duration) clock {
	return clock{deadline: deadline, stalled: stalled, most: stalled + deadline.Sub(now)}
}

// expireOrExtend reports whether the time is over; stalled is for how long this process did not run until now. When the
// deadline passes for the first time, it is put off by secondLook. It is also put off by the time for which this
// process did not run since the wait began, altogether by no more than the wait was long at first.
func (c *clock) expireOrExtend(now time.Time, stalled time.Duration) bool {
	if c.deadline.IsZero() || now.Before(c.deadline) {
		return false
	}
	more := min(stalled, c.most) - c.stalled
	if c.looked && more < Stall {
		return true
	}
	c.stalled += more
	if !c.looked {
		c.looked = true
		more += secondLook
	}
	c.deadline = now.Add(more)
	return false
}

// call is a batch of requests that is under way.
type call[T any] struct {
	batch   []*Request[T]
	ctx     context.Context
	cancel  context.CancelFunc
	waiting int // requests that somebody waits for
	sent    time.Time
	clock   clock // for how long the server may be silent, or a caller who left goes on reading
	silent  bool  // it was
	alone   bool  // its caller makes it
	left    bool  // who has left
}

func (c *call[T]) add(r *Request[T]) {
	r.call = c
	c.batch = append(c.batch, r)
	c.waiting++
}

// begin starts the call.
func (c *call[T]) begin(now time.Time, patience, stalled time.Duration) {
	end, latest := now.Add(mostTrip), now
	for _, r := range c.batch {
		if d := r.clock.deadline; d.IsZero() {
			latest = end
		} else if d.After(latest) {
			latest = d
		}
	}
	latest = earlier(latest.Add(Grace), end)
	inner, cancel := context.WithCancel(context.Background())
	c.ctx, c.cancel = callContext{inner, latest}, cancel
	c.sent, c.silent, c.alone, c.left = now, false, false, false
	c.clock = clock{}
	if patience > 0 {
		c.clock = newClock(now, now.Add(patience), stalled)
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
	c.ctx, c.cancel = nil, nil
	for i, r := range c.batch {
		if r.call == c { // it isn't used again yet
			r.call = nil
		}
		c.batch[i] = nil
	}
	c.batch, c.waiting = c.batch[:0], 0
}

// callContext tells go-redis what to set on the socket: the latest deadline of the call's requests and Grace more, or
// mostTrip. It ends only when it is cancelled; callers whose time is up are released by their clocks.
type callContext struct {
	context.Context
	deadline time.Time
}

// Deadline implements context.Context.
func (c callContext) Deadline() (time.Time, bool) { return c.deadline, true }

// earlier is the earlier of two instants, the zero time being never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

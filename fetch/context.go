package fetch

import (
	"context"
	"sync"
	"time"
)

// earlier is the earlier of two instants, the zero time being never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// deadlineOf is the instant at which a caller of ctx and limit (0: none) stops
// waiting; zero if never.
func deadlineOf(ctx context.Context, limit time.Duration, now time.Time) time.Time {
	deadline, _ := ctx.Deadline()
	if limit > 0 {
		deadline = earlier(deadline, now.Add(limit))
	}
	return deadline
}

// socketContext is the context of a call that its caller makes: it ends at the
// deadline, which go-redis also sets on the socket, and otherwise not, since a
// socket is not interrupted by a cancellation. It is used by one goroutine; its
// timer is set when go-redis first asks for Done.
type socketContext struct {
	context.Context // for its values
	deadline        time.Time
	alarms          *sync.Pool
	alarm           *alarm
}

// alarm is a channel that a timer closes. One that was stopped in time is used
// again.
type alarm struct {
	done  chan struct{}
	timer *time.Timer
}

// newSocketContext makes a context that keeps its alarm in the pool.
func newSocketContext(ctx context.Context, deadline time.Time, alarms *sync.Pool) *socketContext {
	return &socketContext{Context: ctx, deadline: deadline, alarms: alarms}
}

// release frees what Done made. Nobody may use the context afterwards.
func (c *socketContext) release() {
	if c.alarm != nil && c.alarm.timer.Stop() {
		c.alarms.Put(c.alarm)
	}
	c.alarm = nil
}

// Deadline implements context.Context.
func (c *socketContext) Deadline() (time.Time, bool) { return c.deadline, !c.deadline.IsZero() }

// Done implements context.Context.
func (c *socketContext) Done() <-chan struct{} {
	if c.deadline.IsZero() {
		return nil
	}
	if c.alarm != nil {
		return c.alarm.done
	}
	left := time.Until(c.deadline)
	if a, ok := c.alarms.Get().(*alarm); ok {
		c.alarm = a
		a.timer.Reset(left)
		return a.done
	}
	a := &alarm{done: make(chan struct{})}
	a.timer = time.AfterFunc(left, func() { close(a.done) })
	c.alarm = a
	return a.done
}

// Err implements context.Context.
func (c *socketContext) Err() error {
	if c.alarm == nil {
		return nil
	}
	select {
	case <-c.alarm.done:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// callContext is the context of a call that a worker makes. It ends when its
// callers stop waiting, which keeps a call that waits for a connection from being
// sent. Its deadline, which is what go-redis sets on the socket, is later by the
// grace, so that the reply of a call that was sent can still be read.
type callContext struct {
	context.Context
	deadline time.Time // zero: none
}

// newCallContext makes a context of a call whose last caller stops waiting at the
// deadline.
func newCallContext(ctx context.Context, deadline time.Time) (callContext, context.CancelFunc) {
	if !deadline.IsZero() {
		deadline = deadline.Add(lateGrace)
	}
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	return callContext{Context: inner, deadline: deadline}, cancel
}

// Deadline implements context.Context.
func (c callContext) Deadline() (time.Time, bool) { return c.deadline, !c.deadline.IsZero() }

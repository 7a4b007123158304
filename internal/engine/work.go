package engine

import (
	"context"
	"runtime"
	"time"
)

// work makes a call, and then further ones as long as one may depart. Starting a goroutine for a call costs no more
// than keeping idle goroutines that wait for calls.
func (q *Queue[T]) work(c *call[T]) {
	for c != nil {
		trip, err := q.send(c.ctx, c.batch)
		runtime.Gosched() // callers that were answered may send again, with the next call
		c = q.next(c, trip, err)
	}
}

// next records the end of a call, and returns the next one if one may depart.
func (q *Queue[T]) next(c *call[T], trip time.Duration, err error) *call[T] {
	now := time.Now()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended(c, now, trip, err)
	c = q.depart(now)
	q.arm(now)
	q.settle()
	return c
}

// workAlone makes the call of a lone request in the goroutine of its caller.
func (q *Queue[T]) workAlone(ctx context.Context, r *Request[T], c *call[T]) {
	stop := func() bool { return true }
	if ctx.Done() != nil {
		use := r.uses // leave may run late, when another caller uses the request
		stop = context.AfterFunc(ctx, func() { q.leave(ctx, r, use) })
	}
	trip, err := q.express.Send(c.ctx, c.batch)
	stop()
	state := r.state.Load()
	if state != left {
		<-r.signal
	}
	if state != answered && err != nil { // the connection was closed; expire has counted the silence, if there was any
		err = ErrNoEvidence
	}
	c = q.next(c, trip, err)
	if c != nil {
		go q.work(c)
	}
}

// ended records the end of a call whose round trips lasted trip. The lock is held.
func (q *Queue[T]) ended(c *call[T], now time.Time, trip time.Duration, err error) {
	for i := range q.calls {
		if q.calls[i] == c {
			last := len(q.calls) - 1
			q.calls[i], q.calls[last] = q.calls[last], nil
			q.calls = q.calls[:last]
			break
		}
	}
	q.failed = err != nil
	if !q.failed && trip > 0 {
		q.answered = now
		switch { // a single slow round trip has little weight
		case q.rtt == 0:
			q.rtt = trip
		case trip < q.rtt:
			q.rtt = (q.rtt + trip) / 2
		default:
			q.rtt += (trip - q.rtt) / 16
		}
		q.trip.Store(int64(q.rtt))
	}
	if q.breaker != nil {
		q.opened(q.breaker.recordEnd(now, c.silent, err))
	}
	c.end()
}

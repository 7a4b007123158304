package engine

import (
	"runtime"
	"time"
)

// pulse is the period of the timer while a caller waits. A delay of the timer shows that this process did not run, and
// deadlines move by that delay. Otherwise 0.1 percent of the takes of 1,024 goroutines on two busy cores would fail.
const pulse = 5 * time.Millisecond

// tick runs when the timer fires. It makes a call if one may depart, and gives up requests whose time is over.
func (q *Queue[T]) tick() {
	// The goroutine of a timer overtakes goroutines that are ready to run. One of them may be about to deliver an answer.
	runtime.Gosched()
	now := time.Now()
	q.mu.Lock()
	defer q.mu.Unlock()
	select {
	case <-q.drained: // the queue ended while this tick waited for the lock
		return
	default:
	}
	if delay := now.Sub(q.at); delay >= Stall && !q.at.IsZero() {
		q.stalled += delay
	}
	q.at = time.Time{}
	if c := q.depart(now); c != nil {
		go q.work(c)
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
	for r := q.ends.next; r != &q.ends; {
		next := r.next
		q.giveUpIfOver(r, now)
		r = next
	}
	for _, c := range q.calls {
		for _, r := range c.batch {
			q.giveUpIfOver(r, now)
		}
		if c.deadline.at.IsZero() {
			continue
		}
		if !c.deadline.expireOrExtend(now, q.stalled) {
			q.due = earlier(q.due, c.deadline.at)
			continue
		}
		c.deadline = deadline{}
		if c.abandoned {
			c.interrupt(q.express)
		} else if !q.answered.After(c.sent) {
			var opens bool
			c.silent, opens = q.breaker.recordSilence(now)
			q.opened(opens)
		}
	}
}

// giveUpIfOver gives up a request if its time is over. The lock is held.
func (q *Queue[T]) giveUpIfOver(r *Request[T], now time.Time) {
	switch {
	case r.state.Load() != waiting:
	case !r.deadline.expireOrExtend(now, q.stalled):
		q.due = earlier(q.due, r.deadline.at)
	case q.postpone(r, now):
		q.due = earlier(q.due, r.deadline.at)
	case r.state.CompareAndSwap(waiting, expired):
		q.dropped(r)
		r.signal <- struct{}{}
	}
}

// postpone puts the deadline of a request off if connections were opened since it began to wait, and reports whether it
// did. The lock is held.
func (q *Queue[T]) postpone(r *Request[T], now time.Time) bool {
	at := q.PutOff(r.wait)
	if !at.After(now) {
		return false
	}
	r.deadline = newDeadline(now, at, q.stalled)
	return true
}

// arm sets the timer to the next instant at which tick has something to do. The lock is held.
func (q *Queue[T]) arm(now time.Time) {
	next := q.due
	if q.waiters > 0 && len(q.calls) < q.most {
		next = earlier(next, q.departed.Add(q.spacing()))
	}
	if q.waiters > 0 || len(q.calls) > 0 {
		next = earlier(next, now.Add(pulse))
	}
	if !next.IsZero() && (q.at.IsZero() || next.Before(q.at)) {
		q.at = next
		q.timer.Reset(next.Sub(now))
	}
}

package fetch

import (
	"context"
	"time"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// question is a line's call to its bucket, for some of its waiters. It may take as long as the most patient of them
// allows. A waiter with less time does not wait for its end, and neither does one that joins the line meanwhile.
// Otherwise a waiter with 50 ms beside one with 5 s would wait for 5 s for a server that is silent. The lock of the
// lines guards the question.
type question struct {
	began   time.Time     // zero: none is under way
	end     time.Time     // end of the most patient waiter's time; zero: it has no end
	stalled time.Duration // for how long this process did not run
	server  distance      // the server's when it began
	due     time.Time     // when the timer fires; zero: it doesn't
	timer   *time.Timer   // calls overdue
}

// putQuestion records that a line asks for some of its waiters, and returns the options of the call. The lock is held.
func (c *Client) putQuestion(l *line, asked []*waiter) *callConfig {
	if len(asked) == 0 {
		return nil
	}
	q := &l.question
	q.server = c.nodes.of(l.key).distance()
	most := asked[0].cfg
	for _, w := range asked {
		if d := q.timeout(w.cfg); q.timeout(most) > 0 && (d <= 0 || d > q.timeout(most)) {
			most = w.cfg
		}
	}
	l.more = false
	q.began = time.Now()
	q.end = time.Time{}
	q.stalled = 0
	if d := q.timeout(most); d > 0 {
		q.end = q.began.Add(d)
	}
	for w := l.first; w != nil; w = w.next {
		c.watch(l, w)
	}
	return most
}

// timeout returns the time that a waiter with the options has for the question; 0: without end.
func (q *question) timeout(cfg *callConfig) time.Duration {
	if cfg.timed {
		return cfg.timeout
	}
	return q.server.timeout()
}

// from returns when a waiter's time for the question under way began.
func (q *question) from(w *waiter) time.Time {
	if w.since.After(q.began) {
		return w.since
	}
	return q.began
}

// over returns when a waiter's time for the question under way ends, if it is before the question's; otherwise zero.
func (q *question) over(w *waiter) time.Time {
	d := q.timeout(w.cfg)
	if q.began.IsZero() || d <= 0 {
		return time.Time{}
	}
	if over := q.from(w).Add(d + q.stalled); q.end.IsZero() || over.Before(q.end) {
		return over
	}
	return time.Time{}
}

// watch sets the timer for a waiter whose time ends before the question's. The lock is held.
func (c *Client) watch(l *line, w *waiter) {
	q := &l.question
	over := q.over(w)
	if over.IsZero() || !q.due.IsZero() && !over.Before(q.due) {
		return
	}
	q.due = over
	if q.timer == nil {
		q.timer = time.AfterFunc(time.Until(over), func() { c.overdue(l) })
	} else {
		q.timer.Reset(time.Until(over))
	}
}

// overdue answers the waiters whose time is over, as their degraded mode says. Their place in the line doesn't matter.
// A waiter that the mode denies continues to wait. If this process did not run when the first of these times ended, all
// waiters get the delay in addition.
func (c *Client) overdue(l *line) {
	l.mu.Lock()
	defer l.mu.Unlock()
	q, now := &l.question, time.Now()
	if q.due.IsZero() || now.Before(q.due) {
		return // the question has ended meanwhile
	}
	if delay := now.Sub(q.due); q.stalled == 0 && delay >= engine.Stall {
		q.stalled = delay
	}
	q.due = time.Time{}
	for w := l.first; w != nil; w = w.next {
		if over := q.over(w); !over.IsZero() && !now.Before(over) {
			err := failure(context.Background(), q.server.late(now.Sub(q.from(w)), engine.ErrNoAnswer))
			if _, delivered := c.deliverDegraded(l, w, err); delivered {
				continue
			}
			w.since = now
		}
		c.watch(l, w)
	}
}

// degradedLine answers waiters that the bucket did not answer as their takes would be: one after the other until one is
// denied. The lock is held.
func (c *Client) degradedLine(l *line, asked []*waiter, err error) {
	l.denied = time.Time{}
	for _, w := range asked {
		if !w.in {
			continue
		}
		if a, delivered := c.deliverDegraded(l, w, err); !delivered {
			a.runs = []lua.RunReply{{Wait: a.reply.Wait}}
			l.remember([]policy.Run{{N: w.n, Count: 1}}, &a)
			return
		}
	}
}

// deliverDegraded delivers the answer of the degraded mode to a waiter, unless it is a denial. The lock is held.
func (c *Client) deliverDegraded(l *line, w *waiter, err error) (a answer, delivered bool) {
	a = c.degraded(l.key, policy.Run{N: w.n, Count: 1, Leave: l.leave}, err)
	v := verdict{err: a.err}
	switch {
	case a.err != nil:
	case a.reply.OK, a.info.shadowed():
		v.result = c.shadow(a.result(nil, time.Time{}), a.info, w.n)
	case a.info.exceeded(l.key, w.n, l.leave) != nil:
		v.err = a.info.exceeded(l.key, w.n, l.leave)
	default:
		return a, false
	}
	l.remove(w)
	w.verdict <- v
	return a, true
}

// stop ends the question. The lock is held.
func (q *question) stop() {
	q.began, q.due = time.Time{}, time.Time{}
	if q.timer != nil {
		q.timer.Stop()
	}
}

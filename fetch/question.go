package fetch

import (
	"context"
	"time"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// question is the call that a line makes to its bucket for some of its waiters. It may take as long as the longest of
// their timeouts. A waiter with a shorter timeout does not wait for the end of the call, and neither does a waiter that
// joins the line during the call. Otherwise a waiter with a timeout of 50 ms beside one with 5 s would wait for a
// silent server for 5 s. The lock of the lines guards the question.
type question struct {
	began  time.Time // zero: none is under way
	end    time.Time // when the longest of the timeouts passes; zero: never
	server distance  // the server's distance when the question began
}

// putQuestion records that a line makes a call for some of its waiters. It returns the options of the waiter with the
// longest timeout, nil if there is no waiter. The lock is held.
func (c *Client) putQuestion(l *line, asked []*waiter) *callConfig {
	if len(asked) == 0 {
		return nil
	}
	l.more = false
	l.question = question{began: time.Now(), server: c.nodes.of(l.key).distance()}
	q := &l.question
	most := asked[0].cfg
	for _, w := range asked {
		if d := q.timeout(w.cfg); q.timeout(most) > 0 && (d <= 0 || d > q.timeout(most)) {
			most = w.cfg
		}
	}
	if d := q.timeout(most); d > 0 {
		q.end = q.began.Add(d)
	}
	for w := l.first; w != nil; w = w.next {
		c.watch(l, w)
	}
	return most
}

// timeout returns how long a waiter with these options waits for the question to be answered; 0 is without limit.
func (q *question) timeout(cfg *callConfig) time.Duration {
	if cfg.timed {
		return cfg.timeout
	}
	return q.server.timeout()
}

// watch starts the timer of a waiter whose timeout passes before the end of the question under way. The lock is held.
func (c *Client) watch(l *line, w *waiter) {
	q := l.question
	d := q.timeout(w.cfg)
	over := time.Now().Add(d)
	if !q.began.IsZero() && d > 0 && (q.end.IsZero() || over.Before(q.end)) {
		w.schedule(d, func() { c.overdue(l, w, q, over, false) })
	}
}

// overdue delivers the answer of the degraded mode to a waiter whose timeout for a question passed at over, whatever
// its place in the line. If the degraded mode denies the take, the waiter continues to wait. If this process did not
// run when the timeout passed, the timeout is extended once, by the delay but at most by its own length.
func (c *Client) overdue(l *line, w *waiter, q question, over time.Time, extended bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !w.in || !q.began.Equal(l.question.began) {
		return // the waiter or the question has its answer
	}
	d := q.timeout(w.cfg)
	late := time.Since(over)
	if late >= engine.Stall && !extended {
		w.schedule(min(late, d), func() { c.overdue(l, w, q, over, true) })
		return
	}
	err := failure(context.Background(), q.server.late(d+late, engine.ErrNoAnswer))
	if _, delivered := c.deliverDegraded(l, w, err); !delivered {
		c.watch(l, w)
	}
}

// degradedLine answers waiters that the bucket did not answer. Like the bucket it grants their takes one after the
// other, until one is denied. The lock is held.
func (c *Client) degradedLine(l *line, asked []*waiter, err error) {
	l.denied = time.Time{}
	for _, w := range asked {
		if !w.in {
			continue
		}
		if a, delivered := c.deliverDegraded(l, w, err); !delivered {
			a.runs = []lua.RunReply{{Wait: a.reply.Wait}}
			l.remember([]policy.Run{{N: w.n, Count: 1}}, &a, nil)
			return
		}
	}
}

// deliverDegraded delivers the answer of the degraded mode to a waiter, unless it is a denial. The lock is held.
func (c *Client) deliverDegraded(l *line, w *waiter, err error) (a answer, delivered bool) {
	a = c.degraded(l.key, policy.Run{N: w.n, Count: 1, Leave: l.leave}, err)
	v, over := c.verdict(l, w, &a, nil, time.Time{})
	if over {
		l.end(w, v)
	}
	return a, over
}

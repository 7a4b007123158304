package fetch

import (
	"context"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// slowPause is the time between two questions of a line when no refill is known to be due, or when refills are
	// overdue.
	slowPause = time.Second
	// maxJitter is the range of a random delay of questions. Otherwise the lines of many processes for one bucket would
	// ask at the same instant.
	maxJitter = 10 * time.Millisecond
	// mostRuns is the largest number of runs in one question, so that it doesn't occupy the server for long. A run is a
	// series of waiters that want equally many tokens.
	mostRuns = 256
)

// Wait takes n tokens, all at once, and waits until the bucket has them; n is 1 to policy.MaxTokens. The Result is that
// of the take that got the tokens, so it is never a denial. The options are WithTimeout, WithLeave, WithLeavePercent
// and WithFlow. WithTimeout bounds each question to the server, and not the wait.
//
// Callers of Wait for one bucket in one Client, with the same WithLeave and the same WithFlow, form a line. They are
// served in the order of their arrival. While the first caller isn't served, no other caller is, however few tokens it
// wants. Each question to the server is for the whole line, so the number of questions doesn't grow with the length of
// the line. The line asks when the tokens of the first waiter are due. Unless WithRescue(false) is set, it also asks
// every few seconds, because there may be no refiller.
//
// After a bucket has denied a line, two kinds of calls of the same Client don't overtake it. They are lines that leave
// more, and takes and reservations without a request id that leave at least as much. There is one exception. Of the
// takes and reservations that leave as much as the line, one passes the line in each refill interval. If it wants many
// tokens, it passes only after the time in which the bucket earns twice as many. So these calls also get tokens, and
// the line gets at least half of the refilled tokens.
//
// Wait returns ErrDeadline at once if the tokens, after those of the waiters in front, are due after the context's
// deadline. If the context ends while it waits, it returns the context's error, and its place goes to the next waiter.
// The timeout of a question is the longest timeout of the waiters for which it is made. A waiter with a shorter timeout
// gets its result after its own timeout, as from Take, whatever its place in the line. Everything else is as for Take.
// In particular, Wait doesn't wait for a server that is unavailable.
//
// Lines of different processes, and takes, compete for the same tokens.
func (c *Client) Wait(ctx context.Context, key string, n int64, opts ...CallOption) (Result, error) {
	call := Call{Op: OpWait, Key: key, Tokens: n}
	return c.call(ctx, call, n, opts, func(ctx context.Context, cfg *callConfig) (Result, error) {
		v := c.waitFor(ctx, key, n, cfg)
		return v.result, v.err
	})
}

// waitFor is Wait without the observation of the call.
func (c *Client) waitFor(ctx context.Context, key string, n int64, cfg *callConfig) verdict {
	if b := c.buckets.find(key); !b.waited() {
		if r, low := b.takeLocal(cfg.flow, n, n, cfg.leave); r.OK {
			low.signal()
			return verdict{result: r}
		}
	}
	if !c.life.enter() {
		return verdict{err: ErrClosed}
	}
	defer c.life.leave()
	w := &waiter{n: n, cfg: cfg, verdict: make(chan verdict, 1), in: true}
	w.deadline, _ = ctx.Deadline()
	l, err := c.join(key, w)
	if err != nil {
		return verdict{err: err}
	}
	c.buckets.find(key).yield(cfg.flow)
	select {
	case v := <-w.verdict:
		return v
	case <-ctx.Done():
		err = fmt.Errorf("fetch: wait: %w", ctx.Err())
	case <-c.life.quit:
		err = ErrClosed
	}
	return c.leave(l, w, err)
}

// join puts a waiter at the end of its line, unless its tokens come too late.
func (c *Client) join(key string, w *waiter) (*line, error) {
	ls, leave := c.buckets.wait(key), w.cfg.leave
	flow := c.buckets.find(key).known.Load().flowOf(w.cfg.flow)
	ls.mu.Lock()
	defer ls.mu.Unlock()
	due, _ := ls.dueBehind(flow, w.n, leave)
	left := time.Until(w.deadline)
	if !w.deadline.IsZero() && due > left && due != Never {
		ls.waiters.Add(-1)
		return nil, errTooLate(w.n, key, due, left)
	}
	l := ls.find(flow, leave)
	if l == nil {
		l = &line{lines: ls, key: key, flow: flow, leave: leave, info: unseen, again: make(chan struct{}, 1)}
		if !c.life.spawn(func() { c.serve(l) }) {
			ls.waiters.Add(-1)
			return nil, ErrClosed
		}
		ls.of = append(ls.of, l)
	}
	w.prev = l.last
	if w.prev == nil {
		l.first = w
	} else {
		w.prev.next = w
	}
	l.last = w
	l.total += w.n
	c.watch(l, w)
	return l, nil
}

// leave ends the wait of a waiter that gives up with err, unless its verdict was delivered meanwhile.
func (c *Client) leave(l *line, w *waiter, err error) verdict {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !w.in {
		return <-w.verdict
	}
	l.remove(w)
	return verdict{err: err}
}

// serve asks the bucket of a line again and again, until the line is empty or the Client is closed.
func (c *Client) serve(l *line) {
	for {
		c.askForLine(l)
		l.mu.Lock()
		pause, over := c.pause(l)
		l.mu.Unlock()
		if over {
			return
		}
		if pause > 0 {
			timer := time.NewTimer(pause)
			select {
			case <-timer.C:
			case <-l.again:
			case <-c.life.quit:
			}
			timer.Stop()
		}
	}
}

// pause returns how long a line sleeps before it asks again, and reports whether the line is empty. If the tokens of
// the first waiter come after its deadline, pause ends its wait with ErrDeadline. The lock is held.
func (c *Client) pause(l *line) (pause time.Duration, over bool) {
	for l.first != nil && !l.denied.IsZero() {
		w, left := l.first, Never
		if !w.deadline.IsZero() {
			left = time.Until(w.deadline)
		}
		due := l.untilDue(w.n, l.leave)
		if due != Never && due > left {
			l.end(w, verdict{err: errTooLate(w.n, l.key, due, left)})
			continue
		}
		pause = due
		for i := 2; i < l.asked && pause < slowPause; i++ { // the refill turns out to be overdue
			pause = max(2*pause, time.Millisecond)
		}
		if pause > slowPause && (due == Never || due < slowPause) {
			pause = slowPause
		}
		if t := l.info.terms; t != nil && t.MaxElapsed > 0 && c.config.rescue { // a rescue credits no longer time
			pause = min(pause, micros(t.MaxElapsed))
		}
		pause += timing.Between(c.jitter, 0, min(pause/10, maxJitter))
		if due != Never && pause > left {
			pause = max(due, left/2) // further tries before the deadline
		}
		return pause, false
	}
	return 0, l.first == nil
}

// askForLine asks once for as many waiters as go into one call, and serves the waiters for which the bucket has tokens.
func (c *Client) askForLine(l *line) {
	l.mu.Lock()
	asked, runs := l.runs()
	allKeys := !l.denied.IsZero()
	cfg := c.putQuestion(l, asked)
	l.mu.Unlock()
	if len(asked) == 0 {
		return
	}
	if unused := c.deliver(l, asked, runs, c.askLine(l, cfg, runs, allKeys)); unused.N > 0 {
		c.giveBackLater(l.key, unused)
	}
}

// runs returns the waiters of a line that go into one call, and what they take. The lock is held.
func (l *line) runs() (asked []*waiter, runs []policy.Run) {
	total := int64(0)
	for w := l.first; w != nil && len(runs) < mostRuns && w.n <= policy.MaxTokens-total; w = w.next {
		asked, total = append(asked, w), total+w.n
		if last := len(runs) - 1; last >= 0 && runs[last].N == w.n {
			runs[last].Count++
		} else {
			runs = append(runs, policy.Run{N: w.n, Count: 1, Leave: l.leaves(l.flow, w.n, l.leave, true)})
		}
	}
	return asked, runs
}

// deliver serves the waiters for which the answer to a task has tokens. It returns the call that gives back the tokens
// of waiters that have left meanwhile.
func (c *Client) deliver(l *line, asked []*waiter, runs []policy.Run, t *task) (unused lua.ReturnCall) {
	a := &t.got
	l.mu.Lock()
	defer l.mu.Unlock()
	l.question.began = time.Time{}
	if ReasonOf(a.err) != ReasonNone {
		c.degradedLine(l, asked, a.err)
		return unused
	}
	l.remember(runs, a, t.node)
	run, served := 0, int64(0) // served counts waiters of the run
	left, now := a.reply.Remaining+a.reply.Taken, time.Now()
	for _, w := range asked {
		for run < len(runs)-1 && served == runs[run].Count {
			run, served = run+1, 0
		}
		one := a.one(run, served, w.n, left)
		v, over := c.verdict(l, w, &one, t.kind, now)
		if !over {
			return unused // the waiters behind it are not served either
		}
		served++
		left = one.reply.Remaining
		if w.in {
			l.end(w, v)
		} else if one.reply.OK { // the waiter left meanwhile, or its time was over
			back := backOf(&one.reply, a.info, l.flow)
			back.N += unused.N
			back.Paid += unused.Paid
			unused = back
		}
	}
	return unused
}

// one returns the part of the answer to a line that is for the nth take of a run. Each take of the run is for n tokens.
// left is the number of tokens that the bucket had before this take.
func (a *answer) one(run int, nth, n, left int64) answer {
	one := answer{reply: lua.TakeReply{Remaining: left}, info: a.info, err: a.err}
	if a.err != nil || !a.reply.OK && nth >= a.runs[run].Taken {
		return one
	}
	one.reply.OK = true
	one.reply.Taken = n
	one.reply.Remaining -= n
	switch {
	case a.runs != nil:
		one.reply.Paid = paidOf(n, a.runs[run], nth)
	case a.reply.Paid > 0:
		one.reply.Paid = n
	}
	return one
}

// verdict returns the verdict for a waiter after an answer from a bucket of kind k. over reports whether the wait ends.
// A denial does not end it.
func (c *Client) verdict(l *line, w *waiter, a *answer, k kind, now time.Time) (v verdict, over bool) {
	v.err = a.err
	switch {
	case a.err != nil:
	case a.reply.OK, a.info.shadowed():
		v.result = a.result(k, now)
		v.result.paid = a.payment(l.flow)
		v.result = c.shadow(v.result, a.info, w.n)
	default:
		v.err = a.info.exceeded(l.key, w.n, l.leave)
		return v, v.err != nil
	}
	return v, true
}

// askLine makes the takes of a line from the bucket, in their order. It returns the task, which has the answer. If the
// bucket denies a take and the Client then refills it, the source of the answer is SourceRescued: the bucket has more
// tokens by now.
func (c *Client) askLine(l *line, cfg *callConfig, runs []policy.Run, allKeys bool) *task {
	t := c.begin(budgetOf(context.Background(), cfg), l.key)
	t.quits = true
	a := t.put(false, func() error {
		return t.takes(&ask{flow: l.flow, line: runs, allKeys: allKeys || !t.info.fresh(time.Now())})
	})
	if a.err != nil || a.reply.OK {
		return t
	}
	for i, r := range a.runs {
		if r.Taken < runs[i].Count {
			if again, _ := t.rescue(runs[i].N+runs[i].Leave.Of(a.info.limit()), &a.reply); again {
				a.source.Kind = SourceRescued
			}
			break
		}
	}
	return t
}

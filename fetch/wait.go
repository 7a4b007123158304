package fetch

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// slowPause is how often a line asks when no refill is known to be due, or when refills stay out.
	slowPause = time.Second
	// maxJitter spreads the lines of one bucket in many processes, which are all told the same instant.
	maxJitter = 10 * time.Millisecond
	// mostRuns is the most runs of equal waits that one question is for, so that it doesn't occupy the server for long.
	mostRuns = 256
)

// Wait takes n tokens, all at once, and waits until they are there; n is 1 to policy.MaxTokens. Those who wait for a
// bucket in one Client, with the same WithLeave, form a line: they are served in the order of their arrival, and none
// is served while the first isn't, however few tokens it wants. The line asks when the tokens of the first are due,
// once for all, so its calls don't grow with its length; and, but for WithRescue(false), every few seconds, lest no
// refiller lives. The options are WithTimeout, for each question, WithLeave and WithLeavePercent.
//
// What a bucket has that has said no to a line is the line's: takes and reservations through the same Client that leave
// as much or more, and have no request id, don't overtake it, nor do lines that leave more.
//
// It returns ErrDeadline at once when the tokens are due after the context's deadline, counting what those in front
// wait for; and the context's error when that ends meanwhile, which gives the place in the line to the next. A line
// asks with the longest timeout of those it asks for; who has less is answered in time as Take would be, whoever is in
// front. Everything else is as for Take: Wait doesn't wait for a server that is away.
//
// Lines of different processes, and takes, compete for the same tokens.
func (c *Client) Wait(ctx context.Context, key string, n int64, opts ...CallOption) error {
	cfg, err := c.with(OpWait, opts)
	if err != nil {
		return err
	}
	_, err = c.observed(ctx, Call{Op: OpWait, Key: key, Tokens: n}, func(ctx context.Context) (Result, error) {
		v := c.waitFor(ctx, key, n, cfg)
		if v.err != nil {
			return Result{}, v.err
		}
		return Result{OK: true, Taken: n, Source: v.source}, nil
	})
	return err
}

func (c *Client) waitFor(ctx context.Context, key string, n int64, cfg *callConfig) verdict {
	if err := c.check(ctx, key, n); err != nil {
		return verdict{err: err}
	}
	if !c.lines.waited(key) {
		if r, ok := c.leases.take(key, n, cfg.leave); ok {
			return verdict{source: r.Source}
		}
	}
	if !c.life.enter() {
		return verdict{err: ErrClosed}
	}
	defer c.life.leave()
	w := &waiter{n: n, cfg: cfg, since: time.Now(), verdict: make(chan verdict, 1), in: true}
	w.deadline, _ = ctx.Deadline()
	l, err := c.join(key, w)
	if err != nil {
		return verdict{err: err}
	}
	c.leases.yield(key)
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

// lines are those of the waiters of a Client: of each bucket one for each Leave.
type lines struct {
	mu sync.Mutex
	of map[string][]*line
}

// line is the waiters for a bucket, in the order of their arrival. A goroutine asks for all of them until none is left.
// The lock of the lines guards it.
type line struct {
	key         string
	leave       policy.Leave
	first, last *waiter
	total       int64         // tokens that all want
	more        chan struct{} // there may be more tokens, or nobody waits any more

	// What the last denial told; denied is zero if nothing is known.
	denied time.Time
	n      int64 // it was a denial of so many tokens
	wait   time.Duration
	left   int64
	at     lua.Refilled
	info   *info
	asked  int // how often the bucket was asked since that refill

	question question // under way
}

// waiter is one of a line until it is served or leaves.
type waiter struct {
	n          int64
	cfg        *callConfig
	deadline   time.Time // zero: none
	since      time.Time // when it joined, or was last denied in degraded mode
	verdict    chan verdict
	in         bool
	next, prev *waiter
}

// verdict is what a waiter is told.
type verdict struct {
	err    error
	source Source
}

// join puts a waiter at the end of its line, unless its tokens come too late.
func (c *Client) join(key string, w *waiter) (*line, error) {
	ls, leave := &c.lines, w.cfg.leave
	ls.mu.Lock()
	defer ls.mu.Unlock()
	due, _ := ls.due(key, w.n, leave)
	left := time.Until(w.deadline)
	if !w.deadline.IsZero() && due > left && due != Never {
		return nil, errTooLate(w.n, key, due, left)
	}
	l := ls.find(key, leave)
	if l == nil {
		l = &line{key: key, leave: leave, info: unseen, more: make(chan struct{}, 1)}
		if !c.life.spawn(func() { c.serve(l) }) {
			return nil, ErrClosed
		}
		ls.of[key] = append(ls.of[key], l)
	}
	if w.prev = l.last; w.prev == nil {
		l.first = w
	} else {
		w.prev.next = w
	}
	l.last = w
	l.total += w.n
	c.watch(l, w)
	return l, nil
}

// due is the time until n tokens are there and as many as are to be left, for all that the last denial told: 0 if
// nothing is known, Never if that said so.
func (l *line) due(n int64, leave policy.Leave) time.Duration {
	if l.denied.IsZero() || l.info.shadowed() {
		return 0
	}
	due := l.wait
	if n != l.n || leave != l.leave {
		n += leave.Of(l.info.limit())
		if due = l.info.untilDue(n, l.left, l.at); due < 0 {
			return 0
		}
	}
	if due = wait(due); due == Never {
		return Never
	}
	return max(0, due-time.Since(l.denied))
}

// find is the line of a bucket that leaves so much, nil if there is none. The lock is held.
func (ls *lines) find(key string, leave policy.Leave) *line {
	for _, l := range ls.of[key] {
		if l.leave == leave {
			return l
		}
	}
	return nil
}

// waited reports whether somebody waits for a bucket.
func (ls *lines) waited(key string) bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return len(ls.of[key]) > 0
}

// ahead adds up the tokens that the lines want which a take would overtake: those that the bucket has said no to, and
// that leave as much or less. A take that is a line's itself stands behind those lines only that leave less.
// last is the line that asked last. The lock is held.
func (ls *lines) ahead(key string, leave policy.Leave, ofLine bool) (total int64, last *line) {
	for _, l := range ls.of[key] {
		limit := l.info.limit()
		theirs, ours := l.leave.Of(limit), leave.Of(limit)
		if l.denied.IsZero() || theirs > ours || ofLine && theirs == ours {
			continue
		}
		total += l.total
		if last == nil || l.denied.After(last.denied) {
			last = l
		}
	}
	return total, last
}

// due reports whether a take would overtake lines that the bucket has said no to, and when n tokens are due behind
// these: 0 if nothing is known. The lock is held.
func (ls *lines) due(key string, n int64, leave policy.Leave) (due time.Duration, behind bool) {
	total, last := ls.ahead(key, leave, false)
	if last == nil {
		return 0, false
	}
	return last.due(total+n, leave), true
}

// behind is due as a reply tells it: at least a millisecond, and less than 0 is never.
func (ls *lines) behind(key string, n int64, leave policy.Leave) (due time.Duration, yes bool) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	due, yes = ls.due(key, n, leave)
	switch {
	case !yes:
		return 0, false
	case due == Never:
		return -1, true
	}
	return max(due, time.Millisecond), true
}

// leaves is what a take of n that is put to the bucket must leave there: what leave says, and what the lines ahead
// want, at most the capacity less n. The lock is held.
func (ls *lines) leaves(key string, n int64, leave policy.Leave, ofLine bool) policy.Leave {
	total, last := ls.ahead(key, leave, ofLine)
	if last == nil {
		return leave
	}
	limit := last.info.limit()
	least := leave.Of(limit)
	return policy.Leave{Tokens: max(least, min(least+total, limit-n))}
}

// wake has the lines of a bucket ask at once, since there are more tokens.
func (ls *lines) wake(key string) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for _, l := range ls.of[key] {
		l.askAgain()
	}
}

// askAgain has the line ask at once, and forgets its denial: until it has asked, takes may pass. The lock is held.
func (l *line) askAgain() {
	l.denied = time.Time{}
	nudge(l.more)
}

// remove takes a waiter out of its line, and ends the line if it was the last. The lock is held.
func (ls *lines) remove(l *line, w *waiter) {
	w.in = false
	l.total -= w.n
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		l.first = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		l.last = w.prev
	}
	if l.first == nil {
		ls.end(l)
	} else if w.prev == nil {
		nudge(l.more) // the next one may want less
	}
}

// end ends a line, which those that had to stand behind it needn't do any more. The lock is held.
func (ls *lines) end(l *line) {
	others := slices.DeleteFunc(ls.of[l.key], func(other *line) bool { return other == l })
	if ls.of[l.key] = others; len(others) == 0 {
		delete(ls.of, l.key)
	}
	nudge(l.more)
	for _, other := range others {
		if limit := l.info.limit(); other.leave.Of(limit) >= l.leave.Of(limit) {
			other.askAgain()
		}
	}
}

// leave ends the wait of a waiter who gives up with err, unless it was told its verdict meanwhile.
func (c *Client) leave(l *line, w *waiter, err error) verdict {
	c.lines.mu.Lock()
	defer c.lines.mu.Unlock()
	if !w.in {
		return <-w.verdict
	}
	c.lines.remove(l, w)
	return verdict{err: err}
}

// serve asks for a line until nobody waits any more, or the Client is closed.
func (c *Client) serve(l *line) {
	for {
		c.askForLine(l)
		c.lines.mu.Lock()
		pause, over := c.pause(l)
		c.lines.mu.Unlock()
		if over {
			return
		}
		if pause > 0 {
			timer := time.NewTimer(pause)
			select {
			case <-timer.C:
			case <-l.more:
			case <-c.life.quit:
			}
			timer.Stop()
		}
	}
}

// pause is how long a line sleeps before it asks again, or whether nobody waits any more. A first waiter whose tokens
// come after its deadline hears that. The lock is held.
func (c *Client) pause(l *line) (pause time.Duration, over bool) {
	for l.first != nil && !l.denied.IsZero() {
		w, left := l.first, Never
		if !w.deadline.IsZero() {
			left = time.Until(w.deadline)
		}
		due := l.due(w.n, l.leave)
		if due != Never && due > left {
			c.lines.remove(l, w)
			w.verdict <- verdict{err: errTooLate(w.n, l.key, due, left)}
			continue
		}
		pause = due
		for i := 2; i < l.asked && pause < slowPause; i++ { // the refill turns out to be overdue
			pause = max(2*pause, time.Millisecond)
		}
		if pause > slowPause && (due == Never || due < slowPause) {
			pause = slowPause
		}
		if t := l.info.terms; t != nil && t.MaxElapsed > 0 && c.config.rescue { // for longer no rescue makes up
			pause = min(pause, micros(t.MaxElapsed))
		}
		pause += time.Duration(c.jitter() * float64(min(pause/10, maxJitter)))
		if due != Never && pause > left {
			pause = max(due, left/2) // the last chances
		}
		return pause, false
	}
	return 0, l.first == nil
}

// askForLine asks once for as many waiters as go into one call, and serves those that the bucket has tokens for.
func (c *Client) askForLine(l *line) {
	c.lines.mu.Lock()
	var asked []*waiter
	var runs []policy.Run
	total := int64(0)
	for w := l.first; w != nil && len(runs) < mostRuns && w.n <= policy.MaxTokens-total; w = w.next {
		asked, total = append(asked, w), total+w.n
		if last := len(runs) - 1; last >= 0 && runs[last].N == w.n {
			runs[last].Count++
		} else {
			runs = append(runs, policy.Run{N: w.n, Count: 1, Leave: c.lines.leaves(l.key, w.n, l.leave, true)})
		}
	}
	whole := !l.denied.IsZero()
	cfg := c.putQuestion(l, asked)
	c.lines.mu.Unlock()
	if len(asked) == 0 {
		return
	}
	a := c.askLine(l, cfg, runs, whole)
	unused := int64(0) // tokens of those who left meanwhile
	defer func() {
		if unused > 0 {
			c.giveBackLater(l.key, unused, a.info.era)
		}
	}()
	c.lines.mu.Lock()
	defer c.lines.mu.Unlock()
	l.question.stop()
	if ReasonOf(a.err) != ReasonNone {
		c.degradedLine(l, asked, a.err)
		return
	}
	l.note(runs, a)
	served := int64(0) // how many of a run are
	run := 0
	for _, w := range asked {
		for run < len(runs)-1 && served == runs[run].Count {
			run, served = run+1, 0
		}
		v := verdict{err: a.err}
		granted := a.err == nil && (a.reply.OK || served < a.runs[run].Taken)
		switch {
		case granted, a.err != nil:
		case a.info.exceeded(l.key, w.n, l.leave) != nil:
			v.err = a.info.exceeded(l.key, w.n, l.leave)
		case a.info.shadowed():
			c.stats.shadowed.Add(1)
		default:
			return // none is served behind one that isn't
		}
		served++
		if w.in {
			c.lines.remove(l, w)
			w.verdict <- v
		} else if granted { // it left meanwhile, or its time was over
			unused += w.n
		}
	}
}

// note remembers what an answer tells of when the others' tokens are due. The lock is held.
func (l *line) note(runs []policy.Run, a *answer) {
	if a.err != nil || a.reply.OK || a.info.shadowed() {
		l.denied = time.Time{}
		return
	}
	for i, r := range a.runs {
		if r.Taken < runs[i].Count {
			l.n, l.wait = runs[i].N, r.Wait
			break
		}
	}
	if a.reply.Last != l.at.Last {
		l.asked = 0
	}
	l.asked++
	l.denied, l.left, l.at, l.info = time.Now(), a.reply.Remaining, a.reply.Refilled, a.info
	if a.source.Kind == SourceRescued {
		l.denied = time.Time{}
	}
}

// askLine puts the takes of a line to the bucket, each in its turn. If the bucket says no and was rescued, the answer's
// source says so: it has more tokens by now.
func (c *Client) askLine(l *line, cfg *callConfig, runs []policy.Run, whole bool) *answer {
	t := c.begin(from(context.Background(), cfg), l.key)
	a := t.attempt(false, func() (*answer, error) {
		return t.takes(&ask{line: runs, whole: whole ||
			!t.info.fresh(time.Now())})
	})
	if a.err != nil || a.reply.OK {
		return a
	}
	for i, r := range a.runs {
		if r.Taken < runs[i].Count {
			if again, _ := t.rescue(runs[i].N+runs[i].Leave.Of(a.info.limit()), &a.reply); again {
				a.source.Kind = SourceRescued
			}
			break
		}
	}
	return a
}

package fetch

import (
	"context"
	"fmt"
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
// once for all, so its calls don't grow with its length; and every few seconds, lest no refiller lives. Takes of the
// bucket through the same Client that leave as much are denied while a line waits that the bucket has said no to: what
// the bucket has is the line's. The options are WithTimeout, for each question, WithLeave and WithLeavePercent.
//
// It returns ErrDeadline at once when the tokens are due after the context's deadline, counting what those in front
// wait for; and the context's error when that ends meanwhile, which gives the place in the line to the next. Everything
// else is as for Take: Wait doesn't wait for a server that is away.
//
// Lines of different processes, and takes, compete for the same tokens.
func (c *Client) Wait(ctx context.Context, key string, n int64, opts ...CallOption) error {
	cfg, err := c.with(OpWait, opts)
	if err != nil {
		return err
	}
	_, err = c.observed(ctx, Call{Op: OpWait, Key: key, Tokens: n}, func(ctx context.Context) (Result, error) {
		if err := c.waitFor(ctx, key, n, cfg); err != nil {
			return Result{}, err
		}
		return Result{OK: true, Taken: n}, nil
	})
	return err
}

func (c *Client) waitFor(ctx context.Context, key string, n int64, cfg *callConfig) error {
	if err := c.check(ctx, key, n); err != nil {
		return err
	}
	if !c.lines.waited(key) {
		if _, ok := c.leases.take(key, n, cfg.leave); ok {
			return nil
		}
	}
	w := &waiter{n: n, cfg: cfg, verdict: make(chan verdict, 1), in: true}
	w.deadline, _ = ctx.Deadline()
	l, err := c.join(key, w)
	if err != nil {
		return err
	}
	c.leases.yield(key)
	select {
	case v := <-w.verdict:
		return v.err
	case <-ctx.Done():
		err = fmt.Errorf("fetch: wait: %w", ctx.Err())
	case <-c.life.quit:
		err = ErrClosed
	}
	return c.leave(l, w, err)
}

// lines are those of the waiters of a Client.
type lines struct {
	mu      sync.Mutex
	keys    map[lineKey]*line
	waiters map[string]int // by bucket
}

// lineKey is what the waiters of a line wait for.
type lineKey struct {
	key   string
	leave policy.Leave
}

// line is the waiters for a bucket, in the order of their arrival. A goroutine asks for all of them until none is left.
// The lock of the lines guards it.
type line struct {
	lineKey
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
}

// waiter is one of a line until it is served or leaves.
type waiter struct {
	n          int64
	cfg        *callConfig
	deadline   time.Time // zero: none
	verdict    chan verdict
	in         bool
	next, prev *waiter
}

// verdict is what a waiter is told.
type verdict struct {
	err   error
	taken int64 // from the bucket: they go back if the waiter has left
	era   int64
}

// join puts a waiter at the end of its line, unless its tokens come too late.
func (c *Client) join(key string, w *waiter) (*line, error) {
	ls, at := &c.lines, lineKey{key, w.cfg.leave}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	l := ls.keys[at]
	if l == nil {
		l = &line{lineKey: at, info: unseen, more: make(chan struct{}, 1)}
		if !c.life.spawn(func() { c.serve(l) }) {
			return nil, ErrClosed
		}
		ls.keys[at] = l
	} else if due, left := l.due(l.total+w.n), time.Until(w.deadline); !w.deadline.IsZero() && due > left && due != Never {
		return nil, errTooLate(w.n, key, due, left)
	}
	if w.prev = l.last; w.prev == nil {
		l.first = w
	} else {
		w.prev.next = w
	}
	l.last = w
	l.total += w.n
	ls.waiters[key]++
	return l, nil
}

// due is the time until n tokens are there, for all that the last denial told: 0 if nothing is known, Never if that
// said so.
func (l *line) due(n int64) time.Duration {
	if l.denied.IsZero() || l.info.shadowed() {
		return 0
	}
	due := l.wait
	if n != l.n {
		n += l.leave.Of(l.info.limit())
		if due = l.info.untilDue(n, l.left, l.at); due < 0 {
			return 0
		}
	}
	if due = wait(due); due == Never {
		return Never
	}
	return max(0, due-time.Since(l.denied))
}

// waited reports whether somebody waits for a bucket.
func (ls *lines) waited(key string) bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.waiters[key] > 0
}

// behind reports whether the bucket has said no to a line that a take would overtake, and when the take's tokens are
// due behind that; less than 0 is never.
func (ls *lines) behind(key string, n int64, leave policy.Leave) (time.Duration, bool) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	l := ls.keys[lineKey{key, leave}]
	if l == nil || l.denied.IsZero() {
		return 0, false
	}
	if due := l.due(l.total + n); due != Never {
		return max(due, time.Millisecond), true
	}
	return -1, true
}

// wake has the lines of a bucket ask at once, since there are more tokens.
func (ls *lines) wake(key string) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.waiters[key] == 0 {
		return
	}
	for at, l := range ls.keys {
		if at.key == key {
			l.denied = time.Time{}
			nudge(l.more)
		}
	}
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
	if ls.waiters[l.key]--; ls.waiters[l.key] == 0 {
		delete(ls.waiters, l.key)
	}
	if l.first == nil {
		delete(ls.keys, l.lineKey)
		nudge(l.more)
	} else if w.prev == nil {
		nudge(l.more) // the next one may want less
	}
}

// leave ends the wait of a waiter who gives up with err. What it was served meanwhile goes back.
func (c *Client) leave(l *line, w *waiter, err error) error {
	c.lines.mu.Lock()
	if w.in {
		c.lines.remove(l, w)
		c.lines.mu.Unlock()
		return err
	}
	c.lines.mu.Unlock()
	v := <-w.verdict
	c.giveBackLater(l.key, v.taken, v.era)
	return err
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
		due := l.due(w.n)
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
			runs = append(runs, policy.Run{N: w.n, Count: 1, Leave: l.leave})
		}
	}
	whole := !l.denied.IsZero()
	c.lines.mu.Unlock()
	if len(asked) == 0 {
		return
	}
	a := c.askLine(l, asked[0].cfg, runs, whole)
	if ReasonOf(a.err) != ReasonNone {
		a = c.degradedLine(l, runs, a.err)
	}
	c.lines.mu.Lock()
	defer c.lines.mu.Unlock()
	l.note(runs, a)
	served := int64(0) // how many of a run are
	run := 0
	for _, w := range asked {
		for run < len(runs)-1 && served == runs[run].Count {
			run, served = run+1, 0
		}
		v := verdict{err: a.err}
		switch granted := a.err == nil && (a.reply.OK || served < a.runs[run].Taken); {
		case granted && a.source.Kind != SourceFallback:
			v.taken, v.era = w.n, a.info.era
		case granted || a.err != nil:
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
		} else if v.taken > 0 { // it left meanwhile
			c.giveBackLater(l.key, v.taken, v.era)
		}
	}
}

// note remembers what an answer tells of when the others' tokens are due. The lock is held.
func (l *line) note(runs []policy.Run, a answer) {
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
func (c *Client) askLine(l *line, cfg *callConfig, runs []policy.Run, whole bool) answer {
	t, err := c.begin(from(context.Background(), cfg), l.key)
	if err != nil {
		return answer{err: err}
	}
	a := t.attempt(false, func() (answer, error) { return t.takes(ask{line: runs, whole: whole || !t.info.fresh(time.Now())}) })
	if a.err != nil || a.reply.OK {
		return a
	}
	for i, r := range a.runs {
		if r.Taken < runs[i].Count {
			if again, _ := t.rescue(runs[i].N+l.leave.Of(a.info.limit()), &a.reply); again {
				a.source.Kind = SourceRescued
			}
			break
		}
	}
	return a
}

// degradedLine answers waiters that the bucket did not answer, as their takes would be: one after the other until one
// is denied.
func (c *Client) degradedLine(l *line, runs []policy.Run, err error) answer {
	all := answer{reply: lua.TakeReply{OK: true}, runs: make([]lua.RunReply, len(runs))}
	for i, r := range runs {
		for ; all.reply.OK && all.runs[i].Taken < r.Count; all.runs[i].Taken++ {
			a := c.degraded(l.key, r.N, err, l.leave)
			if a.err != nil {
				return a
			}
			all.info, all.source, all.reply.Remaining = a.info, a.source, a.reply.Remaining
			if !a.reply.OK {
				all.reply.OK, all.runs[i].Wait = false, a.reply.Wait
				break
			}
		}
	}
	return all
}

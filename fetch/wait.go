package fetch

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/lua"
)

const (
	// slowPause is how often a line asks when no refill is known to be due, or
	// when refills stay out.
	slowPause = time.Second
	// maxJitter spreads the lines of one bucket in many processes, which are all
	// told the same instant.
	maxJitter = 10 * time.Millisecond
)

// Wait takes n tokens, all at once, and waits until they are there; n is 1 to
// policy.MaxTokens. Those who wait for a bucket in one Client form a line: they
// are served in the order of their arrival, and none is served while the first
// isn't, however few tokens it wants. The line asks when the tokens of the first
// are due and not before, once for all, so its calls don't grow with its length.
//
// It returns ErrDeadline at once when the tokens are due after the context's
// deadline, counting what those in front wait for; and the context's error when
// that ends meanwhile, which gives the place in the line to the next. Everything
// else is as for Take: Wait doesn't wait for a server that is away.
//
// Lines of different processes, and takes, compete for the same tokens.
func (c *Client) Wait(ctx context.Context, key string, n int64) error {
	_, err := c.observed(ctx, Call{OpWait, key, n}, func(ctx context.Context) (Result, error) {
		if err := c.queue(ctx, key, n); err != nil {
			return Result{}, err
		}
		return Result{OK: true, Taken: n}, nil
	})
	return err
}

// queue is Wait.
func (c *Client) queue(ctx context.Context, key string, n int64) error {
	if err := check(key, n); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("fetch: wait: %w", err)
	}
	if !c.lines.waited(key) {
		if _, ok := c.leases.take(key, n); ok {
			return nil
		}
	}
	if err := c.workers.enter(); err != nil {
		return err
	}
	defer c.workers.leave()
	l, w, err := c.lines.join(ctx, key, n)
	if err != nil {
		return err
	}
	c.leases.yield(key)
	select {
	case <-w.first:
		return c.stand(ctx, l, w)
	case v := <-w.served:
		return v.err
	case <-ctx.Done():
		err = fmt.Errorf("fetch: wait: %w", ctx.Err())
	case <-c.workers.quit:
		err = ErrClosed
	}
	return c.leaveLine(ctx, l, w, err)
}

// lines are the lines of those who wait, one per bucket that somebody waits for.
type lines struct {
	mu   sync.Mutex
	keys map[string]*line
}

// line is who waits for a bucket. The first of them asks for all.
type line struct {
	key   string
	first *waiter
	last  *waiter
	total int64 // tokens that all want
	pacer pacer
	more  chan struct{} // there are more tokens than was told

	// What the last denial told.
	known *known
	left  int64
	at    lua.Refilled
	told  time.Time
}

// waiter is one who waits. It is in its line until it is served or leaves.
type waiter struct {
	n      int64
	first  chan struct{} // closed: it is the first in the line
	served chan verdict  // it is no longer in the line
	in     bool
	next   *waiter
	prev   *waiter
}

// verdict is what one who waits is told.
type verdict struct {
	err   error
	taken bool // from the bucket: its tokens go back if it has left
}

// join puts a waiter at the end of a line, unless its tokens come too late.
func (ls *lines) join(ctx context.Context, key string, n int64) (*line, *waiter, error) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	l := ls.keys[key]
	if l == nil {
		l = &line{key: key, known: nothing, more: make(chan struct{}, 1)}
		ls.keys[key] = l
	}
	if deadline, ok := ctx.Deadline(); ok && !l.known.shadowed() && l.last != nil && !l.told.IsZero() {
		due := l.known.untilDue(l.total+n, l.left, l.at)
		if left := time.Until(deadline); due > 0 && time.Until(l.told.Add(due)) > left {
			return nil, nil, tooLate(n, key, time.Until(l.told.Add(due)), left)
		}
	}
	w := &waiter{n: n, first: make(chan struct{}), served: make(chan verdict, 1), in: true, prev: l.last}
	if l.last == nil {
		l.first = w
		close(w.first)
	} else {
		l.last.next = w
	}
	l.last = w
	l.total += n
	return l, w, nil
}

// waited reports whether somebody waits for a bucket.
func (ls *lines) waited(key string) bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.keys[key] != nil
}

// stir has the first of a line ask at once, since there are more tokens.
func (ls *lines) stir(key string) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if l := ls.keys[key]; l != nil {
		l.told = time.Time{}
		nudge(l.more)
	}
}

// remove takes a waiter out of its line and makes the next one first. The lock is
// held.
func (ls *lines) remove(l *line, w *waiter) {
	w.in = false
	l.total -= w.n
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		l.first = w.next
		if w.next != nil {
			close(w.next.first)
		}
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		l.last = w.prev
	}
	if l.first == nil {
		delete(ls.keys, l.key)
	}
}

// leaveLine ends the wait of one who gives up with err. What it was served
// meanwhile goes back.
func (c *Client) leaveLine(ctx context.Context, l *line, w *waiter, err error) error {
	c.lines.mu.Lock()
	if w.in {
		c.lines.remove(l, w)
		c.lines.mu.Unlock()
		return err
	}
	c.lines.mu.Unlock()
	if v := <-w.served; v.taken {
		c.giveBackLater(ctx, l.key, w.n)
	}
	return err
}

// stand sees the first of a line through.
func (c *Client) stand(ctx context.Context, l *line, w *waiter) error {
	for {
		pause, in, err := c.pause(ctx, l, w)
		if !in {
			return (<-w.served).err
		}
		if err == nil {
			err = c.sleep(ctx, pause, l.more)
		}
		if err != nil {
			return c.leaveLine(ctx, l, w, err)
		}
		c.askForLine(ctx, l)
	}
}

// pause is how long the first of a line sleeps before it asks, if it is still in
// the line.
func (c *Client) pause(ctx context.Context, l *line, w *waiter) (pause time.Duration, in bool, err error) {
	c.lines.mu.Lock()
	defer c.lines.mu.Unlock()
	if !w.in || l.told.IsZero() { // served, or nobody has asked yet
		return 0, w.in, nil
	}
	left := Never
	if deadline, ok := ctx.Deadline(); ok {
		left = time.Until(deadline)
	}
	told := time.Until(l.told.Add(l.pacer.told))
	if l.pacer.n != w.n { // another one was told
		told = l.known.untilDue(w.n, l.left, l.at)
		if told < 0 {
			return 0, true, nil
		}
		told -= time.Since(l.told)
	} else if l.pacer.told == Never {
		told = Never
	}
	if told != Never && told > left {
		return 0, true, tooLate(w.n, l.key, told, left)
	}
	pause = l.pacer.pause(told, l.at.Last)
	pause += time.Duration(c.jitter() * float64(min(pause/10, maxJitter)))
	if told != Never && pause > left {
		pause = max(told, left/2) // the last chances
	}
	return pause, true, nil
}

// askForLine asks once for as many as go into one call and serves who is to be
// served. Only the first of the line calls it.
func (c *Client) askForLine(ctx context.Context, l *line) {
	b := batch{}
	c.lines.mu.Lock()
	var asked []*waiter
	for w := l.first; w != nil && b.fits(w.n); w = w.next {
		asked = append(asked, w)
		b.count(w.n)
	}
	c.lines.mu.Unlock()

	var (
		reply   lua.TakeManyReply
		k       = nothing
		err     error
		rescued bool // there are more tokens than the answer says
		shared  = true
	)
	if len(asked) == 1 {
		a := c.ask(ctx, l.key, asked[0].n, c.config.takeConfig, time.Now())
		reply = lua.TakeManyReply{OK: a.reply.OK, Remaining: a.reply.Remaining, Refilled: a.reply.Refilled, Runs: []lua.RunReply{{Wait: a.reply.Wait}}}
		if err = a.err; err == nil {
			k = a.known
		}
	} else {
		reply, k, rescued, err = c.askInLine(ctx, l.key, &b)
	}
	if why := ReasonOf(err); why != ReasonNone {
		if r, known, ok := c.degradedLine(l.key, &b, err); ok {
			reply, k, err, shared = r, known, nil, false
		}
	}
	own := err != nil && ctx.Err() != nil && ReasonOf(err) == ReasonNone // the first gave up, and nobody else
	taken := int64(len(asked))
	if err == nil && !reply.OK {
		taken = 0
		for i, r := range reply.Runs {
			if taken += r.Taken; r.Taken < b.runs[i].Count {
				l.deny(k, reply, b.runs[i].N, r.Wait, &c.lines.mu)
				break
			}
		}
	}
	late := int64(0)
	c.lines.mu.Lock()
	if reply.OK || rescued || k.shadowed() {
		l.told = time.Time{} // nothing is known of those behind
	}
	for i, w := range asked {
		v := verdict{err: err, taken: err == nil && int64(i) < taken && shared}
		switch {
		case own && i > 0:
			continue
		case err != nil || int64(i) < taken:
		case k.exceeded(l.key, w.n) != nil:
			v.err = k.exceeded(l.key, w.n)
		case k.shadowed():
			c.stats.shadowed.Add(1)
		default:
			continue
		}
		switch {
		case w.in:
			c.lines.remove(l, w)
			w.served <- v
		case v.taken: // it left meanwhile
			late += w.n
		}
	}
	c.lines.mu.Unlock()
	c.giveBackLater(ctx, l.key, late)
}

// deny notes what a denial of n tokens told.
func (l *line) deny(k *known, reply lua.TakeManyReply, n int64, told time.Duration, mu *sync.Mutex) {
	mu.Lock()
	defer mu.Unlock()
	l.known, l.left, l.at, l.told = k, reply.Remaining, reply.Refilled, time.Now()
	l.pacer.n, l.pacer.told = n, wait(told)
}

// degradedLine answers several waiters that the bucket did not answer, as their
// takes would be: one after the other until one is denied.
func (c *Client) degradedLine(key string, b *batch, err error) (reply lua.TakeManyReply, k *known, ok bool) {
	reply.OK, k = true, nothing
	reply.Runs = make([]lua.RunReply, len(b.runs))
	for i, r := range b.runs {
		for ; reply.OK && reply.Runs[i].Taken < r.Count; reply.Runs[i].Taken++ {
			a, ok := c.degraded(key, r.N, err)
			if !ok {
				return reply, k, false
			}
			k, reply.Remaining = a.known, a.reply.Remaining
			if !a.reply.OK {
				reply.OK, reply.Runs[i].Wait = false, a.reply.Wait
				break
			}
		}
	}
	return reply, k, true
}

// askInLine makes the call of several waiters. It reports whether the bucket was
// rescued after it had answered.
func (c *Client) askInLine(ctx context.Context, key string, b *batch) (lua.TakeManyReply, *known, bool, error) {
	if why := c.breakers.of(key).open(); why != ReasonNone {
		return lua.TakeManyReply{}, nothing, false, shut(why)
	}
	began := time.Now()
	k, fresh := c.terms.get(key, time.Now())
	reply, err := do(ctx, c, c.config.deadline, func(ctx context.Context) (lua.TakeManyReply, error) {
		reply, err := c.sendMany(ctx, key, b.runs, !fresh, true)
		c.unknownOutcome(b.total, err)
		return reply, err
	}, func(ctx context.Context, reply lua.TakeManyReply) {
		taken := b.total
		if !reply.OK {
			taken = 0
			for i, r := range reply.Runs {
				taken += r.Taken * b.runs[i].N
			}
		}
		c.giveBack(ctx, key, taken)
	})
	c.note(key, began, err)
	if err != nil {
		return reply, nothing, false, err
	}
	one := lua.TakeReply{OK: true, Terms: reply.Terms, Remaining: reply.Remaining}
	n := int64(0)
	for i, r := range reply.Runs {
		if r.Taken < b.runs[i].Count {
			one, n = lua.TakeReply{Terms: reply.Terms, Remaining: reply.Remaining, Wait: r.Wait, Refilled: reply.Refilled}, b.runs[i].N
			break
		}
	}
	if !fresh || !one.OK || one.Terms != nil {
		k = c.learn(key, k, n, one)
	}
	c.saw(answer{reply: one, known: k})
	again, _ := c.rescue(ctx, key, n, c.config.deadline, one)
	return reply, k, again, nil
}

func tooLate(n int64, key string, due, left time.Duration) error {
	return fmt.Errorf("%w: %d tokens of bucket %q are due in %s, the deadline is in %s", ErrDeadline, n, key, due, left)
}

// pacer says how long a line sleeps.
type pacer struct {
	n     int64         // tokens that were denied last
	told  time.Duration // when they were said to be due
	asked int           // how often the bucket was found without a refill in between
	last  int64         // its last refill
}

// pause is the told time, and twice as long each further time that the refill
// turns out to be overdue, up to slowPause.
func (p *pacer) pause(told time.Duration, last int64) time.Duration {
	if last != p.last {
		p.asked, p.last = 0, last
	}
	p.asked++
	if told >= slowPause && told != Never {
		return told
	}
	for i := 2; i < p.asked && told < slowPause; i++ {
		told *= 2
	}
	return min(told, slowPause)
}

// sleep waits for d or for more tokens, unless ctx or the Client ends first.
func (c *Client) sleep(ctx context.Context, d time.Duration, more <-chan struct{}) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-more:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("fetch: wait: %w", ctx.Err())
	case <-c.workers.quit:
		return ErrClosed
	}
}

package fetch

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// lines are the queues of callers that wait for a bucket. There is one line for each pair of a flow and a Leave.
// Otherwise an urgent caller behind one that leaves half of the bucket would wait until the bucket is half full.
type lines struct {
	waiters atomic.Int32 // callers that wait, or are about to

	mu sync.Mutex
	of []*line
}

// line has waiters for a bucket, in the order of their arrival. One goroutine asks the bucket for all of them, and
// repeats that until the line is empty. The mutex of lines guards it.
type line struct {
	*lines
	key         string
	flow        string // empty also if the bucket has no flows
	leave       policy.Leave
	first, last *waiter
	total       int64         // tokens that all its waiters want
	again       chan struct{} // gets a signal when the line has to ask at once, and when the first waiter leaves

	// The last denial. denied is zero if there was none, or if it no longer applies.
	denied time.Time // when the denial was received
	server *node     // whose bucket denied; nil if a share did
	n      int64     // how many tokens the denied take wanted
	wait   time.Duration
	left   int64
	at     lua.Refilled
	info   *info
	asked  int  // denials since the refill at the time at.Last
	more   bool // the line was woken after the current question was sent

	passed time.Time // when a take last passed the line; before that, when the line was first denied

	question question // the current call for the line
}

// waiter is a caller that waits in a line. It is in the line until it is served or leaves.
type waiter struct {
	n          int64
	cfg        *callConfig
	deadline   time.Time // zero: none
	verdict    chan verdict
	in         bool
	timer      *time.Timer // of the question under way, if the waiter's time ends before the question's
	next, prev *waiter
}

// schedule calls f after d, unless the waiter leaves the line or schedule is called again before. The lock is held.
func (w *waiter) schedule(d time.Duration, f func()) {
	w.stop()
	w.timer = time.AfterFunc(d, f)
}

// stop stops the waiter's timer. The lock is held.
func (w *waiter) stop() {
	if w.timer != nil {
		w.timer.Stop()
	}
}

// verdict is the result for a waiter.
type verdict struct {
	result Result
	err    error
}

// untilDue returns the time until the bucket has n tokens beyond those of leave, according to the last denial. It is
// Never if that denial was for the same n and leave, and no known refill brings the tokens. It is 0 if there was no
// denial, or if the time is unknown.
func (l *line) untilDue(n int64, leave policy.Leave) time.Duration {
	if l.denied.IsZero() || l.info.shadowed() {
		return 0
	}
	due := l.wait
	if n != l.n || leave != l.leave {
		n += leave.Of(l.info.limit())
		due = l.info.untilDue(n, l.left, l.at)
		if due < 0 {
			return 0
		}
	}
	due = wait(due)
	if due == Never {
		return Never
	}
	return max(0, due-time.Since(l.denied))
}

// find returns the line with this flow and this leave, nil if there is none. The lock is held.
func (ls *lines) find(flow string, leave policy.Leave) *line {
	for _, l := range ls.of {
		if l.flow == flow && l.leave == leave {
			return l
		}
	}
	return nil
}

// ahead adds up the tokens wanted by the lines that a take must not overtake. These are the lines of its flow that the
// bucket has denied and that leave as much as the take or less. A take of a line itself (ofLine) waits only behind
// lines that leave less. last is the line among them that was denied last. The lock is held.
func (ls *lines) ahead(flow string, leave policy.Leave, ofLine bool) (total int64, last *line) {
	for _, l := range ls.of {
		holdsBack, leavesLess := l.holdsBack(flow, leave)
		if !holdsBack || ofLine && !leavesLess {
			continue
		}
		total += l.total
		if last == nil || l.denied.After(last.denied) {
			last = l
		}
	}
	return total, last
}

// holdsBack reports whether the line holds back takes of a flow with a leave. leavesLess reports whether the line
// leaves less than these takes do. While the server that denied the line is unavailable, the line holds no take back.
func (l *line) holdsBack(flow string, leave policy.Leave) (holdsBack, leavesLess bool) {
	limit := l.info.limit()
	theirs, ours := l.leave.Of(limit), leave.Of(limit)
	denied := !l.denied.IsZero() && (l.server == nil || l.server.available())
	return denied && l.flow == flow && theirs <= ours, theirs < ours
}

// holdTime returns for how long the line holds back a take of n tokens. That is a refill interval, or the time in which
// refills add twice n tokens if that is longer. Otherwise the takes that pass the line could get all tokens.
func (l *line) holdTime(n int64) time.Duration {
	at := l.at
	at.Now = at.Last
	twice := l.info.untilDue(2*min(n, l.info.limit()), 0, at)
	if twice < 0 {
		return slowPause // no refill is known
	}
	return max(micros(l.info.terms.Interval), twice)
}

// pass returns for how long the lines ahead of a take of n tokens still hold it back. If it returns 0, the take passes
// these lines, and the next take is held back anew. Takes that leave more than a line never pass it. The lock is held.
func (ls *lines) pass(flow string, n int64, leave policy.Leave) time.Duration {
	now, held := time.Now(), time.Duration(0)
	for _, l := range ls.of {
		switch holdsBack, leavesLess := l.holdsBack(flow, leave); {
		case leavesLess && holdsBack:
			return Never
		case holdsBack:
			held = max(held, l.holdTime(n)-now.Sub(l.passed))
		}
	}
	if held > 0 {
		return held
	}
	for _, l := range ls.of {
		if holdsBack, _ := l.holdsBack(flow, leave); holdsBack {
			l.passed = now
		}
	}
	return 0
}

// dueBehind reports whether a take would overtake lines that the bucket has denied. If so, it returns the time until
// the bucket has n tokens beyond those that these lines want, or 0 if it is unknown. The lock is held.
func (ls *lines) dueBehind(flow string, n int64, leave policy.Leave) (due time.Duration, behind bool) {
	total, last := ls.ahead(flow, leave, false)
	if last == nil {
		return 0, false
	}
	return last.untilDue(total+n, leave), true
}

// behind reports whether lines hold a take back, and for how long. due is at least a millisecond. If it is negative,
// they hold the take back for ever. If mayPass is set, they hold it back no longer than pass allows.
func (b *bucket) behind(flow string, run policy.Run, mayPass bool) (due time.Duration, yes bool) {
	if !b.waited() {
		return 0, false
	}
	ls := b.lines.Load()
	ls.mu.Lock()
	defer ls.mu.Unlock()
	due, yes = ls.dueBehind(flow, run.N, run.Leave)
	if yes && mayPass {
		held := ls.pass(flow, run.N*run.Count, run.Leave)
		due, yes = min(due, held), held > 0
	}
	switch {
	case !yes:
		return 0, false
	case due == Never:
		return -1, true
	}
	return max(due, time.Millisecond), true
}

// leaves returns the tokens that a call for a take of n must leave in the bucket. These are the tokens of leave and, if
// the take doesn't pass the lines ahead, the tokens that these lines want. The latter are added only as far as the sum
// is at most the capacity less n. The lock is held.
func (ls *lines) leaves(flow string, n int64, leave policy.Leave, ofLine bool) policy.Leave {
	total, last := ls.ahead(flow, leave, ofLine)
	if last == nil || !ofLine && ls.pass(flow, n, leave) == 0 {
		return leave
	}
	limit := last.info.limit()
	least := leave.Of(limit)
	return policy.Leave{Tokens: max(least, min(least+total, limit-n))}
}

// wake makes all lines ask at once, because the bucket has more tokens, or its server is unavailable.
func (ls *lines) wake() {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for _, l := range ls.of {
		l.askAgain()
	}
}

// askAgain makes the line ask at once. It forgets the line's denial, so takes may pass until the line has asked. The
// lock is held.
func (l *line) askAgain() {
	l.denied = time.Time{}
	l.more = true
	timing.Signal(l.again)
}

// remove removes a waiter from its line. If it was the last one, it closes the line. The lock is held.
func (l *line) remove(w *waiter) {
	w.in = false
	w.stop()
	l.waiters.Add(-1)
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
		l.close()
	} else if w.prev == nil {
		timing.Signal(l.again) // the next waiter may want less
	}
}

// end ends the wait of a waiter with a verdict. The lock is held.
func (l *line) end(w *waiter, v verdict) {
	l.remove(w)
	w.verdict <- v
}

// close removes an empty line. Then all lines that leave at least as much ask at once, whatever their flow. The lock is
// held.
func (l *line) close() {
	l.of = slices.DeleteFunc(l.of, func(other *line) bool { return other == l })
	timing.Signal(l.again)
	for _, other := range l.of {
		if limit := l.info.limit(); other.leave.Of(limit) >= l.leave.Of(limit) {
			other.askAgain()
		}
	}
}

// remember records the denial in an answer. From it the line computes when the tokens of its waiters are due. If the
// answer is no denial, remember removes the line's last denial. The answer is that of a server or, if server is nil, of
// a share. The lock is held.
func (l *line) remember(runs []policy.Run, a *answer, server *node) {
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
	l.denied = time.Now()
	l.server = server
	if l.passed.IsZero() {
		l.passed = l.denied
	}
	l.left = a.reply.Remaining
	l.at = a.reply.Refilled
	l.info = a.info
	if a.source.Kind == SourceRescued || l.more { // the bucket may have got tokens after the denial
		l.denied = time.Time{}
	}
}

package refill

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// worker refills the buckets of one Redis master. Everything it knows belongs to one goroutine, run's; others make its
// calls and hand the answers back. A slow or silent master holds up its own worker only.
type worker struct {
	r        *Refiller
	rng      *rand.Rand
	buckets  queue     // by due time, whether this replica refills them or not
	announce []*bucket // a standby's, not in buckets yet: the server may not know their terms
	pulse    *pulse    // nil in race mode
	sets     *activeSets
	sizes    *sizes
	leading  bool

	roles    chan role
	done     chan struct{} // closed when run has returned
	answers  chan func()   // of calls under way: each takes in its answer
	underWay int
	ended    []*trip // to be used again
	sets1st  bool    // the next call is for the active sets, if one is due: they and the buckets take turns

	failures int          // calls in a row that the server failed
	rest     time.Time    // nothing is sent before, since the server failed
	back     time.Time    // when the server came back; zero if it was never away
	racing   bool         // standing in for a silent leader; guarded by Refiller.mu
	lastLoop atomic.Int64 // when the worker last looked for something to do, Unix ns
}

// role is whether this replica leads from here on.
type role struct {
	leading bool
	assumed chan<- struct{} // gets one token when nothing is under way any more under the old role
}

const (
	// maxUnderWay is how many calls are under way at most. The second one is made while the server works on the first,
	// and only where the worker is behind and the server answers: takes of consumers wait for both.
	maxUnderWay = 2
	// behindAfter is the part of a refill interval after which a worker is behind with what is due.
	behindAfter = 20
	// maxIdle bounds the time between two loops of a worker with nothing to do, so that one that hangs can be told from
	// one that rests.
	maxIdle = time.Second
)

// run makes calls until ctx ends or stop is closed, and takes in the answers to all that it has made.
func (w *worker) run(ctx context.Context, stop <-chan struct{}) {
	defer close(w.done)
	defer w.drain()
	w.buckets.order()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		w.lastLoop.Store(time.Now().UnixNano())
		timer.Reset(w.start(ctx))
		select {
		case <-ctx.Done():
			return
		case <-stop:
			return
		case role := <-w.roles:
			w.assume(ctx, role)
		case learn := <-w.answers:
			w.underWay--
			learn()
		case <-timer.C:
		}
	}
}

// drain takes in the answers to all calls under way.
func (w *worker) drain() {
	for ; w.underWay > 0; w.underWay-- {
		(<-w.answers)()
	}
}

// send has call made by a goroutine of its own. The worker's goroutine then calls what it returns.
func (w *worker) send(call func() (learn func())) {
	w.underWay++
	go func() { w.answers <- call() }()
}

// assume changes the role.
func (w *worker) assume(ctx context.Context, to role) {
	w.drain()
	if w.leading && !to.leading {
		w.handOver(ctx)
	}
	w.leading = to.leading
	w.pulse.assume(w.leading, time.Now())
	w.sets.assume()
	w.r.setRacing(w, false)
	w.lookAfresh()
	to.assumed <- struct{}{}
}

// refills reports whether it is for this replica to refill.
func (w *worker) refills() bool { return w.pulse == nil || w.leading || w.pulse.state != beating }

// start starts the calls that are due, and returns how long until there may be another one.
func (w *worker) start(ctx context.Context) time.Duration {
	for {
		now := time.Now()
		if wait := w.wait(now); wait > 0 || !w.startOne(ctx, now) {
			return wait
		}
	}
}

// wait is how long until a call is to be started: 0 if one is.
func (w *worker) wait(now time.Time) time.Duration {
	at, interval := w.next()
	switch {
	case at.IsZero() || w.underWay == maxUnderWay || w.underWay > 0 && w.failures > 0:
		return maxIdle
	case w.underWay > 0:
		at = at.Add(interval / behindAfter)
	}
	if at.Before(w.rest) {
		at = w.rest
	}
	return min(max(at.Sub(now), 0), maxIdle)
}

// next is when the next call is due, zero for never, and the refill interval of what it is for.
func (w *worker) next() (at time.Time, interval time.Duration) {
	earliest := func(due time.Time, of time.Duration) {
		if !due.IsZero() && (at.IsZero() || due.Before(at)) {
			at, interval = due, of
		}
	}
	if w.pulse != nil {
		earliest(w.pulse.due(), w.pulse.beat.interval)
	}
	if n := len(w.announce); n > 0 {
		earliest(w.announce[n-1].due, w.announce[n-1].interval)
	}
	if w.refills() {
		if len(w.buckets) > 0 {
			earliest(w.buckets[0].due, w.buckets[0].bucket.interval)
		}
		earliest(w.sets.next())
	}
	return at, interval
}

// startOne starts one of the calls that are due, and reports whether there was one.
func (w *worker) startOne(ctx context.Context, now time.Time) bool {
	if w.pulse != nil && w.pulse.looks() && !w.pulse.due().After(now) {
		w.listen(ctx)
		return true
	}
	sets := w.sets1st
	w.sets1st = !sets
	return sets && w.sets.start(ctx, now) || w.startBatch(ctx, now) || !sets && w.sets.start(ctx, now)
}

// handOver refills once more, at the end of a term, what was refilled half an interval ago or longer, the pulse too. A
// successor has yet to learn the indexes, and then waits half an interval: it is in time if as much is left. What isn't
// done within half an interval is left to it.
func (w *worker) handOver(ctx context.Context) {
	now := time.Now()
	hurry := func(b *bucket) {
		if b.due.Sub(now) <= b.interval/2 && b.due.After(now) {
			b.due = now
		}
	}
	hurry(w.pulse.beat)
	for _, entry := range w.buckets {
		hurry(entry.bucket)
	}
	w.buckets.order()
	w.sets.hurry(now)
	pending := func() bool {
		beat := w.pulse.due()
		return w.underWay > 0 || !beat.IsZero() && !beat.After(now) || len(w.buckets) > 0 &&
			!w.buckets[0].due.After(now) || w.sets.pending(now)
	}
	for end := now.Add(w.pulse.beat.interval / 2); pending() && time.Now().Before(end); {
		if w.start(ctx); w.underWay == 0 {
			break // the server has failed
		}
		learn := <-w.answers
		w.underWay--
		learn()
	}
	w.drain()
}

// lookAfresh forgets which buckets were missing, because this replica hasn't looked for a while: one that is missing
// now may be remembered by the others.
func (w *worker) lookAfresh() {
	for _, entry := range w.buckets {
		entry.bucket.missing = time.Time{}
	}
}

// failed takes in that the server failed a call, and leaves it alone for a while.
func (w *worker) failed(ctx context.Context, err error) {
	w.failures++
	if w.failures == 1 && ctx.Err() == nil {
		w.r.log.Warn("redis is away: refills pause", "error", err)
	}
	w.rest = time.Now().Add(backoff(w.failures, maxBackoff, w.rng))
}

func (w *worker) recovered() {
	if w.failures > 0 {
		w.r.log.Info("redis is back: refills go on", "failed-calls", w.failures)
		w.back = time.Now()
	}
	w.failures = 0
}

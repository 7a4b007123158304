package refill

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// worker refills the buckets of one Redis master. Two goroutines make its calls; what it knows is under the mutex,
// which none of them holds during a call. A slow or silent master holds up its own worker only.
type worker struct {
	r        *Refiller
	rng      *rand.Rand
	lastLoop atomic.Int64 // when it last looked for something to do, Unix ns
	racing   bool         // standing in for a silent leader; guarded by Refiller.mu
	away     error        // why the server failed the last call; guarded by Refiller.mu

	mu       sync.Mutex
	changed  *sync.Cond  // an answer was taken in, or the worker is over
	timer    *time.Timer // ends the wait of a goroutine that makes no call
	buckets  queue       // by due time, whether this replica refills them or not
	announce queue       // a standby's, not in buckets: the server may not know their terms, or have others in force
	pulse    *pulse      // nil in race mode
	sets     *activeSets
	sizes    *sizes
	version  int64 // of this replica's configuration
	latest   int64 // the latest version that the server reported for a bucket
	leading  bool
	underWay int     // calls
	paused   bool    // no call is to be made
	over     bool    // nor ever again
	setsNext bool    // the next call is for the active sets, if one is due: they and the buckets take turns
	ended    []*trip // to be used again

	failures int           // calls in a row that the server failed
	trip     time.Duration // a round trip to the server; 0 before the first answer
	refused  bool          // refills were among them
	rest     time.Time     // nothing is sent before, since the server failed
	silent   bool          // no refill was answered since the last failed call
	back     time.Time     // when the server answered refills again; zero if it never failed a call
}

const (
	// maxUnderWay is how many calls are under way at most. The second one is made while the server works on the first,
	// and only where the worker is behind and the server answers: takes of consumers wait for both.
	maxUnderWay = 2
	// behindAfter is the part of a refill interval after which a worker is behind with what is due.
	behindAfter = 20
	// maxIdle bounds the time between two looks for something to do, so that a worker that hangs can be told from one
	// that rests.
	maxIdle = time.Second
)

// call is a call to make, without the mutex. It returns what takes in the answer, with the mutex.
type call func() (learn func())

// run makes calls until ctx ends or stop is closed, and takes in the answers to all that it has made.
func (w *worker) run(ctx context.Context, stop <-chan struct{}) {
	var callers sync.WaitGroup
	for range maxUnderWay {
		callers.Go(func() { w.makeCalls(ctx, stop) })
	}
	callers.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	w.changed.Broadcast()
}

// makeCalls makes one call after the other.
func (w *worker) makeCalls(ctx context.Context, stop <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		select {
		case <-ctx.Done():
			return
		case <-stop:
			return
		default:
		}
		now := time.Now()
		w.lastLoop.Store(now.UnixNano())
		if w.wait(now) <= 0 {
			if c := w.next(ctx, now); c != nil {
				w.make(c, now)
				continue
			}
		}
		w.timer.Reset(max(w.wait(now), 0))
		w.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-stop:
		case <-w.timer.C:
		}
		w.mu.Lock()
	}
}

// make makes a call, during which the other goroutine may make one.
func (w *worker) make(c call, now time.Time) {
	w.underWay++
	w.timer.Reset(max(w.wait(now), 0))
	w.mu.Unlock()
	learn := c()
	w.mu.Lock()
	w.underWay--
	learn()
	w.changed.Broadcast()
}

// outdated reports whether a later configuration than this replica's is in force or published.
func (w *worker) outdated() bool { return w.version < max(w.latest, w.r.published.Load()) }

// refills reports whether it is for this replica to refill.
func (w *worker) refills() bool { return w.pulse == nil || w.leading || w.pulse.state != beating }

// wait is how long until a call is to be started: 0 if one is.
func (w *worker) wait(now time.Time) time.Duration {
	at, interval := w.due()
	switch {
	case at.IsZero() || w.paused || w.underWay == maxUnderWay || w.underWay > 0 && w.failures > 0:
		return maxIdle
	case w.underWay > 0:
		at = at.Add(interval / behindAfter)
	}
	if at.Before(w.rest) {
		at = w.rest
	}
	return min(max(at.Sub(now), 0), maxIdle)
}

// due is when the next call is due, zero for never, and the refill interval of what it is for.
func (w *worker) due() (at time.Time, interval time.Duration) {
	earliest := func(due time.Time, of time.Duration) {
		if !due.IsZero() && (at.IsZero() || due.Before(at)) {
			at, interval = due, of
		}
	}
	if w.pulse != nil {
		earliest(w.pulse.due(), w.pulse.beat.interval)
	}
	if len(w.announce) > 0 {
		earliest(w.announce[0].due, w.announce[0].bucket.interval)
	}
	if w.refills() {
		if len(w.buckets) > 0 {
			earliest(w.buckets[0].due, w.buckets[0].bucket.interval)
		}
		earliest(w.sets.due())
	}
	return at, interval
}

// next is one of the calls that are due, nil if none is.
func (w *worker) next(ctx context.Context, now time.Time) call {
	if w.pulse != nil && w.pulse.looks() && !w.pulse.due().IsZero() && !w.pulse.due().After(now) {
		return w.listen(ctx)
	}
	w.setsNext = !w.setsNext
	if w.setsNext {
		if c := w.sets.next(ctx, now); c != nil {
			return c
		}
		return w.nextBatch(ctx, now)
	}
	if c := w.nextBatch(ctx, now); c != nil {
		return c
	}
	return w.sets.next(ctx, now)
}

// connecting is how many times the timeout a call may take at most.
const connecting = 4

// tripsOfCall is how many round trips a call may need: it may have to open a connection, learn a Cluster's slots and
// load a script. A call that always ended before that would never reach a server far away.
const tripsOfCall = 10

// timeout returns the time for the next call: what the distance takes comes on top, and it doubles after each failed
// call, since the distance may be another one now.
func (w *worker) timeout() time.Duration {
	most := connecting * w.r.cfg.Timeout
	if w.failures >= connecting {
		return most
	}
	return min(most, (w.r.cfg.Timeout+tripsOfCall*w.trip)<<w.failures)
}

// measure remembers the shortest time of a call that the server answered.
func (w *worker) measure(took time.Duration) {
	if w.trip == 0 || took < w.trip {
		w.trip = took
	}
}

// failed takes in that the server failed a call, and leaves it alone for a while.
func (w *worker) failed(ctx context.Context, err error) {
	w.failures++
	w.silent = true
	if ctx.Err() == nil {
		w.r.setAway(w, err)
	}
	if w.failures == 1 && ctx.Err() == nil {
		w.r.log.Warn(pauseMessage(err), "error", err)
	}
	w.rest = time.Now().Add(backoff(w.failures, maxBackoff, w.rng))
}

// pauseMessage returns the log message for the error of a failed call. A server that answers with an error, such as
// READONLY, OOM or NOAUTH, is reachable: its operator looks for another cause than for one that doesn't answer.
func pauseMessage(err error) string {
	var reply redis.Error
	if errors.As(err, &reply) {
		return "redis refuses calls: refills pause"
	}
	return "redis does not answer: refills pause"
}

// refillsFailed is failed, of refills of n buckets.
func (w *worker) refillsFailed(ctx context.Context, n int, err error) {
	w.sizes.failed(n)
	w.refused = true
	w.failed(ctx, err)
}

// refilled applies a round trip of refills that the server answered. Only one that wrote proves that the server takes
// refills: a read-only server, and one without memory, still reports that a bucket is unknown.
func (w *worker) refilled(t *trip) {
	w.measure(t.replied.Sub(t.sent))
	w.sizes.answered(t.results)
	if w.silent {
		w.silent = false
		w.back = time.Now()
	}
	for i := range t.results {
		if t.results[i].Err == nil && t.results[i].Outcome.Status.Wrote() {
			w.recovered()
			return
		}
	}
	w.answered()
}

// answered takes in that the server answered a read. A server that fails refills may: one without memory does.
func (w *worker) answered() {
	if !w.refused {
		w.recovered()
	}
}

// recovered takes in that the server takes refills.
func (w *worker) recovered() {
	w.refused = false
	if w.failures > 0 {
		w.r.log.Info("redis takes calls again: refills go on", "failed-calls", w.failures)
		w.r.setAway(w, nil)
	}
	w.failures = 0
}

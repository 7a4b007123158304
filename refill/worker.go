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

// worker refills the buckets of one Redis master. Two goroutines make its calls. The mutex guards its state; neither
// goroutine holds it during a call. A slow or silent master delays only its own worker.
type worker struct {
	r        *Refiller
	rng      *rand.Rand
	lastLoop atomic.Int64 // when it last checked for a due call, Unix ns
	racing   bool         // it refills instead of a silent leader; guarded by Refiller.mu
	away     error        // why the server failed the last call; guarded by Refiller.mu

	mu       sync.Mutex
	changed  *sync.Cond  // a reply was applied, or the worker is over
	timer    *time.Timer // ends the wait of a goroutine that makes no call
	buckets  queue       // by due time, whether this replica refills them or not
	announce queue       // a standby's buckets for which the server may not have our terms; they are not in buckets
	pulse    *pulse      // nil in race mode
	sets     *activeSets
	sizes    *sizes
	version  int64 // of this replica's configuration
	latest   int64 // the latest version that the server reported for a bucket
	leading  bool
	underWay int     // calls
	paused   bool    // no call is to be made
	over     bool    // no call will ever be made again
	turns    turns   // of the active sets and the buckets
	ended    []*trip // trips to reuse

	failures int           // calls in a row that the server failed
	trip     time.Duration // the shortest round trip to the server; 0 before the first one
	refused  bool          // refills were among the failed calls
	rest     time.Time     // no call is sent before this time, after a failed call
	silent   bool          // no refill was answered since the last failed call
	back     time.Time     // when the server answered refills again; zero if no call has ever failed
}

const (
	// maxUnderWay is the most calls that are under way at once. The second one is made only if the worker is behind and
	// the server answers, because takes of consumers wait for both calls.
	maxUnderWay = 2
	// behindAfter is a divisor of the refill interval. If a call has been due for that part of the interval, the worker is
	// behind.
	behindAfter = 20
	// maxIdle bounds the time between two checks for a due call. Otherwise a worker that hangs would look like one that
	// waits.
	maxIdle = time.Second
)

// call makes one request. It runs without the mutex and returns a function that applies the reply; that function runs
// with the mutex held.
type call func() (apply func())

// run makes calls until ctx ends or stop is closed, and returns after it has applied the replies to all of them.
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
				w.execute(c, now)
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

// execute makes a call and applies its reply. Meanwhile the other goroutine may make a call.
func (w *worker) execute(c call, now time.Time) {
	w.underWay++
	w.timer.Reset(max(w.wait(now), 0))
	w.mu.Unlock()
	apply := c()
	w.mu.Lock()
	w.underWay--
	apply()
	w.changed.Broadcast()
}

// outdated reports whether a later configuration than this replica's is in force or published.
func (w *worker) outdated() bool { return w.version < max(w.latest, w.r.published.Load()) }

// refills reports whether this replica has to refill the buckets.
func (w *worker) refills() bool { return w.pulse == nil || w.leading || w.pulse.state != beating }

// wait returns the time until the next call has to start, 0 for now.
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

// due returns when the next call is due, zero for never, and the refill interval of the buckets that it is for.
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

// next returns one of the calls that are due, nil if none is.
func (w *worker) next(ctx context.Context, now time.Time) call {
	if w.pulse != nil && w.pulse.isRead() && !w.pulse.due().IsZero() && !w.pulse.due().After(now) {
		return w.listen(ctx)
	}
	return w.turns.next(ctx, now, w.sets.next, w.nextBatch)
}

// connecting is the factor by which the time of a call may exceed the configured timeout.
const connecting = 4

// tripsOfCall is the number of round trips for which a call has time. It may have to open a connection, read a
// Cluster's slots and load a script. With less time, calls to a server far away would always time out.
const tripsOfCall = 10

// timeout returns the time for the next call. The time of the round trips is added to the configured timeout. The sum
// doubles after each failed call, since the round trip may take longer now.
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

// failed records a failed call and starts a back-off.
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
// READONLY, OOM or NOAUTH, has another cause than a server that doesn't answer. So there are two messages.
func pauseMessage(err error) string {
	var reply redis.Error
	if errors.As(err, &reply) {
		return "redis refuses calls: refills pause"
	}
	return "redis does not answer: refills pause"
}

// refillsFailed records a failed call that was to refill n buckets.
func (w *worker) refillsFailed(ctx context.Context, n int, err error) {
	w.sizes.failed(n)
	w.refused = true
	w.failed(ctx, err)
}

// refilled applies a round trip of refills that the server answered. Only a refill that wrote proves that the server
// accepts refills. A server that is read-only or has no memory still reports that a bucket is unknown.
func (w *worker) refilled(t *trip) {
	w.measure(t.replied.Sub(t.sent))
	w.sizes.answered(t.results)
	if w.silent {
		w.silent = false
		w.back = time.Now()
	}
	for i := range t.results {
		if t.results[i].Err == nil && t.results[i].Status.Wrote() {
			w.recovered()
			return
		}
	}
	w.answered()
}

// answered records that the server answered a read. If refills were refused, that doesn't end their outage, because a
// server without memory still answers reads.
func (w *worker) answered() {
	if !w.refused {
		w.recovered()
	}
}

// recovered records that the server accepts refills.
func (w *worker) recovered() {
	w.refused = false
	if w.failures > 0 {
		w.r.log.Info("redis takes calls again: refills go on", "failed-calls", w.failures)
		w.r.setAway(w, nil)
	}
	w.failures = 0
}

package refill

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/internal/timing"
)

// worker refills the buckets of one Redis master. Two goroutines make its calls. The mutex guards its state; neither
// goroutine holds it during a call. A slow or silent master delays only its own worker.
type worker struct {
	r        *Refiller
	rng      *rand.Rand
	lastLoop atomic.Int64 // when it last checked for a due call, Unix ns
	racing   bool         // it refills instead of a silent leader; guarded by Refiller.mu

	mu       sync.Mutex
	changed  *sync.Cond  // a reply was applied, or the worker is over
	timer    *time.Timer // ends the wait of a goroutine that makes no call
	buckets  queue       // by due time, whether this replica refills them or not
	announce queue       // a standby's buckets for which the server may not have our terms; they are not in buckets
	pulse    *pulse      // nil in race mode
	sets     *activeSets
	version  int64 // of this replica's configuration
	latest   int64 // the latest version that the server reported for a bucket
	leading  bool
	underWay int     // calls
	paused   bool    // no call is to be made
	over     bool    // no call will ever be made again
	turns    turns   // of the active sets and the buckets
	ended    []*trip // trips to reuse
	*health          // of the master
}

const (
	// maxUnderWay is the most calls that are under way at once. The second one is made only if the worker is behind and
	// the server answers, because takes of consumers wait for both calls.
	maxUnderWay = 2
	// behindAfter is a divisor of the refill interval. If a call has been due for that part of the interval, the worker is
	// behind.
	behindAfter = 20
	// maxIdle bounds the time between two checks for a due call. It shows that a worker waits and does not hang.
	maxIdle = time.Second
)

// call makes one request. It runs without the mutex and returns a function that applies the reply; that function runs
// with the mutex held.
type call func() (apply func())

// run makes calls until ctx ends or stop is closed, and returns after it has applied the replies to all of them. Calls
// that hang are ended soon after stop is closed, because the workers of other masters wait for the new ones.
func (w *worker) run(ctx context.Context, stop <-chan struct{}) {
	ctx, end := context.WithCancel(ctx)
	var callers, ender sync.WaitGroup
	ended := make(chan struct{})
	ender.Go(func() {
		defer end()
		select {
		case <-ended:
		case <-stop:
			timing.Sleep(ended, w.lastWait())
		}
	})
	for range maxUnderWay {
		callers.Go(func() { w.makeCalls(ctx, stop) })
	}
	callers.Wait()
	close(ended)
	ender.Wait()
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

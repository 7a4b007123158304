package refill

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

// health is what a replica knows about the failures and the speed of a Redis master. It outlives the master's worker,
// since a change of the configuration during an outage ends neither the outage nor the back-off. The worker's lock
// guards it.
type health struct {
	failures int           // calls in a row that the server failed
	trip     time.Duration // the shortest round trip to the server; 0 before the first one
	refused  bool          // refills were among the failed calls
	rest     time.Time     // no call is sent before this time, after a failed call
	silent   bool          // no refill was answered since the last failed call
	back     time.Time     // when the server answered refills again; zero if no call has ever failed
	sizes    *sizes
	away     error // why the server failed the last call; guarded by Refiller.mu
}

// healths returns the health of each master, by id. If the list of masters has changed, each of them may have the slots
// of a failed one. So all of them count as back from the instant at which the last of them came back, or from now if
// one is still silent. A new master begins with the failures of one that it may have replaced. The lock of the Refiller
// is held, and no worker runs.
func (r *Refiller) healths(masters []master, now time.Time) map[string]*health {
	before := r.memory.health
	if before != nil && slices.EqualFunc(masters, r.memory.masters, master.equal) {
		return before
	}
	back, replaced := r.listed, health{}
	for id, h := range before {
		switch {
		case h.silent:
			back = now
		case h.back.After(back):
			back = h.back
		}
		listed := slices.ContainsFunc(masters, func(m master) bool { return m.id == id })
		if h.silent && !listed {
			replaced = health{failures: h.failures, refused: h.refused, silent: true, away: h.away}
		}
	}
	all := make(map[string]*health, len(masters))
	for _, m := range masters {
		h := before[m.id]
		if h == nil {
			h = new(health)
			*h = replaced
			h.sizes = newSizes(r.cfg.Batch, r.cfg.Timeout)
		}
		h.back = back
		all[m.id] = h
	}
	return all
}

// othersCame reports whether the server has been available for so long that the other replicas have called it since. A
// replica that still backs off may remember a bucket that this replica would create.
func (w *worker) othersCame(now time.Time) bool {
	return !w.silent && (w.back.IsZero() || now.Sub(w.back) >= maxBackoff+connecting*w.r.cfg.Timeout)
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

// lastWait returns the time that the calls under way have when the worker stops.
func (w *worker) lastWait() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.trip == 0 {
		return w.timeout()
	}
	return connecting*w.trip + maxBackoff/2
}

// measure remembers the shortest time of a call that the server answered.
func (w *worker) measure(took time.Duration) {
	if w.trip == 0 || took < w.trip {
		w.trip = took
	}
}

// failed records a failed call and starts a back-off. A call that the replica has ended itself is not a failure of the
// server, but it is not an answer either.
func (w *worker) failed(ctx context.Context, err error) {
	w.silent = true
	if ctx.Err() != nil {
		return
	}
	w.failures++
	w.r.setAway(w, err)
	if w.failures == 1 {
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
	if ctx.Err() == nil {
		w.sizes.failed(n)
		w.refused = true
	}
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

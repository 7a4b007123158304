package refill

import (
	"container/heap"
	"context"
	"errors"
	"time"

	"github.com/tokenrefill/refiller/lua"
)

// assume changes the role. It waits until no call of the old role is under way. It does nothing if the worker is over:
// then another worker has the buckets and shards, and it began with the new role.
func (w *worker) assume(leading bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.over {
		return
	}
	if w.leading && !leading {
		w.handOver()
	}
	for w.paused = true; w.underWay > 0; {
		w.changed.Wait()
	}
	if w.over {
		return
	}
	w.leading = leading
	w.pulse.assume(leading, time.Now())
	w.sets.assume()
	w.r.setRacing(w, false)
	w.forgetMissing()
	if !leading {
		w.standBy(time.Now())
	}
	w.paused = false
	w.timer.Reset(0)
}

// handOver makes the last refills of a term: those of the pulse and of the buckets that are due within half an
// interval. A successor first reads the indexes and then waits half an interval. So it is in time for every refill that
// is due later than that. Buckets that handOver can't refill within half an interval are left to the successor.
func (w *worker) handOver() {
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
	w.timer.Reset(0)
	pending := func() bool {
		beat := w.pulse.due()
		return !beat.IsZero() && !beat.After(now) || len(w.buckets) > 0 && !w.buckets[0].due.After(now) ||
			w.sets.pending(now)
	}
	late := false
	defer time.AfterFunc(w.pulse.beat.interval/2, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		late = true
		w.changed.Broadcast()
	}).Stop()
	for pending() && !late && !w.over && w.failures == 0 {
		w.changed.Wait()
	}
}

// withhold stops the pulse of a leader with an outdated file. Otherwise the standbys would leave the buckets to this
// leader, although one of them may have the later file.
func (w *worker) withhold() {
	if w.pulse == nil || !w.leading || w.pulse.withheld || !w.outdated() {
		return
	}
	w.pulse.withheld = true
	w.r.log.Warn("a later configuration than this leader's is in force: its pulse stops, so that all race",
		"version", w.version, "latest", max(w.latest, w.r.published.Load()))
}

// listen returns a call that reads the pulse.
func (w *worker) listen(ctx context.Context) call {
	w.pulse.asked = true
	within := w.timeout()
	return func() func() {
		callCtx, cancel := context.WithTimeout(ctx, within)
		defer cancel()
		sent := time.Now()
		reply, err := w.r.store.peek(callCtx, w.pulse.beat.key)
		replied := time.Now()
		return func() {
			w.pulse.asked = false
			if err != nil && !errors.Is(err, lua.ErrUnknownBucket) && !ownFault(err) {
				w.failed(ctx, err)
				return
			}
			w.answered()
			w.applyPulse(reply, err, sent, replied)
			if w.pulse.state == beating {
				w.recovered() // the server accepts the leader's refills
			}
		}
	}
}

// applyPulse applies a reading of the pulse. An unreadable pulse counts as a missing one. When the pulse becomes late,
// every bucket is due at once. Its first call then only reads the index, because this replica doesn't know it yet.
func (w *worker) applyPulse(reply lua.PeekReply, err error, sent, replied time.Time) {
	before := w.pulse.state
	if err == nil {
		w.pulse.apply(reply, sent, replied)
	} else {
		w.pulse.applyMissing(replied)
	}
	if unreadable := err != nil && !errors.Is(err, lua.ErrUnknownBucket); unreadable != w.pulse.unreadable {
		w.pulse.unreadable = unreadable
		if unreadable {
			w.r.log.Error("pulse can't be read: this replica races", "pulse", w.pulse.beat.key, "error", err)
		}
	}
	state := w.pulse.state
	if before == beating && state != beating {
		w.takeUp(replied)
		for _, entry := range w.buckets {
			entry.bucket.due = replied
		}
		w.buckets.order()
		w.forgetMissing()
	}
	if before != beating && state == beating {
		w.sets.assume()
		w.standBy(replied)
	}
	if (before == silent) != (state == silent) {
		w.r.setRacing(w, state == silent)
		switch {
		case w.pulse.older:
			w.r.log.Warn("the leader has an older configuration: this replica races", "pulse", w.pulse.beat.key)
		case state == silent:
			w.r.log.Info("pulse is silent: this replica races",
				"pulse", w.pulse.beat.key, "silent-for", replied.Sub(w.pulse.changed))
		default:
			w.r.log.Info("pulse beats: this replica stands by", "pulse", w.pulse.beat.key)
		}
	}
}

// takeUp moves the buckets that a standby announces to the buckets that it refills, and makes them due at once. Their
// refills also announce them.
func (w *worker) takeUp(now time.Time) {
	for _, entry := range w.announce {
		entry.bucket.unannounced, entry.bucket.due = false, now
		heap.Push(&w.buckets, entry.bucket)
	}
	w.announce = nil
}

// standBy leaves the buckets to the leader. The standby still calls for doubtful buckets. Otherwise it would keep
// reporting a fault that has passed.
func (w *worker) standBy(now time.Time) {
	kept := w.buckets[:0]
	for _, entry := range w.buckets {
		if b := entry.bucket; b.doubtful() {
			b.unannounced, b.due = true, now
			heap.Push(&w.announce, b)
		} else {
			kept = append(kept, entry)
		}
	}
	clear(w.buckets[len(kept):])
	w.buckets = kept
	w.buckets.order()
}

// forgetMissing forgets which buckets were missing, because this replica has not called for them for a while. Other
// replicas may remember a bucket that is missing now.
func (w *worker) forgetMissing() {
	for _, entry := range w.buckets {
		entry.bucket.missing = time.Time{}
	}
}

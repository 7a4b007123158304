package refill

import (
	"container/heap"
	"context"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// nextBatch returns a call for the buckets that are due, at most as many as fit in a round trip; nil if none is due.
func (w *worker) nextBatch(ctx context.Context, now time.Time) call {
	batch := w.collect(now)
	if len(batch) == 0 {
		return nil
	}
	othersCame := w.othersCame(now)
	t := w.newTrip(len(batch), w.sizes.perCall())
	for i, b := range batch {
		t.calls[i] = b.call(now, othersCame)
		if b.division != nil {
			t.divided = append(t.divided, divided{i, b.division})
		}
	}
	within := w.timeout()
	return func() func() {
		t.run(ctx, within, w.r.store, w.r.store.refill)
		return func() {
			w.applyBatch(ctx, batch, t)
			w.ended = append(w.ended, t)
		}
	}
}

// collect removes the buckets of a batch from the queues. The leader's pulse comes first.
func (w *worker) collect(now time.Time) (batch []*bucket) {
	most := w.sizes.batch()
	w.withhold()
	if w.pulse != nil && w.leading && !w.pulse.due().IsZero() && !w.pulse.due().After(now) {
		w.pulse.asked = true
		batch = append(batch, w.pulse.beat)
	}
	if w.refills() {
		w.takeUp(now)
	}
	for w.refills() && len(w.buckets) > 0 && !w.buckets[0].due.After(now) && len(batch) < most {
		batch = append(batch, heap.Pop(&w.buckets).(*bucket))
	}
	for len(w.announce) > 0 && !w.announce[0].due.After(now) && len(batch) < most {
		batch = append(batch, heap.Pop(&w.announce).(*bucket))
	}
	return batch
}

// applyBatch applies the replies to a batch, and puts its buckets back into the queues.
func (w *worker) applyBatch(ctx context.Context, batch []*bucket, t *trip) {
	var news notices
	for i, b := range batch {
		res := &t.results[i]
		w.r.observe(t.event(i))
		w.applyReply(b, res, t, &news)
		warnUndivided(&news, b.key, b.division, &b.undivided)
		if !w.refills() && b.doubtful() {
			b.unannounced, b.due = true, t.replied.Add(maxBucketBackoff)
		}
		switch {
		case w.pulse != nil && b == w.pulse.beat:
			w.pulse.asked = false
		case b.unannounced:
			heap.Push(&w.announce, b)
		default:
			heap.Push(&w.buckets, b)
		}
	}
	for _, s := range t.swept {
		warnUnswept(&news, batch[s.index].key, &batch[s.index].unswept, s.err)
	}
	news.log(w.r.log)
	if err := t.serverError(); err != nil {
		w.refillsFailed(ctx, len(batch), err)
		return
	}
	w.refilled(t)
}

// applyReply applies the reply to the refill of one bucket.
func (w *worker) applyReply(b *bucket, res *lua.RefillResult, t *trip, news *notices) {
	switch {
	case res.Err == nil:
		if b.failures > 0 {
			news.add(hclog.Info, "bucket is refilled again", "bucket", b.key)
		}
		b.remember(res.Outcome)
		w.latest = max(w.latest, b.latest)
		if !b.signal {
			b.compare(news, res.Outcome)
			b.report(news, res.Outcome)
		}
		b.apply(res.Outcome, t.replied, t.replied.Sub(t.sent), w.rng)
		b.state = res.Seen
		w.align(b, res.Outcome, t.replied)
	case ownFault(res.Err):
		b.fail(t.replied, w.rng)
		if b.failures == 1 {
			news.add(hclog.Error, "bucket can't be refilled", "bucket", b.key, "error", res.Err)
		}
	default:
		b.due = t.replied.Add(backoff(1, maxBackoff, w.rng))
	}
	if b.claim && (res.Err == nil || ownFault(res.Err)) {
		w.sets.assume()
	}
}

// warnUnswept adds a warning if a bucket's reservations can't be ended. unswept reports whether the last attempt
// failed; then the warning was given already.
func warnUnswept(to *notices, key string, unswept *bool, err error) {
	if err != nil && !*unswept {
		to.add(hclog.Warn, "reservations can't be ended", "bucket", key, "error", err)
	}
	*unswept = err != nil
}

// align makes a leader refill a bucket at the same time as the pulse, so that the silence of the pulse begins with the
// bucket's last refill. It moves the next call by at most half an interval. No call comes within half an interval of a
// refill.
func (w *worker) align(b *bucket, o policy.Outcome, replied time.Time) {
	if !w.leading || w.pulse == nil || b == w.pulse.beat || b.interval != w.pulse.beat.interval ||
		o.Status == policy.StatusUnknown {
		return
	}
	beat := w.pulse.beat.due
	if last := replied.Add(-time.Duration(o.Now-o.Last) * time.Microsecond); beat.Sub(last) < b.interval/2 {
		beat = beat.Add(b.interval)
	}
	if beat.Sub(replied) <= b.interval*3/2 && beat.Sub(replied) >= b.interval/2 {
		b.due = beat
	}
}

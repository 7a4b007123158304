package refill

import (
	"container/heap"
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// lane refills the buckets of one Redis master, one batch after the other, in
// one goroutine. A slow or silent master holds up its own lane only.
type lane struct {
	r       *Refiller
	rng     *rand.Rand
	buckets queue // by due time, this replica's turn or not
	sets    *activeSets
	news    []*bucket // not in buckets yet: their terms are news to the server, perhaps
	pulse   *pulse
	pace    *pace
	leading bool
	lead    chan turn     // tells the lane whether this replica leads; taken between batches only
	done    chan struct{} // closed when run has returned
	down    int           // batches in a row that the server failed
	back    time.Time     // when the server came back; zero if it was never away
	racing  bool          // standing in for a silent leader; guarded by Refiller.mu
	turned  atomic.Int64  // when the lane last went round, Unix ns
}

// turn is whether this replica leads from here on.
type turn struct {
	leading bool
	taken   chan<- struct{} // gets one token when nothing is under way any more under the old role
}

// maxIdle bounds the time between two rounds of a lane with nothing to do, so
// that a lane that hangs can be told from one that rests.
const maxIdle = time.Second

// run calls until ctx ends, or until stop is closed and no call is under way.
func (l *lane) run(ctx context.Context, stop <-chan struct{}) {
	defer close(l.done)
	l.buckets.order()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-stop:
			return
		case t := <-l.lead:
			if l.leading && !t.leading {
				l.handOver(ctx)
			}
			l.leading = t.leading
			l.pulse.turn(l.leading, time.Now())
			l.r.setRacing(l, false)
			l.lookAfresh()
			t.taken <- struct{}{}
		case <-timer.C:
			l.turned.Store(time.Now().UnixNano())
			if wait := l.act(ctx); wait > 0 {
				timer.Reset(wait) // the server failed: nothing is sent before
				continue
			}
		}
		timer.Reset(min(time.Until(l.next()), maxIdle))
	}
}

// active reports whether it is this replica's turn to refill.
func (l *lane) active() bool { return l.pulse == nil || l.leading || l.pulse.state != beating }

// next is when the lane has something to do again.
func (l *lane) next() time.Time {
	var at time.Time
	if l.pulse != nil {
		at = l.pulse.due()
	}
	if n := len(l.news); n > 0 && (at.IsZero() || l.news[n-1].due.Before(at)) {
		at = l.news[n-1].due
	}
	if l.active() && len(l.buckets) > 0 && (at.IsZero() || l.buckets[0].due.Before(at)) {
		at = l.buckets[0].due
	}
	if due := l.sets.next(); l.active() && !due.IsZero() && (at.IsZero() || due.Before(at)) {
		at = due
	}
	if at.IsZero() {
		at = time.Now().Add(maxIdle)
	}
	return at
}

// act makes calls that are due. It returns how long to wait because the server
// failed, 0 if it did not.
func (l *lane) act(ctx context.Context) time.Duration {
	if wait := l.actOnBuckets(ctx); wait > 0 {
		return wait
	}
	return l.sets.act(ctx)
}

func (l *lane) actOnBuckets(ctx context.Context) time.Duration {
	now := time.Now()
	if l.pulse != nil && !l.leading && !l.pulse.peekDue.After(now) {
		if wait := l.listen(ctx); wait > 0 {
			return wait
		}
	}
	var batch []*bucket
	most := l.pace.batch()
	if l.pulse != nil && l.leading && !l.pulse.beat.due.After(now) {
		batch = append(batch, l.pulse.beat)
	}
	if l.active() { // the calls that are due bring the news
		for _, b := range l.news {
			b.news = false
			heap.Push(&l.buckets, b)
		}
		l.news = nil
	}
	for l.active() && len(l.buckets) > 0 && !l.buckets[0].due.After(now) && len(batch) < most {
		batch = append(batch, heap.Pop(&l.buckets).(*bucket))
	}
	for n := len(l.news); n > 0 && !l.news[n-1].due.After(now) && len(batch) < most; n-- {
		batch = append(batch, l.news[n-1])
		l.news = l.news[:n-1]
	}
	if len(batch) == 0 {
		return 0
	}
	wait := l.call(ctx, batch)
	for _, b := range batch {
		switch {
		case l.pulse != nil && b == l.pulse.beat:
		case b.news:
			l.news = append(l.news, b)
		default:
			heap.Push(&l.buckets, b)
		}
	}
	return wait
}

// handOver refills once more, at the end of a term, what was refilled half an
// interval ago or longer, the pulse too. A successor has yet to learn the
// indexes, and then waits half an interval: it is in time if as much is left.
// What isn't done within half an interval is left to it.
func (l *lane) handOver(ctx context.Context) {
	now := time.Now()
	hurry := func(b *bucket) {
		if b.due.Sub(now) <= b.interval/2 && b.due.After(now) {
			b.due = now
		}
	}
	hurry(l.pulse.beat)
	for _, entry := range l.buckets {
		hurry(entry.bucket)
	}
	l.buckets.order()
	l.sets.hurry(now)
	pending := func() bool {
		return !l.pulse.beat.due.After(now) || len(l.buckets) > 0 && !l.buckets[0].due.After(now) || l.sets.pending(now)
	}
	for end := now.Add(l.pulse.beat.interval / 2); pending() && time.Now().Before(end); {
		if l.act(ctx) > 0 {
			return
		}
	}
}

// listen reads the pulse. When it is late, every bucket is due at once: its
// first call only learns the index.
func (l *lane) listen(ctx context.Context) time.Duration {
	ctx, cancel := context.WithTimeout(ctx, l.r.cfg.Timeout)
	defer cancel()
	sent := time.Now()
	reply, err := l.r.store.peek(ctx, l.pulse.beat.key)
	replied := time.Now()
	if err != nil && !errors.Is(err, lua.ErrUnknownBucket) {
		return l.failed(ctx, err)
	}
	l.recovered()
	before := l.pulse.state
	if err == nil {
		l.pulse.heard(reply, sent, replied)
	} else {
		l.pulse.absent(replied)
	}
	state := l.pulse.state
	if before == beating && state != beating {
		for _, entry := range l.buckets {
			entry.bucket.due = replied
		}
		l.buckets.order()
		l.lookAfresh()
	}
	if (before == silent) != (state == silent) {
		l.r.setRacing(l, state == silent)
		if state == silent {
			l.r.log.Info("pulse is silent: this replica races", "pulse", l.pulse.beat.key, "silent-for", replied.Sub(l.pulse.changed))
		} else {
			l.r.log.Info("pulse beats: this replica stands by", "pulse", l.pulse.beat.key)
		}
	}
	return 0
}

// lookAfresh forgets which buckets were missing, because this replica hasn't
// looked for a while: one that is missing now may be remembered by the others.
func (l *lane) lookAfresh() {
	for _, entry := range l.buckets {
		entry.bucket.missing = time.Time{}
	}
}

// call refills the batch and has every bucket learn its answer. It returns how
// long to wait because the server failed all of them.
func (l *lane) call(ctx context.Context, batch []*bucket) time.Duration {
	callCtx, cancel := context.WithTimeout(ctx, l.r.cfg.Timeout)
	defer cancel()
	sent := time.Now()
	// The others may wait as long as this before they call a server that is back.
	othersCame := l.back.IsZero() || sent.Sub(l.back) >= maxBackoff+l.r.cfg.Timeout
	calls := make([]lua.RefillCall, len(batch))
	for i, b := range batch {
		calls[i] = b.call(sent, othersCame)
	}
	results := l.r.store.refill(callCtx, calls, l.pace.perCall())
	replied := time.Now()

	answered, serverErr := 0, error(nil)
	var news notices
	for i, b := range batch {
		res := results[i]
		l.r.observe(Event{Key: b.key, Sent: sent, Replied: replied, Call: calls[i].Call, Outcome: res.Outcome, Err: res.Err})
		switch {
		case res.Err == nil:
			if b.failures > 0 {
				news.add(hclog.Info, "bucket is refilled again", "bucket", b.key)
			}
			answered++
			b.learn(res.Outcome, replied, l.rng)
			l.align(b, res.Outcome, replied)
			b.report(&news, res.Outcome)
		case ownFault(res.Err):
			answered++
			b.fail(replied, l.rng)
			if b.failures == 1 {
				l.r.log.Error("bucket can't be refilled", "error", &BucketError{Bucket: b.key, Err: res.Err})
			}
		default:
			serverErr = res.Err
			b.due = replied.Add(backoff(1, maxBackoff, l.rng))
		}
	}
	news.log(l.r.log)
	if answered > 0 || serverErr == nil {
		l.pace.answered(results)
		l.recovered()
		l.sweep(ctx, calls, results, func(i int, err error) {
			batch[i].unswept = l.warnUnswept(calls[i].Key, batch[i].unswept, err)
		})
		return 0
	}
	l.pace.failed(len(batch))
	return l.failed(ctx, serverErr)
}

// align moves a leader's bucket to the beats of the pulse, so that the pulse's
// silence dates from the bucket's last refill. It moves by half an interval at
// most, once, and no call comes within half an interval of a refill.
func (l *lane) align(b *bucket, o policy.Outcome, replied time.Time) {
	if !l.leading || l.pulse == nil || b == l.pulse.beat || b.interval != l.pulse.beat.interval || o.Status == policy.StatusUnknown {
		return
	}
	beat := l.pulse.beat.due
	if last := replied.Add(-time.Duration(o.Now-o.Last) * time.Microsecond); beat.Sub(last) < b.interval/2 {
		beat = beat.Add(b.interval)
	}
	if beat.Sub(replied) <= b.interval*3/2 && beat.Sub(replied) >= b.interval/2 {
		b.due = beat
	}
}

// failed counts a failure of the server and returns how long to leave it alone.
func (l *lane) failed(ctx context.Context, err error) time.Duration {
	l.down++
	if l.down == 1 && ctx.Err() == nil {
		l.r.log.Warn("redis is away: refills pause", "error", err)
	}
	return backoff(l.down, maxBackoff, l.rng)
}

func (l *lane) recovered() {
	if l.down > 0 {
		l.r.log.Info("redis is back: refills go on", "failed-calls", l.down)
		l.back = time.Now()
	}
	l.down = 0
}

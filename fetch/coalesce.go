package fetch

import (
	"context"
	"fmt"
	"hash/maphash"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/lua"
)

const queueShards = 64

// answer is what a take is told.
type answer struct {
	reply  lua.TakeReply
	known  *known
	source Source
	err    error
}

// coalescer merges the takes of a key that wait for each other. It holds a queue
// per key with a call under way and nothing for any other.
type coalescer struct {
	c      *Client
	seed   maphash.Seed
	shards [queueShards]struct {
		sync.Mutex
		queues map[string]*queue
		crowd  int // how many went along on the last call that was collected
	}
	vigil                     *vigil
	pendings, queues, batches sync.Pool
}

func newCoalescer(c *Client) *coalescer {
	co := &coalescer{c: c, seed: maphash.MakeSeed()}
	co.vigil = newVigil(co.look)
	co.pendings.New = func() any { return &pending{sleeper: newSleeper()} }
	co.queues.New = func() any { return new(queue) }
	co.batches.New = func() any { return new(batch) }
	for i := range co.shards {
		co.shards[i].queues = make(map[string]*queue)
	}
	return co
}

// look is that of the vigil.
func (co *coalescer) look() (again bool) {
	for i := range co.shards {
		shard := &co.shards[i]
		shard.Lock()
		for _, q := range shard.queues {
			again = q.look() || again
		}
		shard.Unlock()
	}
	return again
}

// lane is where the takes of one key meet.
type lane struct {
	*coalescer
	key   string
	shard int
}

// take makes one take. The caller is inside.
func (co *coalescer) take(ctx context.Context, key string, n int64, limit time.Duration, now time.Time) answer {
	p := co.pendings.Get().(*pending)
	p.ctx, p.n, p.deadline = ctx, n, deadlineOf(ctx, limit, now)

	l := lane{co, key, int(maphash.String(co.seed, key) % queueShards)}
	shard := &co.shards[l.shard]
	shard.Lock()
	q := shard.queues[key]
	if q != nil {
		p.state.Store(queued)
		p.stirred.Store(false)
		q.push(p)
		shard.Unlock()
		return l.wait(ctx, q, p, limit, now)
	}
	q = co.queues.Get().(*queue)
	q.calls = 1
	shard.queues[key] = q
	crowd := shard.crowd > 0
	shard.Unlock()
	if !co.c.direct(ctx, p.deadline, now) {
		return l.attend(ctx, q, p, limit, now, true)
	}
	if crowd {
		return l.together(ctx, q, p)
	}
	a := l.alone(ctx, p)
	l.pass(q)
	l.free(p)
	return a
}

// free gives back a take that nobody else refers to.
func (co *coalescer) free(p *pending) {
	p.ctx, p.flight, p.answer = nil, nil, answer{}
	co.pendings.Put(p)
}

// told is the answer of a take, which is given back.
func (co *coalescer) told(p *pending) answer {
	a := p.answer
	co.free(p)
	return a
}

// wait sees a take in the queue through. It sleeps without a timer, which would
// cost as much as all the rest: the vigil stirs who has waited for long.
func (l lane) wait(ctx context.Context, q *queue, p *pending, limit time.Duration, began time.Time) answer {
	if !p.deadline.IsZero() && p.deadline.Sub(began) < 4*vigilPause {
		return l.attend(ctx, q, p, limit, began, false)
	}
	l.vigil.begin()
	for {
		<-p.signal
		switch state := p.state.Load(); {
		case state == done:
			return l.told(p)
		case state == leading || p.stirred.Load():
			return l.attend(ctx, q, p, limit, began, state == leading)
		}
	}
}

// attend sees a take through, in the queue, at the head of it, in a call, for no
// longer than ctx and limit allow.
func (l lane) attend(ctx context.Context, q *queue, p *pending, limit time.Duration, began time.Time, lead bool) answer {
	patience := l.c.newLimitTimer(limit, began)
	defer l.c.endLimitTimer(patience)
	for {
		switch {
		case lead && ctx.Err() != nil:
			l.pass(q)
			l.free(p)
			return answer{err: impatience(ctx, limit)}
		case lead && l.c.direct(ctx, p.deadline, time.Now()):
			return l.together(ctx, q, p)
		case lead:
			// A worker makes the call; this take waits for it like the others.
			lead = false
			l.requeue(q, p)
			if !l.c.workers.hand(ctx, patience.over, func() { l.fly(context.WithoutCancel(ctx), q) }) {
				p.state.Store(gone) // without a leader nobody else changes it
				l.pass(q)
				return answer{err: l.c.unheard(ctx, limit)}
			}
		}
		select {
		case <-p.signal:
		case <-ctx.Done():
			return l.giveUp(ctx, q, p, limit)
		case <-patience.over:
			return l.giveUp(ctx, q, p, limit)
		}
		switch p.state.Load() {
		case done:
			return l.told(p)
		case leading:
			lead = true
		}
	}
}

// giveUp ends the wait of a caller who stopped waiting, unless the answer is there.
func (l lane) giveUp(ctx context.Context, q *queue, p *pending, limit time.Duration) answer {
	switch {
	case p.state.CompareAndSwap(queued, gone): // whoever collects the queue drops it
		return answer{err: impatience(ctx, limit)}
	case p.state.CompareAndSwap(flying, gone):
		p.flight.left()
		l.c.stats.abandoned.Add(1)
		return answer{err: impatience(ctx, limit)}
	}
	a := p.answer // done, unless it leads
	if p.state.Load() == leading {
		l.pass(q)
		a = answer{err: impatience(ctx, limit)}
	}
	l.free(p)
	return a
}

// requeue puts a leading take at the head of the queue.
func (l lane) requeue(q *queue, p *pending) {
	shard := &l.shards[l.shard]
	shard.Lock()
	defer shard.Unlock()
	p.state.Store(queued)
	q.pushFront(p)
}

// pass makes the next take lead, or ends the queue.
func (l lane) pass(q *queue) {
	shard := &l.shards[l.shard]
	shard.Lock()
	q.flying = nil
	for p := q.pop(); p != nil; p = q.pop() {
		if p.state.CompareAndSwap(queued, leading) {
			shard.Unlock()
			p.wake()
			return
		}
	}
	delete(shard.queues, l.key)
	q.calls, q.seen = 0, 0
	shard.Unlock()
	l.queues.Put(q)
}

// collect moves takes from the queue to batch, as many as go into one call. Those
// who were answered together are about to take again, and are waited for.
func (l lane) collect(q *queue, b *batch, f *flight) {
	shard := &l.shards[l.shard]
	shard.Lock()
	defer shard.Unlock()
	gather(&shard.Mutex, &q.size, min(shard.crowd, gatherMost))
	for p := q.first; p != nil && b.fits(p.n); p = q.first {
		q.pop()
		if err := p.ctx.Err(); err != nil {
			if p.answer.err = fmt.Errorf("fetch: %w", err); p.state.CompareAndSwap(queued, done) {
				p.wake()
			}
			continue
		}
		p.flight = f
		f.join()
		if p.state.CompareAndSwap(queued, flying) {
			b.add(p)
		} else {
			f.left()
		}
	}
	shard.crowd = len(b.takes) - 1
	q.flying = b.takes
	q.calls++
}

// alone makes a call for one take in the goroutine of its caller.
func (l lane) alone(ctx context.Context, p *pending) answer {
	socket := newSocketContext(ctx, p.deadline, &l.c.alarms)
	defer socket.release()
	a := l.callOne(socket, p.n)
	if a.err != nil {
		a.err = l.c.directFailure(ctx, a.err)
	}
	return a
}

// callOne makes the call of one take.
func (l lane) callOne(ctx context.Context, n int64) answer {
	k, fresh := l.c.terms.get(l.key, time.Now())
	reply, err := l.c.sendTake(ctx, l.key, n, !fresh)
	if err != nil {
		l.c.unknownOutcome(n, err)
		return answer{err: failure(err)}
	}
	if !fresh || !reply.OK || reply.Terms != nil {
		k = l.c.learn(l.key, k, n, reply)
	}
	return answer{reply: reply, known: k}
}

// together makes a call for p and what is queued behind it in the goroutine of
// its caller.
func (l lane) together(ctx context.Context, q *queue, p *pending) answer {
	b := l.newBatch()
	defer l.freeBatch(b)
	b.add(p)
	l.collect(q, b, nil)
	if len(b.takes) == 1 {
		a := l.alone(ctx, p)
		l.pass(q)
		l.free(p)
		return a
	}
	socket := newSocketContext(ctx, p.deadline, &l.c.alarms)
	l.call(socket, b)
	socket.release()
	l.pass(q)
	late := l.share(b, p)
	l.c.giveBackLater(ctx, l.key, late)
	return l.told(p)
}

// fly makes a call for what is queued, in a worker's goroutine.
func (l lane) fly(ctx context.Context, q *queue) {
	b, f := l.newBatch(), &flight{}
	defer l.freeBatch(b)
	f.waiting.Store(1) // while it is collected
	l.collect(q, b, f)
	callCtx, cancel := newCallContext(ctx, b.latest())
	defer cancel()
	f.cancel = cancel
	late := int64(0)
	if f.left() {
		l.call(callCtx, b)
		late = l.share(b, nil)
	}
	l.pass(q)
	l.c.giveBack(callCtx, l.key, late)
}

// call makes the call of a batch and writes down what each take is told.
func (l lane) call(ctx context.Context, b *batch) {
	if len(b.takes) == 1 {
		b.takes[0].answer = l.callOne(ctx, b.total)
		return
	}
	k, fresh := l.c.terms.get(l.key, time.Now())
	reply, err := l.c.sendMany(ctx, l.key, b.runs, !fresh, false)
	if err != nil {
		l.c.unknownOutcome(b.total, err)
		err = failure(err)
		for _, p := range b.takes {
			p.answer = answer{err: err}
		}
		return
	}
	if !fresh || !reply.OK || reply.Terms != nil {
		k = l.c.learnMany(l.key, k, b.runs, reply)
	}
	left := reply.Remaining + b.total
	if !reply.OK {
		left = reply.Remaining
		for i, r := range b.runs {
			left += r.N * reply.Runs[i].Taken
		}
	}
	next := 0
	for i, r := range b.runs {
		taken, wait := r.Count, time.Duration(0)
		if !reply.OK {
			taken, wait = reply.Runs[i].Taken, reply.Runs[i].Wait
		}
		for j := range r.Count {
			p := b.takes[next]
			next++
			if j < taken {
				left -= r.N
				p.answer = answer{reply: lua.TakeReply{OK: true, Taken: r.N, Remaining: left}, known: k}
			} else {
				p.answer = answer{reply: lua.TakeReply{Remaining: reply.Remaining, Wait: wait, Refilled: reply.Refilled}, known: k}
			}
		}
	}
}

// share tells each take its answer, save self, whose caller this is. It returns
// the tokens taken for callers who are gone.
func (l lane) share(b *batch, self *pending) (late int64) {
	for _, p := range b.takes {
		if p == self {
			continue
		}
		taken := p.answer.reply.Taken
		if p.state.CompareAndSwap(flying, done) {
			p.wake() // p is its caller's from here on
		} else {
			late += taken
		}
	}
	return late
}

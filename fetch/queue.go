package fetch

import (
	"context"
	"sync/atomic"
	"time"
)

// State of a pending take. It is changed by compare-and-swap; who makes the
// change owns what follows from it.
const (
	queued  int32 = iota
	leading       // it is to make the next call
	flying        // it is part of a call
	done          // answered
	gone          // its caller stopped waiting
)

// pending is a take that waits in a queue or for its call.
type pending struct {
	ctx      context.Context
	n        int64
	deadline time.Time // zero: none
	state    atomic.Int32
	sleeper          // until the state is leading or done
	flight   *flight // once flying
	answer   answer  // once done
	next     *pending
}

// flight is a call that a worker makes. It is cancelled when nobody waits for it
// any more. A nil flight is a call that a caller makes.
type flight struct {
	waiting atomic.Int32
	cancel  context.CancelFunc
}

func (f *flight) join() {
	if f != nil {
		f.waiting.Add(1)
	}
}

// left reports whether somebody still waits after one has left.
func (f *flight) left() bool {
	if f == nil || f.waiting.Add(-1) > 0 {
		return true
	}
	f.cancel()
	return false
}

// queue holds the takes of one key that came while a call for it was under way.
// Exactly one goroutine leads it: it makes the call, shares the answer out and
// passes the lead on. A queue without a leader doesn't exist.
type queue struct {
	first, last *pending
	size        int
	flying      []*pending // the takes of the call under way
	calls, seen uint64     // calls made, and those at the last look of the vigil
}

// look stirs who waits if the call under way was so at the last look, and reports
// whether anybody waits.
func (q *queue) look() bool {
	if q.first == nil && q.flying == nil {
		return false
	}
	if q.seen != q.calls {
		q.seen = q.calls
		return true
	}
	for p := q.first; p != nil; p = p.next {
		p.stir()
	}
	for _, p := range q.flying {
		p.stir()
	}
	return true
}

func (q *queue) push(p *pending) {
	if q.first == nil {
		q.first = p
	} else {
		q.last.next = p
	}
	q.last = p
	q.size++
}

func (q *queue) pushFront(p *pending) {
	q.size++
	p.next = q.first
	q.first = p
	if q.last == nil {
		q.last = p
	}
}

func (q *queue) pop() *pending {
	p := q.first
	if p != nil {
		q.size--
		q.first, p.next = p.next, nil
		if q.first == nil {
			q.last = nil
		}
	}
	return p
}

package engine

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	// An open breaker closes when a probe is answered. Each may take probeTime, or longer where round trips are long. They
	// are probeFirst apart, and up to probeMost, each pause between half and one and a half times that.
	probeTime  = time.Second
	probeFirst = 50 * time.Millisecond
	probeMost  = 200 * time.Millisecond
)

// opened has the server probed if the breaker has opened. The lock is held.
func (q *Queue[T]) opened(yes bool) {
	if yes {
		q.probing = true
		go q.probe()
	}
}

// probe asks the server until it answers, or the queue is closed.
func (q *Queue[T]) probe() {
	b, pause := q.breaker, probeFirst
	for q.nap(time.Duration((0.5 + rand.Float64()) * float64(pause))) {
		pause = min(2*pause, probeMost)
		q.mu.Lock()
		most := q.atLeast(probeTime)
		q.mu.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), most)
		err := b.Probe(ctx)
		cancel()
		if err == nil {
			break
		}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	b.close()
	q.probing = false
	q.settle()
}

// nap sleeps and reports whether the queue is still open.
func (q *Queue[T]) nap(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-q.quit:
		return false
	}
}

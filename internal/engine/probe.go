package engine

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/tokenrefill/refiller/internal/timing"
)

const (
	// An open breaker closes when a probe is answered. Each probe may take probeTime, or longer where round trips are
	// long. The pause between probes grows from probeFirst to probeMost; each is varied by a factor of 0.5 to 1.5.
	probeTime  = time.Second
	probeFirst = 50 * time.Millisecond
	probeMost  = 200 * time.Millisecond
)

// opened starts the probes if the breaker has opened. The lock is held.
func (q *Queue[T]) opened(yes bool) {
	if yes {
		q.probing = true
		go q.probe()
	}
}

// probe asks the server until it answers, or the queue is closed.
func (q *Queue[T]) probe() {
	b, pause := q.breaker, probeFirst
	b.Changed(true)
	for timing.Sleep(q.quit, timing.Between(rand.Float64, pause/2, pause/2+pause)) {
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
	b.Changed(false)
	q.mu.Lock()
	defer q.mu.Unlock()
	b.close()
	q.probing = false
	q.settle()
}

package fetch

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// workers runs jobs in goroutines that stay, since a goroutine per call has to
// grow its stack each time. It knows everything that close must wait for.
type workers struct {
	jobs chan func()
	quit chan struct{} // closed: no new jobs
	most int

	busy    atomic.Int64  // callers between enter and leave, and workers; closing is set when closed
	drained chan struct{} // closed: nobody is inside and no worker lives
	once    sync.Once     // closes drained

	mu    sync.Mutex
	alive int // workers
}

// closing is a bit of busy above any count.
const closing = 1 << 62

func newWorkers(most int) *workers {
	return &workers{jobs: make(chan func()), quit: make(chan struct{}), drained: make(chan struct{}), most: most}
}

// enter admits a caller, who calls leave when done.
func (w *workers) enter() error {
	if w.busy.Add(1)&closing != 0 {
		w.leave()
		return ErrClosed
	}
	return nil
}

func (w *workers) leave() {
	if w.busy.Add(-1) == closing {
		w.once.Do(func() { close(w.drained) })
	}
}

// hand gives job to a worker and reports whether one took it: nobody runs it
// otherwise. It waits for a worker until ctx ends, expired fires or the workers
// are closed. The caller is inside.
func (w *workers) hand(ctx context.Context, expired <-chan time.Time, job func()) bool {
	if w.offer(job) {
		return true
	}
	select {
	case w.jobs <- job:
		return true
	case <-ctx.Done():
	case <-expired:
	case <-w.quit:
	}
	return false
}

// offer is hand without waiting.
func (w *workers) offer(job func()) bool {
	select {
	case w.jobs <- job:
		return true
	default:
		return w.start(job)
	}
}

// start adds a worker that begins with job, unless there are enough.
func (w *workers) start(job func()) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.alive == w.most {
		return false
	}
	w.alive++
	w.busy.Add(1) // the caller is inside, so it isn't drained, even if closing
	go w.work(job)
	return true
}

// spawn runs job in a goroutine of its own, which ends when the workers are closed
// and which close waits for. The caller is inside.
func (w *workers) spawn(job func()) {
	w.busy.Add(1)
	go func() {
		defer w.leave()
		job()
	}()
}

func (w *workers) work(job func()) {
	defer func() {
		w.mu.Lock()
		w.alive--
		w.mu.Unlock()
		w.leave()
	}()
	for {
		job()
		select {
		case job = <-w.jobs:
		case <-w.quit:
			return
		}
	}
}

// close refuses new callers and waits until nobody is inside and no worker
// lives, or ctx ends.
func (w *workers) close(ctx context.Context) error {
	if w.busy.Or(closing)&closing == 0 {
		close(w.quit)
	}
	if w.busy.Load() == closing {
		w.once.Do(func() { close(w.drained) })
	}
	select {
	case <-w.drained:
		return nil
	default:
	}
	select {
	case <-w.drained:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("fetch: close: calls are still under way: %w", ctx.Err())
	}
}

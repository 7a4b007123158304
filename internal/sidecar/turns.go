package sidecar

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/internal/sidecar/fair"
	"github.com/tokenrefill/refiller/internal/sidecar/metrics"
)

// placeSize is the number of bytes of a request that need one place in the queue.
const placeSize = 2 << 10

// turns admits calls of all protocols. Waits for tokens take long, so they have a separate bound and do not queue.
type turns struct {
	calls      *fair.Queue
	tokenWaits *fair.Queue
	patience   time.Duration // longest time that a call without a deadline queues
	refusals   *refusals
}

func newTurns(l Limits, r *refusals) *turns {
	return &turns{
		calls:      fair.New(fair.Bounds{Running: l.Calls, Client: l.ClientCalls, Waiting: l.Queue}),
		tokenWaits: fair.New(fair.Bounds{Running: l.TokenWaits, Client: l.TokenWaits/2 + l.TokenWaits%2}),
		patience:   l.QueueWait, refusals: r,
	}
}

// enter waits for a call's turn. If err is nil, leave must be called. If timed is set, only ctx bounds the wait.
func (t *turns) enter(ctx context.Context, origin string, a call.Asks, timed bool) (leave func(), err error) {
	client := clientOf(origin, a)
	queue, patience := t.calls, t.patience
	if a.MayWait {
		queue = t.tokenWaits
	}
	if timed {
		patience = 0
	}
	err = queue.Enter(ctx, client, 1+a.Size/placeSize, patience)
	switch {
	case err == nil:
		return func() { queue.Leave(client) }, nil
	case errors.Is(err, fair.ErrClosed):
		return nil, call.ErrDraining
	case errors.Is(err, fair.ErrFull) && a.MayWait:
		t.refusals.add(metrics.TokenWaits, client)
		return nil, fmt.Errorf("%w: too many waits for tokens are running", call.ErrBusy)
	case errors.Is(err, fair.ErrFull):
		t.refusals.add(metrics.QueueFull, client)
		return nil, fmt.Errorf("%w: the queue is full", call.ErrBusy)
	case errors.Is(err, fair.ErrLate):
		t.refusals.add(metrics.QueueWait, client)
		return nil, fmt.Errorf("%w: the call was in the queue for %s", call.ErrBusy, patience)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		t.refusals.add(metrics.QueueWait, client)
	}
	return nil, fmt.Errorf("sidecar: the call ended in the queue: %w", err)
}

func (t *turns) close() {
	t.calls.Close()
	t.tokenWaits.Close()
}

// refusalsPause is the time between two log entries about refusals of one reason.
const refusalsPause = time.Minute

// refusals counts refusals. For each reason it logs the first refusal, and then one per refusalsPause.
type refusals struct {
	metrics *metrics.Metrics
	log     hclog.Logger

	mu     sync.Mutex
	logged map[string]time.Time
}

func newRefusals(m *metrics.Metrics, log hclog.Logger) *refusals {
	return &refusals{metrics: m, log: log, logged: make(map[string]time.Time)}
}

func (r *refusals) add(reason, client string) {
	r.metrics.Refused.WithLabelValues(reason).Inc()
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	last, before := r.logged[reason]
	if before && now.Sub(last) < refusalsPause {
		return
	}
	r.logged[reason] = now
	r.log.Warn("refusing what is beyond the sidecar's bounds; see refiller_sidecar_refused_total", "reason", reason,
		"client", client)
}

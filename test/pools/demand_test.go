package pools

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/faultproxy"
)

// figures is how many steps it takes to hold their times against targets.
const figures = 20

// TestSharesFollowDemand moves nearly all demand from one region to another, again and again, with no fault and 40 ms each
// way between regions and etcd. It measures how long it takes until nine tenths of what a region is to get are in force.
func TestSharesFollowDemand(t *testing.T) {
	if *steps < figures {
		t.Parallel() // nothing is measured
	}
	w := startWorld(t, 2)
	for _, r := range w.regions {
		for _, l := range r.links {
			require.NoError(t, l.Loss(faultproxy.Both, 0, 0))
			require.NoError(t, l.Delay(faultproxy.Both, 40*time.Millisecond, 2*time.Millisecond))
		}
		r.wants.Store(20)
	}
	stop := w.watch()
	share := rate - floor*float64(len(w.regions)-1)
	has := func(r *region, part float64) func() bool {
		return func() bool { return inForce(r.look(t.Context())) >= part*share }
	}
	hot := w.regions[0]
	hot.wants.Store(1500)
	var times []time.Duration
	for range *steps {
		w.eventually("one region has what it wants", has(hot, 0.97))
		wait(t, time.Duration(w.rng.Int64N(int64(2*time.Second)))) // at any point of a period
		next := w.any()
		for next == hot {
			next = w.any()
		}
		hot.wants.Store(20)
		next.wants.Store(1500)
		began := time.Now()
		require.Eventually(t, has(next, 0.9), patience, 5*time.Millisecond)
		times = append(times, time.Since(began))
		hot = next
	}
	stop()
	slices.Sort(times)
	p50, p95 := times[len(times)/2], times[len(times)*95/100]
	t.Logf("%d steps: nine tenths in force after p50 %s, p95 %s, most %s", len(times), p50, p95, times[len(times)-1])
	require.Empty(t, w.violation)
	if *steps >= figures {
		require.LessOrEqual(t, p50, 2*time.Second)
		require.LessOrEqual(t, p95, 3500*time.Millisecond)
	}
}

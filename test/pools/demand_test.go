package pools

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
)

// figures is the smallest number of steps for which the times are compared with their targets.
const figures = 12

// TestSharesFollowDemand raises the demand of one region, again and again. There are no faults, and the delay between
// regions and etcd is 40 ms each way. It measures how long it takes until nine tenths of the region's additional rate
// are in force.
func TestSharesFollowDemand(t *testing.T) {
	if *steps < figures {
		t.Parallel() // nothing is measured
	}
	const little, much = 100, 900
	const gets = rate - 2*1.1*little // a tenth is headroom
	w := startWorld(t, 2)
	for _, r := range w.regions {
		for _, l := range r.links {
			require.NoError(t, l.Loss(faultproxy.Both, 0, 0))
			require.NoError(t, l.Delay(faultproxy.Both, 40*time.Millisecond, 2*time.Millisecond))
		}
		r.wants.Store(little)
	}
	stop := w.watch()
	us := w.regions[2]
	has := func() float64 { return inForce(us.read(t.Context())) }
	var times []time.Duration
	for i := range *steps + 1 {
		w.eventually("the earlier demand is forgotten", func() bool { return has() > 0 && has() < 0.4*rate })
		wait(t, time.Duration(w.rng.Int64N(int64(time.Second)))) // so that the demand rises at any point of a period
		before, began := has(), time.Now()
		us.wants.Store(much)
		w.eventually("us gets nine tenths of its demand", func() bool { return has() >= before+0.9*(gets-before) })
		t.Logf("from %.0f/s after %s", before, time.Since(began))
		if i > 0 { // at the first step, the demand of the other regions may not be known yet
			times = append(times, time.Since(began))
		}
		us.wants.Store(little)
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

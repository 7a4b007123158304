package pool

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The coordinator's host is suspended, for less than the lease of its leadership or for more, and so its monotonic
// clock stops. No rate is given away twice: its offers count for longer, while grants end on the regions' own clocks.
func TestASuspendedCoordinatorGivesNothingAwayTwice(t *testing.T) {
	for _, length := range []time.Duration{3 * time.Second, 8 * time.Second, time.Minute} {
		t.Run(length.String(), func(t *testing.T) {
			inWorld(t, func(_ *testing.T, w *world) {
				p := w.whoLeads()
				p.suspend()
				w.demands(map[string]float64{"ap": 20, "eu": 5000, "us": 20})
				time.Sleep(length)
				p.resume()
				w.demands(map[string]float64{"ap": 5000, "eu": 20, "us": 5000})
				time.Sleep(30 * time.Second)
			})
		})
	}
}

// A host with a region's Redis and all of its agents is suspended, with all clocks, and is cut off when it resumes. No
// process can detect the suspension. So the grant lasts longer by that time, until it ends on the clock that had
// stopped.
func TestASuspendedRegionKeepsItsRateForAsLongAsItsGrant(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		const length = 30 * time.Second // after 20 s, the others don't always use all of the rate
		w.demands(map[string]float64{"ap": 20, "eu": 5000, "us": 20})
		time.Sleep(20 * time.Second)
		require.GreaterOrEqual(t, w.rates()["eu"], 899.0)
		w.locked(func() {
			w.servers["eu"].down = true
			w.limit, w.stock = 1e9, 1e9
		})
		for _, p := range w.of("eu") {
			p.suspend()
		}
		w.demands(map[string]float64{"ap": 5000, "us": 5000})
		time.Sleep(length)
		require.InDelta(t, 900, w.rates()["ap"]+w.rates()["us"], 1)
		w.cutEtcd("eu")
		w.locked(func() {
			w.servers["eu"].down = false
			w.servers["eu"].skew -= length
		})
		for _, p := range w.of("eu") {
			p.resume()
		}
		time.Sleep(time.Second)
		require.GreaterOrEqual(t, w.rates()["eu"], 899.0)
		time.Sleep(w.timing.Lease - time.Second)
		w.bounded()
		require.InDelta(t, 100, w.rates()["eu"], 0.01)
	})
}

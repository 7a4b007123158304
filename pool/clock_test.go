package pool

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A region has nearly all of the rate and is cut off. Time daemons slew the clock of its Redis as much as they can, and
// the clocks of all processes in the other direction. No other region gets its share before its grant has ended on the
// slow clock.
func TestClocksThatAreSlewedGiveNothingAwayTwice(t *testing.T) {
	first, _ := simSeed(t, 1)
	for seed := first; seed < first+4; seed++ {
		o := live(t, seed, sabotage{}, func(w *world) {
			w.demands(map[string]float64{"us": 1500})
			time.Sleep(15 * time.Second)
			w.slews("us", -maxSlew, maxSlew)
			time.Sleep(15*time.Second + time.Duration(w.rng.Int64N(int64(time.Second))))
			require.Greater(w.t, w.rates()["us"], 800.0, "us keeps its grant while its clock is slewed")
			w.cutEtcd("us")
			w.demands(map[string]float64{"ap": 1500, "eu": 1500})
			time.Sleep(40 * time.Second)
			for _, p := range w.of("us") {
				require.Zero(w.t, p.agent.State().Voids)
				require.InDelta(w.t, -maxSlew, p.agent.State().ClockRate, 0.002)
			}
			w.slews("us", 0, 0)
			w.mendEtcd("us")
			time.Sleep(60 * time.Second)
		})
		requireSafe(t, o)
		require.Empty(t, o.checkEnd())
	}
}

// A clock that runs fast credits too much. The agent reports this, and does not begin a new era.
func TestAClockThatRunsFastIsReported(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.slews("eu", 0.05, 0)
		time.Sleep(30 * time.Second)
		for _, p := range w.of("") {
			want := 0.0
			if p.region == "eu" {
				want = 0.05
			}
			require.InDelta(t, want, p.agent.State().ClockRate, 0.002)
			require.Zero(t, p.agent.State().Voids)
		}
		near(t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
	})
}

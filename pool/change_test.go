package pool

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
)

// change gives every process new settings.
func (w *world) change(change func(p *Pool)) {
	w.mu.Lock()
	p := w.pool
	p.Regions = append([]Region(nil), p.Regions...)
	change(&p)
	w.pool = p
	w.version++
	settings := Settings{Version: w.version, Pools: []Pool{p}}
	w.limit = max(w.limit, float64(p.Rate.Tokens)/p.Rate.Per.Seconds())
	w.stock = max(w.stock, float64(p.Capacity))
	w.mu.Unlock()
	for _, proc := range w.of("") {
		require.NoError(w.t, proc.agent.Update(settings))
	}
}

// settle waits until a change must be complete, and lowers the bound to the rate of the settings in force.
func (w *world) settle() {
	time.Sleep(10 * time.Second)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.limit = float64(w.pool.Rate.Tokens) / w.pool.Rate.Per.Seconds()
	w.check()
}

// inWorld runs a test in a world without random faults, in which every region wants more than the pool's rate.
func inWorld(t *testing.T, test func(t *testing.T, w *world)) {
	seed, _ := simSeed(t, 1)
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, seed, simPool("payments"), sabotage{})
		defer w.end()
		w.demands(map[string]float64{"ap": 5000, "eu": 5000, "us": 5000})
		time.Sleep(10 * time.Second)
		test(t, w)
		w.mu.Lock()
		defer w.mu.Unlock()
		require.Empty(t, w.violation, "%v", w.events)
	})
}

func near(t *testing.T, want, got map[string]float64) {
	t.Helper()
	for r, n := range want {
		require.InDelta(t, n, got[r], 1, "%s of %v", r, got)
	}
}

func TestTheRateIsRaisedAndLoweredInTwoPhases(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		near(t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
		w.change(func(p *Pool) { p.Rate, p.Capacity = policy.PerSecond(2000), 6000 })
		w.settle()
		near(t, map[string]float64{"ap": 500, "eu": 1000, "us": 500}, w.rates())
		w.change(func(p *Pool) {
			p.Rate = policy.Rate{Tokens: 30_000, Per: time.Minute}
			for i := range p.Regions {
				p.Regions[i].Floor = policy.Rate{}
			}
		})
		w.settle()
		near(t, map[string]float64{"ap": 125, "eu": 250, "us": 125}, w.rates())
	})
}

func TestAFloorMovesOnlyOnceItsHolderHasAcknowledged(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for _, p := range w.of("eu") {
			p.set(func() { p.etcd = fault{noRequest: true, noReply: true} })
		}
		time.Sleep(25 * time.Second) // time for another coordinator, if this one is cut off
		near(t, map[string]float64{"eu": 100, "ap": 450, "us": 450}, w.rates())
		w.change(func(p *Pool) {
			p.Regions[0].Floor, p.Regions[1].Floor = policy.PerSecond(140), policy.PerSecond(10)
		})
		w.settle()
		near(t, map[string]float64{"eu": 100, "ap": 450, "us": 450}, w.rates())
		for _, p := range w.of("eu") {
			p.set(func() { p.etcd = fault{} })
		}
		w.settle()
		near(t, map[string]float64{"eu": 500, "ap": 250, "us": 250}, w.rates())
		for _, p := range w.of("eu") {
			p.set(func() { p.etcd = fault{noRequest: true, noReply: true} })
		}
		time.Sleep(25 * time.Second) // time for another coordinator, if this one is cut off
		near(t, map[string]float64{"eu": 10, "ap": 495, "us": 495}, w.rates())
	})
}

func TestARegionJoinsAndLeaves(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.change(func(p *Pool) {
			p.Regions[1].Floor = policy.PerSecond(50)
			p.Regions = append(p.Regions, Region{Name: "sa", Weight: 1, Floor: policy.PerSecond(50)})
		})
		w.addRegion("sa")
		w.demands(map[string]float64{"sa": 5000})
		w.settle()
		near(t, map[string]float64{"ap": 200, "eu": 400, "us": 200, "sa": 200}, w.rates())
		w.change(func(p *Pool) { p.Regions = p.Regions[1:] }) // without ap
		w.settle()
		near(t, map[string]float64{"ap": 0, "eu": 500, "us": 250, "sa": 250}, w.rates())
		w.mu.Lock()
		defer w.mu.Unlock()
		require.NotContains(t, w.keys, shareKeys+"ap", "the share of a region that acknowledged its removal is deleted")
	})
}

func TestAFencedRegionsShareIsFreeAtOnce(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.locked(func() { w.servers["eu"].down = true })
		time.Sleep(20 * time.Second)
		near(t, map[string]float64{"ap": 450, "us": 450}, w.rates())
		operator := w.of("us")[0]
		_, err := operator.put(t.Context(), fenceKeys+"eu", `{"operator":"alice"}`)
		require.NoError(t, err)
		lost := w.servers["eu"]
		w.locked(func() { delete(w.servers, "eu") }) // lost for good, as the operator declares
		time.Sleep(3 * time.Second)
		near(t, map[string]float64{"ap": 500, "us": 500}, w.rates())
		s, _, err := readStatus(t.Context(), operator)
		require.NoError(t, err)
		require.Equal(t, "alice", s.Pools[0].Regions[1].Fenced.Operator)
		require.Zero(t, s.Pools[0].Regions[1].Claimed)

		// The server comes back empty, and the region's rate stays 0 until the fence is lifted.
		w.locked(func() {
			w.servers["eu"] = newSimRedis("eu", 0)
			w.servers["eu"].taken = lost.taken
		})
		w.demands(map[string]float64{"eu": 5000})
		time.Sleep(5 * time.Second)
		near(t, map[string]float64{"ap": 500, "us": 500, "eu": 0}, w.rates())
		entries, _, err := operator.load(t.Context(), fenceKeys+"eu")
		require.NoError(t, err)
		_, err = operator.commit(t.Context(), leadership{},
			[]write{{key: fenceKeys + "eu", seen: entries[0].revision, remove: true}})
		require.NoError(t, err)
		time.Sleep(7 * time.Second)
		near(t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
	})
}

func TestARegionCutOffKeepsItsFloor(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for _, p := range w.of("us") {
			p.set(func() { p.etcd = fault{noRequest: true, noReply: true} })
		}
		time.Sleep(13 * time.Second)
		for range 600 {
			time.Sleep(time.Second)
			require.InDelta(t, 50, w.rates()["us"], 0.01)
		}
		near(t, map[string]float64{"ap": 950.0 / 3, "eu": 1900.0 / 3}, w.rates())
		for _, p := range w.of("us") {
			p.set(func() { p.etcd = fault{} })
		}
		time.Sleep(3 * w.timing.Report)
		require.Greater(t, w.rates()["us"], 125.0, "within three periods us has more than half of its share")
		time.Sleep(5 * w.timing.Report)
		near(t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
	})
}

func TestWithoutTheCoordinatorNoRegionDropsToItsFloor(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for range 3 {
			p := w.whoLeads()
			p.kill()
			w.startProc(p.region, p.name+"'")
			for range 150 {
				time.Sleep(100 * time.Millisecond)
				near(t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
			}
		}
	})
}

func TestAStoppedClockVoidsTheGrant(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for _, p := range w.of("us") {
			p.set(func() { p.etcd = fault{noRequest: true, noReply: true} })
		}
		era := w.servers["us"].bucket.Control.Era
		for range 300 { // the clock runs at seven tenths of its speed
			time.Sleep(10 * time.Millisecond)
			w.locked(func() { w.servers["us"].skew -= 3 * time.Millisecond })
		}
		var later int64
		w.locked(func() { later = w.servers["us"].bucket.Control.Era })
		require.Greater(t, later, era)
		require.InDelta(t, 50, w.rates()["us"], 0.01)
	})
}

// A server's clock is set back by 6 s while the server refuses writes for 7 s. The script can't detect this, and the
// region's grant would last 6 s too long. Both agents of the region have detected it when the server accepts writes
// again. When agents ignored it then, 1.8 times the rate was in force.
func TestAClockThatWentWrongVoidsTheGrantOnceTheServerTakesWrites(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.demands(map[string]float64{"ap": 20, "eu": 20, "us": 5000})
		time.Sleep(20 * time.Second)
		w.cutEtcd("us")
		us := w.servers["us"]
		era := us.bucket.Control.Era
		w.locked(func() { us.full, us.skew = true, us.skew-6*time.Second })
		w.demands(map[string]float64{"ap": 5000, "eu": 5000, "us": 5000})
		time.Sleep(7 * time.Second)
		w.locked(func() {
			require.Equal(t, era, us.bucket.Control.Era)
			us.full = false
		})
		time.Sleep(25 * time.Second)
		w.locked(func() { require.Greater(t, us.bucket.Control.Era, era) })
		voids := int64(0)
		for _, p := range w.of("us") {
			voids += p.agent.State().Voids
		}
		require.EqualValues(t, 1, voids, "eras begun")
	})
}

// While etcd is unavailable, a region's replicas are restarted, and then its Redis restarts empty. The region has its
// floor, because the new replicas have read the terms from Redis before.
func TestARegionThatLosesItsBucketWithoutEtcdHasItsFloor(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.locked(func() { w.etcdDown = true })
		w.stopProcs("eu")
		w.startProc("eu", "eu-new")
		time.Sleep(5 * time.Second)
		w.locked(func() {
			w.servers["eu"].bucket = policy.Bucket{}
			w.servers["eu"].added, w.servers["eu"].denied = 0, 0
		})
		time.Sleep(5 * time.Second)
		require.InDelta(t, 100, w.rates()["eu"], 0.01)
		w.locked(func() { w.etcdDown = false })
		time.Sleep(45 * time.Second)
		near(t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
	})
}

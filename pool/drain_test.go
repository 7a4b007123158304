package pool

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config/etcdconn"
)

const drainRecord = `{"operator":"alice","drain":true}`

// declares writes a fence of a region, as an operator does. An empty fence lifts it.
func (w *world) declares(region, fence string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.revision++
	w.set(fenceKeys+region, fence, fence == "")
	w.record("fence of %s: %q", region, fence)
}

// withFences returns a copy of a snapshot that has the present fences. So an operator would correct the fences after a
// restore of etcd.
func (w *world) withFences(s snapshot) snapshot {
	w.mu.Lock()
	defer w.mu.Unlock()
	for region := range w.servers {
		key := fenceKeys + region
		delete(s.keys, key)
		if e, ok := w.keys[key]; ok {
			e.revision = s.revision
			s.keys[key] = e
		}
	}
	return s
}

// until waits until the rates in force are want, but for at most a minute. It returns the time that it waited.
func (w *world) until(want map[string]float64) time.Duration {
	began := time.Now()
	for time.Since(began) < time.Minute {
		rates, off := w.rates(), 0.0
		for r, n := range want {
			off = max(off, rates[r]-n, n-rates[r])
		}
		if off <= 1 {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	return time.Since(began)
}

func TestADrainedRegionMakesRoomWithoutWaitingForALease(t *testing.T) {
	first, _ := simSeed(t, 1)
	longest := time.Duration(0)
	for seed := first; seed < first+10; seed++ {
		o := live(t, seed, sabotage{}, func(w *world) {
			w.demands(map[string]float64{"ap": 5000, "eu": 5000, "us": 5000})
			time.Sleep(15*time.Second + time.Duration(w.rng.Int64N(int64(time.Second))))
			all, rest := map[string]float64{"ap": 250, "eu": 500, "us": 250}, map[string]float64{"ap": 500, "eu": 0, "us": 500}
			near(w.t, all, w.rates())
			w.declares("eu", drainRecord)
			took := w.until(rest)
			require.LessOrEqual(w.t, took, 3*time.Second)
			longest = max(longest, took)
			time.Sleep(time.Second)
			require.True(w.t, w.status().Regions[1].Idle())
			require.True(w.t, w.awaitOtherLeader(nil).coordinator.Regions()["eu"].Fenced)

			for _, p := range w.of("eu") {
				p.kill()
			}
			time.Sleep(20 * time.Second)
			near(w.t, rest, w.rates())
			w.killTheLeader()
			time.Sleep(20 * time.Second)
			near(w.t, rest, w.rates())

			w.startProc("eu", "eu-back")
			time.Sleep(5 * time.Second)
			near(w.t, rest, w.rates())
			w.declares("eu", "")
			require.LessOrEqual(w.t, w.until(all), 15*time.Second)
			require.False(w.t, w.awaitOtherLeader(nil).coordinator.Regions()["eu"].Fenced)
			time.Sleep(time.Minute)
		})
		requireSafe(t, o)
		require.Empty(t, o.checkEnd())
	}
	t.Logf("REFILLER_SEED=%d: the other regions have the whole rate after %s at most", first, longest)
}

// A region that can't read its drain keeps its floor, and its grant until the grant ends.
func TestAnUnacknowledgedDrainFreesNoFloor(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for _, p := range w.of("eu") {
			p.set(func() { p.etcd = fault{noRequest: true, noReply: true} })
		}
		w.declares("eu", drainRecord)
		time.Sleep(3 * time.Second)
		near(t, map[string]float64{"eu": 500}, w.rates())
		time.Sleep(25 * time.Second) // time for another coordinator, if this one is cut off
		near(t, map[string]float64{"ap": 450, "eu": 100, "us": 450}, w.rates())
		require.False(t, w.status().Regions[1].Idle())
		for _, p := range w.of("eu") {
			p.set(func() { p.etcd = fault{} })
		}
		require.LessOrEqual(t, w.until(map[string]float64{"ap": 500, "eu": 0, "us": 500}), 5*time.Second)
	})
}

// A region was drained, and the others have its share and its floor. Then one of the others is cut off, and etcd is
// restored or emptied, so that it has lost the drain and the shares.
func TestAnEtcdThatForgetsADrainGivesNothingAwayTwice(t *testing.T) {
	first, _ := simSeed(t, 1)
	for name, forget := range map[string]func(w *world, s snapshot){
		"Restored":       func(w *world, s snapshot) { w.restoreEtcd(s, 0) },
		"RestoredBumped": func(w *world, s snapshot) { w.restoreEtcd(s, 1_000_000_000) },
		"Wiped":          func(w *world, _ snapshot) { w.wipe() },
	} {
		t.Run(name, func(t *testing.T) {
			for seed := first; seed < first+10; seed++ {
				o := live(t, seed, sabotage{}, func(w *world) {
					w.demands(map[string]float64{"ap": 5000, "eu": 5000, "us": 5000})
					time.Sleep(15 * time.Second)
					s := w.snapshot()
					w.declares("eu", drainRecord)
					time.Sleep(4*time.Second + time.Duration(w.rng.Int64N(int64(3*time.Second))))
					near(w.t, map[string]float64{"ap": 500, "us": 500}, w.rates())
					silent := []string{"ap"}
					if w.rng.IntN(2) == 0 {
						silent = []string{"ap", "us"}
					}
					for _, r := range silent {
						for _, p := range w.of(r) {
							p.set(func() { p.etcd = fault{noRequest: true, noReply: true} })
						}
					}
					forget(w, s)
					time.Sleep(25 * time.Second)
					for _, p := range w.of("") {
						p.set(func() { p.etcd = fault{} })
					}
					time.Sleep(40 * time.Second)
				})
				requireSafe(t, o)
				require.Empty(t, o.checkEnd())
			}
		})
	}
}

func TestAPoolThatIsClosedWaitsForARegionThatIsDrained(t *testing.T) {
	t.Parallel()
	l := newLedger("payments")
	l.configure(new(simPool("payments")))
	l.declare("eu", draining)
	require.Contains(t, l.waits(), "eu", "a draining region may have an ordinary bucket")
	l.declare("eu", fenced)
	require.NotContains(t, l.waits(), "eu")
}

func TestAFenceThatCannotBeReadChangesNothing(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.declares("eu", "later")
		w.demands(map[string]float64{"ap": 5000, "eu": 0, "us": 0})
		time.Sleep(15 * time.Second)
		near(t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
		require.Equal(t, 1, w.awaitOtherLeader(nil).coordinator.Stats().Unread)
		w.declares("eu", "")
		time.Sleep(30 * time.Second)
		require.Greater(t, w.rates()["ap"], 800.0)
	})
}

func TestARealRegionIsDrainedWithinThreeSeconds(t *testing.T) {
	t.Parallel()
	p := realPool()
	areas, etcd := realPools(t, p)
	ap := areas["ap"]
	eu := areas["eu"]
	us := areas["us"]
	rate := func(a *area) float64 { return a.rate(t, p.Name) }
	client, err := etcdconn.Open(etcdconn.Options{Endpoints: etcd.Endpoints()})
	require.NoError(t, err)
	defer func() { _ = client.Close() }()
	idle := func() bool {
		s, err := ReadStatus(t.Context(), client, testPrefix)
		return err == nil && len(s.Pools) == 1 && s.Pools[0].Regions[1].Idle()
	}
	fence := func(drain bool) error {
		return Fence(t.Context(), client, testPrefix, "eu", Fencing{Operator: "alice", Drain: drain})
	}
	stop := watchSum(t, areas, p.Name, 1000)
	defer stop()
	for _, a := range areas {
		a.want(2000)
	}
	shared := func() bool { return rate(ap) > 200 && rate(eu) > 400 && rate(us) > 200 }
	require.Eventually(t, shared, 30*time.Second, 20*time.Millisecond)

	left := func() bool { return rate(eu) == 0 && rate(ap)+rate(us) > 995 }
	var took []time.Duration
	for range 3 { // other programs may use the machine for a while
		began := time.Now()
		require.NoError(t, fence(true))
		require.Eventually(t, left, 30*time.Second, 5*time.Millisecond)
		took = append(took, time.Since(began))
		require.Eventually(t, idle, 30*time.Second, 20*time.Millisecond)
		require.NoError(t, fence(true), "a drain may be requested again")
		require.NoError(t, Lift(t.Context(), client, testPrefix, "eu"))
		require.Eventually(t, shared, 30*time.Second, 20*time.Millisecond)
	}
	t.Logf("40 ms from etcd the other regions have the whole rate %s after the drain", took)
	require.LessOrEqual(t, slices.Min(took), 3*time.Second)

	eu.proxy.Cut()
	require.NoError(t, fence(true))
	require.Never(t, func() bool { return idle() || rate(eu) < 400 }, 3*time.Second, 50*time.Millisecond,
		"other regions get no share of a region that can't read the drain")
	require.NoError(t, fence(false))
	require.ErrorIs(t, fence(true), ErrFenced)
	require.NoError(t, eu.proxy.Heal())
}

package pool

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
)

// cutEtcd cuts a region off from etcd until mendEtcd is called.
func (w *world) cutEtcd(region string) {
	for _, p := range w.of(region) {
		p.set(func() { p.etcd = fault{noRequest: true, noReply: true} })
	}
}

func (w *world) mendEtcd(region string) {
	for _, p := range w.of(region) {
		p.set(func() { p.etcd = fault{} })
	}
}

// setFile gives a region's processes a file with these pools.
func (w *world) setFile(region string, version int64, pools ...Pool) {
	for _, p := range w.of(region) {
		p.set(func() { p.file = simFile{version: version} })
		require.NoError(w.t, p.agent.Update(Settings{Version: version, Pools: pools}))
	}
}

// ownHalf gives a region's processes a file in which the bucket is an ordinary one with half of the pool's rate.
func (w *world) ownHalf(region string, version int64) {
	half := ownBucket()
	half.Rate = policy.PerSecond(500)
	w.deploy(region, simFile{version: version, plain: half})
	for _, p := range w.of(region) {
		require.NoError(w.t, p.agent.Update(Settings{Version: version}))
	}
}

// unbounded lifts the bounds until bounded is called. The bounds don't apply to buckets that belong to no pool.
func (w *world) unbounded() { w.locked(func() { w.limit, w.stock = 1e9, 1e9 }) }

// withdrawn cuts eu off and removes the pool from the files of the regions. Each of them then has an ordinary bucket
// with half of the pool's rate.
func (w *world) withdrawn(regions ...string) {
	w.cutEtcd("eu")
	time.Sleep(25 * time.Second) // time for another coordinator, if this one is cut off
	w.unbounded()
	w.locked(func() { w.slack += 3000 }) // the capacity of eu's ordinary bucket
	for _, r := range regions {
		w.ownHalf(r, 2)
	}
}

// A pool ends and begins again while a region is cut off. By then that region has an ordinary bucket with half of the
// rate, so the coordinator must not count it as a member of the pool.
func TestAPoolThatComesBackWaitsForARegionThatIsCutOff(t *testing.T) {
	for name, between := range map[string]func(w *world){
		"InOneTerm":         func(*world) { time.Sleep(5 * time.Second) },
		"WithoutRetirement": func(*world) { time.Sleep(200 * time.Millisecond) },
		"InTwoTerms": func(w *world) {
			time.Sleep(5 * time.Second)
			w.killTheLeader()
			time.Sleep(10 * time.Second)
		},
		"WithoutALeader": func(w *world) {
			w.killTheLeader()
			time.Sleep(2 * time.Second)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.withdrawn("ap", "eu", "us")
				between(w)
				w.setFile("ap", 3, w.pool)
				w.setFile("us", 3, w.pool)
				time.Sleep(w.timing.Lease + time.Second) // grants from before may last
				w.bounded()
				time.Sleep(20 * time.Second)
				near(t, map[string]float64{"ap": 50, "eu": 500, "us": 50}, w.rates())
				require.False(t, w.status().Open)
				require.Equal(t, []string{"eu"}, w.status().Waits)
				w.setFile("eu", 3, w.pool)
				w.mendEtcd("eu")
				// The demand of eu is measured anew, and at most doubles with each report. This needs 3 s to 8 s.
				took := w.until(map[string]float64{"ap": 250, "eu": 500, "us": 250})
				require.Less(t, took, 15*time.Second)
				require.True(t, w.status().Open)
				require.Empty(t, w.status().Waits)
			})
		})
	}
}

// A region leaves a pool and joins it again while it is cut off. It counts as a new region, for which its part by
// weight is reserved.
func TestARegionThatComesBackWhileItIsCutOffCountsAsANewOne(t *testing.T) {
	for name, between := range map[string]func(w *world){
		"InOneTerm": func(*world) { time.Sleep(5 * time.Second) },
		"WithoutALeader": func(w *world) {
			w.killTheLeader()
			time.Sleep(2 * time.Second)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.withdrawn("eu")
				without := w.pool
				without.Regions = slices.Delete(slices.Clone(without.Regions), 1, 2)
				w.setFile("ap", 2, without)
				w.setFile("us", 2, without)
				between(w)
				w.setFile("ap", 3, w.pool)
				w.setFile("us", 3, w.pool)
				time.Sleep(10 * time.Second)
				w.bounded()
				near(t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
				time.Sleep(20 * time.Second)
				w.setFile("eu", 3, w.pool)
				w.mendEtcd("eu")
				w.demands(map[string]float64{"ap": 0, "us": 0})
				time.Sleep(30 * time.Second)
				require.Greater(t, w.rates()["eu"], 850.0)
			})
		})
	}
}

// One region has written later settings, in which its floor is higher, and is cut off. Then etcd is restored to its
// state before these settings. The other regions have read the settings and write them again.
func TestForgottenSettingsComeBackFromRegionsThatKnowThem(t *testing.T) {
	for name, forget := range map[string]func(w *world, s snapshot){
		"Restored":       func(w *world, s snapshot) { w.restoreEtcd(s, 0) },
		"RestoredBumped": func(w *world, s snapshot) { w.restoreEtcd(s, 1_000_000_000) },
		"Wiped":          func(w *world, _ snapshot) { w.wipe() },
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				s := w.snapshot()
				later := w.pool
				later.Regions = slices.Clone(later.Regions)
				later.Regions[1].Floor, later.Regions[2].Floor = policy.PerSecond(140), policy.PerSecond(10)
				w.setFile("eu", 2, later)
				time.Sleep(10 * time.Second)
				w.cutEtcd("eu")
				forget(w, s)
				time.Sleep(60 * time.Second)
				require.InDelta(t, 140, w.rates()["eu"], 0.01)
				settings, err := decodeSettings(w.value(configKey))
				require.NoError(t, err)
				require.EqualValues(t, 2, settings.Version)
				w.mendEtcd("eu")
				time.Sleep(20 * time.Second)
				near(t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
			})
		})
	}
}

// A late report acknowledges terms of the pool that has ended. It must not open the pool that has begun since.
func TestAnAcknowledgementFromBeforeThePoolEndedOpensNothing(t *testing.T) {
	p := simPool("payments")
	l := newLedger("payments")
	now := time.Now()
	p.Regions = p.Regions[:1]
	in := func(version int64) *Pool { return &Settings{version, []Pool{p}}.following(noSettings).Pools[0] }
	clock, seq := now.UnixMicro(), int64(0)
	m := func() planInput {
		return planInput{now: now, timing: DefaultTiming(), nextFence: func() policy.Fence {
			seq++
			return policy.Fence{Epoch: 1, Seq: seq}
		}}
	}
	report := func(terms policy.Terms) {
		now, clock = now.Add(time.Second), clock+1e6
		terms.Interval, terms.MaxElapsed = 0, 0
		l.applyTicket("ap", ticket{now: clock, era: 1, kind: pooled, terms: terms}, true, DefaultTiming(), now)
		l.plan(m())
	}
	ap := func() *account { return l.accounts["ap"] }
	l.configure(in(1))
	report(policy.Terms{Per: 1, Capacity: 9})
	before := *ap().newest()
	report(before)
	require.True(t, l.open)
	l.configure(nil)
	l.configure(in(3))
	require.False(t, l.open)
	report(before)
	require.False(t, l.open, "a report of the ended pool doesn't open the new one")
	report(*ap().newest())
	require.True(t, l.open)
}

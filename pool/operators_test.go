package pool

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
)

// ownBucket returns the policy of an ordinary bucket with the rate and the capacity of the pool.
func ownBucket() *policy.Policy {
	return &policy.Policy{Capacity: 3000, Rate: policy.PerSecond(1000), Interval: simInterval}
}

// plainly makes every region's bucket an ordinary one, which belongs to no pool. It lifts the bounds until bounded.
func (w *world) plainly(version int64) {
	w.locked(func() { w.limit, w.stock = 1e9, 1e9 })
	for _, r := range w.pool.Regions {
		w.deploy(r.Name, simFile{version: version, plain: ownBucket()})
	}
}

// bounded puts the pool's bounds in force.
func (w *world) bounded() {
	w.locked(func() {
		w.limit = 1000
		w.stock = 3000
		w.level = 0
		w.check()
	})
}

// taken returns the number of tokens that the consumers of all regions have taken.
func (w *world) taken() (n int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.servers {
		w.drain(s)
		n += s.taken
	}
	return n
}

func (w *world) status() PoolStatus {
	s, _, err := readStatus(w.t.Context(), w.of("")[0])
	require.NoError(w.t, err)
	require.Len(w.t, s.Pools, 1)
	return s.Pools[0]
}

func requireSafe(t *testing.T, o outcome) {
	t.Helper()
	require.Empty(t, o.violation, strings.Join(o.events, "\n"))
}

// Three buckets of 1000/s and version 7 become a pool of 1000/s and 3000 tokens. Once they belong to the pool, at most
// 13,000 tokens are taken in ten seconds, and one more for rounding. When the regions ignored all grants, they took
// 39,000.
func TestPlainBucketsThatBecomeAPoolStayWithinItsRateAndCapacity(t *testing.T) {
	o := live(t, 1, sabotage{}, func(w *world) {
		w.plainly(7)
		w.demands(map[string]float64{"ap": 5000, "eu": 5000, "us": 5000})
		time.Sleep(10 * time.Second)
		w.locked(func() { w.version = 8 })
		for _, r := range []string{"ap", "eu", "us"} {
			w.deploy(r, simFile{version: 8})
		}
		time.Sleep(2 * time.Second)
		w.bounded()
		before := w.taken()
		time.Sleep(10 * time.Second)
		require.LessOrEqual(w.t, w.taken()-before, int64(13_001))
		near(w.t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
	})
	requireSafe(t, o)
}

// A region that hasn't switched to the pool yet has a rate of its own. The others have only their floors until it has
// switched or is fenced.
func TestAPoolOpensWhenEveryRegionHasAcknowledgedIt(t *testing.T) {
	o := live(t, 1, sabotage{}, func(w *world) {
		w.plainly(7)
		w.demands(map[string]float64{"ap": 5000, "eu": 5000, "us": 5000})
		time.Sleep(10 * time.Second)
		w.locked(func() { w.version = 8 })
		w.deploy("ap", simFile{version: 8})
		w.deploy("us", simFile{version: 8})
		time.Sleep(30 * time.Second)
		near(w.t, map[string]float64{"ap": 50, "eu": 1000, "us": 50}, w.rates())
		s := w.status()
		require.False(w.t, s.Open)
		require.Equal(w.t, []string{"eu"}, s.Waits)
		require.Equal(w.t, "plain", s.Regions[1].Bucket)
		require.Equal(w.t, []string{"eu"}, w.whoLeads().coordinator.Sums()["payments"].Waits)
		w.killTheLeader()
		time.Sleep(15 * time.Second)
		near(w.t, map[string]float64{"ap": 50, "eu": 1000, "us": 50}, w.rates())
		w.deploy("eu", simFile{version: 8})
		time.Sleep(3 * time.Second)
		w.bounded()
		time.Sleep(12 * time.Second)
		near(w.t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
		require.True(w.t, w.status().Open)
		require.Empty(w.t, w.status().Waits)
	})
	requireSafe(t, o)
}

func TestAFencedRegionKeepsNoPoolClosed(t *testing.T) {
	o := live(t, 1, sabotage{}, func(w *world) {
		w.locked(func() { w.servers["eu"].down = true })
		w.demands(map[string]float64{"ap": 5000, "us": 5000})
		time.Sleep(20 * time.Second)
		near(w.t, map[string]float64{"ap": 50, "us": 50}, w.rates())
		_, err := w.of("us")[0].put(w.t.Context(), fenceKeys+"eu", `{"operator":"alice"}`)
		require.NoError(w.t, err)
		time.Sleep(5 * time.Second)
		near(w.t, map[string]float64{"ap": 500, "us": 500}, w.rates())
	})
	requireSafe(t, o)
}

func TestAPoolBecomesPlainAndAPoolAgain(t *testing.T) {
	o := live(t, 1, sabotage{}, func(w *world) {
		w.demands(map[string]float64{"ap": 5000, "eu": 5000, "us": 5000})
		time.Sleep(15 * time.Second)
		w.plainly(2)
		time.Sleep(15 * time.Second)
		near(w.t, map[string]float64{"ap": 1000, "eu": 1000, "us": 1000}, w.rates())
		w.locked(func() { w.version = 3 })
		for i, r := range []string{"us", "ap", "eu"} {
			time.Sleep(time.Duration(i) * 4 * time.Second)
			w.deploy(r, simFile{version: 3})
		}
		time.Sleep(3 * time.Second)
		w.bounded()
		time.Sleep(15 * time.Second)
		near(w.t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
	})
	requireSafe(t, o)
}

// The processes of one region move to another prefix, and the others follow later. No rate is granted twice.
func TestRegionsThatMoveToAnotherPrefixExceedNothing(t *testing.T) {
	o := live(t, 1, sabotage{}, func(w *world) {
		w.demands(map[string]float64{"ap": 5000, "eu": 5000, "us": 5000})
		time.Sleep(15 * time.Second)
		other := w.beside()
		move := func(region string) {
			for _, p := range w.of(region) {
				p.kill()
			}
			other.startProc(region, region+"-moved0")
			other.startProc(region, region+"-moved1")
			w.recordf("%s moves", region)
		}
		move("us")
		time.Sleep(40 * time.Second)
		near(w.t, map[string]float64{"us": 50, "ap": 950.0 / 3, "eu": 1900.0 / 3}, w.rates())
		move("ap")
		time.Sleep(time.Duration(w.rng.Int64N(int64(20 * time.Second))))
		move("eu")
		time.Sleep(45 * time.Second)
		near(w.t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
	})
	requireSafe(t, o)
}

// snapshot is a copy of etcd's content.
type snapshot struct {
	keys     map[string]entry
	history  []entry
	revision int64
}

func (w *world) snapshot() snapshot {
	w.mu.Lock()
	defer w.mu.Unlock()
	return snapshot{maps.Clone(w.keys), slices.Clone(w.history), w.revision}
}

// restoreEtcd restores etcd from a snapshot, and raises its revision by bump. A watch from a later revision then stays
// silent.
func (w *world) restoreEtcd(s snapshot, bump int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.keys = maps.Clone(s.keys)
	w.revision = s.revision + bump
	w.history = slices.Clone(s.history)
	w.created, w.lastFence = map[string]int64{}, map[string]policy.Fence{}
	w.compacted = 0
	if bump > 0 { // as etcdutl does with --mark-compacted
		w.compacted, w.history = w.revision, nil
	}
	w.record("etcd is restored at revision %d", w.revision)
}

// wipe deletes everything in etcd.
func (w *world) wipe() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.revision++
	for key := range maps.Clone(w.keys) {
		w.set(key, "", true)
	}
	w.created, w.lastFence = map[string]int64{}, map[string]policy.Fence{}
	w.record("etcd is wiped")
}

// A region has nearly all of the rate and is cut off. Then etcd is restored or emptied, so that it has lost the grant.
func TestAnEtcdThatForgetsGrantsGivesNothingAwayTwice(t *testing.T) {
	for name, forget := range map[string]func(w *world, s snapshot){
		"Restored":       func(w *world, s snapshot) { w.restoreEtcd(s, 0) },
		"RestoredBumped": func(w *world, s snapshot) { w.restoreEtcd(s, 1_000_000_000) },
		"Wiped":          func(w *world, _ snapshot) { w.wipe() },
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(8) {
				o := live(t, seed+1, sabotage{}, func(w *world) {
					w.demands(map[string]float64{"ap": 5000, "eu": 0, "us": 0})
					time.Sleep(15 * time.Second)
					s := w.snapshot()
					time.Sleep(10 * time.Second)
					w.demands(map[string]float64{"ap": 0, "eu": 0, "us": 5000})
					time.Sleep(15*time.Second + time.Duration(w.rng.Int64N(int64(3*time.Second))))
					for _, p := range w.of("us") {
						p.set(func() { p.etcd = fault{noRequest: true, noReply: true} })
					}
					w.demands(map[string]float64{"ap": 5000, "eu": 5000, "us": 5000})
					time.Sleep(time.Duration(w.rng.Int64N(int64(2 * time.Second))))
					forget(w, s)
					time.Sleep(25 * time.Second)
					for _, p := range w.of("us") {
						p.set(func() { p.etcd = fault{} })
					}
					time.Sleep(40 * time.Second)
				})
				requireSafe(t, o)
				require.Empty(t, o.checkEnd(), "all is shared again:\n%s", strings.Join(o.events, "\n"))
			}
		})
	}
}

// Capacity has moved from one region to another one, which is cut off. Then etcd is restored to its state before the
// move. It must not give the capacity to the first region again.
func TestAnEtcdThatForgetsWhereCapacityWentGivesNoneAwayTwice(t *testing.T) {
	first, _ := simSeed(t, 1)
	for seed := first; seed < first+4; seed++ {
		o := live(t, seed, sabotage{}, func(w *world) {
			w.demands(map[string]float64{"ap": 100, "eu": 100, "us": 100})
			bursts := func(ap, eu, us int64) {
				w.change(func(p *Pool) {
					p.Regions[0].Burst = ap
					p.Regions[1].Burst = eu
					p.Regions[2].Burst = us
				})
				time.Sleep(15 * time.Second)
			}
			bursts(500, 2000, 500)
			s := w.snapshot()
			bursts(500, 500, 2000)
			for _, p := range w.of("us") {
				p.set(func() { p.etcd = fault{noRequest: true, noReply: true} })
			}
			w.restoreEtcd(s, w.rng.Int64N(2)*1_000_000_000)
			for began := time.Now(); time.Since(began) < 40*time.Second; time.Sleep(10 * time.Millisecond) {
				w.locked(func() {
					sum := int64(0)
					for _, s := range w.servers {
						sum += s.bucket.Control.Terms.Capacity
					}
					if sum > w.pool.Capacity {
						w.fail("capacities in force are %d", sum)
					}
				})
			}
		})
		requireSafe(t, o)
	}
}

// A region whose Redis can be read but not written keeps its share for a while. Then the others get it.
func TestARegionThatCannotApplyItsGrantsStrandsNoShare(t *testing.T) {
	o := live(t, 1, sabotage{}, func(w *world) {
		w.demands(map[string]float64{"ap": 5000, "eu": 5000, "us": 5000})
		time.Sleep(15 * time.Second)
		w.locked(func() { w.servers["eu"].full = true })
		time.Sleep(w.timing.Lease*3/2 + 5*time.Second)
		near(w.t, map[string]float64{"ap": 450, "eu": 100, "us": 450}, w.rates())
		w.locked(func() { w.servers["eu"].full = false })
		time.Sleep(5 * time.Second)
		near(w.t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
	})
	requireSafe(t, o)
}

// A new coordinator may find reports of regions that no longer exist.
func TestReportsFoundInEtcdAreNoSignOfLife(t *testing.T) {
	l := newLedger("payments")
	l.configure(new(simPool("payments")))
	now, timing := time.Now(), DefaultTiming()
	l.applyTicket("eu", ticket{now: 5_000_000, era: 1}, false, timing, now)
	require.False(t, l.accounts["eu"].live(timing, now))
	l.applyTicket("eu", ticket{now: 6_000_000, era: 1}, true, timing, now)
	require.True(t, l.accounts["eu"].live(timing, now))
}

func TestTicketsFollowTheLatestEra(t *testing.T) {
	l := newLedger("payments")
	l.configure(new(simPool("payments")))
	now, timing := time.Now(), DefaultTiming()
	report := func(at, era, before int64) int64 {
		now = now.Add(time.Second)
		l.applyTicket("eu", ticket{now: at, era: era, before: before}, true, timing, now)
		return l.accounts["eu"].ticket.now
	}
	require.EqualValues(t, 60_000_000, report(60_000_000, 100, 0))
	require.EqualValues(t, 60_000_000, report(59_000_000, 100, 0), "an older ticket is ignored")
	require.EqualValues(t, 55_000_000, report(55_000_000, 101, 100), "the clock was set back by 5 s, which began an era")
	require.EqualValues(t, 55_000_000, report(62_000_000, 100, 0), "a ticket of a replaced server is ignored")
	require.EqualValues(t, 57_000_000, report(57_000_000, 0, 101), "the bucket was lost")
	require.EqualValues(t, 57_000_000, report(64_000_000, 100, 0), "tickets of the replaced server stay ignored")
	now = now.Add(time.Minute)
	require.EqualValues(t, 80_000_000, report(80_000_000, 100, 0), "after all grants have ended, any ticket is accepted")
}

func TestADeadRegionThatIsFencedAndRemovedIsForgotten(t *testing.T) {
	o := live(t, 1, sabotage{}, func(w *world) {
		w.demands(map[string]float64{"ap": 5000, "eu": 5000, "us": 5000})
		time.Sleep(15 * time.Second)
		for _, p := range w.of("eu") {
			p.kill()
		}
		w.locked(func() { delete(w.servers, "eu") })
		_, err := w.of("us")[0].put(w.t.Context(), fenceKeys+"eu", `{"operator":"alice"}`)
		require.NoError(w.t, err)
		time.Sleep(5 * time.Second)
		w.change(func(p *Pool) { p.Regions = append(p.Regions[:1:1], p.Regions[2:]...) })
		time.Sleep(10 * time.Second)
		near(w.t, map[string]float64{"ap": 500, "us": 500}, w.rates())
		s := w.status()
		require.Len(w.t, s.Regions, 2)
		w.mu.Lock()
		defer w.mu.Unlock()
		require.NotContains(w.t, w.keys, shareKeys+"eu")
	})
	requireSafe(t, o)
}

// A region was cut off, fenced and removed from the configuration. It comes back with its earlier state and its old
// file. It must use nothing, like a region that is removed while it can be reached.
func TestARegionThatComesBackAfterItsRemovalUsesNothing(t *testing.T) {
	o := live(t, 1, sabotage{}, func(w *world) {
		w.demands(map[string]float64{"ap": 5000, "eu": 5000, "us": 5000})
		time.Sleep(15 * time.Second)
		for _, p := range w.of("eu") {
			p.set(func() { p.etcd = fault{noRequest: true, noReply: true} })
		}
		w.locked(func() { w.limit, w.stock = 1e9, 1e9 }) // eu is alive, although the operator declares that it is not
		w.declares("eu", `{"operator":"alice"}`)
		time.Sleep(5 * time.Second)
		without := w.pool
		without.Regions = append(without.Regions[:1:1], without.Regions[2:]...)
		for _, p := range append(w.of("ap"), w.of("us")...) {
			require.NoError(w.t, p.agent.Update(Settings{Version: 2, Pools: []Pool{without}}))
		}
		time.Sleep(25 * time.Second) // time for another coordinator, if this one is cut off
		near(w.t, map[string]float64{"ap": 500, "eu": 100, "us": 500}, w.rates())
		require.Len(w.t, w.status().Regions, 2)
		for _, p := range w.of("eu") {
			p.kill()
		}
		w.startProc("eu", "eu-back")
		time.Sleep(10 * time.Second)
		w.bounded()
		near(w.t, map[string]float64{"ap": 500, "eu": 0, "us": 500}, w.rates())
		require.Len(w.t, w.status().Regions, 2, "a region that has acknowledged its removal is no longer listed")
		time.Sleep(20 * time.Second)
		near(w.t, map[string]float64{"ap": 500, "eu": 0, "us": 500}, w.rates())
	})
	requireSafe(t, o)
}

func TestDemandSurvivesAChangeOfTheRate(t *testing.T) {
	l := newLedger("payments")
	p := simPool("payments")
	l.configure(&p)
	l.accounts["eu"].demand.observe(100*float64(l.unit.micros)/1e6, 0, float64(l.unit.total), time.Second, false)
	perSecond := func() float64 {
		return float64(l.accounts["eu"].demand.units(l.unit.total)) * 1e6 / float64(l.unit.micros)
	}
	require.InDelta(t, 110, perSecond(), 0.01)
	p.Rate = policy.PerSecond(10_000)
	l.configure(&p)
	require.InDelta(t, 110, perSecond(), 0.1, "a higher rate of the pool leaves the demand unchanged")
}

func TestWhatASmallerCapacityTakesAwayIsNoDemand(t *testing.T) {
	l := newLedger("payments")
	p := simPool("payments")
	l.configure(&p)
	a := l.accounts["eu"]
	at := func(second, tokens, capacity int64) {
		a.observe(ticket{now: second * 1e6, era: 1, kind: pooled, tokens: tokens, terms: policy.Terms{Capacity: capacity}},
			l.unit, DefaultTiming(), false)
	}
	at(1, 1500, 1500)
	at(2, 1500, 1500)
	at(3, 990, 1000)
	require.InDelta(t, 11e-6*float64(l.unit.micros), a.demand.units(l.unit.total), 1, "ten tokens were taken")
}

// operate makes a random fault of those that operators make. If the fault lasts, operate passes a function to later
// that ends it.
func (w *world) operate(region string, later func(heal func())) {
	switch w.rng.IntN(13) {
	case 0, 1: // etcd is restored from a backup of a while ago
		if s := w.backup; s.keys != nil {
			w.restoreEtcd(w.withFences(s), w.rng.Int64N(2)*1_000_000_000)
		}
	case 2:
		w.wipe()
	case 3: // a Redis runs out of memory
		w.recordf("redis of %s takes no writes", region)
		w.locked(func() { w.servers[region].full = true })
		later(func() { w.locked(func() { w.servers[region].full = false }) })
	case 4: // another client writes an unreadable record
		w.tamper(shareKeys+region, func(string) (string, bool) { return "later", false })
		later(func() { w.tamper(shareKeys+region, func(string) (string, bool) { return "", true }) })
	case 5: // a process with an old file starts, and is killed later
		old := w.startOutdated(region)
		later(old.kill)
	case 6: // a later file with other floors
		floors := []int64{20, 40, 60}
		w.rng.Shuffle(3, func(i, j int) { floors[i], floors[j] = floors[j], floors[i] })
		w.change(func(p *Pool) {
			for i := range p.Regions {
				p.Regions[i].Floor = policy.PerSecond(floors[i])
			}
		})
		w.recordf("floors are %v", floors)
	case 7: // a region is drained
		w.declares(region, drainRecord)
		later(func() { w.declares(region, "") })
	case 8:
		w.recordf("the pool ends")
		w.endPool()
		later(func() { w.change(func(*Pool) {}) })
	case 9:
		w.leavePool(region, later)
	case 10: // another deployment uses the region's name
		if w.canDouble(region) {
			w.double(region, 1500)
			later(func() { w.single(region) })
		}
	case 11: // a region's Redis is moved
		if w.canDouble(region) {
			w.move(region, time.Duration(w.rng.Int64N(int64(hold(w.timing.Lease)))))
		}
	case 12: // another client deletes records
		for _, key := range []string{configKey, shareKeys + region, reportKeys + region} {
			if w.rng.IntN(2) == 0 {
				w.tamper(key, func(string) (string, bool) { return "", true })
			}
		}
	}
	w.backup = w.snapshot()
}

// leavePool removes a region from the pool. The region joins again later, or at once if it has not read the removal.
// Otherwise the next fault could make etcd forget the region together with its floor.
func (w *world) leavePool(region string, later func(heal func())) {
	s, _ := decodeShare(w.value(shareKeys + region)) // empty if it can't be read
	if len(w.pool.Regions) == 1 || !w.pool.Has(region) || !s.pools[w.pool.Name].joined {
		return
	}
	w.recordf("%s leaves the pool", region)
	w.change(func(p *Pool) {
		p.Regions = slices.DeleteFunc(p.Regions, func(r Region) bool { return r.Name == region })
	})
	back := func() {
		w.change(func(p *Pool) {
			p.Regions = append(p.Regions, Region{Name: region, Weight: 1, Floor: policy.PerSecond(40)})
		})
	}
	for range 100 {
		time.Sleep(100 * time.Millisecond)
		if w.value(shareKeys+region) == "" {
			later(back)
			return
		}
	}
	back()
}

// endPool gives every process a file without the pool.
func (w *world) endPool() {
	w.mu.Lock()
	w.version++
	settings := Settings{Version: w.version}
	w.mu.Unlock()
	for _, p := range w.of("") {
		require.NoError(w.t, p.agent.Update(settings))
	}
}

// startOutdated starts a process whose file has version 0 and other floors.
func (w *world) startOutdated(region string) *proc {
	w.recordf("a process of %s starts with an old file", region)
	w.mu.Lock()
	version, pool := w.version, w.pool
	old := pool
	old.Regions = append([]Region(nil), pool.Regions...)
	for i := range old.Regions {
		old.Regions[i].Floor = policy.PerSecond(10)
	}
	w.version, w.pool = 0, old
	w.mu.Unlock()
	p := w.startProc(region, region+"-old")
	w.locked(func() { w.version, w.pool = version, pool })
	return p
}

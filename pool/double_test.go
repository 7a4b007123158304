package pool

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// second names the second server under a region's name.
func second(region string) string { return region + "-second" }

// double starts a second server under a region's name, with processes of its own and the consumers' demand.
func (w *world) double(region string, demand float64) {
	w.mu.Lock()
	name, part := second(region), w.pool.parts()[slices.IndexFunc(w.pool.Regions,
		func(r Region) bool { return r.Name == region })]
	off := time.Duration(w.rng.Int64N(int64(time.Minute)))
	if w.rng.IntN(4) == 0 {
		off -= time.Hour
	}
	s := newSimRedis(name, w.servers[region].skew+off)
	s.demand = demand
	w.servers[name] = s
	w.extra += mostFloor
	w.slack += float64(part.burst) + mostFloor*s.lateness().Seconds()
	w.record("%s has a second server, whose clock is off by %s", region, s.skew)
	w.mu.Unlock()
	for _, n := range []string{"0", "1"} {
		w.startOn(name, region, name+n)
	}
}

// canDouble reports whether a region has one server and a part in the pool.
func (w *world) canDouble(region string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.servers[second(region)] == nil && w.pool.Has(region)
}

// mostFloor is the highest floor of any region in any schedule.
const mostFloor = 100

// lateness returns the longest time between two refills of a server that works.
func (s *simRedis) lateness() time.Duration { return 2 * time.Second }

// stopProcs kills the processes on a server.
func (w *world) stopProcs(server string) {
	for _, p := range w.of("") {
		if p.server == server {
			p.kill()
		}
	}
}

// single removes the second server and its processes.
func (w *world) single(region string) {
	w.stopProcs(second(region))
	w.locked(func() {
		w.servers[region].taken += w.servers[second(region)].taken
		delete(w.servers, second(region))
		w.extra -= mostFloor
		w.record("%s has one server", region)
		w.check()
	})
}

// move moves a region to another server, as an operator does who moves the replicas first. The region's processes move
// at once, and its consumers move after some time. Then the old server is shut down.
func (w *world) move(region string, after time.Duration) {
	w.double(region, 0)
	w.stopProcs(region)
	time.Sleep(after)
	w.locked(func() {
		old, moved := w.servers[region], w.servers[second(region)]
		w.drain(old)
		w.drain(moved)
		moved.demand = old.demand
		moved.taken += old.taken
		w.servers[region] = moved
		delete(w.servers, second(region))
		for _, p := range w.procs {
			if p.server == second(region) {
				p.server = region
			}
		}
		w.extra -= mostFloor
		w.record("%s has moved", region)
		w.check()
	})
}

// Another deployment uses the prefix and a region's name with a Redis of its own. It gets the region's floor, and the
// region keeps its share, whichever replica coordinates.
func TestASecondServerUnderARegionsNameTakesNoGrants(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		shares := map[string]float64{"ap": 250, "eu": 500, "us": 250}
		for _, region := range []string{"eu", "us", "ap"} {
			w.double(region, 5000)
			for i := range 60 {
				time.Sleep(time.Second)
				near(t, shares, w.rates())
				require.InDelta(t, 100, max(w.rates()[second(region)], 100), 0.01)
				if i == 20 {
					w.killTheLeader()
				}
			}
			require.True(t, w.statusOf(region).OtherServer)
			require.True(t, w.whoLeads().coordinator.Regions()[region].OtherServer)
			w.single(region)
			time.Sleep(w.timing.Lease * 3 / 2)
			require.False(t, w.statusOf(region).OtherServer)
			require.False(t, w.whoLeads().coordinator.Regions()[region].OtherServer)
		}
	})
}

func (w *world) statusOf(region string) RegionStatus {
	regions := w.status().Regions
	return regions[slices.IndexFunc(regions, func(r RegionStatus) bool { return r.Region == region })]
}

// A region's Redis is moved, the replicas first. Both servers together never have more than the region's share and
// floor. The region has its share again once the grants of the old server have ended.
func TestARegionsServerThatIsMovedAddsAtMostItsFloor(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		for _, region := range []string{"eu", "us", "ap"} {
			w.move(region, time.Duration(w.rng.Int64N(int64(hold(w.timing.Lease)))))
			time.Sleep(hold(w.timing.Lease) + 3*simTTL) // the coordinator may have been a process of the region
			near(t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
			require.False(t, w.statusOf(region).OtherServer)
		}
	})
}

// A fail-over begins a new era. A replica that has never reported is the first to find this era, and it has read the
// era before. The region has its share back as soon as if the reporter had found the new era.
func TestEveryReplicaThatHasSeenAnEraVouchesForTheNext(t *testing.T) {
	l, timing := newLedger("payments"), DefaultTiming()
	now := time.Now()
	l.configure(new(simPool("payments")))
	report := func(era, before int64) (taken bool) {
		now = now.Add(time.Second)
		l.applyTicket("eu", ticket{now: now.UnixMicro(), era: era, before: before}, true, timing, now)
		return l.accounts["eu"].taken.Equal(now)
	}
	require.True(t, report(100, 0))
	require.False(t, report(150, 0), "no history connects this server to the region")
	require.True(t, report(200, 100))
	require.False(t, report(300, 250))
	require.True(t, report(0, 200), "the server has lost its data")
	require.False(t, report(0, 0), "another server without data is not the region's")
	require.True(t, report(400, 200))
}

package pools

import (
	"flag"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/pool"
)

// Flags, after -args.
var (
	number = flag.Int("n", 0, "random schedules to run in TestSchedules; 0 runs one")
	seed   = flag.Uint64("seed", 0, "seed of the first random schedule, the next has the next seed; 0 draws one")
	steps  = flag.Int("steps", 1,
		"steps of demand in TestSharesFollowDemand; from 12 on the times are held against their targets")
	long = flag.Bool("long", false, "faults that outlast leases and grants")
)

func TestMain(m *testing.M) {
	redisconn.SetLogger(hclog.NewNullLogger()) // connections fail here all the time
	os.Exit(m.Run())
}

// fault is a kind of fault. do makes the fault, and returns a function that heals it.
type fault struct {
	name string
	do   func(w *world) (heal func())
}

func (w *world) any() *region { return w.regions[w.rng.IntN(len(w.regions))] }

func nothing() {}

// faults has all faults that random schedules use.
var faults = []fault{
	{"a region is cut from etcd", func(w *world) func() {
		r := w.any()
		for _, l := range r.links {
			l.Cut()
		}
		return func() { w.mend(r) }
	}},
	{"a region's requests to etcd are lost", oneWay(faultproxy.ToServer)},
	{"etcd's answers to a region are lost", oneWay(faultproxy.ToClient)},
	{"the coordinator is killed", func(w *world) func() {
		if p := w.coordinator(); p != nil {
			p.Kill()
			return p.restart
		}
		return nothing
	}},
	{"the coordinator is paused", func(w *world) func() {
		if p := w.coordinator(); p != nil {
			p.Pause()
			return p.Resume
		}
		return nothing
	}},
	{"etcd has no quorum", func(w *world) func() {
		members := w.etcd.Members()
		members[0].Pause()
		members[1].Pause()
		return func() {
			members[0].Resume()
			members[1].Resume()
		}
	}},
	{"a member of etcd is killed", func(w *world) func() {
		m := w.etcd.Members()[w.rng.IntN(3)]
		m.Kill()
		return m.Restart
	}},
	{"a region's redis is paused", func(w *world) func() {
		r := w.any()
		r.redis.Pause()
		return r.redis.Resume
	}},
	{"a region's redis comes back empty", func(w *world) func() {
		r := w.any()
		r.redis.Kill()
		_ = os.Remove(r.snapshot()) // an earlier fault may have left one
		return r.restart
	}},
	{"a region's redis comes back as it was before", func(w *world) func() {
		r := w.any()
		var before int64
		w.eventually("redis saves", func() bool { // just after a restart of Redis the client may fail at first
			before = r.taken.Load()
			return r.rdb.Save(w.t.Context()).Err() == nil
		})
		wait(w.t, time.Duration(w.rng.Int64N(int64(2*time.Second))))
		r.redis.Kill()
		w.forgive(float64(r.taken.Load() - before)) // the snapshot doesn't have these takes
		return r.restart
	}},
	{"a region's clock steps forward", step(1)},
	{"a region's clock steps back", step(-1)},
	{"a region is drained", func(w *world) func() {
		r, client := w.any(), w.etcd.Client()
		drain := pool.Fencing{Operator: "alice", Drain: true}
		require.NoError(w.t, pool.Fence(w.t.Context(), client, "/refiller/pools", r.name, drain))
		return func() { require.NoError(w.t, pool.Lift(w.t.Context(), client, "/refiller/pools", r.name)) }
	}},
	{"a region's processes are stopped", func(w *world) func() {
		r := w.any()
		r.pause()
		return r.resume
	}},
	{"a region's host is stopped", func(w *world) func() {
		r := w.any()
		r.pause()
		r.redis.Pause()
		return func() {
			r.redis.Resume()
			r.resume()
		}
	}},
	{"another deployment uses a region's name", func(w *world) func() { return w.double(w.any()) }},
	{"a client deletes a region's records and the settings", func(w *world) func() {
		for _, key := range []string{"share/", "rep/"} {
			_, err := w.etcd.Client().Delete(w.t.Context(), "/refiller/pools/"+key+w.any().name)
			require.NoError(w.t, err)
		}
		_, err := w.etcd.Client().Delete(w.t.Context(), "/refiller/pools/cfg")
		require.NoError(w.t, err)
		return nothing
	}},
	{"a region leaves the pool", func(w *world) func() {
		r := w.any()
		w.configure(slices.DeleteFunc(slices.Clone(w.regions), func(other *region) bool { return other == r }))
		return func() { w.configure(w.regions) }
	}},
	{"the pool ends", func(w *world) func() {
		w.configure(nil)
		return func() { w.configure(w.regions) }
	}},
	{"a region's links change", func(w *world) func() {
		w.slow(w.any())
		return nothing
	}},
}

// pause pauses the region's replicas, but not its Redis.
func (r *region) pause() {
	for _, p := range r.replicas {
		p.Pause()
	}
}

func (r *region) resume() {
	for _, p := range r.replicas {
		p.Resume()
	}
}

func oneWay(d faultproxy.Direction) func(*world) func() {
	return func(w *world) func() {
		r := w.any()
		for _, l := range r.links {
			require.NoError(w.t, l.BlackHole(d))
		}
		return func() { w.mend(r) }
	}
}

// step returns a fault that steps the clock of a region's Redis and doesn't step it back. Of a step forward, a refill
// credits at most 2 s.
func step(sign time.Duration) func(*world) func() {
	return func(w *world) func() {
		r := w.any()
		jump := sign * []time.Duration{30 * time.Millisecond, 300 * time.Millisecond, 3 * time.Second,
			time.Minute}[w.rng.IntN(4)]
		before := w.inForce(r)
		r.skew += jump
		r.redis.StepClock(r.skew)
		w.forgive(max(before, w.inForce(r)) * max(0, min(jump.Seconds(), 2)))
		w.t.Logf("the clock of %s steps by %s", r.name, jump)
		return nothing
	}
}

func (w *world) mend(r *region) {
	for _, l := range r.links {
		require.NoError(w.t, l.Heal())
	}
	w.slow(r)
}

// shift changes the demand of the regions' consumers at random.
func (w *world) shift() {
	for _, r := range w.regions {
		r.wants.Store([]int64{0, 20, 200, 600, 1500}[w.rng.IntN(5)])
	}
}

// live runs a world with a few faults, one after the other, and heals them all. It
// requires that no bound was exceeded, and that all of the rate is shared in the end.
func live(t *testing.T, seed uint64, faults []fault, longest time.Duration) {
	t.Logf("make pools N=1 SEED=%d repeats this schedule", seed)
	w := startWorld(t, seed)
	stop := w.watch()
	for _, f := range faults {
		w.shift()
		t.Logf("%s", f.name)
		heal := f.do(w)
		wait(t, time.Second+time.Duration(w.rng.Int64N(int64(longest))))
		heal()
		wait(t, time.Duration(w.rng.Int64N(int64(longest))))
	}
	w.eventually("I7: all of the rate is shared again", w.shared)
	stop()
	t.Logf("Σ rate in force at most %.6f of R, consumption at most %.3f of its bound", w.worst, w.used)
	require.Empty(t, w.violation, "make pools N=1 SEED=%d", seed)
}

// wait lets the system run.
func wait(t *testing.T, d time.Duration) {
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// TestSchedules runs random schedules: -args -n N -seed S -long.
func TestSchedules(t *testing.T) {
	t.Parallel()
	first := *seed
	n := max(1, *number)
	count := 4
	longest := 5 * time.Second
	if *number == 0 {
		count, longest = 2, 2*time.Second
	}
	if first == 0 {
		first = rand.Uint64N(1 << 40)
	}
	if *long {
		count, longest = 5, 40*time.Second
	}
	for s := first; s < first+uint64(n); s++ {
		t.Run(strconv.FormatUint(s, 10), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(s, 1))
			var drawn []fault
			for range count {
				drawn = append(drawn, faults[rng.IntN(len(faults))])
			}
			live(t, s, drawn, longest)
		})
	}
}

// TestRecordsAreDeletedBesideAnotherDeployment runs the two faults that other users of the same etcd cause.
func TestRecordsAreDeletedBesideAnotherDeployment(t *testing.T) {
	t.Parallel()
	var drawn []fault
	for _, f := range faults {
		if f.name == "another deployment uses a region's name" || strings.HasPrefix(f.name, "a client deletes") {
			drawn = append(drawn, f)
		}
	}
	require.Len(t, drawn, 2)
	live(t, 7, drawn, 5*time.Second)
}

// TestARegionThatIsCutOffKeepsItsFloorAndComesBack cuts a region from etcd. The region
// falls to its floor, and gets the floor's credit even while the coordinator is killed.
func TestARegionThatIsCutOffKeepsItsFloorAndComesBack(t *testing.T) {
	t.Parallel()
	w := startWorld(t, 1)
	stop := w.watch()
	us := w.regions[2]
	served := func(r *region) bool { return inForce(r.read(t.Context())) > 4*floor }
	for _, r := range w.regions {
		r.wants.Store(900)
	}
	w.eventually("each region has a share", func() bool {
		return !slices.ContainsFunc(w.regions,
			func(r *region) bool { return !served(r) })
	})
	for _, l := range us.links {
		l.Cut()
	}
	w.eventually("I3: us falls to its floor", func() bool { return inForce(us.read(t.Context())) == floor })
	w.eventually("the other regions get the rest", func() bool {
		ap, eu := w.regions[0], w.regions[1]
		return served(ap) && served(eu) && inForce(ap.read(t.Context()))+inForce(eu.read(t.Context())) > 0.99*(rate-floor)
	})
	var old *replica
	w.eventually("a replica coordinates", func() bool {
		old = w.coordinator()
		return old != nil
	})
	old.Kill()
	defer old.restart()
	added, began := w.credited(us)
	w.eventually("there is a new coordinator, and the floor is credited for a while", func() bool {
		for _, r := range w.regions[:2] {
			if p := r.read(t.Context()); p != nil {
				require.Greater(t, inForce(p), 2*floor, "the loss of the coordinator drops %s to the floor", r.name)
			}
		}
		_, last := w.credited(us)
		return last-began > 3_000_000 && w.coordinator() != nil
	})
	now, last := w.credited(us)
	require.InDelta(t, floor*float64(last-began)/1e6, now-added, 2)
	w.mend(us)
	w.eventually("us has a share again", func() bool { return served(us) })
	stop()
	t.Logf("Σ rate in force at most %.6f of R, consumption at most %.3f of its bound", w.worst, w.used)
	require.Empty(t, w.violation)
}

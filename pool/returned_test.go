package pool

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
)

// loseHome makes eu and the etcd of this world fail. It moves the other regions to another etcd, in which eu is fenced,
// and returns the world of that etcd.
func (w *world) loseHome() *world {
	w.locked(func() { w.etcdDown, w.servers["eu"].down = true, true })
	for _, p := range w.of("") {
		p.kill()
	}
	other := w.beside()
	for _, region := range []string{"ap", "us"} {
		for _, n := range []string{"0", "1"} {
			other.startProc(region, region+"-moved"+n)
		}
	}
	time.Sleep(5 * time.Second)
	w.locked(func() { w.extra, w.slack = 100, 2000 }) // the tokens that the fenced region may use
	_, err := other.of("us")[0].put(w.t.Context(), fenceKeys+"eu", `{"operator":"alice"}`)
	require.NoError(w.t, err)
	time.Sleep(40 * time.Second)
	near(w.t, map[string]float64{"ap": 500, "us": 500}, w.rates())
	return other
}

// homeReturns brings eu back with the old etcd.
func (w *world) homeReturns() {
	w.locked(func() { w.etcdDown, w.servers["eu"].down = false, false })
	w.startProc("eu", "eu-back0")
	w.startProc("eu", "eu-back1")
}

// A region was lost together with its etcd. The other regions use another etcd now, in which the region is fenced. Then
// the region comes back with the old etcd. It has its floor, whichever replica coordinates, until it is configured with
// the new etcd.
func TestAnOldEtcdThatComesBackLendsNothing(t *testing.T) {
	for name, between := range map[string]func(w *world){
		"WithItsRedis": func(*world) {},
		"WithAnEmptyRedis": func(w *world) {
			w.locked(func() { w.servers["eu"].bucket = policy.Bucket{} })
		},
		"RedisComesLater": func(w *world) {
			w.locked(func() { w.servers["eu"].down = true })
			time.Sleep(time.Minute)
			w.locked(func() { w.servers["eu"].down = false })
		},
		"WithSeveralTerms": func(w *world) {
			before := w.whoLeads() // before the etcd failed
			for range 4 {
				before = w.awaitOtherLeader(before)
				time.Sleep(1500 * time.Millisecond)
				w.killTheLeader()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				other := w.loseHome()
				w.homeReturns()
				between(w)
				for range 2 {
					time.Sleep(40 * time.Second)
					near(t, map[string]float64{"ap": 500, "eu": 100, "us": 500}, w.rates())
					require.Equal(t, []string{"ap", "us"}, w.status().Waits)
					w.killTheLeader()
				}
				for _, p := range w.of("eu") {
					p.kill()
				}
				other.startProc("eu", "eu-moved0")
				_, err := other.of("us")[0].commit(t.Context(), leadership{}, []write{{key: fenceKeys + "eu",
					seen: other.keys[fenceKeys+"eu"].revision, remove: true}})
				require.NoError(t, err)
				time.Sleep(40 * time.Second)
				near(t, map[string]float64{"ap": 250, "eu": 500, "us": 250}, w.rates())
			})
		})
	}
}

// A region was drained and stopped. The others don't wait for it when etcd was unavailable for longer than grants last.
func TestADrainedRegionKeepsNoPoolClosed(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.declares("us", `{"drain":true}`)
		time.Sleep(5 * time.Second)
		for _, p := range w.of("us") {
			p.kill()
		}
		w.locked(func() { w.etcdDown = true })
		time.Sleep(time.Minute)
		w.locked(func() { w.etcdDown = false })
		time.Sleep(40 * time.Second)
		require.Greater(t, total(w.rates()), 990.0)
	})
}

// etcd was unavailable for longer than grants last. The pool lends again once every region has reported.
func TestAPoolLendsAgainAfterALongOutageOfEtcd(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.locked(func() { w.etcdDown = true })
		time.Sleep(time.Minute)
		w.cutEtcd("us")
		w.locked(func() { w.etcdDown = false })
		time.Sleep(40 * time.Second)
		near(t, map[string]float64{"ap": 50, "eu": 100, "us": 50}, w.rates())
		require.Equal(t, []string{"us"}, w.status().Waits)
		w.mendEtcd("us")
		w.until(map[string]float64{"ap": 250, "eu": 500, "us": 250})
	})
}

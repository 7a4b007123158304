package pool

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
)

// tamper changes a key of etcd as another client would, for example an operator or a later release.
func (w *world) tamper(key string, change func(old string) (value string, deleted bool)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tampering = true
	defer func() { w.tampering = false }()
	w.revision++
	value, deleted := change(w.keys[key].value)
	w.set(key, value, deleted)
	w.record("tampered with %s", key)
}

// asLater returns a share as a later release might write it.
func asLater(share string) (string, bool) { return "2" + strings.TrimPrefix(share, format), false }

func (w *world) killTheLeader() {
	p := w.whoLeads()
	p.kill()
	w.startProc(p.region, p.name+"'")
}

// awaitOtherLeader waits until a process other than old leads, and returns it. Any leader will do if old is nil.
func (w *world) awaitOtherLeader(old *proc) *proc {
	for range 200 {
		if p := w.whoLeads(); p != nil && p != old {
			return p
		}
		time.Sleep(100 * time.Millisecond)
	}
	w.t.Fatal("no replica leads")
	return nil
}

func total(rates map[string]float64) (sum float64) {
	for _, r := range rates {
		sum += r
	}
	return sum
}

func TestANewCoordinatorKeepsSharesOfUnreadableSettings(t *testing.T) {
	o := live(t, 1, sabotage{}, func(w *world) {
		w.demands(map[string]float64{"ap": 200, "eu": 600, "us": 400})
		time.Sleep(20 * time.Second)
		before, settings := w.rates(), w.value(configKey)
		w.tamper(configKey, func(string) (string, bool) { return `{"version": 9, "format": "of a later release"`, false })
		old := w.whoLeads()
		old.kill()
		w.awaitOtherLeader(old)
		for range 45 {
			time.Sleep(time.Second)
			require.InDelta(w.t, total(before), total(w.rates()), 25, "grants are renewed:\n%s",
				strings.Join(w.events, "\n"))
		}
		require.Equal(w.t, 1, w.whoLeads().coordinator.Stats().Unread)
		w.demands(map[string]float64{"ap": 1500, "eu": 0, "us": 0})
		time.Sleep(10 * time.Second)
		require.InDelta(w.t, before["ap"], w.rates()["ap"], 25, "no region gets more")
		w.tamper(configKey, func(string) (string, bool) { return settings, false })
		time.Sleep(20 * time.Second)
		require.Zero(w.t, w.whoLeads().coordinator.Stats().Unread)
	})
	requireSafe(t, o)
	require.Empty(t, o.checkEnd(), "shares follow demand again")
}

// Another client deletes the settings. The replicas write the newest settings that they know again, even if no watch
// reports the deletion.
func TestSettingsThatAreDeletedComeBack(t *testing.T) {
	for name, remove := range map[string]func(w *world){
		"Watched": func(w *world) { w.tamper(configKey, func(string) (string, bool) { return "", true }) },
		"Unwatched": func(w *world) {
			w.locked(func() {
				w.revision++
				delete(w.keys, configKey)
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.change(func(p *Pool) { p.Regions[1].Floor = policy.PerSecond(90) })
				time.Sleep(20 * time.Second)
				settings := w.value(configKey)
				remove(w)
				time.Sleep(w.timing.Lease + time.Second)
				require.Equal(t, settings, w.value(configKey))
				w.demands(map[string]float64{"ap": 5000, "eu": 0, "us": 0})
				time.Sleep(30 * time.Second)
				near(t, map[string]float64{"ap": 860, "eu": 90, "us": 50}, w.rates())
			})
		})
	}
}

// A share that can't be read is a grant to its region that no other region may get, even while the region is cut off.
func TestAShareThatCannotBeReadIsNotGivenAway(t *testing.T) {
	o := live(t, 1, sabotage{}, func(w *world) {
		w.demands(map[string]float64{"ap": 0, "eu": 0, "us": 1500})
		time.Sleep(20 * time.Second)
		for _, p := range w.of("us") {
			p.set(func() { p.etcd = fault{noRequest: true, noReply: true} })
		}
		tampered := ""
		w.tamper(shareKeys+"us", func(old string) (string, bool) {
			tampered, _ = asLater(old)
			return tampered, false
		})
		w.demands(map[string]float64{"ap": 1500, "eu": 1500, "us": 1500})
		w.killTheLeader()
		time.Sleep(30 * time.Second)
		require.Equal(w.t, tampered, w.value(shareKeys+"us"), "no replica replaces a record that it can't read")
		w.tamper(shareKeys+"us", func(string) (string, bool) { return "", true })
		for _, p := range w.of("us") {
			p.set(func() { p.etcd = fault{} })
		}
		time.Sleep(40 * time.Second)
	})
	require.Empty(t, o.violation, strings.Join(o.events, "\n"))
	require.Empty(t, o.checkEnd())
}

// The epoch in etcd can't be read. So no coordinator knows which epoch is high enough, and none writes shares.
func TestAnUnreadableEpochLeavesFloorsUntilItIsDeleted(t *testing.T) {
	o := live(t, 1, sabotage{}, func(w *world) {
		w.demands(map[string]float64{"ap": 0, "eu": 0, "us": 1500})
		time.Sleep(20 * time.Second)
		onItsFloor := func() bool {
			s := w.of("us")[0].agent.State().Shares[0]
			return s.Rate == s.Floor
		}
		require.False(w.t, onItsFloor())
		w.tamper(epochKey, func(string) (string, bool) { return "nonsense", false })
		time.Sleep(30 * time.Second)
		require.True(w.t, onItsFloor())
		require.Equal(w.t, "nonsense", w.value(epochKey))
		unread := 0
		for range 100 { // coordinators that can't write resign, so at times there is none
			time.Sleep(100 * time.Millisecond)
			for _, region := range []string{"ap", "eu", "us"} {
				for _, p := range w.of(region) {
					unread += p.coordinator.Stats().Unread
				}
			}
		}
		require.Positive(w.t, unread, "the coordinator counts the unreadable record")
		w.tamper(epochKey, func(string) (string, bool) { return "", true })
		time.Sleep(20 * time.Second)
		require.False(w.t, onItsFloor())
	})
	require.Empty(t, o.violation, strings.Join(o.events, "\n"))
	require.Empty(t, o.checkEnd())
}

func TestAReplicaLeavesSettingsThatItCannotRead(t *testing.T) {
	const later = `{"version": 9, "format": "of a later release"`
	o := live(t, 1, sabotage{}, func(w *world) {
		time.Sleep(10 * time.Second)
		settings := w.value(configKey)
		w.tamper(configKey, func(string) (string, bool) { return later, false })
		p := w.startProc("eu", "eu-new")
		time.Sleep(5 * time.Second)
		require.Equal(w.t, later, w.value(configKey))
		require.NotEmpty(w.t, p.agent.State().Unread)
		w.tamper(configKey, func(string) (string, bool) { return settings, false })
		time.Sleep(10 * time.Second)
	})
	require.Empty(t, o.violation, strings.Join(o.events, "\n"))
}

// Etcd refuses all writes of a coordinator that keeps its lease. The coordinator resigns, so that another one leads
// before the grants end.
func TestACoordinatorThatCannotWriteResigns(t *testing.T) {
	o := live(t, 1, sabotage{}, func(w *world) {
		w.demands(map[string]float64{"ap": 200, "eu": 600, "us": 400})
		time.Sleep(20 * time.Second)
		old := w.whoLeads()
		old.set(func() { old.etcd = fault{readOnly: true} })
		began := time.Now()
		w.awaitOtherLeader(old)
		require.LessOrEqual(w.t, time.Since(began), w.timing.Lease/3+3*time.Second)
		for range 30 {
			time.Sleep(time.Second)
			require.Greater(w.t, total(w.rates()), 900.0, "no region falls to its floor:\n%s", strings.Join(w.events, "\n"))
		}
	})
	require.Empty(t, o.violation, strings.Join(o.events, "\n"))
	require.Empty(t, o.checkEnd())
}

// An unreadable record no longer has an effect after it was deleted, even if no watch reported the deletion.
func TestAnUnreadableRecordThatWentUnseenIsForgotten(t *testing.T) {
	o := live(t, 1, sabotage{}, func(w *world) {
		w.demands(map[string]float64{"ap": 200, "eu": 600, "us": 400})
		time.Sleep(20 * time.Second)
		w.tamper(shareKeys+"us", asLater)
		time.Sleep(5 * time.Second)
		require.Equal(w.t, 1, w.awaitOtherLeader(nil).coordinator.Stats().Unread)
		s := w.snapshot()
		delete(s.keys, shareKeys+"us")
		w.locked(func() {
			w.keys = s.keys
			w.revision = s.revision + 1
			w.history = nil
			w.compacted = w.revision
		})
		time.Sleep(40 * time.Second)
		require.Zero(w.t, w.awaitOtherLeader(nil).coordinator.Stats().Unread)
	})
	requireSafe(t, o)
	require.Empty(t, o.checkEnd())
}

// A region that has nearly all of the rate is cut off. Its share and its report are deleted, and another coordinator
// takes over. No other region gets the region's rate before the grant must have ended.
func TestAShareThatIsDeletedIsNotGivenAway(t *testing.T) {
	first, _ := simSeed(t, 1)
	for seed := first; seed < first+4; seed++ {
		o := live(t, seed, sabotage{}, func(w *world) {
			w.demands(map[string]float64{"us": 1500})
			time.Sleep(20*time.Second + time.Duration(w.rng.Int64N(int64(time.Second))))
			require.Greater(w.t, w.rates()["us"], 800.0)
			w.cutEtcd("us")
			time.Sleep(time.Second)
			for _, key := range []string{shareKeys, reportKeys} {
				w.tamper(key+"us", func(string) (string, bool) { return "", true })
			}
			w.demands(map[string]float64{"ap": 1500, "eu": 1500})
			w.locked(func() { w.renewed = time.Time{} })
			if p := w.whoLeads(); p != nil && p.region != "us" {
				p.kill()
			}
			time.Sleep(30 * time.Second)
			require.Greater(w.t, total(w.rates()), 790.0, "all of the rate is granted except the reserve for us")
			w.mendEtcd("us")
			time.Sleep(60 * time.Second)
		})
		requireSafe(t, o)
		require.Empty(t, o.checkEnd())
	}
}

package pool

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/policy"
)

// atRest stops a member of etcd, calls do with the directory of its data, and starts it again.
func atRest(t *testing.T, m *testenv.EtcdMember, do func(data string) error) {
	t.Helper()
	m.Stop()
	require.NoError(t, do(filepath.Join(m.Dir(), "data")))
	m.Restart()
}

// A region gets nearly all of the rate and is cut off. Then etcd is restored to its state before that. No other region
// gets the region's rate, and all of the rate is shared again soon after the region is back.
func TestARealEtcdThatIsRestoredGivesNothingAwayTwice(t *testing.T) {
	t.Parallel()
	p := realPool()
	areas, etcd := realPools(t, p)
	ap := areas["ap"]
	eu := areas["eu"]
	us := areas["us"]
	rate := func(a *area) float64 { return a.rate(t, p.Name) }
	sum := func() float64 { return rate(ap) + rate(eu) + rate(us) }
	eventually := func(what string, ok func() bool) {
		t.Helper()
		require.Eventually(t, ok, 2*time.Minute, 20*time.Millisecond, what)
	}
	stop := watchSum(t, areas, p.Name, 1000)
	defer stop()
	ap.want(2000)
	eventually("ap has nearly everything", func() bool { return rate(ap) > 800 })

	backup := filepath.Join(t.TempDir(), "backup")
	atRest(t, etcd.Members()[0], func(data string) error { return os.CopyFS(backup, os.DirFS(data)) })
	ap.want(0)
	us.want(2000)
	eventually("us has nearly everything", func() bool { return rate(us) > 800 })
	us.proxy.Cut()
	atRest(t, etcd.Members()[0], func(data string) error {
		if err := os.RemoveAll(data); err != nil {
			return err
		}
		return os.CopyFS(data, os.DirFS(backup))
	})
	ap.want(2000)
	eu.want(2000)
	eventually("the grant of us has ended", func() bool { return rate(us) == 50 })
	eventually("the other regions get the share that us had", func() bool { return sum() > 990 })
	require.NoError(t, us.proxy.Heal())
	eventually("us is served again", func() bool { return rate(us) > 200 && sum() > 990 })
}

// A region has acknowledged a floor of 60/s and is now cut off. A restored etcd has lost the records of this, and shows
// a floor of 50/s. No other region gets the difference.
func TestTheFloorOfASilentRegionIsReservedWhateverItsRecordsSay(t *testing.T) {
	t.Parallel()
	l := newLedger("payments")
	l.configure(&Pool{Name: "payments", Rate: policy.PerSecond(1000), Capacity: 3000, Regions: []Region{
		{Name: "eu", Weight: 1, Floor: policy.PerSecond(20)}, {Name: "us", Weight: 1, Floor: policy.PerSecond(60)},
	}})
	now := time.Unix(1_800_000_000, 0)
	known := l.terms(l.unit.convert(50, 1_000_000), l.unit.convert(50, 1_000_000), 100)
	l.inherit("us", grants{terms: []policy.Terms{known}, joined: true, open: true}, time.Second, now)
	l.account("eu").joined = true
	m := planInput{now: now, timing: ForTTL(5 * time.Second)}
	l.settle(m)
	_, free, _, _ := l.survey(m)
	perSecond := l.unit.total / 1000
	require.Equal(t, 1000*perSecond-60*perSecond-20*perSecond, free)
}

// Etcd was restored. Its record of eu is a grant that eu no longer had when us got its grant. Then there is a new
// coordinator. It must not offer eu the rate that us may be using.
func TestRecordsAboveTheRateGiveNoRegionMore(t *testing.T) {
	t.Parallel()
	l := newLedger("payments")
	now := time.Unix(1_800_000_000, 0)
	seq := int64(0)
	l.configure(new(simPool("payments")))
	m := planInput{now: now, timing: DefaultTiming(), nextFence: func() policy.Fence {
		seq++
		return policy.Fence{Epoch: 9, Seq: seq}
	}}
	perSecond := l.unit.total / 1000
	recorded := func(rate int64) policy.Terms {
		terms := l.terms(rate*perSecond, 50*perSecond, 750)
		terms.GrantEra, terms.GrantEnd = 1, 1e12
		return terms
	}
	l.inherit("eu", grants{terms: []policy.Terms{recorded(950)}, joined: true, open: true}, m.timing.Lease, now)
	l.inherit("us", grants{terms: []policy.Terms{recorded(455)}, joined: true, open: true}, m.timing.Lease, now)
	clock := int64(2e12)
	report := func(added int64) {
		clock += 1e6
		shows := l.terms(0, 100*perSecond, 1500)
		shows.Interval = 0
		shows.MaxElapsed = 0
		shows.Fence = policy.Fence{Epoch: 1, Seq: 1}
		shown := ticket{now: clock, era: 1, kind: pooled, added: added, denied: added, terms: shows}
		l.applyTicket("eu", shown, true, m.timing, now)
	}
	report(0)
	report(1000)
	l.doubted = false
	l.plan(m)
	require.Equal(t, 100*perSecond, l.accounts["eu"].newest().GrantTokens)
}

// The settings lower the floor of a region. The region may have acknowledged the higher floor to a coordinator whose
// records a restored etcd has lost. So the higher floor stays reserved until the region reports.
func TestTheFloorOfASilentRegionIsReservedUntilItReports(t *testing.T) {
	t.Parallel()
	p := Pool{Name: "payments", Rate: policy.PerSecond(1000), Capacity: 3000, Regions: []Region{
		{Name: "eu", Weight: 1, Floor: policy.PerSecond(20)}, {Name: "us", Weight: 1, Floor: policy.PerSecond(60)},
	}}
	l, m := newLedger("payments"), planInput{now: time.Unix(1_800_000_000, 0), timing: ForTTL(5 * time.Second)}
	free := func() int64 {
		l.settle(m)
		_, free, _, _ := l.survey(m)
		return free * 1000 / l.unit.total
	}
	l.configure(&p)
	require.EqualValues(t, 920, free())
	p.Regions[1].Floor = policy.PerSecond(10)
	l.configure(&p)
	require.EqualValues(t, 920, free())
	l.accounts["us"].reported = m.now
	require.EqualValues(t, 970, free())
}

// A region holds a grant that a restored etcd has lost, and is cut off. The tickets of other regions show such grants
// to the first coordinator, but no longer to its successor. The successor must still wait for these grants.
func TestASuccessorStillWaitsForGrantsThatARestoredEtcdLost(t *testing.T) {
	first, _ := simSeed(t, 1)
	for seed := first; seed < first+6; seed++ {
		o := live(t, seed, sabotage{}, func(w *world) {
			w.demands(map[string]float64{"ap": 5000, "eu": 0, "us": 0})
			time.Sleep(15 * time.Second)
			s := w.snapshot()
			w.demands(map[string]float64{"ap": 0, "eu": 0, "us": 5000})
			time.Sleep(25 * time.Second)
			w.cutEtcd("us")
			w.demands(map[string]float64{"ap": 5000, "eu": 5000})
			w.restoreEtcd(s, w.rng.Int64N(2)*1_000_000_000)
			time.Sleep(1500 * time.Millisecond)
			w.killTheLeader()
			time.Sleep(30 * time.Second)
			require.Greater(w.t, w.rates()["ap"]+w.rates()["eu"], 940.0)
		})
		requireSafe(t, o)
	}
}

// An etcd is restored while every region is cut off. When the first region is back, the revisions are already higher
// than before the restore. So no watch and no write reveals the restore.
func TestForgottenSettingsComeBackWithoutAnEvent(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.demands(map[string]float64{"ap": 5000, "eu": 5000, "us": 5000})
		time.Sleep(15 * time.Second)
		w.endPool()
		time.Sleep(15 * time.Second)
		ended := w.snapshot()
		w.change(func(*Pool) {})
		time.Sleep(15 * time.Second)
		for _, p := range w.of("") {
			p.set(func() { p.etcd = fault{noRequest: true, noReply: true} })
		}
		time.Sleep(time.Second)
		w.restoreEtcd(ended, 1_000_000)
		w.mu.Lock()
		w.compacted = 0 // a compaction doesn't reveal the restore either
		w.mu.Unlock()
		for _, p := range w.of("") {
			p.set(func() { p.etcd = fault{} })
		}
		time.Sleep(40 * time.Second)
		require.Greater(t, total(w.rates()), 990.0)
	})
}

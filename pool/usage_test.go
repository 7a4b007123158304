package pool

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestUsageIsWhatWasTakenLessWhatCameBack(t *testing.T) {
	t.Parallel()
	at := func(kind kind, era, capacity, added, tokens int64) ticket {
		return ticket{kind: kind, era: era, added: added, tokens: tokens, terms: policy.Terms{Capacity: capacity}}
	}
	var last ticket
	for _, step := range []struct {
		what        string
		t           ticket
		used, ahead int64
	}{
		{"no bucket yet", at(absent, 0, 0, 0, 0), 0, 0},
		{"a bucket that began empty: 100 added, 40 left", at(pooled, 5, 200, 100, 40), 60, 0},
		{"nothing was taken or returned", at(pooled, 5, 200, 100, 40), 60, 0},
		{"10 taken", at(pooled, 5, 200, 100, 30), 70, 0},
		{"25 returned", at(pooled, 5, 200, 100, 55), 70, 25},
		{"20 taken of these 25", at(pooled, 5, 200, 100, 35), 70, 5},
		{"100 added, 20 taken", at(pooled, 5, 200, 200, 115), 85, 0},
		{"the capacity is cut to 50, and 5 are taken", at(pooled, 5, 50, 200, 45), 90, 0},
		{"3 returned", at(pooled, 5, 50, 200, 48), 90, 3},
		{"a new era, before which takes and returns are unknown", at(pooled, 6, 50, 230, 0), 90, 0},
		{"30 added, 10 taken", at(pooled, 6, 50, 260, 20), 100, 0},
		{"a bucket of no pool", at(plain, 7, 500, 260, 400), 100, 0},
		{"the pool's bucket again, with the tokens that were left", at(pooled, 8, 50, 0, 50), 100, 0},
		{"40 added, 30 taken", at(pooled, 8, 50, 40, 60), 130, 0},
		{"the bucket was lost", at(absent, 0, 0, 0, 0), 130, 0},
		{"a new bucket, whose first ticket has no usage", at(pooled, 9, 50, 70, 20), 130, 0},
		{"20 taken", at(pooled, 9, 50, 70, 0), 150, 0},
	} {
		step.t.usage = step.t.usageFrom(last)
		require.Equal(t, usage{step.used, step.ahead}, step.t.usage, step.what)
		last = step.t
	}
}

// consumedIn returns the number of tokens that a region's consumers have taken.
func (w *world) consumedIn(region string) (n int64) {
	w.locked(func() { n = w.servers[region].taken })
	return n
}

// Whatever fails of coordinators, replicas and etcd, the usage continues from its last value and is exact.
func TestUsageSurvivesCoordinatorsReplicasAndEtcd(t *testing.T) {
	o := live(t, 1, sabotage{}, func(w *world) {
		last := map[string]int64{}
		for what, do := range []func(){
			func() {},
			w.killTheLeader,
			func() { // replace both replicas of a region, one after the other
				for i, p := range w.of("eu") {
					p.kill()
					time.Sleep(2 * time.Second)
					w.startProc("eu", []string{"eu-new0", "eu-new1"}[i])
				}
			},
			func() { // replace both replicas of a region at once
				for _, p := range w.of("us") {
					p.kill()
				}
				time.Sleep(2 * time.Second)
				w.startProc("us", "us-new")
			},
			w.wipe,
		} {
			do()
			w.demands(map[string]float64{"ap": 700, "eu": 700, "us": 700})
			time.Sleep(25 * time.Second)
			w.demands(map[string]float64{"ap": 0, "eu": 0, "us": 0})
			time.Sleep(2 * time.Second)
			for _, r := range w.status().Regions {
				require.Greater(w.t, r.Used, last[r.Region], "step %d", what)
				require.Equal(w.t, w.consumedIn(r.Region), r.Used, "%s, step %d", r.Region, what)
				last[r.Region] = r.Used
			}
		}
	})
	requireSafe(t, o)
}

// When a new era begins, the tokens that were taken since the last report aren't counted. No token is counted twice.
func TestUsageAcrossAFailOverCountsNothingTwice(t *testing.T) {
	first, _ := simSeed(t, 1)
	for seed := first; seed < first+10; seed++ {
		o := live(t, seed, sabotage{}, func(w *world) {
			w.demands(map[string]float64{"ap": 700, "eu": 700, "us": 700})
			time.Sleep(20 * time.Second)
			for range 3 {
				w.failOver("eu")
				time.Sleep(10 * time.Second)
			}
			w.demands(map[string]float64{"ap": 0, "eu": 0, "us": 0})
			time.Sleep(2 * time.Second)
			used, taken := w.status().Regions[1].Used, w.consumedIn("eu")
			require.LessOrEqual(w.t, used, taken, "seed %d", seed)
			require.GreaterOrEqual(w.t, used, taken-3*3000, "seed %d", seed)

			// Replicas without any knowledge continue from the report in etcd, since the bucket's own counts are incomplete.
			for _, p := range w.of("eu") {
				p.kill()
			}
			w.startProc("eu", "eu-new")
			time.Sleep(5 * time.Second)
			require.Equal(w.t, used, w.status().Regions[1].Used, "seed %d", seed)
		})
		requireSafe(t, o)
	}
}

// shown simulates buckets, whose states are their tickets, and a registry, which stores the last report. Buckets
// without a ticket can't be read.
type shown struct {
	registry
	buckets
	at     map[string]lua.Ticket
	report string
}

func (s *shown) tickets(_ context.Context, pools []string) []lua.TicketResult {
	results := make([]lua.TicketResult, len(pools))
	for i, p := range pools {
		t, ok := s.at[p]
		results[i].Ticket = t
		if !ok {
			results[i].Err = errors.New("node is unavailable")
		}
	}
	return results
}

func (s *shown) put(_ context.Context, _, report string) (int64, error) {
	s.report = report
	return 1, nil
}

// agent returns the agent of a new replica of the region, which has read the last report.
func (s *shown) agent(t *testing.T) *Agent {
	settings := Settings{Version: 1, Pools: []Pool{simPool("far"), simPool("near")}}
	a := newAgent(AgentConfig{Region: "eu", Settings: settings, Timing: DefaultTiming(), Logger: hclog.NewNullLogger()},
		s, s, 1)
	if s.report != "" {
		require.False(t, a.applyEntry(entry{key: reportKeys + "eu", value: s.report}))
	}
	require.False(t, a.applyEntry(allRead))
	return a
}

// place puts a pool's bucket into an era, with these numbers of tokens added and taken.
func (s *shown) place(pool string, era, added, taken int64) {
	terms := simPool(pool).Start("eu", 1)
	s.at[pool] = lua.Ticket{Now: time.Now().UnixMicro(), Version: policy.Version{Era: era, Index: 1}, Terms: &terms,
		Added: added, Tokens: added - taken}
}

func (s *shown) used(t *testing.T, pool string) int64 {
	r, err := decodeReport(s.report)
	require.NoError(t, err)
	require.Contains(t, r.tickets, pool)
	return r.tickets[pool].used
}

// A pool's bucket is on a node that is unavailable, while the other buckets are reported. Then every replica is
// replaced. The usage continues from its last value, although the bucket's own counts are lower.
func TestUsageOfABucketThatCannotBeReadStaysInTheReport(t *testing.T) {
	t.Parallel()
	s := &shown{at: map[string]lua.Ticket{}}
	a := s.agent(t)
	s.place("near", 1, 500, 400)
	s.place("far", 1, 500, 400)
	a.poll(t.Context(), true)
	s.place("far", 2, 0, 0) // the bucket was lost and created again
	a.poll(t.Context(), true)
	s.place("far", 2, 100, 70)
	a.poll(t.Context(), true)
	require.EqualValues(t, 470, s.used(t, "far"))

	delete(s.at, "far")
	s.place("near", 1, 600, 450)
	a.poll(t.Context(), true)
	require.EqualValues(t, 450, s.used(t, "near"))
	require.EqualValues(t, 470, s.used(t, "far"))
	a = s.agent(t)
	a.poll(t.Context(), true)
	require.EqualValues(t, 470, s.used(t, "far"))
	s.place("far", 2, 300, 100)
	a.poll(t.Context(), true)
	require.EqualValues(t, 500, s.used(t, "far"))
}

// A report has only the usage of a bucket that couldn't be read. Neither the coordinator nor the status treats this as
// a ticket, whether the coordinator knew the bucket or not.
func TestUsageThatIsCarriedOverIsNoTicket(t *testing.T) {
	t.Parallel()
	s := &shown{at: map[string]lua.Ticket{}}
	s.place("near", 1, 500, 400)
	s.place("far", 1, 500, 400)
	a := s.agent(t)
	a.poll(t.Context(), true)
	first := s.report
	delete(s.at, "far")
	s.place("near", 1, 600, 450)
	a.poll(t.Context(), true)
	carried := s.report

	settings := Settings{Version: 1, Pools: []Pool{simPool("far"), simPool("near")}}
	for name, before := range map[string]string{"Known": first, "New": ""} {
		c := newCoordinator(nil, DefaultTiming(), hclog.NewNullLogger())
		term, now := newTerm(c, leadership{revision: 7}), time.Now()
		require.NoError(t, term.applySettings(settings.record()))
		if before != "" {
			require.NoError(t, term.applyReport("eu", before, true, now))
		}
		far, near := *term.ledgers["far"].accounts["eu"], *term.ledgers["near"].accounts["eu"]
		require.NoError(t, term.applyReport("eu", carried, true, now.Add(time.Second)))
		require.Equal(t, far, *term.ledgers["far"].accounts["eu"], name)
		require.NotEqual(t, near, *term.ledgers["near"].accounts["eu"], name)
	}
	r, err := decodeReport(carried)
	require.NoError(t, err)
	var status RegionStatus
	status.fill(grants{}, r, "far", time.Second)
	require.EqualValues(t, 400, status.Used)
	require.False(t, status.Reported)
	require.Zero(t, status.At)
}

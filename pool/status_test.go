package pool

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
)

// Etcd was restored, or emptied, while us is cut off. For a region that has reported since, the status shows at least
// what the region uses. For us it shows that the usage is unknown.
func TestTheStatusOfARestoredEtcdShowsAtLeastTheUsage(t *testing.T) {
	for name, forget := range map[string]func(w *world, s snapshot){
		"Restored": func(w *world, s snapshot) { w.restoreEtcd(s, 0) },
		"Wiped": func(w *world, _ snapshot) {
			w.cutEtcd("us")
			time.Sleep(time.Second) // wait until no report of us is under way
			w.wipe()
		},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				s, reported := w.snapshot(), map[string]time.Time{}
				w.demands(map[string]float64{"eu": 0})
				time.Sleep(25 * time.Second)
				for _, r := range w.status().Regions {
					reported[r.Region] = r.At
				}
				forget(w, s)
				for range 1000 {
					time.Sleep(20 * time.Millisecond)
					before := w.rates() // the rates may change during the read
					now, _, err := readStatus(t.Context(), w.of("")[0])
					require.NoError(t, err)
					after := w.rates()
					for _, p := range now.Pools { // there are no pools until a replica has written the settings again
						for _, r := range p.Regions {
							if r.At.After(reported[r.Region]) {
								require.GreaterOrEqual(t, r.Claimed, min(before[r.Region], after[r.Region])-1, r.Region)
							}
						}
					}
				}
				regions := w.status().Regions
				require.True(t, regions[0].Known() && regions[1].Known())
				if us := regions[2]; name == "Wiped" {
					require.False(t, us.Known())
					require.InDelta(t, 50, us.Claimed, 0.01, "the floor of us is reserved")
				}
			})
		})
	}
}

// If one record can't be read, the status still has all other regions, and names the record's key.
func TestARecordThatCannotBeReadHidesNoOther(t *testing.T) {
	for key, region := range map[string]string{
		shareKeys + "us": "us", reportKeys + "us": "us", fenceKeys + "us": "us", configKey: "",
	} {
		t.Run(key, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				time.Sleep(10 * time.Second)
				w.cutEtcd("us")
				time.Sleep(time.Second)
				w.tamper(key, func(string) (string, bool) { return "later", false })
				s, _, err := readStatus(t.Context(), w.of("eu")[0])
				require.NoError(t, err)
				require.Len(t, s.Unreadable, 1)
				require.Contains(t, s.Unreadable[key], "bad record")
				require.Len(t, s.Pools[0].Regions, 3)
				for _, r := range s.Pools[0].Regions {
					require.Equal(t, r.Region == region, r.Unreadable)
					require.Equal(t, r.Region != region, r.Known())
					require.True(t, r.Configured)
				}
				require.InDelta(t, 500, s.Pools[0].Regions[1].Granted, 1)
			})
		})
	}
}

// A region is alive if it reports, whatever its Redis' clock shows.
func TestALivingRegionIsOneThatReports(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.stepClock("ap", -time.Hour)
		w.stepClock("us", time.Hour)
		time.Sleep(20 * time.Second)
		alive := func(regions ...string) map[string]bool {
			s, err := readLiveStatus(t.Context(), w.of("eu")[0], regions...)
			require.NoError(t, err)
			is := map[string]bool{}
			for _, r := range s.Pools[0].Regions {
				is[r.Region] = r.Alive
			}
			return is
		}
		began := time.Now()
		require.Equal(t, map[string]bool{"ap": true, "eu": true, "us": true}, alive())
		require.Less(t, time.Since(began), 1500*time.Millisecond, "the call returns after one report of each region")
		w.stopProcs("us")
		time.Sleep(time.Second)
		began = time.Now()
		require.Equal(t, map[string]bool{"ap": true, "eu": true, "us": false}, alive())
		require.InDelta(t, 2.5, time.Since(began).Seconds(), 0.2)
		began = time.Now()
		require.True(t, alive("ap")["ap"])
		require.Less(t, time.Since(began), 1500*time.Millisecond, "the call waits only for the named region")
		require.False(t, alive("us")["us"])
	})
}

// The status shows a pool whose settings can't be read. The regions joined the pool with version 0, which otherwise
// marks regions that are not configured.
func TestAStatusWithoutReadableSettingsOfVersionZero(t *testing.T) {
	t.Parallel()
	terms := policy.Terms{Pool: true, Tokens: 10, Per: 1_000_000, Capacity: 100}
	rec := records{
		shares: map[string]share{
			"eu": {pools: map[string]grants{"payments": {terms: []policy.Terms{terms}, joined: true, open: true}}},
			"us": {pools: map[string]grants{"payments": {terms: []policy.Terms{terms}, open: true}}},
		},
		unreadable: map[string]string{configKey: "it is of a later release"},
	}
	p := rec.status(Pool{Name: "payments"})
	require.Len(t, p.Regions, 2)
	require.InDelta(t, 10, p.Regions[1].Claimed, 1e-9)
}

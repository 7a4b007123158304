package pool

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Etcd was restored, or emptied while us is cut off. Of a region that has reported since, the status tells of no less
// than it uses; of us, that what it uses isn't known.
func TestTheStatusOfAnEtcdThatForgotTellsOfNoLessThanIsInUse(t *testing.T) {
	for name, forget := range map[string]func(w *world, s snapshot){
		"Restored": func(w *world, s snapshot) { w.restoreEtcd(s, 0) },
		"Wiped": func(w *world, _ snapshot) {
			w.cutEtcd("us")
			time.Sleep(time.Second) // no report of it is under way
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
					before := w.rates() // a read takes a while
					now, err := readStatus(t.Context(), w.of("")[0])
					require.NoError(t, err)
					after := w.rates()
					for _, p := range now.Pools { // none until somebody has brought it again
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
					require.InDelta(t, 50, us.Claimed, 0.01, "its floor is reserved")
				}
			})
		})
	}
}

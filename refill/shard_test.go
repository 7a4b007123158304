package refill

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// On a Cluster, neighbours of one slot share a script call.
func TestBucketsOfAClustersShardAreRefilledSlotBySlot(t *testing.T) {
	t.Parallel()
	var names []string
	ofSlot := map[int]int{}
	for i := 0; len(names) < 60; i++ {
		if name := fmt.Sprintf("user:%d", i); lua.Slot(name) < 20 {
			names = append(names, name)
			ofSlot[lua.Slot(name)]++
		}
	}
	for _, cluster := range []bool{false, true} {
		s := &shard{template: &policy.CompiledTemplate{}, bySlot: cluster}
		s.enter(time.Now())
		s.begin(int64(len(names)), time.Now())
		m := s.members
		m.read(names[:30], 17, time.Now())
		m.read(names[30:], 0, time.Now())
		require.Len(t, m.work, len(names))
		changes := 0
		for i, e := range m.work {
			if !cluster {
				require.Equal(t, names[i], e.key, "entries keep the order of the reply")
			}
			if i == 0 || lua.Slot(e.key) != lua.Slot(m.work[i-1].key) {
				changes++
			}
		}
		if cluster {
			require.Equal(t, len(ofSlot), changes)
		}
	}
}

package schedule_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/test/robustness/faults"
	"github.com/tokenrefill/refiller/test/robustness/schedule"
	"github.com/tokenrefill/refiller/test/robustness/system"
)

func TestPlansAreValidAndRepeatableFromTheirSeeds(t *testing.T) {
	t.Parallel()
	drawn, servers := map[string]int{}, map[string]int{}
	for seed := range uint64(2500) {
		embedded := seed >= 2000
		plan := schedule.Random(seed, embedded)
		require.Equal(t, plan.String(), schedule.Random(seed, embedded).String())
		servers[plan.Spec.Servers]++
		require.GreaterOrEqual(t, len(plan.Phases), 2)
		for _, phase := range plan.Phases {
			groups := map[string]bool{}
			for _, f := range phase {
				require.True(t, f.Goes(plan.Spec), "%s: %s", plan, f.Name)
				require.False(t, groups[f.Group], "%s combines two faults of one group", plan)
				groups[f.Group] = true
				drawn[f.Name]++
			}
			require.False(t, len(phase) > 1 && phase[1].Group == faults.Etcd,
				"%s may spoil the pulse on a server that is paused", plan)
		}
	}
	for _, f := range faults.All {
		require.Greater(t, drawn[f.Name], 5, f.Name)
	}
	for _, kind := range []string{system.Single, system.Sentinel, system.Cluster, system.Replicated} {
		require.Greater(t, servers[kind], 100, kind)
	}
}

func TestAFaultThatCannotHappenIsRefused(t *testing.T) {
	t.Parallel()
	_, err := schedule.Fixed("x", 1, system.Spec{Replicas: 3}, "etcd-leader-kill")
	require.ErrorContains(t, err, "etcd-leader-kill")
	_, err = schedule.Fixed("x", 1, system.Spec{Replicas: 3}, "no-such-fault")
	require.ErrorContains(t, err, "no-such-fault")
}

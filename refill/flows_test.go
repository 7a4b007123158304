package refill

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// observed returns a division that has observed a loud and a quiet flow for a minute, and the instant at which that
// minute ends.
func observed() (d *division, at int64) {
	const second = int64(time.Second / time.Microsecond)
	d = newDivision(policy.Policy{
		Capacity: 100, Rate: policy.Rate{Tokens: 10, Per: time.Second}, Interval: time.Second,
		Flows: &policy.Flows{Headroom: policy.DefaultHeadroom, Most: policy.DefaultFlows},
	}, &policy.Terms{Interval: second})
	at = int64(1e15)
	for i := range int64(60) {
		at += second
		d.apply(policy.Version{Era: 1, Index: i + 1}, at, &lua.PlanResult{Use: policy.Use{
			Asked: map[string]int64{"loud": 20, "quiet": 2}, Denied: map[string]int64{"loud": 12}, Covered: second,
		}})
	}
	return d, at
}

func TestReplicasThatWinInTurnKeepWhatTheyKnow(t *testing.T) {
	t.Parallel()
	for name, written := range map[string]*lua.PlanResult{
		"another replica wrote the plan": {Stale: true}, "there was no reply": {Err: errors.New("cut off")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, at := observed()
			require.False(t, d.next.Whole, "each plan changes this replica's previous plan")
			d.apply(policy.Version{Era: 1, Index: 70}, at+10_000_000, written)
			require.True(t, d.next.Whole)
			require.False(t, d.next.Kept)
			require.Len(t, d.next.Listed, 1)
			require.Equal(t, "loud", d.next.Listed[0].Name)
		})
	}
}

func TestAReplicaForgetsWhatOthersHaveReadSince(t *testing.T) {
	t.Parallel()
	const hour = int64(time.Hour / time.Microsecond)
	d, at := observed()
	d.apply(policy.Version{Era: 1, Index: 70}, at+hour, &lua.PlanResult{Stale: true})
	require.True(t, d.next.Kept, "the stored plan has more data")
	d, at = observed()
	d.apply(policy.Version{Era: 1, Index: 70}, at-hour, &lua.PlanResult{Stale: true})
	require.False(t, d.next.Kept, "the clock was set back")
}

// A replica with an older file may win refills. It leaves the plan to the replicas whose policy is in force.
func TestOnlyReplicasWhosePolicyIsInForcePlan(t *testing.T) {
	t.Parallel()
	d, _ := observed()
	older := policy.Terms{Fence: policy.Fence{Epoch: 1}}
	later := policy.Terms{Fence: policy.Fence{Epoch: 2}}
	r := &lua.RefillResult{Outcome: policy.Outcome{Status: policy.StatusApplied, Fence: later.Fence}}
	require.False(t, d.planned(&older, r))
	require.True(t, d.planned(&later, r))
	r.Differs = true
	require.False(t, d.planned(&later, r), "another file of the same version is in force")

	pool := &division{flows: d.flows, pooled: true}
	r = &lua.RefillResult{Outcome: policy.Outcome{Status: policy.StatusApplied, Pool: true, PoolsVersion: 2}}
	terms := poolTerms(1, 100)
	for version, plans := range map[int64]bool{1: false, 2: true, 3: true} {
		terms.PoolsVersion = version
		require.Equal(t, plans, pool.planned(&terms, r), "pools_version %d", version)
	}
}

package metrics_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/metrics"
	"github.com/tokenrefill/refiller/internal/operate/stats"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/pool"
)

func TestPoolMetricsOfAReplicaAndOfTheCoordinator(t *testing.T) {
	state := metrics.State{}
	m := metrics.New("test", "eu", stats.New(), func() metrics.State { return state })
	require.NotContains(t, scrape(t, m), "refiller_pool_")

	state.Pools = &metrics.PoolState{Terms: 2, Coordinated: true,
		Agent: pool.AgentState{Reports: 7, Failures: 1, ClockRate: -0.05, Cut: "away", Shares: []pool.Share{{
			Pool: "payments", Rate: policy.PerSecond(400), Floor: policy.PerSecond(100),
			Demand: policy.Rate{Tokens: 3000, Per: 2 * time.Second}, Remaining: 1500 * time.Millisecond, Used: 12345, Open: true, Doubled: true,
		}, {Pool: "mail", Used: -1}}}}
	body := scrape(t, m)
	for _, line := range []string{
		`refiller_pool_rate_tokens_per_second{pool="payments",region="eu"} 400`,
		`refiller_pool_floor_tokens_per_second{pool="payments",region="eu"} 100`,
		`refiller_pool_demand_tokens_per_second{pool="payments",region="eu"} 1500`,
		`refiller_pool_grant_remaining_seconds{pool="payments",region="eu"} 1.5`,
		`refiller_pool_used_tokens_total{pool="payments",region="eu"} 12345`,
		`refiller_pool_reports_total{region="eu"} 7`,
		`refiller_pool_report_failures_total{region="eu"} 1`, `refiller_pool_etcd_up{region="eu"} 0`,
		`refiller_pool_coordinating{region="eu"} 0`, `refiller_pool_terms_total{region="eu"} 2`,
		`refiller_pool_coordinated{region="eu"} 1`, `refiller_pools_on_floor{region="eu"} 1`,
		`refiller_pools_closed{region="eu"} 1`, `refiller_pools_other_redis{region="eu"} 1`,
		`refiller_pool_clock_rate_error{region="eu"} -0.05`,
	} {
		require.Contains(t, body, line+"\n")
	}
	require.NotContains(t, body, `refiller_pool_used_tokens_total{pool="mail"`, "the use of mail is not known yet")
	require.NotContains(t, body, "claimed", "only the coordinator has claims")

	state.Pools.Coordinator = pool.CoordinatorStats{Leading: true, Epoch: 42, Writes: 9}
	state.Pools.Sums = map[string]pool.PoolSum{"payments": {Rate: 1000, Claimed: 999.5, Demand: 1700,
		Waits: []string{"ap", "us"}}, "mail": {Rate: 10, Claimed: 11}}
	state.Pools.Regions = map[string]pool.RegionSeen{"eu": {LastReport: time.Now()},
		"us": {Since: time.Now().Add(-time.Minute), Fenced: true}}
	body = scrape(t, m)
	for _, line := range []string{
		`refiller_pools_overclaimed{region="eu"} 1`, `refiller_pool_coordinating{region="eu"} 1`,
		`refiller_pool_epoch{region="eu"} 42`,
		`refiller_pool_share_writes_total{region="eu"} 9`,
		`refiller_pool_limit_tokens_per_second{pool="payments",region="eu"} 1000`,
		`refiller_pool_claimed_tokens_per_second{pool="payments",region="eu"} 999.5`,
		`refiller_pool_waits{pool="payments",region="eu"} 2`,
		`refiller_pool_wanted_tokens_per_second{pool="payments",region="eu"} 1700`,
		`refiller_pool_region_fenced{region="us"} 1`,
		`refiller_pool_region_fenced{region="eu"} 0`,
	} {
		require.Contains(t, body, line+"\n")
	}
	require.Contains(t, body, `refiller_pool_region_silent_seconds{region="us"} 6`,
		"a region that has never reported is silent since the coordinator knows it")
}

func TestTheNumberOfPoolsWithSeriesIsBounded(t *testing.T) {
	pools := &metrics.PoolState{Sums: map[string]pool.PoolSum{}}
	for i := range 1000 {
		name := fmt.Sprintf("p%04d", i)
		pools.Agent.Shares = append(pools.Agent.Shares, pool.Share{Pool: name})
		pools.Sums[name] = pool.PoolSum{Rate: 1, Claimed: 2}
	}
	pools.Coordinator.Leading = true
	m := metrics.New("test", "eu", stats.New(), func() metrics.State { return metrics.State{Pools: pools} })
	body := scrape(t, m)
	require.Equal(t, metrics.MaxPools, strings.Count(body, "refiller_pool_rate_tokens_per_second{"))
	require.Equal(t, metrics.MaxPools, strings.Count(body, "refiller_pool_claimed_tokens_per_second{"))
	for _, line := range []string{`refiller_pools_on_floor{region="eu"} 1000`, `refiller_pools_closed{region="eu"} 1000`,
		`refiller_pools_overclaimed{region="eu"} 1000`} {
		require.Contains(t, body, line+"\n", "the metrics that alerts use count every pool")
	}
}

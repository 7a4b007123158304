package metrics

import (
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/pool"
)

// MaxPools is the largest number of pools with series of their own. They are the first pools by name. Each pool has at
// most pool.MaxRegions regions. Alerts use the series that count pools, which include all pools.
const MaxPools = 200

// PoolState is the replica's part in the pools at the time of a scrape.
type PoolState struct {
	Agent       pool.AgentState
	Coordinator pool.CoordinatorStats
	Sums        map[string]pool.PoolSum    // empty unless this replica coordinates
	Regions     map[string]pool.RegionSeen // empty unless this replica coordinates
	Terms       int64                      // terms as the coordinator since the start
	Coordinated bool                       // etcd answers this replica, and a coordinator exists
}

var (
	descPoolRate = desc("pool_rate_tokens_per_second", "Rate in force in this replica's region, by its Redis.",
		"pool")
	descPoolFloor  = desc("pool_floor_tokens_per_second", "Rate that is always the region's.", "pool")
	descPoolDemand = desc("pool_demand_tokens_per_second",
		"What the region could use, as the coordinator computed it at the newest grant.", "pool")
	descPoolRemaining = desc("pool_grant_remaining_seconds",
		"Time that the region's grant has left on its Redis' clock; 0 if it is on its floor.", "pool")
	descPoolUsed = desc("pool_used_tokens_total",
		"Tokens that the region's consumers took, less what came back. All its replicas export the same: don't add them.",
		"pool")
	descPoolReports  = desc("pool_reports_total", "Reports that this replica has written to etcd for its region.")
	descPoolFailures = desc("pool_report_failures_total", "Reports that could not be written.")
	descPoolVoids    = desc("pool_clock_voids_total",
		"Times that Redis' clock did not agree with this replica's, so that the region's bucket began a new era.")
	descPoolClock = desc("pool_clock_rate_error",
		"By what part of 1 Redis' clock runs faster than this replica's, or slower if it is below 0.")
	descPoolsOnFloor = desc("pools_on_floor", "Pools of which the region has no grant.")
	descPoolsClosed  = desc("pools_closed",
		"Pools that some region has not acknowledged, so that no region gets more than its floor.")
	descPoolsDoubled = desc("pools_other_redis",
		"Pools for which another Redis reports under the region's name, too.")
	descPoolEtcd = desc("pool_etcd_up", "1 if etcd answers this replica's agent.")

	descPoolCoordinated = desc("pool_coordinated",
		"1 if etcd answers this replica and has a coordinator of the pools, in whatever region.")
	descPoolCoordinating = desc("pool_coordinating", "1 while this replica coordinates the pools of all regions.")
	descPoolEpoch        = desc("pool_epoch",
		"Pool epoch under which this replica writes shares, or last wrote them, as the coordinator.")
	descPoolTerms  = desc("pool_terms_total", "Terms in which this replica has coordinated.")
	descPoolWrites = desc("pool_share_writes_total",
		"Regions' shares that this replica has written as the coordinator.")
	descPoolRefused = desc("pool_share_writes_refused_total",
		"Transactions of this replica as the coordinator that etcd refused, since a share had changed.")
	descPoolErrors = desc("pool_coordinator_errors_total",
		"Requests to etcd of this replica as the coordinator that failed.")
	descPoolUnread = desc("pool_unreadable_records",
		"Records in etcd that this replica as the coordinator can't read: until it can, shares stay as they are, or end if "+
			"it is the epoch.")
	descPoolTooLarge = desc("pool_shares_too_large_total",
		"Regions' shares that this replica as the coordinator did not write, since etcd would refuse them.")
	descPoolLimit   = desc("pool_limit_tokens_per_second", "The pool's rate. Only from the coordinator.", "pool")
	descPoolClaimed = desc("pool_claimed_tokens_per_second",
		"The most that all regions may be using together. Only from the coordinator.", "pool")
	descPoolWanted = desc("pool_wanted_tokens_per_second",
		"What all regions could use together. Only from the coordinator.", "pool")
	descPoolsOverclaimed = desc("pools_overclaimed",
		"Pools of which all regions may be using more than the rate together. Only from the coordinator.")
	descPoolWaits = desc("pool_waits",
		"Regions without which the pool stays closed, so that no region gets more than its floor. Only from the coordinator.",
		"pool")
	descPoolSilent = seenDesc("pool_region_silent_seconds",
		"Time since the region's last report. Only from the coordinator.")
	descPoolFenced = seenDesc("pool_region_fenced",
		"1 if an operator has declared that the region uses nothing. Only from the coordinator.")
)

// seenDesc describes a metric that the coordinator has about a region. The label "region" is that region, not the
// region of the coordinator.
func seenDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("refiller_"+name, help, []string{"region"}, nil)
}

// collect exports the state. seen exports a gauge that the coordinator has about a region.
func (s *PoolState) collect(gauge, count func(*prometheus.Desc, float64, ...string),
	seen func(d *prometheus.Desc, v float64, region string)) {
	s.collectCounts(gauge)
	for i, share := range s.Agent.Shares { // sorted by pool
		if i == MaxPools {
			break
		}
		gauge(descPoolRate, perSecond(share.Rate), share.Pool)
		gauge(descPoolFloor, perSecond(share.Floor), share.Pool)
		gauge(descPoolDemand, perSecond(share.Demand), share.Pool)
		gauge(descPoolRemaining, share.Remaining.Seconds(), share.Pool)
		if share.Used >= 0 {
			count(descPoolUsed, float64(share.Used), share.Pool)
		}
	}
	count(descPoolReports, float64(s.Agent.Reports))
	count(descPoolFailures, float64(s.Agent.Failures))
	count(descPoolVoids, float64(s.Agent.Voids))
	gauge(descPoolClock, s.Agent.ClockRate)
	gauge(descPoolEtcd, truth(s.Agent.Cut == ""))

	gauge(descPoolCoordinated, truth(s.Coordinated))
	gauge(descPoolCoordinating, truth(s.Coordinator.Leading))
	gauge(descPoolEpoch, float64(s.Coordinator.Epoch))
	count(descPoolTerms, float64(s.Terms))
	count(descPoolWrites, float64(s.Coordinator.Writes))
	count(descPoolRefused, float64(s.Coordinator.Refused))
	count(descPoolErrors, float64(s.Coordinator.Errors))
	gauge(descPoolUnread, float64(s.Coordinator.Unread))
	count(descPoolTooLarge, float64(s.Coordinator.TooLarge))
	for i, name := range slices.Sorted(maps.Keys(s.Sums)) {
		if i == MaxPools {
			break
		}
		sum := s.Sums[name]
		gauge(descPoolLimit, sum.Rate, name)
		gauge(descPoolClaimed, sum.Claimed, name)
		gauge(descPoolWanted, sum.Demand, name)
		gauge(descPoolWaits, float64(len(sum.Waits)), name)
	}
	for name, region := range s.Regions {
		last := region.LastReport
		if last.IsZero() {
			last = region.Since
		}
		seen(descPoolSilent, time.Since(last).Seconds(), name)
		seen(descPoolFenced, truth(region.Fenced), name)
	}
}

// collectCounts exports the number of pools in each state, among all pools.
func (s *PoolState) collectCounts(gauge func(*prometheus.Desc, float64, ...string)) {
	count := func(is func(pool.Share) bool) (n float64) {
		for _, share := range s.Agent.Shares {
			n += truth(is(share))
		}
		return n
	}
	gauge(descPoolsOnFloor, count(func(share pool.Share) bool { return share.Remaining == 0 }))
	gauge(descPoolsClosed, count(func(share pool.Share) bool { return !share.Open }))
	gauge(descPoolsDoubled, count(func(share pool.Share) bool { return share.Doubled }))
	if !s.Coordinator.Leading {
		return
	}
	overclaimed := 0.0
	for _, sum := range s.Sums {
		overclaimed += truth(sum.Claimed > sum.Rate*(1+1e-6))
	}
	gauge(descPoolsOverclaimed, overclaimed)
}

func perSecond(r policy.Rate) float64 {
	if r.Per == 0 {
		return 0
	}
	return float64(r.Tokens) / r.Per.Seconds()
}

package metrics

import (
	"maps"
	"net/http"
	"runtime"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/tokenrefill/refiller/internal/operate/stats"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
)

// MaxBuckets is the largest number of buckets with series of their own.
const MaxBuckets = 200

// Other is the value of the label bucket for the sum of the buckets beyond MaxBuckets.
const Other = "other"

// fresh is the age up to which the last number of a bucket's tokens is exported. A standby gets no new number.
const fresh = 15 * time.Second

// State is the state of the replica at the time of a scrape.
type State struct {
	Refill        refill.Stats
	RedisUp       bool
	Elected       bool  // election mode etcd; otherwise the fields up to Terms are unused
	ElectionUp    bool  // etcd answers
	Terms         int64 // terms as the leader since the start
	Reloads       map[string]int64
	ReloadRefused bool // the last reload was refused
	// Conflict reports whether any part of the configuration differs from the policy in force under the same version.
	// TemplatesConflict and PoolsConflict report this for templates and for pools.
	Conflict, TemplatesConflict, PoolsConflict bool
	TemplatesOutdated, PoolsOutdated           bool // templates or pools of a later version are in force
	RestartNeeded                              bool // the file has changes that need a restart
	// Shadow has the numbers of tokens that buckets in shadow mode have counted as denied.
	Shadow map[string]int64
	Pools  *PoolState // nil if the replica takes no part in pools
}

// Metrics exports one replica's numbers. Its methods are safe for concurrent use.
type Metrics struct {
	registry *prometheus.Registry
	region   string
	stats    *stats.Stats
	state    func() State

	mu  sync.Mutex
	own map[string]bool // by key: whether the bucket has series of its own

	lag      prometheus.Histogram
	call     prometheus.Histogram
	takeover prometheus.Histogram
}

var _ prometheus.Collector = (*Metrics)(nil)

// New returns the metrics of a replica. build is the version of the program, and region is the region of the replica. t
// has the stats of the replica's buckets. state is called at each scrape.
//
// Every series of this package has the label "region". Otherwise an alert would have to join each series with
// refiller_build_info to judge the regions one by one.
func New(build, region string, t *stats.Stats, state func() State) *Metrics {
	inRegion := prometheus.Labels{"region": region}
	m := &Metrics{
		registry: prometheus.NewRegistry(), region: region, stats: t, state: state, own: map[string]bool{},
		lag: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:        "refiller_refill_lag_seconds",
			Help:        "How much later than one refill interval after the refill before a refill came.",
			Buckets:     []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
			ConstLabels: inRegion,
		}),
		call: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "refiller_refill_call_seconds", Help: "Time from sending a refill call's batch to its answer.",
			Buckets:     []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1},
			ConstLabels: inRegion,
		}),
		takeover: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:        "refiller_takeover_gap_seconds",
			Help:        "How long a bucket went without a refill before this replica took it over from another.",
			Buckets:     []float64{.05, .1, .125, .15, .2, .25, .5, 1, 2, 5, 10, 30},
			ConstLabels: inRegion,
		}),
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "refiller_build_info", Help: "1; the labels have the program's version and the replica's region.",
		ConstLabels: prometheus.Labels{"version": build, "go_version": runtime.Version(), "region": region},
	})
	info.Set(1)
	m.registry.MustRegister(m, m.lag, m.call, m.takeover, info,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Observe counts one reply to a refill call, here and in the stats.
func (m *Metrics) Observe(e refill.Event) {
	if e.Err == nil {
		m.call.Observe(e.Replied.Sub(e.Sent).Seconds())
	}
	r := m.stats.Observe(e)
	if r.Won && r.Gap > 0 {
		m.lag.Observe(r.Lag.Seconds())
	}
	if r.TookOver {
		m.takeover.Observe(r.Gap.Seconds())
	}
}

// Handler returns the handler of scrapes.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry, MaxRequestsInFlight: 4})
}

// desc describes a metric of a replica. Its last label is the replica's region.
func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("refiller_"+name, help, append(labels, "region"), nil)
}

var (
	descCalls   = desc("refill_calls_total", "Answers to refill calls, by what they did.", "status")
	descErrors  = desc("refill_errors_total", "Refill calls without an answer.")
	descFaults  = desc("refill_bucket_faults_total", "Refill calls for buckets that are malformed or forbidden.")
	descRedisUp = desc("redis_up", "1 if Redis answers.")
	descPaused  = desc("refills_paused", "1 while refills pause on a master of Redis, since it fails the replica's calls.")
	descBuckets = desc("buckets", "Configured buckets.")
	descTurn    = desc("refill_loop_turn_age_seconds", "Time since the slowest part of the refill loop last went round.")

	descVersion  = desc("config_version", "Version of the configuration in force.")
	descReloads  = desc("config_reloads_total", "Reloads of the configuration, by result.", "result")
	descReloadOK = desc("config_last_reload_ok", "1 unless the last reload was refused, or something else is in force than the configuration says, under the same version.")
	descRestart  = desc("config_restart_needed", "1 if the file has changes that need a restart.")
	descOutdated = desc("buckets_outdated", "Buckets whose policy in force is of a later version than this replica's.")
	descConflict = desc("buckets_conflicting", "Buckets whose policy in force differs under the same version.")

	descTemplatesConflict = desc("templates_conflicting", "1 if other templates are published under the same version.")
	descPoolsConflict     = desc("pools_conflicting", "1 if other pools are in force under the same version.")
	descTemplatesOutdated = desc("templates_outdated", "1 if templates of a later version are published.")
	descPoolsOutdated     = desc("pools_outdated", "1 if pools of a later version are in force.")

	descLeading    = desc("leading", "1 while this replica leads. Only with election mode etcd.")
	descEpoch      = desc("epoch", "Epoch of this replica's present or last term. Only with election mode etcd.")
	descTerms      = desc("terms_total", "Terms that this replica has led. Only with election mode etcd.")
	descRacing     = desc("racing", "1 while this replica refills for a silent leader. Only with election mode etcd.")
	descElectionUp = desc("election_up", "1 if etcd answers. Only with election mode etcd.")

	descCredited = desc("credit_added_tokens_total",
		"Tokens that refills by this replica found due, with those that the full bucket could not hold.", "bucket")
	descDue = desc("credit_due_tokens_total",
		"Tokens that fell due by elapsed time and rate in the stretches that this replica refilled.", "bucket")
	descClamped = desc("credit_clamped_tokens_total", "Tokens due that the full bucket could not hold.", "bucket")
	descTaken   = desc("taken_tokens_total",
		"Tokens taken, less those returned, in the stretches that this replica refilled.", "bucket")
	descRefills     = desc("refills_total", "Refills by this replica.", "bucket")
	descEmpty       = desc("refills_found_empty_total", "Refills that found no token in the bucket.", "bucket")
	descQuarantines = desc(
		"quarantines_total", "Times that the server had lost writes, so that the bucket began a new era.", "bucket")
	descClock = desc(
		"clock_steps_total", "Times that the server's clock had stepped back, so that the bucket began a new era.", "bucket")
	descCreated = desc("buckets_created_total", "Times that the bucket was created, or adopted from a foreign client.",
		"bucket")
	descLost = desc("buckets_lost_total",
		"Times that the server had lost the bucket, so that it was created again.", "bucket")
	descShadow = desc("shadow_denied_tokens_total", "Tokens that takes of a bucket in shadow mode would have been denied, as the bucket counts them. Each replica exports the same number, so take the largest and not the sum.", "bucket")
	descTokens = desc("bucket_tokens", "Tokens in the bucket at this replica's last call.", "bucket")
	descHeld   = desc("bucket_outstanding_tokens",
		"Tokens of the bucket that consumers hold in reservations and leases, at this replica's last call.", "bucket")
	descCapacity = desc("bucket_capacity_tokens", "Configured capacity.", "bucket")

	descFlowsSeen   = desc("flows_seen", "Flows of the bucket that this replica counts separately.", "bucket")
	descFlowsListed = desc("flows_listed",
		"Flows that this replica's last plan lists: those that ask for more than half of their part.", "bucket")
	descFlowsLevel = desc("flows_level_tokens_per_second",
		"What this replica's last plan gives to a flow of weight 1, or to a team.", "bucket")
	descFlowsDenied = desc("flows_denied_tokens_total",
		"Tokens that takes asked Redis for and were denied, as far as this replica read it, of listed flows and of others.",
		"bucket", "flows")
)

// Describe implements prometheus.Collector. It describes nothing, because some metrics exist only in one mode. So
// Prometheus doesn't check them.
func (m *Metrics) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	s := m.state()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, append(labels, m.region)...)
	}
	count := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, append(labels, m.region)...)
	}
	for status := policy.StatusApplied; status <= policy.StatusConflict; status++ {
		count(descCalls, float64(s.Refill.Calls[status]), status.String())
	}
	count(descErrors, float64(s.Refill.Errors))
	count(descFaults, float64(s.Refill.Faults))
	gauge(descRedisUp, truth(s.RedisUp))
	gauge(descPaused, truth(s.Refill.Away != nil))
	gauge(descBuckets, float64(s.Refill.Buckets))
	if !s.Refill.LastLoop.IsZero() {
		gauge(descTurn, time.Since(s.Refill.LastLoop).Seconds())
	}
	gauge(descVersion, float64(s.Refill.Version))
	for result, n := range s.Reloads {
		count(descReloads, float64(n), result)
	}
	gauge(descReloadOK, truth(!s.ReloadRefused && !s.Conflict))
	gauge(descTemplatesConflict, truth(s.TemplatesConflict))
	gauge(descPoolsConflict, truth(s.PoolsConflict))
	gauge(descTemplatesOutdated, truth(s.TemplatesOutdated))
	gauge(descPoolsOutdated, truth(s.PoolsOutdated))
	gauge(descRestart, truth(s.RestartNeeded))
	if s.Elected {
		gauge(descLeading, truth(s.Refill.Leading))
		gauge(descEpoch, float64(s.Refill.Epoch))
		count(descTerms, float64(s.Terms))
		gauge(descRacing, truth(s.Refill.Racing))
		gauge(descElectionUp, truth(s.ElectionUp))
	}
	m.collectBuckets(gauge, count, s.Shadow)
	m.collectTemplates(ch, s.Refill.Templates, gauge, count)
	if s.Pools != nil {
		s.Pools.collect(gauge, count, func(d *prometheus.Desc, v float64, region string) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, region)
		})
	}
}

// collectBuckets exports the buckets that have series of their own, and the sum of the others. shadow has the tokens
// that buckets in shadow mode have counted as denied.
func (m *Metrics) collectBuckets(gauge, count func(*prometheus.Desc, float64, ...string), shadow map[string]int64) {
	v := m.buckets()
	for key, b := range v.own {
		counts(count, key, b)
		gauge(descCapacity, float64(b.Capacity), key)
		if time.Since(b.Flows.Read) < fresh {
			gauge(descFlowsSeen, float64(b.Flows.Seen), key)
			gauge(descFlowsListed, float64(b.Flows.Listed), key)
			gauge(descFlowsLevel, b.Flows.Level, key)
		}
		if time.Since(b.Seen) < fresh {
			gauge(descTokens, float64(b.Tokens), key)
			gauge(descHeld, float64(b.Held), key)
		}
	}
	if v.summed {
		counts(count, Other, v.other)
	}
	rest, beyond := int64(0), false
	for key, denied := range shadow {
		if _, own := v.own[key]; own {
			count(descShadow, float64(denied), key)
			continue
		}
		rest, beyond = rest+denied, true
	}
	if beyond {
		count(descShadow, float64(rest), Other)
	}
	gauge(descOutdated, float64(v.outdated))
	gauge(descConflict, float64(v.conflicting))
}

// view is the state of the buckets for one scrape.
type view struct {
	own                   map[string]stats.Bucket // buckets with series of their own
	other                 stats.Bucket            // the sum of the other buckets
	summed                bool                    // whether there are other buckets
	outdated, conflicting int
}

// buckets reads all buckets, and copies only those that have series. A bucket that is added meanwhile is in the next
// scrape.
func (m *Metrics) buckets() view {
	m.mu.Lock()
	defer m.mu.Unlock()
	var keys []string
	m.stats.Each(func(key string, _ *stats.Bucket) { keys = append(keys, key) })
	m.label(keys)
	v := view{own: map[string]stats.Bucket{}}
	m.stats.Each(func(key string, b *stats.Bucket) {
		own, known := m.own[key]
		if !known {
			return
		}
		if b.Outdated {
			v.outdated++
		}
		if b.Conflict {
			v.conflicting++
		}
		if own {
			v.own[key] = *b
		} else {
			v.summed = true
			add(&v.other, *b)
		}
	})
	return v
}

// label chooses the buckets that get series of their own: the first MaxBuckets by key. It skips a key that can't be a
// label. A bucket that is in the sum stays there. Otherwise its counters would move to another series, and a spike
// would appear. The caller holds the mutex.
func (m *Metrics) label(keys []string) {
	var unknown []string
	for _, key := range keys {
		if _, known := m.own[key]; !known {
			unknown = append(unknown, key)
		}
	}
	if len(m.own)+len(unknown) > len(keys) { // some buckets were removed
		there := make(map[string]bool, len(keys))
		for _, key := range keys {
			there[key] = true
		}
		maps.DeleteFunc(m.own, func(key string, _ bool) bool { return !there[key] })
	}
	labelled := 0
	for _, own := range m.own {
		if own {
			labelled++
		}
	}
	slices.Sort(unknown)
	for _, key := range unknown {
		m.own[key] = labelled < MaxBuckets && key != Other && utf8.ValidString(key)
		if m.own[key] {
			labelled++
		}
	}
}

func counts(count func(*prometheus.Desc, float64, ...string), label string, b stats.Bucket) {
	count(descCredited, float64(b.Credited), label)
	count(descDue, b.Due, label)
	count(descClamped, float64(b.Clamped), label)
	count(descTaken, float64(b.Taken), label)
	count(descRefills, float64(b.Refills), label)
	count(descEmpty, float64(b.Empty), label)
	count(descQuarantines, float64(b.Quarantines), label)
	count(descClock, float64(b.ClockSteps), label)
	count(descCreated, float64(b.Created), label)
	count(descLost, float64(b.Lost), label)
	if !b.Flows.Read.IsZero() {
		count(descFlowsDenied, float64(b.Flows.DeniedListed), label, "listed")
		count(descFlowsDenied, float64(b.Flows.DeniedOther), label, "other")
	}
}

func add(sum *stats.Bucket, b stats.Bucket) {
	sum.Credited += b.Credited
	sum.Due += b.Due
	sum.Clamped += b.Clamped
	sum.Taken += b.Taken
	sum.Refills += b.Refills
	sum.Empty += b.Empty
	sum.Quarantines += b.Quarantines
	sum.ClockSteps += b.ClockSteps
	sum.Created += b.Created
	sum.Lost += b.Lost
	sum.Flows.DeniedListed += b.Flows.DeniedListed
	sum.Flows.DeniedOther += b.Flows.DeniedOther
	if b.Flows.Read.After(sum.Flows.Read) {
		sum.Flows.Read = b.Flows.Read
	}
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

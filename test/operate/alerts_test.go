package operate

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

const monitoring = "../../deploy/monitoring"

// rule is an alert rule as Prometheus reads it.
type rule struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

func alertRules(t *testing.T) []rule {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(monitoring, "alerts.yaml"))
	require.NoError(t, err)
	var file struct {
		Groups []struct{ Rules []rule }
	}
	require.NoError(t, yaml.Unmarshal(data, &file))
	require.Len(t, file.Groups, 1)
	return file.Groups[0].Rules
}

// tool returns the path of a program of Debian's package prometheus.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	require.NoError(t, err, "scripts/require.sh prometheus installs %s", name)
	return path
}

// A unit test of a rule covers 50 minutes, with a sample every 30 s. A sample is written in promtool's form,
// first+step×count.
const (
	sampled = 100
	step    = "30s"
	judged  = "45m" // sample 90
)

func steady(v float64) string { return fmt.Sprintf("%g+0x%d", v, sampled) }

func rising(step int) string { return fmt.Sprintf("0+%dx%d", step, sampled) }

// jump returns values that are 0 before the sample, and 1 from the sample on.
func jump(sample int) string { return fmt.Sprintf("0+0x%d 1+0x%d", sample-1, sampled-sample) }

// stale has values of 1 for a series that ends long before the alerts are evaluated.
const stale = "1+0x70 stale"

// target is a replica that Prometheus scrapes.
type target struct {
	namespace, region string
	leads             bool
	version           float64 // version of the configuration
	refills           int     // refills of the bucket, per sample
}

// targets has the replicas of two releases, limits and mail. Release limits runs in two regions, and each region has
// its own configuration. Both releases have a bucket with the same name.
var targets = map[string]target{
	"a": {namespace: "limits", region: "eu", leads: true, version: 7, refills: 300},
	"b": {namespace: "limits", region: "eu", version: 7},
	"c": {namespace: "limits", region: "eu", version: 7},
	"d": {namespace: "limits", region: "us", leads: true, version: 9, refills: 300},
	"e": {namespace: "mail", region: "eu", leads: true, version: 3, refills: 30000},
}

// series returns the name of a series of a replica. It adds labels to the labels that all series of the replica have.
func series(instance, name string, labels ...string) string {
	t := targets[instance]
	all := fmt.Sprintf(`namespace=%q,job="refiller",instance=%q,region=%q`, t.namespace, instance, t.region)
	for _, label := range labels {
		all += "," + label
	}
	return fmt.Sprintf("refiller_%s{%s}", name, all)
}

// seenRegion returns the name of a series of the coordinator about a region.
func seenRegion(name, region string) string {
	return fmt.Sprintf(`refiller_pool_region_%s{instance="a",region=%q}`, name, region)
}

const (
	ofCheckout = `bucket="checkout"`
	ofTemplate = `template="user:"`
	isApplied  = `status="applied"`
	isStale    = `status="stale"`
	isMalform  = `status="malformed"`

	sidecarReload = `refiller_sidecar_limits_last_reload_ok{instance="sidecar"}`
)

// ofSidecar returns the name of a series of a sidecar. The sidecars are instances one and two of job sidecars.
func ofSidecar(instance, name string, labels ...string) string {
	all := fmt.Sprintf(`namespace="limits",job="sidecars",instance=%q`, instance)
	for _, label := range labels {
		all += "," + label
	}
	return fmt.Sprintf("%s{%s}", name, all)
}

// Names of series of sidecars.
const (
	isScraped     = "up"
	hasReloaded   = "refiller_sidecar_limits_last_reload_ok"
	refusedCalls  = "refiller_sidecar_refused_total"
	limitRequests = "refiller_sidecar_limit_requests_total"
	callSeconds   = "refiller_sidecar_call_seconds_bucket"
	degradedCalls = "refiller_consumer_degraded_total"
	consumerCalls = "refiller_consumer_calls_total"
	rescues       = "refiller_consumer_rescues_total"
)

const (
	atCheck      = `door="check"`
	atEnvoy      = `door="envoy"`
	isFailed     = `outcome="failed"`
	isAdmitted   = `outcome="admitted"`
	fromDeadline = `reason="deadline"`
	isQueueFull  = `reason="queue_full"`
)

// healthySidecars adds the series of two sidecars with nothing wrong.
func healthySidecars(s map[string]string) {
	for _, instance := range []string{"one", "two"} {
		set := func(values, name string, labels ...string) { s[ofSidecar(instance, name, labels...)] = values }
		set(steady(1), isScraped)
		set(steady(1), hasReloaded)
		set(steady(0), refusedCalls, isQueueFull)
		for _, door := range []string{atCheck, atEnvoy} {
			set(rising(300), limitRequests, door, isAdmitted)
			set(rising(1), limitRequests, door, isFailed)
			for _, le := range []string{"0.01", "0.02", "0.05", "0.1", "0.5", "+Inf"} {
				set(rising(300), callSeconds, door, fmt.Sprintf("le=%q", le))
			}
		}
		set(rising(300), consumerCalls)
		set(rising(1), degradedCalls, fromDeadline)
		set(steady(0), rescues)
	}
}

// illSidecars returns the illnesses of sidecars and consumers.
func illSidecars() map[string]illness {
	one := func(key, values string) map[string]string { return map[string]string{key: values} }
	job := func(more ...string) map[string]string {
		labels := map[string]string{"namespace": "limits", "job": "sidecars"}
		for i := 0; i < len(more); i += 2 {
			labels[more[i]] = more[i+1]
		}
		return labels
	}
	slow := func(door string) map[string]string {
		s := map[string]string{}
		for _, le := range []string{"0.01", "0.02", "0.05"} {
			for _, instance := range []string{"one", "two"} {
				s[ofSidecar(instance, callSeconds, door, fmt.Sprintf("le=%q", le))] = rising(280)
			}
		}
		return s
	}
	slowCheck := slow(atCheck)
	slowCheck[ofSidecar("one", callSeconds, atCheck, `le="0.1"`)] = rising(280)
	slowCheck[ofSidecar("two", callSeconds, atCheck, `le="0.1"`)] = rising(280)
	gone := map[string]string{}
	for _, instance := range []string{"one", "two"} {
		gone[ofSidecar(instance, isScraped)] = stale
		gone[ofSidecar(instance, hasReloaded)] = stale
	}
	return map[string]illness{
		"SidecarAbsent": {gone, job(), "No sidecar of sidecars is scraped."},
		" One sidecar was removed": {series: map[string]string{
			ofSidecar("two", isScraped): stale, ofSidecar("two", hasReloaded): stale,
		}},
		"SidecarDown": {map[string]string{
			ofSidecar("two", isScraped): "1+0x70 0+0x30", ofSidecar("two", hasReloaded): stale,
		}, job("instance", "two"), "Sidecar two does not answer."},
		"SidecarRefuses": {one(ofSidecar("one", refusedCalls, isQueueFull), rising(60)),
			job("instance", "one", "reason", "queue_full"),
			"Sidecar one refuses 2 calls or connections per second (queue_full)."},
		" A sidecar refused a burst a while ago": {series: one(ofSidecar("one", refusedCalls, isQueueFull), jump(60))},
		"SidecarSlow": {slowCheck, job("door", "check"),
			"One call in a hundred at door check of sidecars takes 440ms."},
		"SidecarSlow for Envoy": {slow(atEnvoy), job("door", "envoy"),
			"One call in a hundred at door envoy of sidecars takes 92.5ms."},
		" A proxy's checks take as long": {series: slow(atCheck)},
		"LimitsUndecided": {one(ofSidecar("one", limitRequests, atCheck, isFailed), rising(30)), job("door", "check"),
			"1.033 requests per second at door check of sidecars got no decision."},
		"ConsumersDegraded": {one(ofSidecar("one", degradedCalls, fromDeadline), rising(30)), job("reason", "deadline"),
			"1.033 calls per second of sidecars got the answer of their degraded mode (deadline)."},
		"ConsumersRefill": {one(ofSidecar("one", rescues), rising(60)), job(),
			"Consumers of sidecars refill buckets themselves, 2 times per second."},
		" Consumers refilled a bucket once": {series: one(ofSidecar("one", rescues), jump(60))},
	}
}

// healthy returns the series of replicas and sidecars when everything works.
func healthy() map[string]string {
	s := map[string]string{sidecarReload: steady(1)}
	for instance, of := range targets {
		set := func(values, name string, labels ...string) { s[series(instance, name, labels...)] = values }
		leads := 0.0
		if of.leads {
			leads = 1
		}
		coordinates := 0.0
		if instance == "a" {
			coordinates = 1
		}
		set(steady(1), "build_info", `version="v1"`)
		for _, name := range []string{"redis_up", "election_up", "config_last_reload_ok"} {
			set(steady(1), name)
		}
		for _, name := range []string{"refills_paused", "refill_bucket_faults_total", "racing", "config_restart_needed",
			"buckets_conflicting", "templates_conflicting", "pools_conflicting", "buckets_outdated", "templates_outdated",
			"pools_outdated", "refill_errors_total", "pool_clock_voids_total", "pool_unreadable_records",
			"pool_shares_too_large_total", "pools_on_floor", "pools_closed", "pools_other_redis"} {
			set(steady(0), name)
		}
		set(steady(leads), "leading")
		set(steady(leads), "terms_total")
		set(steady(of.version), "config_version")
		set(steady(0.1), "refill_loop_turn_age_seconds")
		set(rising(of.refills), "refill_calls_total", isApplied)
		set(rising(1), "refill_calls_total", isStale)
		set(steady(0), "refill_calls_total", isMalform)
		set(steady(0), "template_refill_bucket_faults_total", ofTemplate)
		set(steady(0), "template_refill_calls_total", isMalform, ofTemplate)
		set(steady(coordinates), "pool_coordinating")
		set(steady(1), "pool_coordinated")
		set(steady(-0.002), "pool_clock_rate_error")
		set(rising(of.refills), "refills_total", ofCheckout)
		set(rising(of.refills/5), "refills_found_empty_total", ofCheckout)
		set(rising(of.refills*50), "credit_added_tokens_total", ofCheckout)
		set(rising(of.refills*50), "credit_due_tokens_total", ofCheckout)
		for _, name := range []string{"quarantines_total", "buckets_lost_total", "clock_steps_total"} {
			set(steady(0), name, ofCheckout)
		}
		for _, le := range []string{"0.005", "0.5", "1", "+Inf"} {
			set(rising(of.refills), "refill_lag_seconds_bucket", fmt.Sprintf("le=%q", le))
		}
		for _, le := range []string{"0.25", "1", "10", "+Inf"} {
			values := steady(0)
			if instance == "b" { // this replica took over once, quickly
				values = jump(70)
			}
			set(values, "takeover_gap_seconds_bucket", fmt.Sprintf("le=%q", le))
		}
	}
	// Only the coordinator exports these.
	s[series("a", "pools_overclaimed")] = steady(0)
	s[seenRegion("silent_seconds", "eu")] = steady(1)
	s[seenRegion("fenced", "eu")] = steady(0)
	healthySidecars(s)
	return s
}

// illness has series that differ from the healthy ones, and the expected alert.
type illness struct {
	series  map[string]string // values by series; "" means that the series is missing
	labels  map[string]string // of the alert
	summary string            // of the alert
}

// secondAlerts has a second alert that an illness may make fire.
var secondAlerts = map[string]string{"RefillsStopped with Redis at work": "BucketsNotRefilled"}

// of returns the labels of an alert about a release in a region. more has further labels: name, value, and so on.
func of(namespace, region string, more ...string) map[string]string {
	labels := map[string]string{"namespace": namespace, "job": "refiller", "region": region}
	for i := 0; i < len(more); i += 2 {
		labels[more[i]] = more[i+1]
	}
	return labels
}

// on returns the labels of an alert about a replica.
func on(instance string) map[string]string {
	t := targets[instance]
	return of(t.namespace, t.region, "instance", instance)
}

// illnesses returns the illnesses of refillers, by name. A name begins with the alert that the illness makes fire, and
// a description may follow after a space. If a name begins with a space, no alert fires.
func illnesses() map[string]illness {
	one := func(key, values string) map[string]string { return map[string]string{key: values} }
	inEU, checkout := of("limits", "eu"), of("limits", "eu", "bucket", "checkout")
	build := func(instance string) string { return series(instance, "build_info", `version="v1"`) }
	absent := map[string]string{}
	for instance := range targets {
		absent[build(instance)] = ""
	}
	slow := map[string]string{}
	for _, le := range []string{"0.25", "1"} {
		slow[series("b", "takeover_gap_seconds_bucket", fmt.Sprintf("le=%q", le))] = steady(0)
	}
	onFloor := map[string]string{}
	for _, instance := range []string{"a", "b", "c"} {
		onFloor[series(instance, "pools_on_floor")] = steady(3)
	}
	uncoordinated := one(series("a", "pool_coordinating"), steady(0))
	for instance := range targets {
		uncoordinated[series(instance, "pool_coordinated")] = steady(0)
	}
	atWork := map[string]string{
		series("a", "refills_total", ofCheckout):             steady(9),
		series("a", "refills_found_empty_total", ofCheckout): steady(9),
	}
	return map[string]illness{
		"RefillerAbsent": {series: absent, summary: "No refiller replica is scraped."},
		"RefillerAbsent in one region": {one(build("d"), stale), of("limits", "us"),
			"No refiller replica is scraped in region us."},
		"RefillerAbsent of one release": {one(build("e"), stale), of("mail", "eu"),
			"No refiller replica is scraped in region eu."},
		"RefillsStopped": {map[string]string{series("a", "refills_paused"): steady(1),
			series("b", "refills_paused"): steady(1), series("c", "refills_paused"): steady(1)}, inEU,
			"No bucket is refilled in region eu."},
		"RefillsStopped of one release": {one(series("e", "refills_paused"), steady(1)), of("mail", "eu"),
			"No bucket is refilled in region eu."},
		"RefillsStopped with Redis at work": {with(atWork, series("a", "refill_bucket_faults_total"), rising(10)), inEU,
			"No bucket is refilled in region eu."},
		"BucketsNotRefilled": {one(series("a", "refill_bucket_faults_total"), rising(6)), inEU,
			"Some buckets are not refilled in region eu."},
		"BucketsNotRefilled of a template": {one(series("b", "template_refill_bucket_faults_total", ofTemplate), rising(6)),
			inEU, "Some buckets are not refilled in region eu."},
		"BucketsNotRefilled since they hold something else": {map[string]string{
			series("d", "template_refill_calls_total", isMalform, ofTemplate): rising(6),
			series("d", "refill_calls_total", isMalform):                      rising(6),
		}, of("limits", "us"), "Some buckets are not refilled in region us."},
		" A bucket was forbidden for a moment":       {series: one(series("a", "refill_bucket_faults_total"), jump(85))},
		" Nothing is due: buckets of long intervals": {series: atWork},
		" One replica's way to Redis is broken":      {series: one(series("a", "refills_paused"), steady(1))},
		"RefillLoopHangs": {one(series("a", "refill_loop_turn_age_seconds"), steady(20)), on("a"),
			"The refill loop of a has been stuck for 20s."},
		"RedisUnreachable": {one(series("a", "redis_up"), steady(0)), on("a"), "Redis does not answer a."},
		"RefillErrors": {one(series("a", "refill_errors_total"), rising(30)), on("a"),
			"1 refill calls per second of a have no answer."},
		"RefillsLate": {map[string]string{series("a", "refill_lag_seconds_bucket", `le="0.005"`): rising(280),
			series("a", "refill_lag_seconds_bucket", `le="0.5"`): rising(280)}, inEU,
			"One refill in a hundred comes 925ms late in region eu."},
		"RefillsLate in one region": {map[string]string{series("d", "refill_lag_seconds_bucket", `le="0.005"`): rising(280),
			series("d", "refill_lag_seconds_bucket", `le="0.5"`): rising(280)}, of("limits", "us"),
			"One refill in a hundred comes 925ms late in region us."},
		"TakeoverSlow": {slow, inEU,
			"Buckets in region eu went 9.1s without a refill before another replica took over."},
		"CreditAboveDue": {one(series("a", "credit_added_tokens_total", ofCheckout), rising(15200)), checkout,
			"Bucket checkout in region eu got 4k tokens more than due in ten minutes."},
		"CreditBelowDue": {one(series("a", "credit_added_tokens_total", ofCheckout), rising(14000)), checkout,
			"Bucket checkout in region eu did not get 20k tokens that were due in ten minutes."},
		"BucketRolledBack": {one(series("a", "quarantines_total", ofCheckout), jump(80)), checkout,
			"Redis lost writes of bucket checkout in region eu."},
		"BucketLost": {one(series("a", "buckets_lost_total", ofCheckout), jump(80)), checkout,
			"Redis lost bucket checkout in region eu."},
		"RedisClockStepped": {one(series("a", "clock_steps_total", ofCheckout), jump(80)), inEU,
			"The clock of Redis stepped back in region eu."},
		"NoLeader": {one(series("a", "leading"), steady(0)), inEU, "No replica leads in region eu."},
		"TwoLeaders": {one(series("b", "leading"), steady(1)), inEU,
			"2 replicas believe that they lead in region eu."},
		"LeadershipFlaps":     {one(series("a", "terms_total"), rising(1)), inEU, "30 terms in 15 minutes in region eu."},
		"ElectionUnreachable": {one(series("a", "election_up"), steady(0)), on("a"), "etcd does not answer a."},
		"ReplicaRaces":        {one(series("b", "racing"), steady(1)), on("b"), "b has been racing for five minutes."},
		"ConfigRefused": {one(series("b", "config_last_reload_ok"), steady(0)), on("b"),
			"b refused a new configuration."},
		"ConfigRefused by a sidecar": {one(sidecarReload, steady(0)), map[string]string{"instance": "sidecar"},
			"sidecar refused a new configuration."},
		"ConfigVersionsDiffer": {one(series("b", "config_version"), steady(6)), inEU,
			"Replicas of region eu have had different versions of the configuration for five minutes."},
		"ConfigNeedsRestart": {one(series("b", "config_restart_needed"), steady(1)), on("b"),
			"b has changes in its file that need a restart."},
		"ConfigOutdated": {map[string]string{series("b", "templates_outdated"): steady(1),
			series("b", "buckets_outdated"): steady(2)}, on("b"),
			"The file of b is not in force for 3 buckets, sets of templates or sets of pools: a later version is."},
		"PolicyConflict": {map[string]string{series("b", "buckets_conflicting"): steady(2),
			series("b", "config_last_reload_ok"): steady(0)}, on("b"),
			"The file of b differs from what is in force under its version in 2 buckets, sets of templates or sets of pools."},
		"PoolUncoordinated": {uncoordinated, nil, "No replica finds a coordinator of the pools in etcd."},
		" The pools are coordinated in a region that this Prometheus doesn't scrape": {
			series: one(series("a", "pool_coordinating"), steady(0))},
		"PoolRegionOnFloor":                           {onFloor, inEU, "Region eu is on its floor of 3 pools."},
		" One replica has yet to read the new grants": {series: one(series("a", "pools_on_floor"), steady(3))},
		"PoolRegionSilent": {one(seenRegion("silent_seconds", "eu"), steady(90)), map[string]string{"region": "eu"},
			"The coordinator has had no report from region eu for 1m 30s."},
		"PoolClosed": {one(series("b", "pools_closed"), steady(2)), nil,
			"2 pools are closed: they wait for some of their regions."},
		"PoolRegionFenced": {one(seenRegion("fenced", "eu"), steady(1)), map[string]string{"region": "eu"},
			"Region eu has been fenced for half an hour."},
		"PoolOverclaimed": {one(series("a", "pools_overclaimed"), steady(2)), nil,
			"The regions may be using more than the rate of 2 pools."},
		"PoolClockDrifts": {one(series("b", "pool_clock_rate_error"), steady(-0.05)), on("b"),
			"The clock of Redis runs 5% fast or slow against that of b."},
		"PoolClockDrifts fast": {one(series("b", "pool_clock_rate_error"), steady(0.02)), on("b"),
			"The clock of Redis runs 2% fast or slow against that of b."},
		" A clock is slewed a little": {series: one(series("b", "pool_clock_rate_error"), steady(0.009))},
		"PoolRegionDoubled": {one(series("b", "pools_other_redis"), steady(4)), inEU,
			"More than one Redis reports for region eu, in 4 pools."},
		"PoolRecordsUnreadable": {one(series("a", "pool_unreadable_records"), steady(2)), nil,
			"The coordinator can't read 2 records of pools in etcd."},
		"PoolShareTooLarge": {one(series("a", "pool_shares_too_large_total"), jump(80)), on("a"),
			"a can't write a region's share, which is too large for etcd."},
		"PoolClockVoided": {one(series("b", "pool_clock_voids_total"), jump(80)), map[string]string{"instance": "b"},
			"The clock of Redis does not agree with that of b."},
		"BucketEmpty": {one(series("a", "refills_found_empty_total", ofCheckout), rising(299)), checkout,
			"Bucket checkout in region eu has been empty for 15 minutes."},
		"BucketEmpty in one region": {one(series("d", "refills_found_empty_total", ofCheckout), rising(299)),
			of("limits", "us", "bucket", "checkout"), "Bucket checkout in region us has been empty for 15 minutes."},
	}
}

// with returns a copy of the series with one more.
func with(series map[string]string, key, values string) map[string]string {
	all := maps.Clone(series)
	all[key] = values
	return all
}

// ruleTest returns one test in the form that promtool reads.
func ruleTest(t *testing.T, rules []rule, name string, ill illness) map[string]any {
	fires, _, _ := strings.Cut(name, " ")
	series := healthy()
	for k, v := range ill.series {
		_, known := series[k]
		require.True(t, known, "%s: no healthy series %s", name, k)
		series[k] = v
		if v == "" {
			delete(series, k)
		}
	}
	var input, expect []map[string]any
	for _, k := range slices.Sorted(maps.Keys(series)) {
		input = append(input, map[string]any{"series": k, "values": series[k]})
	}
	for _, r := range rules {
		if r.Alert == secondAlerts[name] {
			continue
		}
		alerts := []any{}
		if r.Alert == fires {
			labels, annotations := maps.Clone(r.Labels), maps.Clone(r.Annotations)
			maps.Copy(labels, ill.labels)
			annotations["summary"] = ill.summary
			alerts = append(alerts, map[string]any{"exp_labels": labels, "exp_annotations": annotations})
		}
		expect = append(expect, map[string]any{"eval_time": judged, "alertname": r.Alert, "exp_alerts": alerts})
	}
	return map[string]any{"name": name, "interval": step, "input_series": input, "alert_rule_test": expect}
}

func TestEachAlertFiresForItsFaultAlone(t *testing.T) {
	t.Parallel()
	promtool := tool(t, "promtool")
	rules, ills := alertRules(t), illnesses()
	maps.Copy(ills, illSidecars())
	tests := []any{ruleTest(t, rules, " healthy", illness{})}
	for _, r := range rules {
		require.Contains(t, ills, r.Alert, "every alert has its test")
	}
	for name, ill := range ills {
		tests = append(tests, ruleTest(t, rules, name, ill))
	}

	path, err := filepath.Abs(filepath.Join(monitoring, "alerts.yaml"))
	require.NoError(t, err)
	out, err := exec.CommandContext(t.Context(), promtool, "check", "rules", path).CombinedOutput()
	require.NoError(t, err, "%s", out)
	data, err := yaml.Marshal(map[string]any{"rule_files": []string{path}, "evaluation_interval": step, "tests": tests})
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "tests.yaml")
	require.NoError(t, os.WriteFile(file, data, 0o600))
	out, err = exec.CommandContext(t.Context(), promtool, "test", "rules", file).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

func TestPrometheusAcceptsTheConfigurationOfTheDemo(t *testing.T) {
	t.Parallel()
	args := []string{"check", "config", "--syntax-only", "../../deploy/compose/prometheus.yaml"}
	out, err := exec.CommandContext(t.Context(), tool(t, "promtool"), args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

func TestEachAlertHasARunbook(t *testing.T) {
	t.Parallel()
	doc, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	for _, r := range alertRules(t) {
		require.Contains(t, string(doc), "\n### "+r.Alert+"\n")
		require.True(t, strings.HasSuffix(r.Annotations["runbook_url"], "docs/operations.md#"+strings.ToLower(r.Alert)),
			r.Alert)
	}
}

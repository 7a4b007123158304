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

// tool is the path of a program of Debian's package prometheus.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	require.NoError(t, err, "scripts/require.sh prometheus installs %s", name)
	return path
}

// The unit tests of the rules see three replicas of region eu, of which a refills
// and leads, and one of region us, for 50 minutes with a sample every 30 s. A sample is written as promtool wants
// it: first+step×count.
const (
	sampled = 100
	step    = "30s"
	judged  = "45m" // sample 90
)

func steady(v float64) string { return fmt.Sprintf("%g+0x%d", v, sampled) }

func rising(step int) string { return fmt.Sprintf("0+%dx%d", step, sampled) }

// jump is 0 up to the sample, and 1 from then on.
func jump(sample int) string { return fmt.Sprintf("0+0x%d 1+0x%d", sample-1, sampled-sample) }

// healthy are the series of the replicas with nothing wrong.
func healthy() map[string]string {
	s := map[string]string{}
	for _, instance := range []string{"a", "b", "c", "d"} {
		set := func(name, labels, values string) {
			s[fmt.Sprintf(`refiller_%s{instance=%q%s}`, name, instance, labels)] = values
		}
		leads, idle := 0.0, func(int) string { return steady(0) }
		if instance == "a" || instance == "d" {
			leads, idle = 1, rising
		}
		region := "eu"
		version := 7.0
		key := "checkout"
		coordinates := leads
		if instance == "d" { // it has a file of its own
			region = "us"
			version = 9
			key = "orders"
			coordinates = 0
		}
		set("build_info", fmt.Sprintf(`,region=%q,version="v1"`, region), steady(1))
		set("redis_up", "", steady(1))
		set("refills_paused", "", steady(0))
		set("refill_bucket_faults_total", "", steady(0))
		set("election_up", "", steady(1))
		set("leading", "", steady(leads))
		set("terms_total", "", steady(leads))
		set("racing", "", steady(0))
		set("config_version", "", steady(version))
		set("config_last_reload_ok", "", steady(1))
		set("config_restart_needed", "", steady(0))
		set("buckets_conflicting", "", steady(0))
		set("templates_conflicting", "", steady(0))
		set("pools_conflicting", "", steady(0))
		set("buckets_outdated", "", steady(0))
		set("templates_outdated", "", steady(0))
		set("pools_outdated", "", steady(0))
		set("refill_loop_turn_age_seconds", "", steady(0.1))
		set("refill_errors_total", "", steady(0))
		set("refill_calls_total", `,status="applied"`, idle(300))
		set("refill_calls_total", `,status="stale"`, rising(1))
		set("refill_calls_total", `,status="malformed"`, steady(0))
		set("template_refill_bucket_faults_total", `,template="user:"`, steady(0))
		set("template_refill_calls_total", `,status="malformed",template="user:"`, steady(0))
		set("pool_coordinating", "", steady(coordinates))
		set("pool_clock_voids_total", "", steady(0))
		set("pool_grant_remaining_seconds", fmt.Sprintf(`,pool="payments",region=%q`, region), steady(11))
		bucket := fmt.Sprintf(`,bucket=%q`, key)
		set("refills_total", bucket, idle(300))
		set("refills_found_empty_total", bucket, idle(60))
		set("credit_added_tokens_total", bucket, idle(15000))
		set("credit_due_tokens_total", bucket, idle(15000))
		set("quarantines_total", bucket, steady(0))
		set("buckets_lost_total", bucket, steady(0))
		set("clock_steps_total", bucket, steady(0))
		for _, le := range []string{"0.005", "0.5", "1", "+Inf"} {
			set("refill_lag_seconds_bucket", fmt.Sprintf(`,le=%q`, le), idle(300))
		}
		for _, le := range []string{"0.25", "1", "10", "+Inf"} {
			values := steady(0)
			if instance == "b" { // it took over once, quickly
				values = jump(70)
			}
			set("takeover_gap_seconds_bucket", fmt.Sprintf(`,le=%q`, le), values)
		}
	}
	// What the coordinator alone exports.
	s[`refiller_pool_limit_tokens_per_second{instance="a",pool="payments"}`] = steady(1000)
	s[`refiller_pool_claimed_tokens_per_second{instance="a",pool="payments"}`] = steady(1000)
	s[`refiller_pool_waits{instance="a",pool="payments"}`] = steady(0)
	s[`refiller_pool_region_silent_seconds{instance="a",region="eu"}`] = steady(1)
	s[`refiller_pool_region_fenced{instance="a",region="eu"}`] = steady(0)
	s["refiller_sidecar_limits_last_reload_ok"+ofSidecar] = steady(1)
	return s
}

// illness is what makes one alert fire, or none: series that differ from the healthy ones ("" for gone), and the alert
// expected.
type illness struct {
	series  map[string]string
	labels  map[string]string
	summary string
}

// also is the alert that fires beside the one that an illness is about.
var also = map[string]string{"RefillsStopped with Redis at work": "BucketsNotRefilled"}

const (
	ofA       = `{instance="a"}`
	ofB       = `{instance="b"}`
	checkoutA = `{instance="a",bucket="checkout"}`
	ofSidecar = `{instance="sidecar"}`
)

// illnesses are by the alert that they make fire and, after a space, how; without an alert none fires.
func illnesses() map[string]illness {
	on := func(instance string) map[string]string { return map[string]string{"instance": instance} }
	onBucket, inEU := map[string]string{"bucket": "checkout"}, map[string]string{"region": "eu"}
	slow := map[string]string{}
	for _, le := range []string{"0.25", "1"} {
		slow[fmt.Sprintf(`refiller_takeover_gap_seconds_bucket{instance="b",le=%q}`, le)] = steady(0)
	}
	onFloor := map[string]string{}
	for _, instance := range []string{"a", "b", "c"} {
		onFloor[fmt.Sprintf(`refiller_pool_grant_remaining_seconds{instance=%q,pool="payments",region="eu"}`,
			instance)] = steady(0)
	}
	return map[string]illness{
		"RefillerAbsent": {series: map[string]string{
			`refiller_build_info{instance="a",region="eu",version="v1"}`: "",
			`refiller_build_info{instance="b",region="eu",version="v1"}`: "",
			`refiller_build_info{instance="c",region="eu",version="v1"}`: "",
			`refiller_build_info{instance="d",region="us",version="v1"}`: "",
		}, summary: "No refiller replica is scraped."},
		"RefillerAbsent in one region": {map[string]string{
			`refiller_build_info{instance="d",region="us",version="v1"}`: "1+0x70 stale",
		}, map[string]string{"region": "us"}, "No refiller replica is scraped in region us."},
		"RefillsStopped": {series: map[string]string{
			"refiller_refills_paused" + ofA: steady(1), "refiller_refills_paused" + ofB: steady(1),
			`refiller_refills_paused{instance="c"}`: steady(1),
		}, labels: inEU, summary: "No bucket is refilled in region eu."},
		"RefillsStopped with Redis at work": {series: map[string]string{
			"refiller_refills_total" + checkoutA: steady(9), "refiller_refills_found_empty_total" + checkoutA: steady(9),
			"refiller_refill_bucket_faults_total" + ofA: rising(10),
		}, labels: inEU, summary: "No bucket is refilled in region eu."},
		"BucketsNotRefilled": {series: map[string]string{"refiller_refill_bucket_faults_total" + ofA: rising(6)},
			labels: inEU, summary: "Some buckets are not refilled in region eu."},
		"BucketsNotRefilled of a template": {series: map[string]string{
			`refiller_template_refill_bucket_faults_total{instance="b",template="user:"}`: rising(6),
		}, labels: inEU, summary: "Some buckets are not refilled in region eu."},
		"BucketsNotRefilled since they hold something else": {series: map[string]string{
			`refiller_template_refill_calls_total{instance="d",status="malformed",template="user:"}`: rising(6),
			`refiller_refill_calls_total{instance="d",status="malformed"}`:                           rising(6),
		}, labels: map[string]string{"region": "us"}, summary: "Some buckets are not refilled in region us."},
		" A bucket was forbidden for a moment": {series: map[string]string{
			"refiller_refill_bucket_faults_total" + ofA: jump(85)}},
		" Nothing is due: buckets of long intervals": {series: map[string]string{
			"refiller_refills_total" + checkoutA: steady(9), "refiller_refills_found_empty_total" + checkoutA: steady(9),
		}},
		" One replica's way to Redis is broken": {series: map[string]string{"refiller_refills_paused" + ofA: steady(1)}},
		"RefillLoopHangs": {map[string]string{"refiller_refill_loop_turn_age_seconds" + ofA: steady(20)}, on("a"),
			"The refill loop of a has not gone round for 20s."},
		"RedisUnreachable": {map[string]string{"refiller_redis_up" + ofA: steady(0)}, on("a"), "Redis does not answer a."},
		"RefillErrors": {map[string]string{"refiller_refill_errors_total" + ofA: rising(30)}, on("a"),
			"1 refill calls per second of a have no answer."},
		"RefillsLate": {map[string]string{`refiller_refill_lag_seconds_bucket{instance="a",le="0.005"}`: rising(280),
			`refiller_refill_lag_seconds_bucket{instance="a",le="0.5"}`: rising(280)}, nil,
			"One refill in a hundred comes 850ms late."},
		"TakeoverSlow": {slow, nil, "Buckets went 9.1s without a refill before another replica took over."},
		"CreditAboveDue": {map[string]string{"refiller_credit_added_tokens_total" + checkoutA: rising(15200)}, nil,
			"4k tokens more than due were credited in ten minutes."},
		"CreditBelowDue": {map[string]string{"refiller_credit_added_tokens_total" + checkoutA: rising(14000)}, nil,
			"20k tokens that were due in ten minutes were not credited."},
		"BucketRolledBack": {map[string]string{"refiller_quarantines_total" + checkoutA: jump(80)}, onBucket,
			"Redis lost writes of bucket checkout."},
		"BucketLost": {map[string]string{"refiller_buckets_lost_total" + checkoutA: jump(80)}, onBucket,
			"Redis lost bucket checkout."},
		"RedisClockStepped": {map[string]string{"refiller_clock_steps_total" + checkoutA: jump(80)}, nil,
			"The clock of Redis stepped back."},
		"NoLeader": {map[string]string{"refiller_leading" + ofA: steady(0)}, inEU,
			"No replica leads in region eu."},
		"TwoLeaders": {map[string]string{"refiller_leading" + ofB: steady(1)}, inEU,
			"2 replicas believe that they lead in region eu."},
		"LeadershipFlaps": {map[string]string{"refiller_terms_total" + ofA: rising(1)}, inEU,
			"30 terms in 15 minutes in region eu."},
		"ElectionUnreachable": {map[string]string{"refiller_election_up" + ofA: steady(0)}, on("a"),
			"etcd does not answer a."},
		"ReplicaRaces": {map[string]string{"refiller_racing" + ofB: steady(1)}, on("b"),
			"b has been racing for five minutes."},
		"ConfigRefused": {map[string]string{"refiller_config_last_reload_ok" + ofB: steady(0)}, on("b"),
			"b refused a new configuration."},
		"ConfigRefused by a sidecar": {map[string]string{"refiller_sidecar_limits_last_reload_ok" + ofSidecar: steady(0)},
			on("sidecar"), "sidecar refused a new configuration."},
		"ConfigVersionsDiffer": {map[string]string{"refiller_config_version" + ofB: steady(6)}, inEU,
			"Replicas of region eu have had different versions of the configuration for five minutes."},
		"ConfigNeedsRestart": {map[string]string{"refiller_config_restart_needed" + ofB: steady(1)}, on("b"),
			"b has changes in its file that need a restart."},
		"ConfigOutdated": {map[string]string{"refiller_templates_outdated" + ofB: steady(1),
			"refiller_buckets_outdated" + ofB: steady(2)}, on("b"), "The file of b has no say over 3 buckets, sets of templates " +
			"or of pools: a later version is in force."},
		"PolicyConflict": {map[string]string{"refiller_buckets_conflicting" + ofB: steady(2),
			"refiller_config_last_reload_ok" + ofB: steady(0)}, on("b"),
			"The file of b differs from what is in force under its version in 2 buckets, sets of templates or of pools."},
		"PoolUncoordinated": {map[string]string{"refiller_pool_coordinating" + ofA: steady(0)}, nil,
			"Nobody coordinates the pools."},
		"PoolRegionOnFloor": {onFloor, map[string]string{"pool": "payments", "region": "eu"},
			"Region eu is on its floor of pool payments."},
		"PoolRegionSilent": {map[string]string{`refiller_pool_region_silent_seconds{instance="a",region="eu"}`: steady(90)},
			map[string]string{"region": "eu"},
			"The coordinator has not heard of region eu for 1m 30s."},
		"PoolClosed": {map[string]string{`refiller_pool_waits{instance="a",pool="payments"}`: steady(2)},
			map[string]string{"pool": "payments"}, "Pool payments is closed: it waits for 2 of its regions."},
		"PoolRegionFenced": {map[string]string{`refiller_pool_region_fenced{instance="a",region="eu"}`: steady(1)},
			map[string]string{"region": "eu"},
			"Region eu has been fenced for half an hour."},
		"PoolOverclaimed": {map[string]string{`refiller_pool_claimed_tokens_per_second{instance="a",pool="payments"}`: steady(
			1200)}, map[string]string{"pool": "payments"},
			"The regions may be using 1.2k/s of pool payments, which is more than its rate."},
		"PoolClockVoided": {map[string]string{"refiller_pool_clock_voids_total" + ofB: jump(80)}, on("b"),
			"The clock of Redis does not agree with that of b."},
		"BucketEmpty": {map[string]string{"refiller_refills_found_empty_total" + checkoutA: rising(299)}, onBucket,
			"Bucket checkout has been empty for 15 minutes."},
	}
}

// ruleTest is one test as promtool reads it.
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
		if r.Alert == also[name] {
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

package metrics_test

import (
	"fmt"
	"io"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/metrics"
	"github.com/tokenrefill/refiller/internal/operate/stats"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
	"github.com/tokenrefill/refiller/refill/flow"
)

func bucket(key string) refill.Bucket {
	return refill.Bucket{Key: key, Policy: policy.Policy{Capacity: 1000, Rate: policy.PerSecond(500),
		Interval: 100 * time.Millisecond}}
}

func applied(key string, index, added int64) refill.Event {
	terms := bucket(key).Policy.Terms(policy.Fence{})
	return refill.Event{
		Key: key, Replied: time.Now(), Call: policy.Call{Terms: &terms},
		Outcome: policy.Outcome{Status: policy.StatusApplied, Version: policy.Version{Era: 1, Index: index}, Added: added,
			Elapsed: 100_000, Tokens: 500},
	}
}

func scrape(t *testing.T, m *metrics.Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	require.Equal(t, 200, w.Code, "%s", w.Body)
	body, err := io.ReadAll(w.Body)
	require.NoError(t, err)
	return string(body)
}

func TestDenialsOfBucketsInShadowModeAreCounters(t *testing.T) {
	tl := stats.New()
	tl.Configure([]refill.Bucket{bucket("trial")})
	m := metrics.New("test", "eu", tl, func() metrics.State {
		return metrics.State{Shadow: map[string]int64{"trial": 15, "\xff": 2, "\xfe": 3}}
	})
	body := scrape(t, m)
	require.Contains(t, body, "# TYPE refiller_shadow_denied_tokens_total counter")
	require.Contains(t, body, `refiller_shadow_denied_tokens_total{bucket="trial",region="eu"} 15`)
	require.Contains(t, body, `refiller_shadow_denied_tokens_total{bucket="other",region="eu"} 5`)
}

func TestTemplatesHaveSeriesOfTheirOwn(t *testing.T) {
	lag := make([]int64, len(refill.LagBounds)+1)
	lag[0] = 90
	lag[2] = 8
	lag[len(lag)-1] = 2
	m := metrics.New("test", "eu", stats.New(), func() metrics.State {
		return metrics.State{Refill: refill.Stats{Templates: []refill.TemplateStats{
			{Prefix: "user:", Shards: 6, Active: 1234,
				Calls: map[policy.Status]int64{policy.StatusApplied: 100, policy.StatusStale: 7}, Left: 3,
				Added: 500, Lag: lag, LagSum: 30 * time.Second},
			{Prefix: "\xff", Calls: map[policy.Status]int64{}, Lag: make([]int64, len(lag))},
		}}}
	})
	body := scrape(t, m)
	for _, line := range []string{
		`refiller_template_active_buckets{region="eu",template="user:"} 1234`,
		`refiller_template_shards{region="eu",template="user:"} 6`,
		`refiller_template_refill_calls_total{region="eu",status="applied",template="user:"} 100`,
		`refiller_template_refill_calls_total{region="eu",status="stale",template="user:"} 7`,
		`refiller_template_left_total{region="eu",template="user:"} 3`,
		`refiller_template_credit_added_tokens_total{region="eu",template="user:"} 500`,
		`refiller_template_refill_lag_seconds_bucket{region="eu",template="user:",le="0.001"} 90`,
		`refiller_template_refill_lag_seconds_bucket{region="eu",template="user:",le="0.005"} 98`,
		`refiller_template_refill_lag_seconds_bucket{region="eu",template="user:",le="+Inf"} 100`,
		`refiller_template_refill_lag_seconds_sum{region="eu",template="user:"} 30`,
	} {
		require.Contains(t, body, line)
	}
}

func TestTheNumberOfSeriesIsBounded(t *testing.T) {
	tl := stats.New()
	var list []refill.Bucket
	for i := range 1000 {
		list = append(list, bucket(fmt.Sprintf("b%04d", i)))
	}
	list = append(list, bucket(metrics.Other), bucket("\xff"))
	tl.Configure(list)
	m := metrics.New("test", "eu", tl, func() metrics.State { return metrics.State{} })
	for i, b := range list {
		for index := range int64(3) {
			m.Observe(applied(b.Key, index, int64(i%10)))
		}
	}
	m.Observe(applied("user:4711", 1, 5))
	body := scrape(t, m)
	require.Equal(t, metrics.MaxBuckets+1, strings.Count(body, "refiller_credit_added_tokens_total{"))
	require.Equal(t, metrics.MaxBuckets, strings.Count(body, "refiller_bucket_tokens{"))
	require.Contains(t, body, `refiller_credit_added_tokens_total{bucket="b0007",region="eu"} 21`)
	others := 1002 - metrics.MaxBuckets
	require.Contains(t, body, fmt.Sprintf(`refiller_refills_total{bucket="other",region="eu"} %d`, 3*others))
	require.NotContains(t, body, "user:", "keys that clients choose are no labels")

	for _, b := range list[len(list)/2-100:] { // some of them have series of their own, and some don't
		e := applied(b.Key, 3, 0)
		e.Outcome.Fence.Epoch++
		e.Outcome.FileVersion = e.Outcome.Fence.Epoch
		m.Observe(e)
	}
	for _, b := range list[:len(list)/2-100] {
		e := applied(b.Key, 3, 0)
		e.Outcome.Differs = true
		m.Observe(e)
	}
	body = scrape(t, m)
	require.Contains(t, body, fmt.Sprintf(`refiller_buckets_outdated{region="eu"} %d`, len(list)-len(list)/2+100))
	require.Contains(t, body, fmt.Sprintf(`refiller_buckets_conflicting{region="eu"} %d`, len(list)/2-100))

	// When a bucket with series of its own is removed, no bucket in the sum gets series of its own instead.
	tl.Configure(list[1:])
	body = scrape(t, m)
	require.Equal(t, metrics.MaxBuckets, strings.Count(body, "refiller_credit_added_tokens_total{"))
	require.Contains(t, body, fmt.Sprintf(`refiller_refills_total{bucket="other",region="eu"} %d`, 4*others))
	tl.Configure(append(list[1:], bucket("a-new-one")))
	require.Contains(t, scrape(t, m), `refiller_refills_total{bucket="a-new-one",region="eu"} 0`)
}

func TestABucketWithFlowsHasMetricsOfThem(t *testing.T) {
	tl := stats.New()
	tl.Configure([]refill.Bucket{bucket("acme"), bucket("\xff"), bucket("plain")})
	m := metrics.New("test", "eu", tl, func() metrics.State { return metrics.State{} })
	m.Observe(applied("plain", 1, 5))
	require.NotContains(t, scrape(t, m), "refiller_flows")
	for _, key := range []string{"acme", "acme", "\xff"} {
		e := applied(key, 1, 5)
		e.Flows = &refill.FlowsRead{
			Covered: time.Second, Summary: flow.Summary{Seen: 51, Listed: 23, Level: 19.5},
			Flows: []refill.FlowUse{{Name: "loud", Asked: 9, Denied: 7, Listed: true}, {Name: "quiet", Asked: 4, Denied: 2}},
		}
		m.Observe(e)
	}
	body := scrape(t, m)
	for _, line := range []string{
		`refiller_flows_seen{bucket="acme",region="eu"} 51`,
		`refiller_flows_listed{bucket="acme",region="eu"} 23`,
		`refiller_flows_level_tokens_per_second{bucket="acme",region="eu"} 19.5`,
		`refiller_flows_denied_tokens_total{bucket="acme",flows="listed",region="eu"} 14`,
		`refiller_flows_denied_tokens_total{bucket="acme",flows="other",region="eu"} 4`,
		`refiller_flows_denied_tokens_total{bucket="other",flows="listed",region="eu"} 7`,
		`refiller_flows_denied_tokens_total{bucket="other",flows="other",region="eu"} 2`,
	} {
		require.Contains(t, body, line+"\n")
	}
	require.NotContains(t, body, `refiller_flows_seen{bucket="other"`)
	require.NotContains(t, body, `refiller_flows_denied_tokens_total{bucket="plain"`)
	require.NotContains(t, body, "loud", "names that callers choose are no labels")
}

func TestElectionMetricsExistInElectionModeOnly(t *testing.T) {
	state := metrics.State{}
	m := metrics.New("test", "eu", stats.New(), func() metrics.State { return state })
	require.NotContains(t, scrape(t, m), "refiller_leading")
	state = metrics.State{Elected: true, ElectionUp: true, Terms: 3, Refill: refill.Stats{Leading: true, Epoch: 42}}
	body := scrape(t, m)
	for _, line := range []string{
		`refiller_leading{region="eu"} 1`, `refiller_epoch{region="eu"} 42`, `refiller_terms_total{region="eu"} 3`,
		`refiller_racing{region="eu"} 0`, `refiller_election_up{region="eu"} 1`,
	} {
		require.Contains(t, body, line+"\n")
	}
}

func TestCallsAndReloadsAreCountedByResult(t *testing.T) {
	m := metrics.New("v1.2.3", "eu", stats.New(), func() metrics.State {
		return metrics.State{
			Refill: refill.Stats{Calls: map[policy.Status]int64{policy.StatusApplied: 5, policy.StatusStale: 2},
				Errors: 1, Version: 9},
			Reloads:       map[string]int64{"applied": 4, "refused": 1},
			ReloadRefused: true, RestartNeeded: true,
		}
	})
	body := scrape(t, m)
	for _, line := range []string{
		`refiller_refill_calls_total{region="eu",status="applied"} 5`,
		`refiller_refill_calls_total{region="eu",status="stale"} 2`,
		`refiller_refill_calls_total{region="eu",status="malformed"} 0`,
		`refiller_refill_errors_total{region="eu"} 1`,
		`refiller_config_version{region="eu"} 9`,
		`refiller_config_reloads_total{region="eu",result="applied"} 4`,
		`refiller_config_reloads_total{region="eu",result="refused"} 1`,
		`refiller_config_last_reload_ok{region="eu"} 0`,
		`refiller_config_restart_needed{region="eu"} 1`,
		`refiller_redis_up{region="eu"} 0`,
	} {
		require.Contains(t, body, line+"\n")
	}
	require.Contains(t, body, `region="eu",version="v1.2.3"`)
}

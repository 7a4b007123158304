package sidecar

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	descriptorpb "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
)

const limitRequests = "refiller_sidecar_limit_requests_total"

// outcomes returns the numbers of requests to a limit through a door, by outcome. It leaves out outcomes without
// requests.
func outcomes(t *testing.T, registry *prometheus.Registry, door, limit string) map[string]int {
	t.Helper()
	found := make(map[string]int)
	for _, outcome := range []string{"admitted", "near_limit", "denied", "shadow", "failed", "refused", "cancelled"} {
		n := counted(t, registry, limitRequests, "door", door, "limit", limit, "outcome", outcome)
		if n > 0 {
			found[outcome] = int(n)
		}
	}
	return found
}

func TestRequestsToNamedLimitsAreCountedByOutcome(t *testing.T) {
	t.Parallel()
	const file = `
limits:
  - {name: hourly, window: {limit: 5, length: 1h}}
  - {name: mail, schedule: {windows: [{limit: 1, length: 1m}]}}
  - {name: pool, bucket: {prefix: "team:"}}
`
	registry := prometheus.NewRegistry()
	b := start(t, func(o *Options, b *bench) {
		o.Named, o.Deadline = b.named(file), patience
		o.Registry = registry
	})
	shadowed := hourly(1)
	shadowed.Shadow = true
	createBucket(t, b.rdb, "team:red", shadowed)
	c := refillerv1.NewLimitsClient(b.dial())
	takes := map[string]func(limit, key string, n int64){
		"http": func(limit, key string, n int64) {
			b.post("/v1/limits/"+limit+"/take", string(marshal(t, map[string]any{"key": key, "tokens": n})))
		},
		"grpc": func(limit, key string, n int64) {
			_, _ = c.Take(t.Context(), &refillerv1.TakeLimitRequest{Name: limit, Key: key, Tokens: &n}) // counted if it fails
		},
		"check": func(limit, key string, n int64) {
			b.do(http.MethodGet, fmt.Sprintf("/v1/check?limit=%s&key=%s&tokens=%d", limit, key, n), "")
		},
	}
	for _, door := range []string{"http", "grpc", "check"} {
		take := takes[door]
		for range 6 { // one more than the limit of five
			take("hourly", door, 1)
		}
		take("hourly", "large", 6)
		require.Equal(t, map[string]int{"admitted": 4, "near_limit": 1, "denied": 1, "refused": 1},
			outcomes(t, registry, door, "hourly"), door)
		take("pool", "red", 1)
		take("pool", "red", 1)
		take("pool", "none", 1)
		take("none", "red", 1)
		require.Zero(t, counted(t, registry, limitRequests, "limit", "none"), "an unknown limit has no series")
		require.Positive(t, counted(t, registry, "refiller_sidecar_call_seconds", "door", door))
	}
	require.Equal(t, map[string]int{"near_limit": 1, "shadow": 1, "refused": 1}, outcomes(t, registry, "http", "pool"))
	require.Equal(t, 2, outcomes(t, registry, "grpc", "pool")["shadow"])
	door := openHTTP(b)
	at := time.Now().Add(time.Hour)
	door.reserve("mail", "u", "a", at)
	door.reserve("mail", "u", "b", at)
	require.Equal(t, map[string]int{"near_limit": 1, "denied": 1}, outcomes(t, registry, "http", "mail"))
	b.redis.Kill()
	for door, take := range takes {
		take("hourly", door, 1)
		require.Equal(t, 1, outcomes(t, registry, door, "hourly")["failed"], door)
	}
}

func TestEnvoysDescriptorsAreCountedByTheirLimit(t *testing.T) {
	t.Parallel()
	const file = `
domain: edge
descriptors:
  - {key: checkout, value: pay, rate_limit: {unit: hour, requests_per_unit: 5}}
  - {key: trial, rate_limit: {unit: hour, requests_per_unit: 1}, shadow_mode: true}
  - {key: free, rate_limit: {unlimited: true}}
  - key: path
    value: /v*
    value_to_metric: true
    descriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 5}}]
  - key: tenant
    descriptors: [{key: user, detailed_metric: true, rate_limit: {unit: hour, requests_per_unit: 5}}]
  - key: host
    value: "a*"
    share_threshold: true
    detailed_metric: true
    rate_limit: {unit: hour, requests_per_unit: 5}
`
	registry := prometheus.NewRegistry()
	b := start(t, func(o *Options, b *bench) {
		limits, err := envoy.Parse(map[string][]byte{"edge.yaml": []byte(file)},
			envoy.NewWindows(b.rdb, always(patience), envoy.DefaultWindowOptions()))
		require.NoError(t, err)
		o.Envoy, o.Registry = limits, registry
	})
	c := rls.NewRateLimitServiceClient(b.dial())
	for range 6 {
		should(t, c, request(0, of("checkout", "pay"), of("free", "x"), of("unknown", "x")))
	}
	for range 2 {
		should(t, c, request(0, of("trial", "7")))
	}
	should(t, c, request(0, of("path", "/v1", "user", "7"), of("tenant", "acme", "user", "7"), of("host", "abc")))
	own := of("partner", "acme")
	own.Limit = &descriptorpb.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: 5, Unit: typepb.RateLimitUnit_HOUR}
	should(t, c, request(0, own))
	for limit, want := range map[string]map[string]int{
		"edge.checkout_pay":       {"admitted": 4, "near_limit": 1, "denied": 1},
		"edge.trial":              {"near_limit": 1, "shadow": 1},
		"edge.free":               {},
		"edge.unknown":            {},
		"edge.path_/v1.user":      {"admitted": 1},
		"edge.tenant_acme.user_7": {"admitted": 1},
		"edge.host_a*":            {"admitted": 1},
		"edge.partner_acme":       {"admitted": 1},
	} {
		require.Equal(t, want, outcomes(t, registry, "envoy", limit), limit)
	}
	require.Positive(t, counted(t, registry, "refiller_sidecar_call_seconds", "door", "envoy"))

	// The number of series that contain values of requests is bounded.
	for i := range 1100 {
		should(t, c, request(0, of("tenant", "acme", "user", fmt.Sprint("u", i))))
	}
	require.Equal(t, 1, outcomes(t, registry, "envoy", "edge.tenant_acme.user_u5")["admitted"])
	require.Empty(t, outcomes(t, registry, "envoy", "edge.tenant_acme.user_u1099"))
	require.Greater(t, outcomes(t, registry, "envoy", "other")["admitted"], 99)
	b.redis.Kill()
	_, err := c.ShouldRateLimit(t.Context(), request(0, of("path", "/v1", "user", "9")))
	require.Error(t, err)
	require.Equal(t, 1, outcomes(t, registry, "envoy", "edge.path_/v1.user")["failed"])
}

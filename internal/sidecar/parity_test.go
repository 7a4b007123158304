package sidecar

import (
	"net/http"
	"strings"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
)

// The tests below check features that users of Envoy's reference service would miss.

func TestRequestsInJSONAreAnsweredLikeEnvoys(t *testing.T) {
	t.Parallel()
	b, _ := envoyBench(t, nil)
	const body = `{"domain":"edge","descriptors":[{"entries":[{"key":"partner","value":"acme"}]}]}`
	for range 3 {
		r := b.post("/json", body)
		require.Equal(t, http.StatusOK, r.status, string(r.body))
		require.Equal(t, "OK", r.json(t)["overallCode"])
	}
	r := b.post("/json", body)
	require.Equal(t, http.StatusTooManyRequests, r.status)
	require.Equal(t, "OVER_LIMIT", r.json(t)["overallCode"])
	require.EqualValues(t, 0, b.tokens("edge:partner_acme"))

	require.Equal(t, http.StatusMethodNotAllowed, b.do(http.MethodGet, "/json", "").status)
	for _, bad := range []string{"", "{", `{"domain":""}`, `{"domain":"edge","descriptors":[]}`, `{"dominion":"edge"}`} {
		r := b.post("/json", bad)
		require.Equal(t, http.StatusBadRequest, r.status, bad)
		require.Equal(t, "bad_request", r.json(t)["code"], bad)
	}
	require.Equal(t, http.StatusUnsupportedMediaType, b.do(http.MethodPost, "/json", body, "Content-Type", "").status,
		"a form is refused, since a web page may send it")
	without := start(t, nil)
	require.Equal(t, http.StatusNotFound, without.post("/json", body).status)
	require.Equal(t, http.StatusNotFound, without.do(http.MethodGet, "/rlconfig", "").status)
}

func TestTheLimitsInForceAreListed(t *testing.T) {
	t.Parallel()
	const file = `
domain: edge
descriptors:
  - {key: address, rate_limit: {unit: minute, requests_per_unit: 100}}
  - key: partner
    descriptors: [{key: route, value: "/v*", rate_limit: {bucket: "{value:partner}"}, shadow_mode: true}]
  - {key: free, value: x, rate_limit: {unlimited: true}}
`
	b := start(t, func(o *Options, b *bench) {
		var err error
		o.Envoy, err = envoy.Parse(map[string][]byte{"edge.yaml": []byte(file)},
			envoy.NewWindows(b.rdb, always(patience), envoy.DefaultWindowOptions()))
		require.NoError(t, err)
	})
	r := b.do(http.MethodGet, "/rlconfig", "")
	require.Equal(t, http.StatusOK, r.status)
	require.Equal(t, `edge.address: unit=MINUTE requests_per_unit=100, shadow_mode: false, quota_mode: false
edge.free_x: unlimited, shadow_mode: false, quota_mode: false
edge.partner.route_/v*: bucket={value:partner}, shadow_mode: true, quota_mode: false
`, string(r.body))
}

func TestRequestsOfAnExhaustedWindowDoNotReachRedis(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	for range 3 {
		should(t, c, request(0, of("remote_address", "10.0.0.2")))
	}
	began, before := time.Now(), b.tries()
	for range 200 {
		require.Equal(t, over, should(t, c, request(0, of("remote_address", "10.0.0.2"))).GetOverallCode())
	}
	calls := scriptCalls(t, b.tries()) - scriptCalls(t, before)
	require.LessOrEqual(t, calls, 2+int(time.Since(began)/time.Second), "Redis gets one call a second")
}

func TestKeysOfWindowsHaveThePrefix(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) {
		var err error
		o.Envoy, err = envoy.Parse(map[string][]byte{"edge.yaml": []byte(
			"domain: edge\ndescriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 3}}]")},
			envoy.NewWindows(b.rdb, always(patience), envoy.WindowOptions{Prefix: "staging:"}))
		require.NoError(t, err)
	})
	should(t, rls.NewRateLimitServiceClient(b.dial()), request(0, of("k", "v")))
	keys, err := b.rdb.Keys(t.Context(), "*").Result()
	require.NoError(t, err)
	require.Len(t, keys, 1)
	require.True(t, strings.HasPrefix(keys[0], "{staging:edge:"), keys[0])
}

func TestHeadersHaveTheNamesOfTheFlags(t *testing.T) {
	t.Parallel()
	_, c := envoyBench(t, func(l *envoy.Limits) {
		l.Headers = &envoy.HeaderNames{Limit: "X-Limit", Remaining: "X-Left", Reset: "X-Reset"}
	})
	var names []string
	for _, h := range should(t, c, request(0, of("generic_key", "checkout"))).GetResponseHeadersToAdd() {
		names = append(names, h.GetKey())
	}
	require.Equal(t, []string{"X-Limit", "X-Left", "X-Reset"}, names)
}

// With all limits as quotas, a request is over limit when all of its descriptors are.
func TestAllLimitsMayBeQuotas(t *testing.T) {
	t.Parallel()
	_, c := envoyBench(t, func(l *envoy.Limits) { l.Quota = true })
	exhausted, other := of("remote_address", "10.0.0.2"), of("generic_key", "checkout")
	for range 3 {
		should(t, c, request(0, exhausted))
	}
	require.Equal(t, over, should(t, c, request(0, exhausted)).GetOverallCode())
	require.Equal(t, codeOK, should(t, c, request(0, exhausted, other)).GetOverallCode())
	require.Equal(t, codeOK, should(t, c, request(0, exhausted, of("unknown", "x"))).GetOverallCode(),
		"a descriptor without a limit is not exceeded")
}

// After a service was scaled out, its old connections end. When clients connect again, some of them reach the new
// servers.
func TestOldConnectionsEnd(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, _ *bench) { o.Limits.ConnectionAge = time.Second })
	b.bucket("checkout", 3)
	client := &http.Client{Transport: &http.Transport{}}
	eventually(t, func() bool {
		return send(t, client, http.MethodGet, b.url("/v1/peek?key=checkout"), "").close
	}, "a response closes an old connection")
	require.False(t, send(t, client, http.MethodGet, b.url("/v1/peek?key=checkout"), "").close,
		"the next connection is new")

	conn := b.dial()
	_, err := refillerv1.NewBucketsClient(conn).Peek(t.Context(), &refillerv1.PeekRequest{Key: "checkout"})
	require.NoError(t, err)
	for state := conn.GetState(); state == connectivity.Ready; state = conn.GetState() {
		require.True(t, conn.WaitForStateChange(t.Context(), state))
	}
}

// Spans of the sidecar are below those of its callers.
func TestCallsHaveSpans(t *testing.T) {
	t.Parallel()
	recorder := tracetest.NewSpanRecorder()
	b := start(t, func(o *Options, b *bench) {
		o.Traces = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder))
		o.Envoy = edgeLimits(t, b)
	})
	b.bucket("checkout", 3)
	const caller = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	b.do(http.MethodPost, "/v1/take", `{"key":"checkout"}`, "traceparent", caller)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", caller)
	c := rls.NewRateLimitServiceClient(b.dial())
	_, err := c.ShouldRateLimit(ctx, request(0, of("generic_key", "checkout")))
	require.NoError(t, err)
	_, err = c.ShouldRateLimit(ctx, &rls.RateLimitRequest{})
	require.Error(t, err)
	eventually(t, func() bool { return len(recorder.Ended()) == 3 }, "the spans end")
	var names []string
	for _, span := range recorder.Ended() {
		names = append(names, span.Name()+" "+span.Status().Code.String())
		require.Equal(t, "4bf92f3577b34da6a3ce929d0e0e4736", span.SpanContext().TraceID().String())
		require.Equal(t, "00f067aa0ba902b7", span.Parent().SpanID().String())
	}
	require.ElementsMatch(t, []string{"sidecar http Unset", "sidecar envoy Unset", "sidecar envoy Error"}, names)
}

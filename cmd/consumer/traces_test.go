package main

import (
	"context"
	"encoding/hex"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"

	"github.com/tokenrefill/refiller/internal/cli"
)

// receiver is a collector that keeps the spans that it receives.
type receiver struct {
	collector.UnimplementedTraceServiceServer

	mu       sync.Mutex
	exported []*tracepb.ResourceSpans
}

func (r *receiver) Export(_ context.Context, req *collector.ExportTraceServiceRequest) (
	*collector.ExportTraceServiceResponse, error,
) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.exported = append(r.exported, req.GetResourceSpans()...)
	return &collector.ExportTraceServiceResponse{}, nil
}

// startReceiver serves a collector and returns it with its address.
func startReceiver(t *testing.T) (*receiver, string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r, server := &receiver{}, grpc.NewServer()
	collector.RegisterTraceServiceServer(server, r)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		require.NoError(t, <-done)
	})
	return r, listener.Addr().String()
}

// spans returns the spans by their names, and the names of the services that made them.
func (r *receiver) spans() (spans map[string]*tracepb.Span, services []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	spans = map[string]*tracepb.Span{}
	for _, of := range r.exported {
		services = append(services, attributesOf(of.GetResource().GetAttributes())["service.name"].GetStringValue())
		for _, scope := range of.GetScopeSpans() {
			for _, span := range scope.GetSpans() {
				spans[span.GetName()] = span
			}
		}
	}
	return spans, services
}

func attributesOf(list []*commonpb.KeyValue) map[string]*commonpb.AnyValue {
	all := map[string]*commonpb.AnyValue{}
	for _, a := range list {
		all[a.GetKey()] = a.GetValue()
	}
	return all
}

// A take has two spans: the sidecar's is below the caller's, and the SDK's is below the sidecar's. When the sidecar has
// ended, the collector has both.
func TestServeExportsTheSpansOfATake(t *testing.T) {
	const (
		trace  = "4bf92f3577b34da6a3ce929d0e0e4736"
		parent = "00f067aa0ba902b7"
	)
	received, collectorAddress := startReceiver(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+collectorAddress)
	server, _ := newBucket(t, hourly(3))
	p, address, _ := startSidecar(t, server.URL(), "--metrics-policy", "checkout")

	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+address+"/v1/take",
		strings.NewReader(`{"key":"checkout","tokens":2}`))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Traceparent", "00-"+trace+"-"+parent+"-01")
	res, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusOK, res.StatusCode)
	p.Signal(syscall.SIGTERM)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	code, err := p.Wait(ctx)
	require.NoError(t, err)
	require.Equal(t, cli.ExitOK, code)

	spans, services := received.spans()
	require.Subset(t, []string{"refiller-sidecar"}, services)
	call, take := spans["sidecar http"], spans["refiller take"]
	require.NotNil(t, call, "the sidecar's span")
	require.NotNil(t, take, "the SDK's span")
	for _, span := range []*tracepb.Span{call, take} {
		require.Equal(t, trace, hex.EncodeToString(span.GetTraceId()))
		require.Less(t, span.GetStartTimeUnixNano(), span.GetEndTimeUnixNano())
	}
	require.Equal(t, parent, hex.EncodeToString(call.GetParentSpanId()))
	require.Equal(t, call.GetSpanId(), take.GetParentSpanId())
	require.Equal(t, tracepb.Span_SPAN_KIND_SERVER, call.GetKind())
	require.Equal(t, tracepb.Span_SPAN_KIND_CLIENT, take.GetKind())

	about := attributesOf(call.GetAttributes())
	require.Equal(t, "POST", about["http.request.method"].GetStringValue())
	require.EqualValues(t, http.StatusOK, about["http.response.status_code"].GetIntValue())
	about = attributesOf(take.GetAttributes())
	require.Equal(t, "take", about["refiller.op"].GetStringValue())
	require.Equal(t, "checkout", about["refiller.bucket"].GetStringValue())
	require.Equal(t, "taken", about["refiller.outcome"].GetStringValue())
	require.Equal(t, "shared", about["refiller.source"].GetStringValue())
	require.EqualValues(t, 2, about["refiller.tokens"].GetIntValue())
	require.EqualValues(t, 2, about["refiller.taken"].GetIntValue())
}

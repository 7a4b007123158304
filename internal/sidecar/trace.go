package sidecar

import (
	"context"
	"net/http"

	"github.com/felixge/httpsnoop"
	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/tokenrefill/refiller/internal/sidecar/httpapi"
)

// tracer makes a span of each call, below that of its caller. Without a provider it makes none.
type tracer struct {
	tracer     trace.Tracer // nil if there are no spans
	propagator propagation.TraceContext
}

func newTracer(provider trace.TracerProvider) tracer {
	if provider == nil {
		return tracer{}
	}
	return tracer{tracer: provider.Tracer("github.com/tokenrefill/refiller/internal/sidecar")}
}

// http makes the spans of calls over HTTP.
func (t tracer) http(next http.Handler) http.Handler {
	if t.tracer == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx := t.propagator.Extract(r.Context(), propagation.HeaderCarrier(r.Header))
		ctx, span := t.tracer.Start(ctx, "sidecar "+httpapi.Door(r), trace.WithSpanKind(trace.SpanKindServer),
			trace.WithAttributes(attribute.String("http.request.method", r.Method)))
		defer span.End()
		code := http.StatusOK
		w = httpsnoop.Wrap(w, httpsnoop.Hooks{WriteHeader: func(write httpsnoop.WriteHeaderFunc) httpsnoop.WriteHeaderFunc {
			return func(status int) {
				code = status
				write(status)
			}
		}})
		next.ServeHTTP(w, r.WithContext(ctx))
		span.SetAttributes(attribute.Int("http.response.status_code", code))
		if code >= http.StatusInternalServerError {
			span.SetStatus(otelcodes.Error, http.StatusText(code))
		}
	})
}

// grpc begins the span of a call over gRPC. The returned function end ends the span.
func (t tracer) grpc(ctx context.Context, method, door string) (_ context.Context, end func(error)) {
	if t.tracer == nil {
		return ctx, func(error) {}
	}
	incoming, _ := metadata.FromIncomingContext(ctx)
	ctx = t.propagator.Extract(ctx, carrier(incoming))
	ctx, span := t.tracer.Start(ctx, "sidecar "+door, trace.WithSpanKind(trace.SpanKindServer),
		trace.WithAttributes(attribute.String("rpc.system", "grpc"), attribute.String("rpc.method", method)))
	return ctx, func(err error) {
		code := status.Code(err)
		span.SetAttributes(attribute.Int("rpc.grpc.status_code", int(code)))
		if err != nil {
			span.SetStatus(otelcodes.Error, code.String())
		}
		span.End()
	}
}

// carrier reads a trace's context from the metadata of a call.
type carrier metadata.MD

// Get implements propagation.TextMapCarrier.
func (c carrier) Get(key string) string {
	if values := metadata.MD(c).Get(key); len(values) > 0 {
		return values[0]
	}
	return ""
}

// Set implements propagation.TextMapCarrier.
func (c carrier) Set(key, value string) { metadata.MD(c).Set(key, value) }

// Keys implements propagation.TextMapCarrier.
func (c carrier) Keys() []string {
	keys := make([]string, 0, len(c))
	for key := range c {
		keys = append(keys, key)
	}
	return keys
}

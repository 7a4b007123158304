package fetchotel

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/tokenrefill/refiller/fetch"
)

const (
	scope  = "github.com/tokenrefill/refiller/fetch/fetchotel"
	prefix = "refiller.consumer." // of metrics
)

// Hook is a fetch.Hook that makes spans. Its methods are safe for concurrent use.
type Hook struct {
	tracer trace.Tracer
	bucket func(key string) string
}

var _ fetch.Hook = (*Hook)(nil)

// New makes a Hook that gets its spans from the provider. bucket returns the value of the attribute refiller.bucket for
// a key. A key may contain the name of a user, so let bucket return only what spans may show. If bucket is nil or
// returns "", a span doesn't have the attribute.
func New(provider trace.TracerProvider, bucket func(key string) string) *Hook {
	if bucket == nil {
		bucket = func(string) string { return "" }
	}
	return &Hook{tracer: provider.Tracer(scope), bucket: bucket}
}

// Begin implements fetch.Hook.
func (h *Hook) Begin(ctx context.Context, call fetch.Call) context.Context {
	op := call.Op.String()
	ctx, span := h.tracer.Start(ctx, "refiller "+op, trace.WithSpanKind(trace.SpanKindClient))
	if !span.IsRecording() {
		return ctx
	}
	span.SetAttributes(attribute.String("refiller.op", op), attribute.Int64("refiller.tokens", call.Tokens))
	if bucket := h.bucket(call.Key); bucket != "" {
		span.SetAttributes(attribute.String("refiller.bucket", bucket))
	}
	return ctx
}

// End implements fetch.Hook.
func (h *Hook) End(ctx context.Context, call fetch.Call, o fetch.Outcome) {
	span := trace.SpanFromContext(ctx)
	defer span.End()
	if !span.IsRecording() {
		return
	}
	outcome := o.Name(call.Op)
	span.SetAttributes(attribute.String("refiller.outcome", outcome))
	if o.Reason != fetch.ReasonNone {
		span.SetAttributes(attribute.String("refiller.reason", o.Reason.String()))
	}
	if o.Err != nil {
		span.SetStatus(codes.Error, outcome) // the error's text has the key
		return
	}
	span.SetAttributes(attribute.String("refiller.source", o.Result.Source.Kind.String()))
	if o.Result.Shadow {
		span.SetAttributes(attribute.Bool("refiller.shadow", true))
	}
	if o.Result.Taken > 0 {
		span.SetAttributes(attribute.Int64("refiller.taken", o.Result.Taken))
	}
}

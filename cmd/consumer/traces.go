package main

import (
	"context"
	"fmt"
	"time"

	"github.com/hashicorp/go-hclog"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config/fields"
)

// exportTime bounds the export of the last spans when the sidecar ends.
const exportTime = 3 * time.Second

// newTraces makes a provider that exports spans as the variables of OpenTelemetry say. provider is nil if they name no
// address. shutdown exports the last spans.
func newTraces(ctx context.Context, environ fields.Environment, log hclog.Logger) (
	provider *sdktrace.TracerProvider, shutdown func(), err error,
) {
	none := func() {}
	if environ["OTEL_SDK_DISABLED"] == "true" ||
		environ["OTEL_EXPORTER_OTLP_ENDPOINT"] == "" && environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "" {
		return nil, none, nil
	}
	for _, name := range []string{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"} {
		if p := environ[name]; p != "" && p != "grpc" {
			return nil, none, cli.Usage(fmt.Errorf("%s %q: want grpc", name, p))
		}
	}
	exporter, err := otlptracegrpc.New(ctx)
	if err != nil {
		return nil, none, fmt.Errorf("traces: %w", err)
	}
	about, err := resource.New(ctx, resource.WithAttributes(attribute.String("service.name", "refiller-sidecar")),
		resource.WithFromEnv(), resource.WithTelemetrySDK())
	if err != nil {
		return nil, none, cli.Usage(fmt.Errorf("traces: OTEL_RESOURCE_ATTRIBUTES: %w", err))
	}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("spans were not exported", "error", err) }))
	provider = sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(about))
	return provider, func() {
		ctx, cancel := context.WithTimeout(context.Background(), exportTime)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			log.Warn("the last spans were not exported", "error", err)
		}
	}, nil
}

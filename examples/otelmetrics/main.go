// Command otelmetrics takes a token and exports what the SDK counts over OpenTelemetry: the bridge of OpenTelemetry
// hands on the metrics that package fetchprom keeps, so that there is one list of them. Package fetchotel makes spans.
//
//	go -C examples run ./otelmetrics redis://127.0.0.1:6379/0 checkout
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	bridge "go.opentelemetry.io/contrib/bridges/prometheus"
	"go.opentelemetry.io/otel/exporters/stdout/stdoutmetric"
	"go.opentelemetry.io/otel/sdk/metric"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/fetchprom"
)

// producer makes OpenTelemetry's metrics of what the hook counts. Give it to any reader with metric.WithProducer.
func producer(hook *fetchprom.Hook) (metric.Producer, error) {
	registry := prometheus.NewRegistry()
	if err := registry.Register(hook); err != nil {
		return nil, err
	}
	return bridge.NewMetricProducer(bridge.WithGatherer(registry)), nil
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: otelmetrics REDIS-URL KEY")
		os.Exit(2)
	}
	if err := run(context.Background(), os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "otelmetrics:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, url, key string) error {
	options, err := redis.ParseURL(url)
	if err != nil {
		return err
	}
	rdb := redis.NewClient(options)
	defer func() { _ = rdb.Close() }()
	hook := fetchprom.New(fetchprom.Policies(key))
	client, err := fetch.New(rdb, fetch.WithHook(hook))
	if err != nil {
		return err
	}
	hook.Watch(client)

	p, err := producer(hook)
	if err != nil {
		return err
	}
	exporter, err := stdoutmetric.New() // in earnest one of otlpmetricgrpc or otlpmetrichttp
	if err != nil {
		return err
	}
	provider := metric.NewMeterProvider(metric.WithReader(metric.NewPeriodicReader(exporter, metric.WithProducer(p))))
	_, err = client.Take(ctx, key, 1)
	return errors.Join(err, client.Close(ctx), provider.Shutdown(ctx)) // the shutdown exports what there is
}

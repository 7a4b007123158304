package main

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/fetchprom"
)

func TestWhatTheHookCountsReachesAReader(t *testing.T) {
	hook := fetchprom.New(fetchprom.Policies("checkout"))
	call := fetch.Call{Op: fetch.OpTake, Key: "checkout", Tokens: 3}
	hook.End(context.Background(), call, fetch.Outcome{Result: fetch.Result{OK: true, Taken: 3}, Duration: time.Millisecond})

	p, err := producer(hook)
	require.NoError(t, err)
	reader := metric.NewManualReader(metric.WithProducer(p))
	provider := metric.NewMeterProvider(metric.WithReader(reader))
	var got metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(t.Context(), &got))
	require.NoError(t, provider.Shutdown(t.Context()))

	found := map[string]metricdata.Aggregation{}
	for _, scope := range got.ScopeMetrics {
		for _, m := range scope.Metrics {
			found[m.Name] = m.Data
		}
	}
	taken, ok := found["refiller_consumer_tokens_taken_total"].(metricdata.Sum[float64])
	require.True(t, ok, "%v", found)
	require.True(t, taken.IsMonotonic)
	require.InDelta(t, 3, taken.DataPoints[0].Value, 0)
	policy, _ := taken.DataPoints[0].Attributes.Value("policy")
	require.Equal(t, "checkout", policy.AsString())
	require.Contains(t, found, "refiller_consumer_call_seconds")
}

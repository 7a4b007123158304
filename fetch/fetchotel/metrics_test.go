package fetchotel_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/fetch/fetchotel"
	"github.com/tokenrefill/refiller/fetch/fetchprom"
)

// ofPrometheus returns the series that fetchprom exports, with their values.
func ofPrometheus(t *testing.T, h *fetchprom.Hook) map[string]string {
	t.Helper()
	registry := prometheus.NewRegistry()
	require.NoError(t, registry.Register(h))
	families, err := registry.Gather()
	require.NoError(t, err)
	all := map[string]string{}
	for _, f := range families {
		for _, m := range f.Metric {
			labels := ""
			for _, l := range m.Label { // sorted
				labels += fmt.Sprintf(",%s=%s", l.GetName(), l.GetValue())
			}
			value := fmt.Sprint(m.GetCounter().GetValue() + m.GetGauge().GetValue())
			if f.GetType() == dto.MetricType_HISTOGRAM {
				value = fmt.Sprintf("%d in %.4g s", m.Histogram.GetSampleCount(), m.Histogram.GetSampleSum())
				for _, b := range m.Histogram.Bucket {
					value += fmt.Sprintf(" %g:%d", b.GetUpperBound(), b.GetCumulativeCount())
				}
			}
			all[f.GetName()+labels] = value + " " + f.GetHelp()
		}
	}
	return all
}

// ofOpenTelemetry returns the same series of fetchotel, under the names that OpenTelemetry's exporters give them for
// Prometheus.
func ofOpenTelemetry(t *testing.T, reader metric.Reader) map[string]string {
	t.Helper()
	var got metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(t.Context(), &got))
	all := map[string]string{}
	for _, s := range got.ScopeMetrics {
		for _, m := range s.Metrics {
			name := strings.ReplaceAll(m.Name, ".", "_")
			labels := func(set attribute.Set) (text string) {
				for _, a := range set.ToSlice() { // sorted
					text += fmt.Sprintf(",%s=%s", a.Key, a.Value.AsString())
				}
				return text
			}
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				if d.IsMonotonic {
					name += "_total"
				}
				for _, p := range d.DataPoints {
					all[name+labels(p.Attributes)] = fmt.Sprint(float64(p.Value), " ", m.Description)
				}
			case metricdata.Histogram[float64]:
				require.Equal(t, "s", m.Unit)
				for _, p := range d.DataPoints {
					value, sum := fmt.Sprintf("%d in %.4g s", p.Count, p.Sum), uint64(0)
					for i, bound := range p.Bounds {
						sum += p.BucketCounts[i]
						value += fmt.Sprintf(" %g:%d", bound, sum)
					}
					all[name+"_seconds"+labels(p.Attributes)] = value + " " + m.Description
				}
			default:
				require.Fail(t, "unknown kind of metric", "%s: %T", m.Name, d)
			}
		}
	}
	return all
}

func TestTheMetricsAreThoseForPrometheus(t *testing.T) {
	reader := metric.NewManualReader()
	provider := metric.NewMeterProvider(metric.WithReader(reader))
	t.Cleanup(func() { require.NoError(t, provider.Shutdown(context.Background())) })
	entries := []string{"checkout", "user:*", "user:vip:*"}
	ours, err := fetchotel.NewMetrics(provider, fetchotel.Policies(entries...))
	require.NoError(t, err)
	theirs := fetchprom.New(fetchprom.Policies(entries...))
	end := func(call fetch.Call, o fetch.Outcome) {
		o.Duration = 3 * time.Millisecond
		for _, h := range []fetch.Hook{ours, theirs} {
			h.End(h.Begin(t.Context(), call), call, o)
		}
	}
	fallback := fetch.Source{Kind: fetch.SourceFallback, Reason: fetch.ReasonDeadline}
	for key, o := range map[string]fetch.Outcome{
		"checkout":   {Result: fetch.Result{OK: true, Taken: 3}},
		"user:1":     {Result: fetch.Result{Source: fetch.Source{Kind: fetch.SourceCached}}},
		"user:vip:1": {Result: fetch.Result{OK: true, Taken: 2, Source: fallback}, Reason: fetch.ReasonDeadline},
		"unheard-of": {Err: fmt.Errorf("x: %w", fetch.ErrUnavailable), Reason: fetch.ReasonBusy},
		"user:2":     {Err: errors.New("other")},
	} {
		end(fetch.Call{Op: fetch.OpTake, Key: key, Tokens: 3}, o)
	}
	end(fetch.Call{Op: fetch.OpPeek, Key: "checkout"}, fetch.Outcome{})
	requests := []fetch.Request{{Key: "user:1", N: 4}, {Key: "checkout", N: 5}}
	end(fetch.Call{Op: fetch.OpTakeAll, Key: "user:1", Tokens: 9, Requests: requests}, fetch.Outcome{
		Result:  fetch.Result{OK: true, Taken: 9},
		Results: []fetch.Result{{OK: true, Taken: 4}, {OK: true, Taken: 5, Shadow: true}},
	})
	require.Equal(t, ofPrometheus(t, theirs), ofOpenTelemetry(t, reader))

	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1, MaxRetries: -1})
	t.Cleanup(func() { _ = rdb.Close() })
	c, err := fetch.New(rdb)
	require.NoError(t, err)
	ours.Watch(c)
	theirs.Watch(c)
	_, err = c.Take(t.Context(), "checkout", 1)
	require.ErrorIs(t, err, fetch.ErrUnavailable)
	require.NoError(t, c.Close(t.Context()))
	got := ofOpenTelemetry(t, reader)
	require.Equal(t, ofPrometheus(t, theirs), got)
	require.Contains(t, got, "refiller_consumer_rescues_total")
	require.Contains(t, got, "refiller_consumer_tokens_leased")
	require.NotContains(t, fmt.Sprint(got), "unheard-of")
}

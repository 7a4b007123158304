package fetchprom_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/fetch/fetchprom"
)

func scrape(t *testing.T, h *fetchprom.Hook) string {
	t.Helper()
	registry := prometheus.NewRegistry()
	require.NoError(t, registry.Register(h))
	w := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	require.Equal(t, 200, w.Code)
	return w.Body.String()
}

func TestCallsAreCountedByPolicyOutcomeAndSource(t *testing.T) {
	h := fetchprom.New(fetchprom.Policies("checkout", "user:*", "user:vip:*"))
	end := func(op fetch.Op, key string, o fetch.Outcome) {
		o.Duration = time.Millisecond
		h.End(h.Begin(context.Background(), fetch.Call{}), fetch.Call{Op: op, Key: key, Tokens: 3}, o)
	}
	fallback := fetch.Source{Kind: fetch.SourceFallback, Reason: fetch.ReasonDeadline}
	end(fetch.OpTake, "checkout", fetch.Outcome{Result: fetch.Result{OK: true, Taken: 3}})
	end(fetch.OpTake, "user:1", fetch.Outcome{Result: fetch.Result{Source: fetch.Source{Kind: fetch.SourceCached}}})
	end(fetch.OpTake, "user:vip:1", fetch.Outcome{Result: fetch.Result{OK: true, Taken: 2, Source: fallback},
		Reason: fetch.ReasonDeadline})
	end(fetch.OpTake, "unheard-of", fetch.Outcome{Err: fmt.Errorf("x: %w", fetch.ErrUnavailable),
		Reason: fetch.ReasonBusy})
	for _, err := range []error{fetch.ErrDeadline, context.DeadlineExceeded, context.Canceled, fetch.ErrExceedsCapacity,
		errors.New("other")} {
		end(fetch.OpWait, "checkout", fetch.Outcome{Err: err})
	}
	all := []fetch.Result{{OK: true, Taken: 4}, {OK: true, Taken: 5, Shadow: true}}
	h.End(context.Background(), fetch.Call{
		Op: fetch.OpTakeAll, Key: "user:1", Tokens: 9,
		Requests: []fetch.Request{{Key: "user:1", N: 4}, {Key: "checkout", N: 5}},
	}, fetch.Outcome{Result: fetch.Result{OK: true, Taken: 9}, Results: all})
	end(fetch.OpPeek, "checkout", fetch.Outcome{})
	end(fetch.OpReturn, "checkout", fetch.Outcome{})

	page := scrape(t, h)
	for _, line := range []string{
		`refiller_consumer_calls_total{op="take",outcome="taken",policy="checkout",source="shared"} 1`,
		`refiller_consumer_calls_total{op="take",outcome="denied",policy="user:*",source="cached"} 1`,
		`refiller_consumer_calls_total{op="take",outcome="taken",policy="user:vip:*",source="fallback"} 1`,
		`refiller_consumer_calls_total{op="take",outcome="unavailable",policy="other",source="none"} 1`,
		`refiller_consumer_calls_total{op="wait",outcome="deadline",policy="checkout",source="none"} 2`,
		`refiller_consumer_calls_total{op="wait",outcome="cancelled",policy="checkout",source="none"} 1`,
		`refiller_consumer_calls_total{op="wait",outcome="exceeds_capacity",policy="checkout",source="none"} 1`,
		`refiller_consumer_calls_total{op="wait",outcome="refused",policy="checkout",source="none"} 1`,
		`refiller_consumer_calls_total{op="peek",outcome="done",policy="checkout",source="shared"} 1`,
		`refiller_consumer_calls_total{op="return",outcome="done",policy="checkout",source="shared"} 1`,
		`refiller_consumer_tokens_taken_total{policy="checkout",source="shared"} 8`,
		`refiller_consumer_tokens_taken_total{policy="user:*",source="shared"} 4`,
		`refiller_consumer_shadowed_total{policy="checkout"} 1`,
		`refiller_consumer_tokens_taken_total{policy="user:vip:*",source="fallback"} 2`,
		`refiller_consumer_degraded_total{policy="user:vip:*",reason="deadline"} 1`,
		`refiller_consumer_degraded_total{policy="other",reason="busy"} 1`,
		`refiller_consumer_call_seconds_count{op="take"} 4`,
	} {
		require.Contains(t, page, line+"\n")
	}
	require.NotContains(t, page, "unheard-of")
	require.NotContains(t, page, "rescues")
}

func TestTheCountsOfAClientAreExported(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1, MaxRetries: -1})
	t.Cleanup(func() { _ = rdb.Close() })
	h := fetchprom.New(nil)
	c, err := fetch.New(rdb, fetch.WithHook(h))
	require.NoError(t, err)
	h.Watch(c)
	_, err = c.Take(t.Context(), "checkout", 1)
	require.ErrorIs(t, err, fetch.ErrUnavailable)
	require.NoError(t, c.Close(t.Context()))
	page := scrape(t, h)
	require.Contains(t, page, `refiller_consumer_degraded_total{policy="other",reason="connection"} 1`)
	for _, name := range []string{"rescues", "breaker_opened", "calls_abandoned", "tokens_returned", "tokens_clamped",
		"tokens_lost"} {
		require.Contains(t, page, "refiller_consumer_"+name+"_total 0\n")
	}
	require.Contains(t, page, "refiller_consumer_tokens_leased 0\n")
}

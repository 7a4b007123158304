package fetchotel_test

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/fetch/fetchotel"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// recorded returns a provider whose spans are recorded.
func recorded(t *testing.T) (*sdk.TracerProvider, *tracetest.SpanRecorder) {
	t.Helper()
	r := tracetest.NewSpanRecorder()
	p := sdk.NewTracerProvider(sdk.WithSpanProcessor(r))
	t.Cleanup(func() { require.NoError(t, p.Shutdown(context.Background())) })
	return p, r
}

func attributes(s sdk.ReadOnlySpan) map[attribute.Key]any {
	m := make(map[attribute.Key]any)
	for _, a := range s.Attributes() {
		m[a.Key] = a.Value.AsInterface()
	}
	return m
}

func TestEachCallHasASpanBelowItsCallers(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	terms := policy.Policy{Capacity: 5, Rate: policy.Rate{Tokens: 1, Per: time.Hour}}.Terms(policy.Fence{})
	_, err := lua.Refill(t.Context(), rdb, "user:1", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	provider, spans := recorded(t)
	first := fetchotel.New(provider, func(key string) string { return key[:4] })
	c, err := fetch.New(rdb, fetch.WithHook(first), fetch.WithHook(fetchotel.New(provider, nil)),
		fetch.WithTimeout(20*time.Second))
	require.NoError(t, err)
	ctx, caller := provider.Tracer("test").Start(t.Context(), "caller")
	for range 2 { // the second call is denied
		_, err = c.Take(ctx, "user:1", 3)
		require.NoError(t, err)
	}
	_, err = c.Take(ctx, "user:2", 1)
	require.ErrorIs(t, err, fetch.ErrUnknownBucket)
	_, err = c.Peek(ctx, "user:1")
	require.NoError(t, err)
	require.NoError(t, c.Close(t.Context()))

	ended := spans.Ended()
	require.Len(t, ended, 8, "two hooks record four calls")
	want := []map[attribute.Key]any{
		{"refiller.op": "take", "refiller.tokens": int64(3), "refiller.outcome": "taken", "refiller.source": "shared",
			"refiller.taken": int64(3)},
		{"refiller.op": "take", "refiller.tokens": int64(3), "refiller.outcome": "denied", "refiller.source": "shared"},
		{"refiller.op": "take", "refiller.tokens": int64(1), "refiller.outcome": "unknown_bucket"},
		{"refiller.op": "peek", "refiller.tokens": int64(0), "refiller.outcome": "done", "refiller.source": "shared"},
	}
	for i, w := range want {
		inner, outer := ended[2*i], ended[2*i+1]
		require.Equal(t, w, attributes(inner))
		require.Equal(t, "refiller "+w["refiller.op"].(string), inner.Name())
		require.Equal(t, trace.SpanKindClient, inner.SpanKind())
		require.Equal(t, outer.SpanContext().SpanID(), inner.Parent().SpanID(), "the first hook begins first and ends last")
		require.Equal(t, caller.SpanContext().SpanID(), outer.Parent().SpanID())
		w["refiller.bucket"] = "user"
		require.Equal(t, w, attributes(outer))
		status := codes.Unset
		if i == 2 {
			status = codes.Error
			require.Equal(t, "unknown_bucket", inner.Status().Description, "the status does not contain the key")
			require.Empty(t, inner.Events())
		}
		require.Equal(t, status, inner.Status().Code, "a denial is no error")
	}
}

func TestASpanHasTheReasonOfAMissingAnswer(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", DialerRetries: 1, MaxRetries: -1})
	t.Cleanup(func() { _ = rdb.Close() })
	provider, spans := recorded(t)
	c, err := fetch.New(rdb, fetch.WithHook(fetchotel.New(provider, nil)), fetch.WithUnknownDegraded(policy.DegradedOpen))
	require.NoError(t, err)
	_, err = c.Take(t.Context(), "checkout", 1)
	require.NoError(t, err)
	require.NoError(t, c.Close(t.Context()))
	require.Equal(t, map[attribute.Key]any{
		"refiller.op": "take", "refiller.tokens": int64(1), "refiller.outcome": "taken", "refiller.source": "fallback",
		"refiller.taken":  int64(1),
		"refiller.reason": "connection",
	}, attributes(spans.Ended()[0]))
}

package sidecar

import (
	"net/http"
	"strconv"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// budgets publishes a template of budgets that get 100 tokens at each new year.
func (b *bench) budgets(prefix string) {
	b.t.Helper()
	steps, err := policy.ParseCalendar("0 0 1 1 *", time.UTC)
	require.NoError(b.t, err)
	list := []policy.Template{
		{Prefix: prefix, Policy: policy.Policy{Capacity: 100, Steps: steps, StepTokens: 100}},
	}
	set, err := policy.NewTemplates(1, list, nil)
	require.NoError(b.t, err)
	_, err = lua.PublishTemplates(b.t.Context(), b.rdb, set)
	require.NoError(b.t, err)
}

// untilNewYear returns the time until the budgets get their next tokens.
func untilNewYear() time.Duration {
	now := time.Now().UTC()
	return time.Date(now.Year()+1, 1, 1, 0, 0, 0, 0, time.UTC).Sub(now)
}

func TestEachDoorTakesFromABudget(t *testing.T) {
	t.Parallel()
	for name, take := range flowDoors {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := flowBench(t, "")
			b.budgets("acme")
			require.True(t, take(b, 60, "a"), "the first take creates the budget")
			require.False(t, take(b, 41, "a"))
			require.True(t, take(b, 40, "b"))
			require.EqualValues(t, 0, b.tokens("acme"))
		})
	}
}

func TestEnvoyAndProxiesGetTheTimeUntilABudgetBegins(t *testing.T) {
	t.Parallel()
	b := flowBench(t, edgeOfFlows)
	b.budgets("ac")
	c := rls.NewRateLimitServiceClient(b.dial())
	require.Equal(t, codeOK, should(t, c, request(100, of("tenant", "acme"))).GetOverallCode())
	denied := should(t, c, request(1, of("tenant", "acme")))
	require.Equal(t, over, denied.GetOverallCode())
	left := denied.GetStatuses()[0].GetDurationUntilReset().AsDuration()
	require.InDelta(t, untilNewYear(), left, float64(time.Minute))

	r := b.do(http.MethodGet, "/v1/check?limit=any&key=acme", "")
	require.Equal(t, http.StatusTooManyRequests, r.status)
	seconds, err := strconv.Atoi(r.header.Get("Retry-After"))
	require.NoError(t, err)
	require.InDelta(t, untilNewYear().Seconds(), seconds, 60)
}

func TestABudgetIsReservedAndSettledOverHTTP(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	b.budgets("user:")
	r := b.post("/v1/reserve", `{"key":"user:1","tokens":70,"ttl_ms":60000,"id":"job","overrun":"debt"}`)
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	require.Equal(t, true, r.json(t)["ok"])
	r = b.post("/v1/reserve", `{"key":"user:1","tokens":31,"ttl_ms":60000,"id":"other"}`)
	require.Equal(t, false, r.json(t)["ok"])
	require.InDelta(t, untilNewYear().Milliseconds(), r.json(t)["retry_after_ms"], 60_000)
	r = b.post("/v1/settle", `{"key":"user:1","id":"job","used":110}`)
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	require.EqualValues(t, 30, r.json(t)["charged"])
	require.EqualValues(t, 10, r.json(t)["owed"])

	r = b.post("/v1/take-all", `{"requests":[{"key":"user:1"},{"key":"user:2"}]}`)
	require.Equal(t, "user:1", r.json(t)["denied"])
	r = b.do(http.MethodGet, "/v1/peek?key=user:2", "")
	require.Equal(t, 100.0, r.json(t)["remaining"], "no budget was charged")
}

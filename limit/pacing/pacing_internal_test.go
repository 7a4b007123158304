package pacing

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/limit/internal/limittest"
	"github.com/tokenrefill/refiller/policy"
)

func TestScriptAgreesWithTheModel(t *testing.T) {
	t.Parallel()
	rng := limittest.Rand(t)
	embedded, tick := limittest.Embedded(t, rng)
	rdb := limittest.Redis(t)
	stepping, step := limittest.Stepping(t, rng)
	denied := 0
	for i, cfg := range []Config{
		{Rate: policy.PerSecond(10_000), MaxWait: 5 * time.Millisecond},
		{Rate: policy.PerSecond(997), MaxWait: 7 * time.Millisecond},
		{Rate: policy.Rate{Tokens: 1, Per: time.Hour}},
		{Rate: policy.Rate{Tokens: 7, Per: time.Hour}, MaxWait: 2 * time.Hour},
	} {
		rule, err := cfg.rule()
		require.NoError(t, err)
		denied += limittest.Agree(t, rdb, func() {}, rng, rule, newModel(rule), true, fmt.Sprint(i), 2000)
		denied += limittest.Agree(t, embedded, tick, rng, rule, newModel(rule), true, fmt.Sprint(i), 300)
		if cfg.Rate.Per == time.Hour {
			denied += limittest.Agree(t, stepping, step, rng, rule, newModel(rule), true, fmt.Sprint(i), 500)
		}
	}
	require.NotZero(t, denied)
}

package lazy

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/limit/internal/limittest"
	"github.com/tokenrefill/refiller/policy"
)

// fast are limits that gain and lose tokens within the milliseconds of a test.
var fast = []Config{
	{Capacity: 10, Rate: policy.Rate{Tokens: 3, Per: 7 * time.Millisecond}},
	{Capacity: 1, Rate: policy.Rate{Tokens: 1, Per: time.Millisecond}},
	{Capacity: 5, Rate: policy.Rate{Tokens: 999_983, Per: 100 * time.Second}}, // a prime
	{Capacity: 1000, Rate: policy.Rate{Tokens: 50_000_017, Per: 100 * time.Second}},
	{Capacity: 100, Rate: policy.PerSecond(50_000)},
	{Capacity: 7, Rate: policy.Rate{Tokens: 1, Per: time.Hour}},
}

func agree(t *testing.T, rdb redis.UniversalClient, tick func(), rng *rand.Rand, calls int) {
	denied := 0
	for i, cfg := range fast {
		rule, err := cfg.rule()
		require.NoError(t, err)
		denied += limittest.Agree(t, rdb, tick, rng, rule, newModel(rule), true, fmt.Sprint(i), calls)
	}
	require.NotZero(t, denied)
}

func TestScriptAgreesWithTheModel(t *testing.T) {
	t.Parallel()
	agree(t, limittest.Redis(t), func() {}, limittest.Rand(t), 2000)
}

func TestScriptAgreesWithTheModelWhenTheClockIsStepped(t *testing.T) {
	t.Parallel()
	rng := limittest.Rand(t)
	rdb, tick := limittest.Stepping(t, rng)
	for i, cfg := range []Config{
		{Capacity: 7, Rate: policy.Rate{Tokens: 1, Per: time.Hour}},
		{Capacity: 1000, Rate: policy.Rate{Tokens: 997, Per: 10 * time.Minute}},
	} {
		rule, err := cfg.rule()
		require.NoError(t, err)
		require.NotZero(t, limittest.Agree(t, rdb, tick, rng, rule, newModel(rule), true, fmt.Sprint(i), 500))
	}
}

func TestScriptAgreesWithTheModelOnTheEmbeddedStore(t *testing.T) {
	t.Parallel()
	rng := limittest.Rand(t)
	rdb, tick := limittest.Embedded(t, rng)
	agree(t, rdb, tick, rng, 300)
}

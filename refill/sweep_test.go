package refill

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestReservationsEndWithNoConsumerAlive(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	b := Bucket{Key: "llm", Policy: policy.Policy{Capacity: 300, Rate: policy.Rate{Tokens: 1, Per: time.Hour}}}
	require.NoError(t, b.Policy.Validate())
	terms := b.Policy.Terms(policy.Fence{})
	_, err := lua.Refill(t.Context(), rdb, b.Key, policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	const ended = sweptOfBucket + 50 // more than one sweep's
	for i := range ended {
		_, err := lua.Reserve(t.Context(), rdb, b.Key, lua.ReserveCall{ID: fmt.Sprint("crashed-", i), N: 1, TTL: time.Second})
		require.NoError(t, err)
	}
	alive, err := lua.Reserve(t.Context(), rdb, b.Key, lua.ReserveCall{ID: "alive", N: 10, TTL: time.Hour})
	require.NoError(t, err)
	require.True(t, alive.OK)

	running(t, rdb, newWatch(), false, []Bucket{b})
	require.Eventually(t, func() bool {
		held, err := rdb.Get(t.Context(), b.Key).Int64()
		return err == nil && held == 290
	}, time.Minute, 10*time.Millisecond, "what nobody settles goes back")
	s, err := lua.Settle(t.Context(), rdb, b.Key, "alive", 0)
	require.NoError(t, err)
	require.EqualValues(t, 10, s.Returned, "what is not over is held")
}

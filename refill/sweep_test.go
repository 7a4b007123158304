package refill

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestReservationsEndWithNoConsumerAlive(t *testing.T) {
	testReservationsEnd(t, testenv.Redis(t).Client())
}

func TestReservationsOnAClusterEndWithNoConsumerAlive(t *testing.T) {
	testReservationsEnd(t, testenv.Cluster(t).Client())
}

// testReservationsEnd has reservations of buckets in several slots end.
func testReservationsEnd(t *testing.T, rdb redis.UniversalClient) {
	p := policy.Policy{Capacity: 300, Rate: policy.Rate{Tokens: 1, Per: time.Hour}}
	require.NoError(t, p.Validate())
	terms := p.Terms(policy.Fence{})
	var buckets []Bucket
	for _, key := range []string{"llm", "user:1", "user:2"} {
		buckets = append(buckets, Bucket{Key: key, Policy: p})
		_, err := lua.Refill(t.Context(), rdb, key, policy.Call{Create: policy.CreateInitial, Terms: &terms})
		require.NoError(t, err)
		alive, err := lua.Reserve(t.Context(), rdb, key, lua.ReserveCall{ID: "alive", N: 10, TTL: time.Hour})
		require.NoError(t, err)
		require.True(t, alive.OK)
	}
	const ended = sweptOfBucket + 50 // more than one sweep's
	for i := range ended * len(buckets) {
		_, err := lua.Reserve(t.Context(), rdb, buckets[i%len(buckets)].Key, lua.ReserveCall{ID: fmt.Sprint("crashed-",
			i), N: 1, TTL: time.Second})
		require.NoError(t, err)
	}

	running(t, rdb, newWatch(), false, buckets)
	for _, b := range buckets {
		require.Eventually(t, func() bool {
			held, err := rdb.Get(t.Context(), b.Key).Int64()
			return err == nil && held == 290
		}, time.Minute, 10*time.Millisecond, "what nobody settles goes back")
		s, err := lua.Settle(t.Context(), rdb, b.Key, "alive", 0)
		require.NoError(t, err)
		require.EqualValues(t, 10, s.Returned, "what is not over is held")
	}
}

package refill

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
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

// A bucket's reservations can't be ended, and those of another bucket in the same round trip can. The failure is logged
// only once.
func TestReservationsThatCannotBeEndedAreLoggedOnce(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	set, err := policy.NewTemplates(1, []policy.Template{{
		Prefix: "user:", Policy: policy.Policy{Capacity: 1000, Rate: policy.PerSecond(1), Interval: interval},
	}}, nil)
	require.NoError(t, err)
	var keys []string // of one shard
	for i := 0; len(keys) < 2; i++ {
		if key := fmt.Sprintf("user:%d", i); lua.ActiveShard(key) == 0 {
			keys = append(keys, key)
		}
	}
	good, bad := keys[0], keys[1]
	reserve := func(key, id string) {
		held, err := lua.Reserve(t.Context(), rdb, key, lua.ReserveCall{ID: id, N: 1, TTL: time.Millisecond})
		require.NoError(t, err)
		require.True(t, held.OK)
	}
	for _, key := range keys {
		ok, err := newConsumer(rdb).take(t.Context(), set.Of(key), key, 900, false)
		require.NoError(t, err)
		require.True(t, ok)
	}
	reserve(bad, "one")
	require.NoError(t, rdb.Del(t.Context(), "{"+bad+"}:due").Err())
	require.NoError(t, rdb.Set(t.Context(), "{"+bad+"}:due", "x", 0).Err())

	var log lockedBuffer
	w := newWatch()
	_, stop := runningWith(t, Config{Redis: rdb, Templates: set, ObserveActive: w.observe,
		Logger: hclog.New(&hclog.LoggerOptions{Output: &log})})
	for i := range 10 {
		reserve(good, fmt.Sprint(i))
		w.until(t, "the reservation is due at a refill of each bucket", func(events map[string][]Event) bool {
			for _, key := range keys {
				if !slices.ContainsFunc(events[key], func(e Event) bool {
					return e.Outcome.Status.Wrote() && e.Outcome.Due != 0 && e.Outcome.Due <= e.Outcome.Now
				}) {
					return false
				}
			}
			return true
		})
		w.forget()
	}
	stop()
	require.Equal(t, 1, strings.Count(log.String(), "reservations can't be ended"), log.String())
}

// testReservationsEnd checks that reservations of buckets in several slots end.
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
	const ended = sweptOfBucket + 50 // more than one sweep ends
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
		}, time.Minute, 10*time.Millisecond, "tokens of an unsettled reservation return")
		s, err := lua.Settle(t.Context(), rdb, b.Key, "alive", 0)
		require.NoError(t, err)
		require.EqualValues(t, 10, s.Returned, "a reservation that has not ended is kept")
	}
}

// A bucket loses its state while 30 of its 100 tokens are reserved. The first refill creates the state again, and the
// sweep after it counts the reserved tokens. Refills of a strict bucket never replace these tokens.
func TestABucketThatLosesItsStateIsCountedByTheSweep(t *testing.T) {
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	for key, most := range map[string]int64{"strict": 70, "loose": 100} {
		bucket := Bucket{Key: key, Policy: policy.Policy{Capacity: 100, Rate: policy.PerSecond(400),
			Strict: key == "strict"}}
		w := newWatch()
		_, stop := running(t, rdb, w, false, []Bucket{bucket})
		w.until(t, "the bucket is refilled", appliedTo([]Bucket{bucket}))
		r, err := lua.Reserve(ctx, rdb, key, lua.ReserveCall{ID: "job", N: 30, TTL: time.Hour})
		require.NoError(t, err)
		require.True(t, r.OK)
		require.NoError(t, rdb.Del(ctx, lua.ControlKey(key)).Err())
		w.forget()
		w.until(t, "the bucket is refilled again", func(events map[string][]Event) bool {
			applied := 0
			for _, e := range events[key] {
				if e.Outcome.Status == policy.StatusInitialised || applied > 0 {
					require.LessOrEqual(t, e.Outcome.Tokens, most)
				}
				if e.Outcome.Status == policy.StatusApplied && e.Outcome.Outstanding == 30 {
					applied++
				}
			}
			return applied >= 5
		})
		stop()
	}
}

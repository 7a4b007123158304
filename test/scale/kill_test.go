package scale

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/lua"
)

var (
	killed   = flag.Int("kills", 1, "how many replicas TestKilledReplicas kills")
	killKeys = flag.Int("kill-keys", 100, "over how many buckets")
)

// The whole way: replicas publish a template, a consumer without a policy makes its
// buckets, and these are refilled, whichever replica is killed.
func TestKilledReplicasShardsAreRefilledByTheOthers(t *testing.T) {
	t.Parallel()
	const interval = 500 * time.Millisecond
	s := startStore(t, false)
	sc := scenario{Keys: *killKeys, Active: *killKeys, Interval: interval}
	config := sc.config(s.url)
	running := make([]*replica, 3)
	for i := range running {
		running[i] = startReplica(t, fmt.Sprintf("killed%d", i), config)
	}
	client, err := fetch.New(s.rdb)
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close(t.Context()) })
	begin := time.Now()
	const taken = capacity * 9 / 10
	for i := range sc.Keys {
		result, err := client.Take(t.Context(), sc.key(i), taken)
		require.NoError(t, err)
		require.True(t, result.OK)
	}
	active, _ := s.active(t)
	require.EqualValues(t, sc.Keys, active)

	// oldest is the bucket whose last refill was the longest ago, on Redis' clock.
	oldest := func() (last time.Time) {
		for i := range sc.Keys {
			reply, err := lua.Peek(t.Context(), s.rdb, sc.key(i), 1)
			require.NoError(t, err)
			require.LessOrEqual(t, reply.Tokens, capacity-taken+int64(rate*time.Since(begin).Seconds())+1, "no more than its rate allows")
			if at := time.UnixMicro(reply.Last); last.IsZero() || at.Before(last) {
				last = at
			}
		}
		return last
	}
	refilledSince := func(instant time.Time) func() bool { return func() bool { return oldest().After(instant) } }
	require.Eventually(t, refilledSince(time.Now()), patience, 10*time.Millisecond, "every bucket is refilled")
	var worst time.Duration
	rng := rand.New(rand.NewPCG(uint64(begin.UnixNano()), 0)) //nolint:gosec // which one is killed when needs no replay
	for i := range *killed {
		time.Sleep(4*interval + time.Duration(rng.Int64N(int64(interval)))) // the shards are shared
		victim := i % len(running)
		at := time.Now()
		running[victim].Kill()
		require.Eventually(t, refilledSince(at), patience, 10*time.Millisecond, "no bucket starves")
		worst = max(worst, time.Since(at))
		running[victim] = startReplica(t, fmt.Sprintf("killed%d-%d", victim, i), config)
	}
	t.Logf("every bucket was refilled within %s of a kill; the interval is %s", worst.Round(time.Millisecond), interval)
}

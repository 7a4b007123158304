package scale

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
)

var (
	killed   = flag.Int("kills", 1, "how many replicas TestKilledReplicas kills")
	killKeys = flag.Int("kill-keys", 100, "over how many buckets")
	killBeat = flag.Duration("kill-interval", 500*time.Millisecond, "how often these are refilled")
)

// Replicas publish a template, and takes of a consumer create its buckets. When a
// replica is killed, the others refill its buckets.
func TestKilledReplicasShardsAreRefilledByTheOthers(t *testing.T) {
	t.Parallel()
	t.Run("Redis", func(t *testing.T) {
		t.Parallel()
		killReplicas(t, startStore(t, false))
	})
	t.Run("Cluster", func(t *testing.T) {
		t.Parallel()
		killReplicas(t, startStore(t, true))
	})
}

func killReplicas(t *testing.T, s *store) {
	interval := *killBeat
	sc := scenario{Keys: *killKeys, Active: *killKeys, Interval: interval}
	config := sc.config(s.url)
	running := make([]*replica, 3)
	for i := range running {
		running[i] = startReplica(t, fmt.Sprintf("killed%d", i), config)
	}
	client, err := fetch.New(s.rdb, fetch.WithTimeout(patience)) // a busy machine may be slow
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close(t.Context()) })
	begin := time.Now()
	const taken = capacity * 9 / 10
	for i := range sc.Keys {
		result, err := client.Take(t.Context(), sc.key(i), taken)
		require.NoError(t, err)
		require.True(t, result.OK)
	}
	require.Eventually(t, func() bool { // on a Cluster, a bucket is added to the active set a moment after its take
		active, _ := s.active(t)
		return active == int64(sc.Keys)
	}, patience, 10*time.Millisecond)

	// since waits until every bucket has been refilled after an instant. It returns, for each bucket, the time from the
	// instant to the first such refill, on the clock of Redis.
	since := func(instant time.Time) (waited []time.Duration) {
		first := make([]time.Duration, sc.Keys)
		require.Eventually(t, func() bool {
			buckets := s.read(t, sc)
			most := capacity - taken + int64(rate*time.Since(begin).Seconds()) + 1
			all := true
			for i, b := range buckets {
				require.LessOrEqual(t, b.tokens, most, "%s holds no more than its rate allows", sc.key(i))
				if first[i] == 0 && b.last.After(instant) {
					first[i] = b.last.Sub(instant)
				}
				all = all && first[i] > 0
			}
			return all
		}, patience, 10*time.Millisecond, "no bucket starves")
		return first
	}
	since(time.Now())
	var worst []time.Duration
	rng := rand.New(rand.NewPCG(uint64(begin.UnixNano()), 0)) //nolint:gosec // which one is killed when needs no replay
	for i := range *killed {
		time.Sleep(4*interval + time.Duration(rng.Int64N(int64(interval)))) // until the replicas have shared the shards
		victim := i % len(running)
		at := time.Now()
		running[victim].Kill()
		worst = append(worst, slices.Max(since(at)).Round(time.Millisecond))
		running[victim] = startReplica(t, fmt.Sprintf("killed%d-%d", victim, i), config)
	}
	slices.Sort(worst)
	t.Logf("%d buckets, %d kills: from a kill until every bucket had been refilled it took at most %s, in the median %s; the interval is %s",
		sc.Keys, *killed, worst[len(worst)-1], worst[len(worst)/2], interval)
}

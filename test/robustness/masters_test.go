package robustness_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/test/robustness/record"
	"github.com/tokenrefill/refiller/test/robustness/report"
	"github.com/tokenrefill/refiller/test/robustness/system"
)

// TestMasterFailover measures how long takes through the SDK fail when the master of a Cluster is killed or frozen. It
// measures the time until takes work again twice: from the loss of the master, and from the promotion of its replica.
func TestMasterFailover(t *testing.T) {
	t.Parallel()
	for _, m := range []struct {
		name     string
		stop     func(*testenv.RedisServer)
		distance time.Duration
		within   time.Duration // takes must work again so soon after the promotion
	}{
		{"killed", func(s *testenv.RedisServer) { s.Kill() }, 0, 2 * time.Second},
		{"frozen", func(s *testenv.RedisServer) { s.Pause() }, 0, 4 * time.Second},
		{"killed, 60 ms away", func(s *testenv.RedisServer) { s.Kill() }, 60 * time.Millisecond, 2500 * time.Millisecond},
	} {
		t.Run(m.name, func(t *testing.T) {
			if *kills < figures {
				t.Parallel() // nothing is measured
			}
			var outages, after []time.Duration
			s := system.Start(t, t.TempDir(), record.Meta{Name: "master"}, system.Spec{Servers: system.Replicated,
				Replicas: 2, Distance: m.distance, Buckets: []system.Bucket{
					{Key: "checkout", Lines: []string{"capacity: 1000, rate: 500/s"}},
				}})
			c, err := fetch.New(s.Dial())
			require.NoError(t, err)
			defer func() { require.NoError(t, c.Close(context.WithoutCancel(t.Context()))) }()
			require.NoError(t, c.Ready(t.Context()))
			for range (*kills + 9) / 10 { // fewer than in TestFailover, because each takes some ten seconds
				outage, since := loseMaster(t, s, c, m.stop)
				outages, after = append(outages, outage), append(after, since)
			}
			t.Logf("master %s, %d times: takes fail for p50 %s, max %s; work after the promotion within p50 %s, max %s", m.name,
				len(outages), report.Quantile(outages, 0.5), report.Quantile(outages, 1), report.Quantile(after, 0.5),
				report.Quantile(after, 1))
			if *kills >= figures {
				require.LessOrEqual(t, report.Quantile(after, 1), m.within)
			}
		})
	}
}

// loseMaster stops the master of the bucket. outage is the time from then until takes work again, and since is the time
// from the promotion of the replica. When loseMaster returns, the former master is the replica of the new one.
func loseMaster(t *testing.T, s *system.System, c *fetch.Client, stop func(*testenv.RedisServer)) (outage,
	since time.Duration) {
	t.Helper()
	slot := lua.Slot("checkout")
	old := s.Cluster.Master(slot)
	require.NotNil(t, old)
	stop(old)
	stopped := time.Now()
	var promoted atomic.Int64 // since the stop
	promotion := make(chan struct{})
	go func() {
		defer close(promotion)
		for now := s.Cluster.Master(slot); now == nil || now == old; now = s.Cluster.Master(slot) {
			letRun(t.Context(), 10*time.Millisecond)
			if t.Context().Err() != nil {
				return
			}
		}
		promoted.Store(int64(time.Since(stopped)))
	}()
	for failed := false; ; {
		began := time.Since(stopped)
		_, err := c.Take(t.Context(), "checkout", 1)
		require.NoError(t, t.Context().Err())
		failed = failed || err != nil
		if err == nil && failed {
			outage = began
			break
		}
		require.Less(t, began, time.Minute, "takes never work again")
		letRun(t.Context(), 10*time.Millisecond)
	}
	<-promotion
	old.Kill()
	old.Restart()
	require.True(t, s.Check("after a loss"))
	s.AwaitReplica(old)
	return outage, max(0, outage-time.Duration(promoted.Load()))
}

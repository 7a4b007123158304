package robustness_test

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/test/robustness/record"
	"github.com/tokenrefill/refiller/test/robustness/report"
	"github.com/tokenrefill/refiller/test/robustness/system"
)

var kills = flag.Int("kills", 2,
	"times that TestFailover ends the active replica in each mode; from 100 on the figures are held against their targets")

// figures is the smallest number of losses for which the quantiles of the gaps are compared with their targets.
const figures = 100

// mode is a way in which the active replica is lost.
type mode struct {
	name     string
	etcd     bool
	outage   bool // etcd is paused all the time
	graceful bool
	systems  int // number of systems that run at the same time, each with its part of the kills
	distance time.Duration
	p50, p99 time.Duration // targets; no target if 0
}

// TestFailover ends the active replica, and measures the gap between the last refill before that and the first refill
// after that on the clock of Redis. There are three replicas, the refill interval is 100 ms, and the lease is 5 s.
func TestFailover(t *testing.T) {
	const ms = time.Millisecond
	for _, m := range []mode{
		{name: "race, SIGKILL", systems: 1, p50: 130 * ms, p99: 220 * ms},
		{name: "race, SIGTERM", systems: 1, graceful: true, p99: 150 * ms},
		{name: "race, 60 ms away, SIGKILL", systems: 1, distance: 60 * ms, p50: 250 * ms, p99: 340 * ms},
		{name: "elected, SIGKILL", etcd: true, systems: 4, p50: 230 * ms, p99: 330 * ms},
		{name: "elected, SIGTERM", etcd: true, graceful: true, systems: 1, p99: 150 * ms},
		{name: "elected, etcd away, SIGKILL", etcd: true, outage: true, systems: 1, p50: 230 * ms, p99: 330 * ms},
	} {
		t.Run(m.name, func(t *testing.T) {
			if *kills < figures {
				t.Parallel() // nothing is measured
			}
			var mu sync.Mutex
			var gaps []time.Duration
			lost := int64(0)
			t.Run("run", func(t *testing.T) {
				for i := range m.systems {
					t.Run(fmt.Sprint(i), func(t *testing.T) {
						t.Parallel()
						g, l := failover(t, m, (*kills+m.systems-1)/m.systems)
						mu.Lock()
						defer mu.Unlock()
						gaps, lost = append(gaps, g...), lost+l
					})
				}
			})
			t.Logf("%-28s %d times: p50 %s, p99 %s, max %s; tokens lost: %d", m.name, len(gaps),
				report.Quantile(gaps, 0.5), report.Quantile(gaps, 0.99), report.Quantile(gaps, 1), lost)
			require.NotEmpty(t, gaps)
			if len(gaps) < figures {
				return
			}
			require.Zero(t, lost)
			if m.p50 > 0 {
				require.LessOrEqual(t, report.Quantile(gaps, 0.5), m.p50)
			}
			require.LessOrEqual(t, report.Quantile(gaps, 0.99), m.p99)
		})
	}
}

// failover ends the active replica n times. It returns the gaps, and the number of tokens that fell due in the gaps but
// were never credited.
func failover(t *testing.T, m mode, n int) (gaps []time.Duration, lost int64) {
	t.Helper()
	dir := t.TempDir()
	spec := system.Spec{Servers: system.Single, Replicas: 3, TTL: 5 * time.Second, Distance: m.distance,
		Buckets: []system.Bucket{{Key: "checkout", Lines: []string{"capacity: 1000, rate: 500/s"}}}}
	if m.etcd {
		spec.Etcd = 1
	}
	s := system.Start(t, dir, record.Meta{Name: "failover"}, spec)
	if m.outage {
		for _, member := range s.Etcd.Members() {
			member.Pause()
		}
		letRun(t.Context(), 6*time.Second) // longer than the lease: no replica trusts it any more
	}
	type loss struct {
		at     int64
		victim string
	}
	var losses []loss
	for range n {
		letRun(t.Context(), 500*time.Millisecond+time.Duration(rand.Int64N(int64(100*time.Millisecond))))
		victim := active(t, s, m)
		at := time.Now().UnixNano()
		if m.graceful {
			victim.Stop()
		} else {
			victim.Kill()
		}
		losses = append(losses, loss{at, victim.Name})
		require.True(t, s.Check("after a loss"))
		victim.Restart()
	}
	require.True(t, s.Check("at the end"))
	if m.outage {
		for _, member := range s.Etcd.Members() {
			member.Resume()
		}
	}
	s.Finish()

	refills, err := record.LoadRefills(dir)
	require.NoError(t, err)
	var writes []record.Refill
	for _, f := range refills {
		if f.Key == "checkout" && f.Outcome != nil && f.Outcome.Status.Wrote() {
			writes = append(writes, f)
		}
	}
	slices.SortFunc(writes, func(a, b record.Refill) int {
		return cmp.Compare(a.Outcome.Version.Index,
			b.Outcome.Version.Index)
	})
	after := map[int]bool{} // refills that ended a gap
	for _, l := range losses {
		i := slices.IndexFunc(writes, func(f record.Refill) bool { return f.Replica != l.victim && f.Replied >= l.at })
		require.GreaterOrEqual(t, i, 0)
		after[i] = true
		o := writes[i].Outcome
		gaps = append(gaps, time.Duration(o.Elapsed)*time.Microsecond)
		// due is the time since the refill before this one. A killed replica may not have written its last refill to its
		// file. Then due is the time that this refill credited.
		due := o.Elapsed
		if i > 0 && writes[i-1].Outcome.Version.Index+1 == o.Version.Index {
			due = o.Now - writes[i-1].Outcome.Now
		}
		lost += max(0, due*500/1_000_000-o.Added-o.Clamped)
	}
	calm := int64(0)
	for i, f := range writes {
		if !after[i] {
			calm = max(calm, f.Outcome.Elapsed)
		}
	}
	t.Logf("longest gap that had another reason than a loss, such as a busy machine: %s",
		time.Duration(calm)*time.Microsecond)
	return gaps, lost
}

// active waits until one replica refills, and returns it. In elected mode it is the leader.
func active(t *testing.T, s *system.System, m mode) *system.Replica {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var etcd *clientv3.Client
	if m.etcd && !m.outage {
		etcd = s.Etcd.Client()
	}
	for ctx.Err() == nil {
		r := s.Active()
		if etcd == nil {
			return r
		}
		reply, err := etcd.Get(ctx, "/refiller/lead/", clientv3.WithPrefix(),
			clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend), clientv3.WithLimit(1))
		if err == nil && len(reply.Kvs) == 1 && strings.Contains(string(reply.Kvs[0].Value), r.Name) &&
			strings.Contains(r.Log(), `"epoch":`+fmt.Sprint(reply.Kvs[0].CreateRevision)) {
			letRun(ctx, 300*time.Millisecond) // until the standbys know that the leader refills
			return r
		}
		letRun(ctx, 50*time.Millisecond)
	}
	require.NoError(t, ctx.Err(), "no replica leads")
	return nil
}

// Package robustness_test runs whole systems of Redis, etcd, replicas and consumers under faults, and checks that
// refiller keeps its promises. README.md explains how to run it.
package robustness_test

import (
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/test/robustness/deck"
	"github.com/tokenrefill/refiller/test/robustness/record"
	"github.com/tokenrefill/refiller/test/robustness/report"
	"github.com/tokenrefill/refiller/test/robustness/schedule"
	"github.com/tokenrefill/refiller/test/robustness/system"
	"github.com/tokenrefill/refiller/test/robustness/verify"
)

// Flags, after -args.
var (
	number  = flag.Int("n", 0, "random schedules to run in TestSchedules; 0 runs a few with fixed seeds")
	seed    = flag.Uint64("seed", 0, "seed of the first random schedule, the next has the next seed; 0 draws one")
	atOnce  = flag.Int("parallel-runs", 2*runtime.NumCPU(), "schedules to run at once")
	onStore = flag.Bool("embedded", false, "TestSchedules runs on the embedded store in place of Redis")
	keep    = flag.String("keep", "",
		"directory to keep the records of all runs in; those of failed runs are kept anyway")
	history = flag.String("history", "", "directory of a kept record for TestVerify to judge again")
)

// parallel is the number of tests that run at the same time if -parallel isn't given. The tests wait most of the time.
const parallel = 8

func TestMain(m *testing.M) {
	flag.Parse()
	chosen := false
	flag.Visit(func(f *flag.Flag) { chosen = chosen || f.Name == "test.parallel" })
	if !chosen {
		_ = flag.Set("test.parallel", strconv.Itoa(parallel)) // the flag exists and accepts a number
	}
	redisconn.SetLogger(hclog.NewNullLogger()) // connections fail here all the time
	os.Exit(m.Run())
}

// recordDir returns the directory for the record of a run. The directory is removed if the test passes, unless -keep is
// given.
func recordDir(t *testing.T, name string) string {
	t.Helper()
	if *keep != "" {
		dir := filepath.Join(*keep, name)
		require.NoError(t, os.MkdirAll(dir, 0o700))
		return dir
	}
	dir, err := os.MkdirTemp("", "refiller-robustness-"+name+"-")
	require.NoError(t, err)
	t.Cleanup(func() {
		if !t.Failed() {
			require.NoError(t, os.RemoveAll(dir))
			return
		}
		t.Logf("the record is kept; judge it again with: go test ./test/robustness -run TestVerify -args -history %s",
			dir)
	})
	return dir
}

var judging sync.Mutex

// judge verifies a record and fails the test if a promise was broken.
func judge(t *testing.T, dir string, into *report.Report) {
	t.Helper()
	run, err := record.Load(dir)
	require.NoError(t, err)
	judging.Lock() // the search for an order of the calls uses all processors
	result, err := verify.Dir(dir)
	judging.Unlock()
	require.NoError(t, err)
	for _, v := range result.Violations {
		t.Errorf("%s", v)
	}
	for _, n := range result.Remarks {
		t.Logf("remark: %s", n)
	}
	t.Logf("%d calls, %d refill calls, %d writes (%d unseen), %.0f %% of the window bound used", result.Ops,
		result.Refills, result.Writes, result.Hidden, 100*result.Slack)
	into.Add(run.Meta, result)
}

// TestFixedSchedules runs fixed plans, which together have nearly every kind of fault.
func TestFixedSchedules(t *testing.T) {
	t.Parallel()
	var all report.Report
	t.Run("run", func(t *testing.T) {
		for i, fixed := range []struct {
			name   string
			spec   system.Spec
			faults []string
		}{
			{"replicas", system.Spec{Replicas: 3}, []string{"replica-kill", "replica-pause", "replicas-pause-all",
				"replicas-rolling-restart"}},
			{"network", system.Spec{Replicas: 3}, []string{"network-slow", "network-lossy", "network-reset",
				"network-half-open", "replies-lost"}},
			{"partitions", system.Spec{Replicas: 3}, []string{"replica-cut-from-redis", "replica-one-way-partition",
				"replica-stalled", "clients-one-way-partition"}},
			{"redis-answers", system.Spec{Replicas: 3}, []string{"redis-script-flush", "redis-busy", "redis-oom",
				"redis-readonly", "redis-pause", "redis-kill-keeps-data", "redis-loading+replica-kill"}},
			{"redis-loses", system.Spec{Replicas: 3}, []string{"redis-kill", "redis-flushall", "redis-evict",
				"redis-evict", "redis-evict"}},
			{"redis-clock", system.Spec{Replicas: 3}, []string{"redis-clock-forward", "redis-clock-back",
				"redis-clock-forward+replica-pause", "redis-clock-back"}},
			{"elected", system.Spec{Replicas: 3, Etcd: 1}, []string{"replica-kill", "replica-pause-past-lease",
				"replica-cut-from-etcd", "etcd-stands-still", "pulse-unreadable"}},
			{"etcd", system.Spec{Replicas: 3, Etcd: 3}, []string{"etcd-leader-kill", "etcd-quorum-loss+replica-pause"}},
			{"sentinel", system.Spec{Replicas: 3, Servers: system.Sentinel}, []string{"redis-script-flush",
				"redis-failover-to-lagging-replica"}},
			{"cluster", system.Spec{Replicas: 3, Servers: system.Cluster}, []string{"cluster-reshard",
				"cluster-node-loses-data", "redis-busy+replica-kill"}},
			{"versions", system.Spec{Replicas: 4, Versions: []int{1, 2, 1, 2}}, []string{"replica-kill",
				"network-half-open+replica-pause"}},
			{"twenty", system.Spec{Replicas: 20}, []string{"replica-kill", "replica-pause"}},
			{"kinds", system.Spec{Replicas: 3, Buckets: schedule.Pick("stepped", "quota", "kept", "whole", "strict",
				"minutely")},
				[]string{"redis-rollback", "redis-flushall", "redis-evict", "replica-kill"}},
			{"kinds-clock", system.Spec{Replicas: 3, Buckets: schedule.Pick("plain", "stepped", "minutely", "quota",
				"user:1", "guest:1")},
				[]string{"redis-clock-far-ahead-and-back", "redis-clock-forward", "redis-clock-back"}},
			{"templates", system.Spec{Replicas: 3, Buckets: schedule.Pick("plain", "user:1", "guest:1", "strict",
				"whole")},
				[]string{"replica-kill", "redis-flushall", "redis-rollback", "replica-pause"}},
			{"foreign", system.Spec{Replicas: 3, Buckets: schedule.Pick("plain", "foreign", "rare", "stepped", "user:1")},
				[]string{"replica-kill", "replica-pause", "network-slow", "redis-forbids-a-bucket"}},
			{"embedded", system.Spec{Replicas: 3, Embedded: true, Buckets: schedule.Pick("plain", "stepped", "quota",
				"whole", "strict", "user:1", "guest:1")}, []string{"replica-kill", "replica-pause", "network-slow",
				"replies-lost", "redis-pause", "redis-script-flush", "redis-flushall", "redis-evict", "redis-kill"}},
			{"kinds-change", system.Spec{Replicas: 4, Versions: []int{1, 2, 1, 2}, Buckets: schedule.Pick("plain",
				"stepped", "changed", "quota", "user:1", "strict")},
				[]string{"replica-kill", "replica-pause"}},
			{"cluster-fails-over", system.Spec{Replicas: 2, Servers: system.Replicated, Distance: 60 * time.Millisecond,
				Consumers: deck.Sidecar, Buckets: schedule.Pick("drained", "strict", "user:1")},
				[]string{"cluster-master-frozen"}},
			{"sentinel-frozen", system.Spec{Replicas: 2, Servers: system.Sentinel, Distance: 20 * time.Millisecond,
				Buckets: schedule.Pick("drained", "leased", "user:1")}, []string{"redis-failover-from-frozen-master"}},
			{"far-away", system.Spec{Replicas: 1, Distance: 150 * time.Millisecond, Consumers: deck.Plain, Later: 2,
				Buckets: schedule.Pick("drained", "strict", "user:1")},
				[]string{"replica-reads-a-later-file", "redis-pause"}},
			{"older-leader", system.Spec{Replicas: 2, Etcd: 1, Versions: []int{1, 2}, InOrder: true,
				Buckets: schedule.Pick("plain", "begun-anew", "operated", "user:1")}, []string{"replica-kill"}},
			{"operations", system.Spec{Replicas: 2, Buckets: schedule.Pick("leased", "leased-strictly", "operated",
				"divided", "shadowed", "open", "local", "user:own", "few:1")}, []string{"redis-pause", "replica-kill"}},
		} {
			t.Run(fixed.name, func(t *testing.T) {
				t.Parallel()
				plan, err := schedule.Fixed(fixed.name, uint64(i+1), fixed.spec, fixed.faults...)
				require.NoError(t, err)
				dir := recordDir(t, fixed.name)
				schedule.Run(t, dir, plan)
				judge(t, dir, &all)
			})
		}
	})
	t.Logf("\n%s", &all)
}

// fixedSeeds are the seeds of the schedules that TestSchedules runs without -n.
var fixedSeeds = []uint64{1, 2}

// TestSchedules runs random schedules: -args -n N -seed S.
func TestSchedules(t *testing.T) {
	t.Parallel()
	seeds := fixedSeeds
	fills := false
	if *number > 0 {
		first := *seed
		if first == 0 {
			first = rand.Uint64N(1<<40) / deck.Size * deck.Size // the first seed of a deck
		}
		fills = deck.Fills(first, *number)
		t.Logf("%d schedules from seed %d; one of them again: make robustness N=1 SEED=…", *number, first)
		seeds = make([]uint64, *number)
		for i := range seeds {
			seeds[i] = first + uint64(i)
		}
	}
	var all report.Report
	slots := make(chan struct{}, *atOnce)
	t.Run("run", func(t *testing.T) {
		for _, s := range seeds {
			t.Run(strconv.FormatUint(s, 10), func(t *testing.T) {
				t.Parallel()
				slots <- struct{}{}
				defer func() { <-slots }()
				plan := schedule.Random(s, *onStore)
				t.Logf("%s", plan)
				dir := recordDir(t, plan.Name)
				schedule.Run(t, dir, plan)
				judge(t, dir, &all)
			})
		}
	})
	table, empty := all.Deployments()
	t.Logf("\n%s\n%s", &all, table)
	if fills {
		require.Empty(t, empty, "each pair has a run")
	} else {
		t.Logf("%d of %d pairs had no run; %d schedules have all of them", len(empty), len(deck.Cells), deck.Size)
	}
}

// TestVerify judges a kept record again: -args -history DIR. Without -history it makes a record and judges that. In
// both cases two further verdicts on the record must be equal.
func TestVerify(t *testing.T) {
	t.Parallel()
	dir := *history
	if dir == "" {
		dir = recordDir(t, "verify")
		plan, err := schedule.Fixed("verify", 1, system.Spec{Replicas: 2}, "replica-kill")
		require.NoError(t, err)
		schedule.Run(t, dir, plan)
	}
	var all report.Report
	judge(t, dir, &all)
	first, err := verify.Dir(dir)
	require.NoError(t, err)
	second, err := verify.Dir(dir)
	require.NoError(t, err)
	require.Equal(t, first, second, "the verdict depends on the files alone")
	t.Logf("\n%s", &all)
}

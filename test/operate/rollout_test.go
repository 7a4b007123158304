package operate

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// gracePeriod is the terminationGracePeriodSeconds of deploy/k8s.
const gracePeriod = 30 * time.Second

// gaps measures the gaps between a bucket's refills on the clock of Redis. There may be several refills between two
// readings. Then the mean of their gaps is used, which may be less than the largest one.
type gaps struct {
	mu      sync.Mutex
	largest time.Duration
	before  lua.Refilled
	seen    int
	err     error
}

// watchGaps reads the bucket's last refill every few milliseconds until the test ends.
func watchGaps(t *testing.T, rdb *redis.Client, key string) *gaps {
	t.Helper()
	g := &gaps{}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		pace := time.NewTicker(5 * time.Millisecond)
		defer pace.Stop()
		for {
			select {
			case <-stop:
				return
			case <-pace.C:
			}
			p, err := lua.Peek(t.Context(), rdb, key, 1)
			g.mu.Lock()
			switch {
			case err != nil:
				g.err = err
			case p.Last != g.before.Last:
				if g.before.Last > 0 {
					mean := (p.Last - g.before.Last) / (p.Version.Index - g.before.Version.Index)
					g.largest = max(g.largest, time.Duration(mean)*time.Microsecond)
				}
				g.before = p.Refilled
				g.seen++
			}
			g.mu.Unlock()
		}
	})
	t.Cleanup(func() {
		close(stop)
		wg.Wait()
	})
	return g
}

// take returns the largest gap and the number of readings with a new refill since the last call of take.
func (g *gaps) take(t *testing.T) (largest time.Duration, seen int) {
	t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	require.NoError(t, g.err)
	largest, seen = g.largest, g.seen
	g.largest, g.seen = 0, 0
	return largest, seen
}

// demand counts tokens that are asked for at less than the bucket's rate. A system without gaps denies none of them.
type demand struct{ asked, denied atomic.Int64 }

// want asks for n tokens of a bucket again and again until the test ends.
func want(t *testing.T, rdb *redis.Client, key string, n int64, every time.Duration) *demand {
	t.Helper()
	d := &demand{}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		pace := time.NewTicker(every)
		defer pace.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-pace.C:
			}
			r, err := lua.TakeUpTo(ctx, rdb, key, n)
			if err == nil {
				d.asked.Add(n)
				d.denied.Add(n - r.Taken)
			} else if ctx.Err() == nil {
				t.Error(err)
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return d
}

func TestARollingRestartLeavesNoGapAndLosesNoToken(t *testing.T) {
	for _, mode := range []string{"race", "etcd"} {
		t.Run(mode, func(t *testing.T) {
			server := testenv.Redis(t)
			rdb := server.Client()
			config := limit(server.URL(), 1, "500/s") + "  - {key: mail, capacity: 1000, rate: 500/s}\n"
			if mode == "etcd" {
				etcd := testenv.Etcd(t, 1)
				config += fmt.Sprintf("election: {mode: etcd, endpoints: [%q]}\n", etcd.Endpoints()[0])
			}
			nodes := []*node{startNode(t, "a", config), startNode(t, "b", config), startNode(t, "c", config)}
			for _, n := range nodes {
				n.ready()
			}
			eventually(t, func() bool {
				_, err := lua.Peek(t.Context(), rdb, "checkout", 1)
				return err == nil
			}, patience,
				10*time.Millisecond)
			load, steady := consume(t, rdb, "checkout"), want(t, rdb, "mail", 4, 10*time.Millisecond)
			refills := watchGaps(t, rdb, "checkout")
			rest(t, time.Second)
			quiet, seen := refills.take(t)
			require.Positive(t, seen)
			tokensBefore, lastBefore := load.account(t, rdb, "checkout")

			// The replica that refills is restarted first, so that the others have to take over.
			slices.SortFunc(nodes, func(
				x, y *node) int {
				return int(y.status().Calls["applied"] - x.status().Calls["applied"])
			})
			for _, n := range nodes {
				began := time.Now()
				n.Signal(syscall.SIGTERM)
				select {
				case <-n.Exited():
				case <-time.After(gracePeriod):
					require.Fail(t, "the replica still runs after the grace period")
				}
				t.Logf("%s: exits %s after SIGTERM", mode, time.Since(began).Round(time.Millisecond))
				require.Contains(t, n.Log(), "replica stopped")
				n.Restart()
				n.findAddr(2)
				n.ready()
			}
			rest(t, time.Second)
			largest, seen := refills.take(t)
			t.Logf("%s: largest gap of %d refills in the roll-out %s, before it %s", mode, seen, largest, quiet)
			const interval = 100 * time.Millisecond
			require.Less(t, largest, 10*interval+quiet,
				"the gap is a few intervals on a busy machine, because no lease has to end")

			asked, denied := steady.asked.Load(), steady.denied.Load()
			t.Logf("%s: of %d tokens that a steady system admits, %d were denied", mode, asked, denied)
			require.Greater(t, asked, int64(400))
			require.LessOrEqual(t, denied, asked/200)

			// The bucket was never full meanwhile, so all tokens that fell due must have been added.
			tokens, last := load.account(t, rdb, "checkout")
			due := float64(last-lastBefore) * 500 / 1e6
			require.InDelta(t, due, tokens-tokensBefore, 1, "no token was lost or minted")
		})
	}
}

func TestTheProbesFailForTheirOwnReasons(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	n := startNode(t, "a", limit(server.URL(), 1, "500/s"))
	n.ready()
	server.Pause()
	eventually(t, func() bool {
		_, err := n.get("/readyz")
		return err != nil
	}, patience, 10*time.Millisecond,
		"the replica is not ready without Redis")
	_, err := n.get("/livez")
	require.NoError(t, err, "the replica is alive, because a restart would not help")
	server.Resume()
	n.ready()
}

func TestAReplicaThatCannotReachEtcdEndsWithinTheGracePeriod(t *testing.T) {
	t.Parallel()
	server, etcd := testenv.Redis(t), testenv.Etcd(t, 1)
	election := fmt.Sprintf("election: {mode: etcd, endpoints: [%q]}\n", etcd.Endpoints()[0])
	n := startNode(t, "a", limit(server.URL(), 1, "500/s")+election)
	leader(t, []*node{n})
	for _, m := range etcd.Members() {
		m.Pause()
	}
	n.Signal(syscall.SIGTERM)
	select {
	case <-n.Exited():
	case <-time.After(gracePeriod):
		require.Fail(t, "the replica still runs after the grace period")
	}
	require.Contains(t, n.Log(), "replica stopped")
}

func TestTheGracePeriodIsThatOfTheManifest(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join("..", "..", "deploy", "k8s", "base", "deployment.yaml"))
	require.NoError(t, err)
	require.Contains(t, string(text), fmt.Sprintf("terminationGracePeriodSeconds: %d\n", int(gracePeriod.Seconds())))
}

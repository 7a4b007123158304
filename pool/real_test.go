package pool

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/election"
	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
)

const testPrefix = "/refiller/pools"

// area is a region with a real Redis. It has a refiller, an agent and a candidate for coordinator, which reach etcd
// through one proxy.
type area struct {
	name  string
	redis *testenv.RedisServer
	rdb   *redis.Client
	proxy *faultproxy.Proxy
	agent *Agent
	coord *Coordinator
	stop  context.CancelFunc // of the candidate

	mu     sync.Mutex
	demand float64
}

// realPools starts the regions of a pool on real servers.
func realPools(t *testing.T, p Pool) (map[string]*area, *testenv.EtcdCluster) {
	etcd := testenv.Etcd(t, 1)
	level := hclog.Warn
	if os.Getenv("REFILLER_DEBUG") != "" {
		level = hclog.Debug
	}
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	areas := map[string]*area{}
	t.Cleanup(func() { // before the servers end
		cancel()
		wg.Wait()
	})
	for _, r := range p.Regions {
		a := &area{name: r.Name, redis: testenv.Redis(t)}
		a.rdb = a.redis.Client()
		proxy := testenv.Proxy(t, etcd.Members()[0].Addr(), 0)
		a.proxy = proxy
		require.NoError(t, proxy.Delay(faultproxy.Both, 20*time.Millisecond, 5*time.Millisecond)) // 40 ms there and back
		client, err := etcdconn.Open(etcdconn.Options{Endpoints: []string{proxy.Addr()}})
		require.NoError(t, err)
		t.Cleanup(func() { _ = client.Close() })
		log := hclog.New(&hclog.LoggerOptions{Name: r.Name, Level: level})

		rf, err := refill.New(refill.Config{
			Redis: a.rdb, Logger: log, Buckets: []refill.Bucket{{Key: p.Name, Policy: policy.Policy{Interval: p.interval()},
				Pooled: true}},
		})
		require.NoError(t, err)
		a.agent, err = NewAgent(AgentConfig{
			Client: client, Prefix: testPrefix, Redis: a.rdb, Refiller: rf, Region: r.Name, Identity: r.Name,
			Settings: Settings{Version: 1, Pools: []Pool{p}}, Timing: DefaultTiming(), Logger: log,
		})
		require.NoError(t, err)
		a.coord, err = NewCoordinator(CoordinatorConfig{Client: client, Prefix: testPrefix, Timing: DefaultTiming(),
			Logger: log})
		require.NoError(t, err)
		cfg := election.DefaultConfig()
		cfg.Client = client
		cfg.Prefix = testPrefix
		cfg.Identity = r.Name
		cfg.Logger = log
		cfg.TTL = 2 * time.Second
		cfg.SafetyMargin = 400 * time.Millisecond
		e, err := election.New(cfg)
		require.NoError(t, err)

		leading, stop := context.WithCancel(ctx)
		a.stop = stop
		wg.Go(func() { _ = rf.Run(ctx) })
		wg.Go(func() { _ = a.agent.Run(ctx) })
		wg.Go(func() { _ = e.Run(leading, a.coord.Lead) })
		wg.Go(func() { a.consume(ctx, p.Name) })
		areas[r.Name] = a
	}
	return areas, etcd
}

// consume takes tokens at the rate that the region wants, in a burst every 50 ms.
func (a *area) consume(ctx context.Context, key string) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	owed, last := 0.0, time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			a.mu.Lock()
			owed += a.demand * now.Sub(last).Seconds()
			a.mu.Unlock()
			last = now
			if n := int64(owed); n > 0 {
				owed -= float64(n)
				if r, err := lua.TakeUpTo(ctx, a.rdb, key, n); err == nil && r.Taken < n {
					_, _ = lua.Take(ctx, a.rdb, key, n-r.Taken, false) // denied, and counted
				}
			}
		}
	}
}

func (a *area) want(n float64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.demand = n
}

// rate returns the rate in force in the region's Redis, in tokens per second.
func (a *area) rate(t require.TestingT, key string) float64 {
	p, err := lua.Peek(context.Background(), a.rdb, key, 1)
	if err != nil || p.Terms == nil {
		return 0
	}
	n := p.Terms.Tokens
	if p.Terms.GrantEra == p.Version.Era && p.Now < p.Terms.GrantEnd {
		n = p.Terms.GrantTokens
	}
	return float64(n) * 1e6 / float64(p.Terms.Per)
}

// watchSum asserts until stop is called that the rates in force together are at most limit. It reads the rates one
// after the other, so it adds only rates that are equal in two readings.
func watchSum(t *testing.T, areas map[string]*area, key string, limit float64) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	worst := ""
	wg.Go(func() {
		for ctx.Err() == nil {
			first, second := 0.0, 0.0
			text := ""
			one := map[string]float64{}
			for name, a := range areas {
				one[name] = a.rate(t, key)
			}
			for name, a := range areas {
				r := a.rate(t, key)
				first += min(one[name], r)
				second += r
				text += fmt.Sprintf(" %s %.1f", name, r)
			}
			if first > limit*1.000001 {
				worst = text
			}
			timing.Sleep(ctx.Done(), 10*time.Millisecond)
		}
	})
	return func() {
		cancel()
		wg.Wait()
		require.Empty(t, worst, "the regions' rates add up to no more than R")
	}
}

func realPool() Pool {
	return Pool{Name: "payments", Rate: policy.PerSecond(1000), Capacity: 1500, Regions: []Region{
		{Name: "ap", Weight: 1, Floor: policy.PerSecond(50)},
		{Name: "eu", Weight: 2, Floor: policy.PerSecond(100)},
		{Name: "us", Weight: 1, Floor: policy.PerSecond(50)},
	}}
}

func TestPoolOverRealServers(t *testing.T) {
	p := realPool()
	areas, _ := realPools(t, p)
	ap := areas["ap"]
	eu := areas["eu"]
	us := areas["us"]
	rate := func(a *area) float64 { return a.rate(t, p.Name) }
	eventually := func(what string, within time.Duration, ok func() bool) time.Duration {
		t.Helper()
		began := time.Now()
		require.Eventually(t, ok, within, 20*time.Millisecond, what)
		return time.Since(began)
	}
	stop := watchSum(t, areas, p.Name, 1000)
	defer stop()

	ap.want(100)
	eu.want(100)
	us.want(100)
	eventually("idle regions share everything", 30*time.Second, func() bool { return rate(ap)+rate(eu)+rate(us) > 995 })

	// A demand step.
	us.want(900)
	took := eventually("demand in us is served", 30*time.Second, func() bool { return rate(us) > 0.9*(1000-2*110) })
	t.Logf("after a demand step us has 90 %% in %s", took)

	// A region that is cut off keeps its floor, and the others get the rest.
	us.proxy.Cut()
	ap.want(900)
	eventually("us falls to its floor", 30*time.Second, func() bool { return rate(us) == 50 })
	eventually("ap gets the share that us had", 30*time.Second, func() bool { return rate(ap) > 700 })
	before, err := lua.Tickets(t.Context(), us.rdb, []string{p.Name})[0].Ticket, error(nil)
	require.NoError(t, err)
	time.Sleep(3 * time.Second) // measure the floor over this time
	after := lua.Tickets(t.Context(), us.rdb, []string{p.Name})[0].Ticket
	seconds := float64(after.Now-before.Now) / 1e6
	require.InDelta(t, 50, float64(after.Added-before.Added)/seconds, 15,
		"the floor is credited, give or take a late refill")
	require.NoError(t, us.proxy.Heal())
	took = eventually("us is served again", 30*time.Second, func() bool { return rate(us) > 300 })
	t.Logf("back from the partition, us is served in %s", took)

	// The coordinator dies. No region falls to its floor.
	eventually("shares are level", 30*time.Second, func() bool { return rate(ap) > 400 && rate(us) > 400 })
	var leader *area
	eventually("a replica leads", 30*time.Second, func() bool {
		for _, a := range areas {
			if a.coord.Stats().Leading {
				leader = a
			}
		}
		return leader != nil
	})
	epoch := leader.coord.Stats().Epoch
	leader.proxy.Cut() // cut its resignation and its agent off
	leader.stop()
	time.Sleep(200 * time.Millisecond) // so that it has stopped before its agent is connected again
	require.NoError(t, leader.proxy.Heal())
	lowest := map[string]float64{}
	eventually("another replica leads", 30*time.Second, func() bool {
		for name, a := range areas {
			if r := rate(a); lowest[name] == 0 || r < lowest[name] {
				lowest[name] = r
			}
		}
		for _, a := range areas {
			if s := a.coord.Stats(); s.Leading && s.Epoch > epoch && s.Commits > 0 {
				return true
			}
		}
		return false
	})
	require.Greater(t, lowest["ap"], 300.0)
	require.Greater(t, lowest["us"], 300.0)
	eu.want(900)
	eventually("the new coordinator moves shares", 30*time.Second, func() bool { return rate(eu) > 400 })
}

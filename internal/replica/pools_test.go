package replica_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/replica"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/pool"
)

// poolConfig returns the configuration of a replica in a region.
func poolConfig(t *testing.T, region string, server *testenv.RedisServer, etcd *testenv.EtcdCluster, version int64,
	mode, pools string) config.Config {
	t.Helper()
	cfg, err := config.Load(config.Source{Data: fmt.Appendf(nil,
		"region: %s\nredis: {url: %q}\nlisten: 127.0.0.1:0\nversion: %d\nelection: {mode: %s, ttl: 2s, endpoints: [%s]}\nbuckets: [{key: own, capacity: 1000, rate: 100/s}]\n%s",
		region, server.URL(), version, mode, strings.Join(etcd.Endpoints(), ", "), pools)})
	require.NoError(t, err)
	return cfg
}

func onePool(rate string, capacity int, regions string) string {
	return fmt.Sprintf("pools:\n  - {name: payments, rate: %s, capacity: %d, regions: {%s}}\n", rate, capacity, regions)
}

// share returns the share of a replica's region in the pool, from the replica's status.
func share(t *testing.T, r *replica.Replica) admin.Share {
	t.Helper()
	if s := r.Status(t.Context(), admin.Query{}); len(s.Pools.Shares) == 1 {
		return s.Pools.Shares[0]
	}
	return admin.Share{}
}

func TestReplicasOfTwoRegionsShareAPool(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	eu := testenv.Redis(t)
	us := testenv.Redis(t)
	ap := testenv.Redis(t)
	two := onePool("1000/s", 3000, "eu: {weight: 3, floor: 100/s}, us: {floor: 50/s}")
	a := running(t, poolConfig(t, "eu", eu, etcd, 1, "race", two), replica.Options{Identity: "a"})
	b := running(t, poolConfig(t, "us", us, etcd, 1, "etcd", two), replica.Options{Identity: "b"})

	total := func() float64 { return share(t, a).Rate + share(t, b).Rate }
	near := func(want float64) func() bool {
		return func() bool {
			n := total()
			return n > 0.995*want && n < 1.000001*want
		}
	}
	eventually(t, "the regions share the rate", near(1000))
	require.InDelta(t, 100, share(t, a).Floor, 0.01)
	require.InDelta(t, 50, share(t, b).Floor, 0.01)
	eventually(t, "the pool's bucket is refilled", func() bool { return share(t, a).Remaining > 0 })
	require.EqualValues(t, 1000, share(t, a).Limit)
	eventually(t, "one region coordinates, and each region has its own leader", func() bool {
		one, other := a.Status(t.Context(), admin.Query{}), b.Status(t.Context(), admin.Query{})
		return one.Pools.Coordinator != nil && one.Pools.Coordinating == (one.Pools.Coordinator.Identity == "eu/a") &&
			one.Pools.Coordinating != other.Pools.Coordinating && other.Leader != nil && other.Leader.Identity == "b"
	})
	eventually(t, "each region's page has the shares of both", func() bool {
		for _, r := range []*replica.Replica{a, b} {
			regions := share(t, r).Regions
			if len(regions) != 2 || regions[0].Region != "eu" || regions[1].Region != "us" {
				return false
			}
			sum := 0.0
			for _, band := range share(t, r).Stack() {
				if band.Now == nil || band.Path == "" {
					return false
				}
				sum += *band.Now
			}
			if sum < 0.995 || sum > 1.000001 {
				return false
			}
		}
		return true
	})
	require.NotNil(t, peek(t, eu.Client(), "payments").Terms)
	require.NotNil(t, peek(t, eu.Client(), "own").Terms)

	// The rate is raised at run time. A new file in one region is enough.
	require.NoError(t, a.Reload(poolConfig(t, "eu", eu, etcd, 2, "race",
		onePool("2000/s", 6000, "eu: {weight: 3, floor: 100/s}, us: {floor: 50/s}")), "test"))
	eventually(t, "the new rate is shared", near(2000))

	// A region joins, and the rate is lowered.
	three := onePool("500/s", 3000, "eu: {weight: 3, floor: 50/s}, us: {floor: 20/s}, ap: {floor: 20/s}")
	c := running(t, poolConfig(t, "ap", ap, etcd, 3, "race", three), replica.Options{Identity: "c"})
	require.NoError(t, a.Reload(poolConfig(t, "eu", eu, etcd, 3, "race", three), "test"))
	require.NoError(t, b.Reload(poolConfig(t, "us", us, etcd, 3, "etcd", three), "test"))
	eventually(t, "three regions share the rate", func() bool {
		n := total() + share(t, c).Rate
		return share(t, c).Rate > 0 && n > 0.995*500 && n < 1.000001*500
	})

	// A region leaves the pool. Its bucket gets terms under which it may use nothing.
	without := onePool("500/s", 3000, "eu: {weight: 3, floor: 50/s}, us: {floor: 20/s}")
	require.NoError(t, a.Reload(poolConfig(t, "eu", eu, etcd, 4, "race", without), "test"))
	eventually(t, "the other regions share the whole rate", near(500))
	eventually(t, "the region that left has acknowledged", func() bool {
		p := peek(t, ap.Client(), "payments")
		return p.Terms.Tokens == 0 && p.Terms.GrantEra == 0 && p.Terms.Capacity == 1
	})
}

func TestPoolsBeginWithAStart(t *testing.T) {
	t.Parallel()
	etcd, server := testenv.Etcd(t, 1), testenv.Redis(t)
	plain := poolConfig(t, "eu", server, etcd, 1, "race", "")
	r := running(t, plain, replica.Options{})
	require.NoError(t, r.Reload(poolConfig(t, "eu", server, etcd, 2, "race", onePool("100/s", 300, "eu: {}")), "test"))
	s := r.Status(t.Context(), admin.Query{})
	require.Equal(t, []string{"pools"}, s.Reload.Restart)
	require.Nil(t, s.Pools)
}

func TestPoolsAreRefusedUnderTheSameVersion(t *testing.T) {
	t.Parallel()
	etcd, server := testenv.Etcd(t, 1), testenv.Redis(t)
	r := running(t, poolConfig(t, "eu", server, etcd, 1, "race", onePool("100/s", 300, "eu: {}")), replica.Options{})
	require.ErrorContains(t, r.Reload(poolConfig(t, "eu", server, etcd, 1, "race", onePool("200/s", 300, "eu: {}")),
		"test"), "other pools")
	eventually(t, "a single region has the whole rate", func() bool { return share(t, r).Rate == 100 })
	// A file without the field pools doesn't change the pools. A file with an empty list ends them.
	require.NoError(t, r.Reload(poolConfig(t, "eu", server, etcd, 2, "race", ""), "test"))
	require.Equal(t, []string{"pools"}, r.Status(t.Context(), admin.Query{}).Reload.Restart)
	require.NoError(t, r.Reload(poolConfig(t, "eu", server, etcd, 3, "race", "pools: []\n"), "test"))
	eventually(t, "the pool has ended", func() bool { return peek(t, server.Client(), "payments").Terms.Capacity == 1 })
}

// The elections of a region can use an etcd of the region, while the pools use another one.
func TestPoolsMeetInARegistryOfTheirOwn(t *testing.T) {
	t.Parallel()
	global, regional := testenv.Etcd(t, 1), testenv.Etcd(t, 1)
	pools := onePool("1000/s", 3000, "eu: {}, us: {}") +
		fmt.Sprintf("pool_registry: {endpoints: [%q], prefix: /shared, ttl: 2s}\npools_version: 3\n", global.Endpoints()[0])
	a := running(t, poolConfig(t, "eu", testenv.Redis(t), regional, 7, "etcd", pools), replica.Options{Identity: "a"})
	cfg, err := config.Load(config.Source{Data: fmt.Appendf(nil,
		"region: us\nredis: {url: %q}\nlisten: 127.0.0.1:0\nversion: 9\n%s",
		testenv.Redis(t).URL(), pools)})
	require.NoError(t, err, "a region that races has no etcd of its own")
	b := running(t, cfg, replica.Options{Identity: "b"})

	eventually(t, "the regions share the rate, and each elects its own leader", func() bool {
		status := a.Status(t.Context(), admin.Query{})
		return share(t, a).Rate+share(t, b).Rate > 995 && status.Leader != nil && status.Leader.Identity == "a"
	})
	settings, found, err := pool.ReadSettings(t.Context(), global.Client(), "/shared/pools")
	require.NoError(t, err)
	require.True(t, found)
	require.EqualValues(t, 3, settings.Version, "the settings have the version of the pools")
	for prefix, want := range map[string]int64{"/refiller/regions/eu/": 1, "/shared/": 0} {
		got, err := regional.Client().Get(t.Context(), prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
		require.NoError(t, err)
		require.Equal(t, want, got.Count, prefix)
	}
}

// The files of the regions change one after the other. The region whose file comes last gets its first terms before its
// replica refills the pool.
func TestARegionWhoseFileComesLateGetsItsBucket(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	eu, us := testenv.Redis(t), testenv.Redis(t)
	none := "pools: []\n"
	both := onePool("1000/s", 3000, "eu: {}, us: {}")
	a := running(t, poolConfig(t, "eu", eu, etcd, 1, "race", none), replica.Options{Identity: "a"})
	b := running(t, poolConfig(t, "us", us, etcd, 1, "race", none), replica.Options{Identity: "b"})
	require.NoError(t, a.Reload(poolConfig(t, "eu", eu, etcd, 2, "race", both), "test"))
	eventually(t, "us has terms before it has the file", func() bool { return share(t, b).Rate > 0 })
	require.NoError(t, b.Reload(poolConfig(t, "us", us, etcd, 2, "race", both), "test"))

	client, err := fetch.New(us.Client())
	require.NoError(t, err)
	defer func() { require.NoError(t, client.Close(t.Context())) }()
	eventually(t, "the late region has tokens", func() bool {
		r, err := client.Take(t.Context(), "payments", 1)
		return err == nil && r.OK
	})
}

// The plan that divides a pool among its flows has the headroom of the later file, although a replica with an older file
// refills the pool, too.
func TestThePlanOfAPoolIsOfTheLaterFile(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	server := testenv.Redis(t)
	ctx := t.Context()
	rdb := server.Client()
	file := func(version int64, headroom string) config.Config {
		return poolConfig(t, "eu", server, etcd, version, "race", fmt.Sprintf(
			"pools:\n  - {name: payments, rate: 100/s, capacity: 300, regions: {eu: {}}, flows: {headroom: %s}}\n", headroom))
	}
	running(t, file(7, "10%"), replica.Options{Identity: "old"})
	later := running(t, file(7, "10%"), replica.Options{Identity: "later"})
	c := consumer(t, rdb)
	floor := func() string { // in the plan in force
		for _, flow := range []string{"loud", "quiet"} {
			_, _ = c.Take(ctx, "payments", 1, fetch.WithFlow(flow)) // there is no bucket at first
		}
		if f := strings.Fields(rdb.HGet(ctx, "{payments}:flows", "/").Val()); len(f) > 3 {
			return f[2]
		}
		return ""
	}
	eventually(t, "there is a plan", func() bool { return floor() == "30" })
	require.NoError(t, later.Reload(file(8, "50%"), "test"))
	eventually(t, "the later file's plan is in force", func() bool { return floor() == "150" })
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		require.Equal(t, "150", floor())
	}
}

func TestABucketThatBecomesTheFirstPoolIsRefilledByConsumersUntilTheRestart(t *testing.T) {
	t.Parallel()
	etcd, server := testenv.Etcd(t, 1), testenv.Redis(t)
	file := func(version int, limits string) config.Config {
		cfg, err := config.Load(config.Source{Data: fmt.Appendf(nil,
			"region: eu\nredis: {url: %q}\nlisten: 127.0.0.1:0\nversion: %d\nelection: {mode: race, endpoints: [%s]}\n%s",
			server.URL(), version, etcd.Endpoints()[0], limits)})
		require.NoError(t, err)
		return cfg
	}
	r := running(t, file(1, "buckets: [{key: payments, capacity: 300, rate: 100/s}]\n"), replica.Options{})
	eventually(t, "the bucket exists", func() bool {
		return server.Client().Exists(t.Context(), "payments").Val() == 1
	})
	require.NoError(t, r.Reload(file(2, onePool("100/s", 300, "eu: {}")), "test"))
	require.Equal(t, []string{"pools"}, r.Status(t.Context(), admin.Query{}).Reload.Restart)
	before := peek(t, server.Client(), "payments").Version.Index
	c, err := fetch.New(server.Client())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close(context.WithoutCancel(t.Context()))) })
	eventually(t, "the consumer refills", func() bool {
		_, err := c.TakeUpTo(t.Context(), "payments", 300)
		return err == nil && peek(t, server.Client(), "payments").Version.Index > before+3
	})
}

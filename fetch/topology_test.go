package fetch

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// keysOf returns n keys of buckets in slots from first to last.
func keysOf(n, first, last int) (keys []string) {
	for i := 0; len(keys) < n; i++ {
		if key := fmt.Sprint("user:", i); first <= lua.Slot(key) && lua.Slot(key) <= last {
			keys = append(keys, key)
		}
	}
	return keys
}

// clusterClients are clients of a Cluster that are set up in several ways.
func clusterClients(t *testing.T, cluster *testenv.RedisCluster) map[string]redis.UniversalClient {
	url, err := redisconn.ParseURL(cluster.URL())
	require.NoError(t, err)
	sidecars, err := redisconn.Open(redisconn.Options{URL: url})
	require.NoError(t, err)
	clients := map[string]redis.UniversalClient{
		"by default":                 redis.NewClusterClient(&redis.ClusterOptions{Addrs: cluster.Addrs()}),
		"with the sidecar's options": sidecars,
		"reloads each second": redis.NewClusterClient(&redis.ClusterOptions{
			Addrs: cluster.Addrs(), ClusterStateReloadInterval: time.Second,
		}),
	}
	for _, rdb := range clients {
		t.Cleanup(func() { _ = rdb.Close() })
	}
	return clients
}

// The Client soon finds a replica that was promoted, whatever the options of the Redis client are.
func TestTakesWorkSoonAfterAClustersFailover(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]struct {
		stop   func(*testenv.RedisServer)
		within time.Duration
	}{
		"killed": {(*testenv.RedisServer).Kill, 2 * time.Second}, "frozen": {(*testenv.RedisServer).Pause, 4 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := testenv.Cluster(t)
			promoted := cluster.Replicate()[0].Client()
			key := keysOf(1, 0, 5000)[0]
			createBucket(t, cluster.Client(), key, hourly(policy.MaxTokens))
			require.NoError(t, cluster.Nodes()[0].Client().Wait(t.Context(), 1, patience).Err())
			var since atomic.Pointer[time.Time] // the promotion
			var wg sync.WaitGroup
			defer wg.Wait()
			for opened, rdb := range clusterClients(t, cluster) {
				c := newClient(t, rdb)
				_, err := c.Take(t.Context(), key, 1, slow())
				require.NoError(t, err)
				wg.Go(func() {
					for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
						began := time.Now()
						_, err := c.Take(t.Context(), key, 1)
						if at := since.Load(); err == nil && at != nil && began.After(*at) {
							t.Logf("%s: takes work %s after the promotion", opened, began.Sub(*at))
							if began.Sub(*at) > fail.within {
								t.Errorf("%s: want at most %s", opened, fail.within)
							}
							return
						}
					}
					t.Errorf("%s: takes never work again", opened)
				})
			}
			fail.stop(cluster.Nodes()[0])
			eventually(t, func() bool {
				return strings.Contains(promoted.Info(t.Context(), "replication").Val(), "role:master")
			}, "the replica is promoted")
			now := time.Now()
			since.Store(&now)
		})
	}
}

// A stopped master affects no buckets on other masters, even if their slots are adjacent.
func TestAFrozenMasterTakesNothingFromOthers(t *testing.T) {
	t.Parallel()
	cluster := testenv.Cluster(t)
	const border = 16384 / 3 // the first slot of the second master
	frozen, healthy := keysOf(20, border-100, border-1), keysOf(20, border, border+100)
	rdb := cluster.Client()
	for _, key := range append(frozen, healthy...) {
		createBucket(t, rdb, key, hourly(policy.MaxTokens))
	}
	c := newClient(t, rdb, WithTimeout(250*time.Millisecond)) // for a busy machine
	for _, key := range append(frozen, healthy...) {
		_, err := c.Take(t.Context(), key, 1, slow())
		require.NoError(t, err)
	}
	cluster.Nodes()[0].Pause()
	defer cluster.Nodes()[0].Resume()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	var failed, taken atomic.Int64
	for i := range frozen {
		wg.Go(func() {
			for ctx.Err() == nil {
				_, err := c.Take(t.Context(), frozen[i], 1)
				if err == nil {
					t.Error("a take was answered although its master is frozen")
					return
				}
				time.Sleep(time.Millisecond) // an open breaker refuses at once
			}
		})
		wg.Go(func() {
			for ctx.Err() == nil {
				taken.Add(1)
				if _, err := c.Take(t.Context(), healthy[i], 1, slow()); err != nil {
					failed.Add(1)
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	wg.Wait()
	require.Zero(t, failed.Load(), "some of %d takes failed", taken.Load())
	require.EqualValues(t, 1, c.Stats().BreakerOpened)
}

// One master of a Cluster hangs: it accepts connections and doesn't answer. A process that starts now takes from
// buckets on the other masters within a second, whichever master it asks first where the slots are.
func TestANewProcessTakesFromTheMastersThatWork(t *testing.T) {
	t.Parallel()
	cluster := testenv.Cluster(t)
	key := keysOf(1, 16383/2, 16383)[0]
	createBucket(t, cluster.Client(), key, hourly(1000))
	cluster.Nodes()[0].Pause()
	defer cluster.Nodes()[0].Resume()
	for range 6 {
		c := newClient(t, cluster.Client())
		_, err := c.Take(t.Context(), key, 1)
		require.NoError(t, err)
	}
}

// silentAddr returns the address of a server that neither accepts nor refuses connections, like a host that is down.
func silentAddr(t *testing.T) string {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = syscall.Close(fd) })
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	require.NoError(t, syscall.Listen(fd, 0))
	bound, err := syscall.Getsockname(fd)
	require.NoError(t, err)
	addr := fmt.Sprint("127.0.0.1:", bound.(*syscall.SockaddrInet4).Port)
	for { // until the queue of connections is full
		conn, err := net.DialTimeout("tcp", addr, 200*time.Millisecond)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
}

// go-redis asks one node after the other for the slots of a Cluster. A host that is down must delay this by no more
// than a second.
func TestAHostThatIsDownDelaysTheSlotsByASecond(t *testing.T) {
	t.Parallel()
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{silentAddr(t)}})
	defer rdb.Close()
	c := newClient(t, rdb)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	began := time.Now()
	require.ErrorIs(t, c.Ready(ctx), ErrUnavailable)
	require.Less(t, time.Since(began), 5*time.Second)
}

// A server that has left is forgotten, and so is its queue, however often servers come and go.
func TestServersThatLeftAreForgotten(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	_, port, err := net.SplitHostPort(server.Addr())
	require.NoError(t, err)
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": server.Addr()}})
	defer ring.Close()
	cluster := testenv.Cluster(t)
	for name, rdb := range map[string]redis.UniversalClient{"ring": ring, "cluster": cluster.Client()} {
		createBucket(t, rdb, "mail", hourly(policy.MaxTokens))
		c := newClient(t, rdb, slow())
		_, err := c.Take(t.Context(), "mail", 1)
		require.NoError(t, err)
		nodes := func() (n int) {
			c.nodes.byClient.Range(func(any, any) bool {
				n++
				return true
			})
			return n
		}
		before := nodes()
		for i := range 10 {
			if name == "ring" {
				ring.SetAddrs(map[string]string{"a": []string{"localhost:" + port, server.Addr()}[i%2]})
			} else { // as when a node joins, and then leaves
				joined := c.nodes.cluster.Options().NewClient(&redis.Options{Addr: "127.0.0.1:1"})
				require.NoError(t, joined.Close())
			}
			_, err := c.Take(t.Context(), "mail", 1)
			require.NoError(t, err)
		}
		eventually(t, func() bool { return nodes() <= before+1 }, name+": all nodes except the last are forgotten")
	}
}

// If the network drops connections without an error, as a firewall may do, the Client soon gives them up, however many
// of them are idle.
func TestForgottenConnectionsAreGivenUpSoon(t *testing.T) {
	t.Parallel()
	for _, pause := range []time.Duration{time.Second, time.Millisecond} {
		t.Run(fmt.Sprint("a take every ", pause), func(t *testing.T) {
			t.Parallel()
			f := newFaulty(t, nil)
			createBucket(t, f.direct, "mail", hourly(policy.MaxTokens))
			require.NoError(t, f.proxy.Delay(faultproxy.ToClient, 100*time.Millisecond, 0))
			c := newClient(t, f.rdb, WithTimeout(time.Second))
			var wg sync.WaitGroup
			for range 500 { // these calls leave idle connections
				time.Sleep(time.Millisecond)
				wg.Go(func() { _, _ = c.Take(t.Context(), "mail", 1, slow()) })
			}
			wg.Wait()
			const rounds = 3 // on a busy machine, takes may fail for want of processor time
			for range rounds {
				last := lastFailure(t, f, c, pause)
				t.Logf("the last take that failed began %s after", last)
				if last <= 3*time.Second {
					return
				}
			}
			t.Error("takes failed for longer in each round")
		})
	}
}

// lastFailure makes the network drop the present connections, and takes for six seconds. It returns when the last take
// that failed began, after the drop.
func lastFailure(t *testing.T, f *faulty, c *Client, pause time.Duration) time.Duration {
	t.Helper()
	f.proxy.Swallow()
	forgotten := time.Now()
	var late atomic.Int64
	var wg sync.WaitGroup
	for time.Since(forgotten) < 6*time.Second {
		time.Sleep(pause)
		wg.Go(func() {
			began := time.Now()
			_, err := c.Take(t.Context(), "mail", 1)
			if after := began.Sub(forgotten); err != nil && after > time.Duration(late.Load()) {
				late.Store(int64(after))
			}
		})
	}
	wg.Wait()
	return time.Duration(late.Load())
}

// The Client opens no more connections than the options of the Redis client allow.
func TestConnectionsAreTheUsersToBound(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]redis.Options{
		"PoolSize": {PoolSize: 4}, "MaxActiveConns": {PoolSize: 10, MaxActiveConns: 4}, "one": {PoolSize: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFaulty(t, func(to *redis.Options) { to.PoolSize, to.MaxActiveConns = o.PoolSize, o.MaxActiveConns })
			createBucket(t, f.direct, "mail", hourly(policy.MaxTokens))
			c := newClient(t, f.rdb, slow())
			f.warm(t, c)
			require.NoError(t, f.proxy.Delay(faultproxy.ToClient, 50*time.Millisecond, 0))
			var wg sync.WaitGroup
			for range 300 {
				time.Sleep(time.Millisecond)
				wg.Go(func() {
					if _, err := c.Take(t.Context(), "mail", 1); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			most := f.proxy.Connections()
			require.LessOrEqual(t, most, 4)
			if o.PoolSize == 1 {
				require.Equal(t, 1, most)
			}
		})
	}
}

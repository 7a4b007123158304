package fetch

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// A server is not considered unavailable because connections to it open slowly.
func TestSlowConnectionsAreNoEvidence(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	createBucket(t, server.Client(), "checkout", hourly(100))
	o := server.ClientOptions()
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		time.Sleep(500 * time.Millisecond) // as TLS may
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	rdb := redis.NewClient(o)
	defer func() { require.NoError(t, rdb.Close()) }()
	c := newClient(t, rdb, WithPublishedTemplates(false)) // otherwise all takes wait for the templates
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			time.Sleep(time.Duration(i) * 10 * time.Millisecond) // so that not all takes are in one call
			if _, err := c.Take(t.Context(), "checkout", 1, slow()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.Zero(t, c.Stats().BreakerOpened)
}

// A lone caller must not make its call itself here. Otherwise it would wait for as long as the Redis client needs to
// open a connection.
func TestALoneCallerIsNotHeldByASlowProviderOfCredentials(t *testing.T) {
	t.Parallel()
	var slowly atomic.Bool
	release := make(chan struct{})
	f := newFaulty(t, func(o *redis.Options) {
		o.CredentialsProvider = func() (string, string) {
			if slowly.Load() {
				select {
				case <-release:
				case <-time.After(patience):
				}
			}
			return "", ""
		}
	})
	c := newClient(t, f.rdb)
	f.warm(t, c)
	slowly.Store(true)
	defer close(release)
	f.proxy.Reset() // connections have to be made anew
	began := time.Now()
	for range 3 {
		_, err := c.Take(t.Context(), "checkout", 1)
		require.ErrorIs(t, err, ErrUnavailable)
	}
	require.Less(t, time.Since(began), 3*DefaultTimeout+noise)
}

// dialler opens connections, unless it must not.
type dialler struct {
	refuse  atomic.Bool
	hang    atomic.Bool
	release chan struct{} // ends the dials that hang
}

func newDialler(t *testing.T) *dialler {
	d := &dialler{release: make(chan struct{})}
	t.Cleanup(func() { close(d.release) })
	return d
}

func (d *dialler) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if d.refuse.Load() {
		return nil, syscall.ECONNREFUSED
	}
	if d.hang.Load() { // as if the first packet was lost
		<-d.release
		return nil, syscall.ETIMEDOUT
	}
	return new(net.Dialer).DialContext(ctx, network, addr)
}

// lone returns a server, and a client of it with a bucket whose connections d opens.
func (d *dialler) lone(t *testing.T) (*testenv.RedisServer, *Client) {
	server := testenv.Redis(t)
	createBucket(t, server.Client(), "checkout", hourly(1000))
	require.NoError(t, lua.Load(t.Context(), server.Client()))
	o := server.ClientOptions()
	o.Dialer = d.dial
	rdb := redis.NewClient(o)
	t.Cleanup(func() { require.NoError(t, rdb.Close()) })
	return server, newClient(t, rdb, slow())
}

func TestALoneCallerNeedsNoSecondConnection(t *testing.T) {
	t.Parallel()
	for name, prevent := range map[string]func(*testing.T, *testenv.RedisServer, *dialler){
		"too many clients": func(t *testing.T, server *testenv.RedisServer, _ *dialler) {
			require.NoError(t, server.Client().ConfigSet(t.Context(), "maxclients", "1").Err())
		},
		"refused": func(_ *testing.T, _ *testenv.RedisServer, d *dialler) { d.refuse.Store(true) },
		"silent":  func(_ *testing.T, _ *testenv.RedisServer, d *dialler) { d.hang.Store(true) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDialler(t)
			server, c := d.lone(t)
			require.NoError(t, granted(c.Take(t.Context(), "checkout", 1)))
			prevent(t, server, d)
			for range 100 {
				require.NoError(t, granted(c.Take(t.Context(), "checkout", 1)))
			}
			require.NoError(t, c.Ready(t.Context()))
			require.Zero(t, c.Stats().BreakerOpened)
		})
	}
}

func ringOfTwo(t *testing.T, slowAddr, fastAddr string) (rdb *redis.Ring, slow, fast string) {
	t.Helper()
	rdb = redis.NewRing(&redis.RingOptions{
		Addrs: map[string]string{"slow": slowAddr, "fast": fastAddr}, HeartbeatFrequency: time.Hour,
	})
	t.Cleanup(func() { _ = rdb.Close() })
	for i := 0; slow == "" || fast == ""; i++ {
		key := fmt.Sprint("user:", i)
		shard, err := rdb.GetShardClientForKey(key)
		require.NoError(t, err)
		createBucket(t, shard, key, hourly(100))
		if shard.Options().Addr == slowAddr {
			slow = key
		} else {
			fast = key
		}
	}
	return rdb, slow, fast
}

// Calls to a shard that doesn't answer don't count toward the limit of calls to other shards.
func TestASilentShardTakesNothingFromOthers(t *testing.T) {
	t.Parallel()
	proxy := testenv.Proxy(t, testenv.Redis(t).Addr(), 0)
	rdb, silent, there := ringOfTwo(t, proxy.Addr(), testenv.Redis(t).Addr())
	c := newClient(t, rdb, slow(), WithConcurrency(2))
	for _, key := range []string{silent, there} {
		_, err := c.Take(t.Context(), key, 1)
		require.NoError(t, err)
	}
	require.NoError(t, proxy.Stall(faultproxy.Both))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() { _, _ = c.Take(ctx, silent, 1) })
	}
	shard, err := rdb.GetShardClientForKey(silent)
	require.NoError(t, err)
	eventually(t, func() bool {
		s := shard.PoolStats()
		return s.TotalConns-s.IdleConns == 2
	}, "two calls are under way")
	_, err = c.Take(t.Context(), there, 1, WithTimeout(5*time.Second))
	require.NoError(t, err)
	cancel()
	wg.Wait()
	require.NoError(t, proxy.Heal())
}

// The timeout of a single call also applies if the connections belong to the Redis client. It may be longer than the
// timeout of other calls, and the call ends when it has passed.
func TestACallsLongerTimeoutHoldsOnARing(t *testing.T) {
	t.Parallel()
	proxy := testenv.Proxy(t, testenv.Redis(t).Addr(), 0)
	rdb, far, _ := ringOfTwo(t, proxy.Addr(), testenv.Redis(t).Addr())
	c := newClient(t, rdb)
	_, err := c.Take(t.Context(), far, 1, slow())
	require.NoError(t, err)
	require.NoError(t, proxy.Delay(faultproxy.ToClient, 1500*time.Millisecond, 0))
	_, err = c.Take(t.Context(), far, 1, slow())
	require.NoError(t, err)

	require.NoError(t, proxy.Stall(faultproxy.Both))
	_, err = c.Take(t.Context(), far, 1)
	require.ErrorIs(t, err, ErrUnavailable)
	shard, err := rdb.GetShardClientForKey(far)
	require.NoError(t, err)
	eventually(t, func() bool {
		s := shard.PoolStats()
		return s.TotalConns == s.IdleConns
	}, "the call ends soon after its timeout")
	require.NoError(t, proxy.Heal())
}

// Even if Close returned early, all connections are closed in the end.
func TestConnectionsEndAfterACloseThatTimedOut(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, nil)
	c, err := New(f.rdb, slow())
	require.NoError(t, err)
	f.warm(t, c)
	require.NoError(t, f.proxy.Stall(faultproxy.ToClient))
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = c.Take(t.Context(), "checkout", 1) })
	eventually(t, func() bool { return tokens(t, f.direct, "checkout") == 99 }, "the take runs")
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	require.ErrorIs(t, c.Close(ctx), context.DeadlineExceeded)
	require.NoError(t, f.proxy.Heal())
	wg.Wait()
	for _, own := range c.nodes.own {
		eventually(t, func() bool { return own.(*redis.Client).PoolStats().TotalConns == 0 }, "connections closed")
	}
}

// A replica does not know that a slot moves. So it would reply that a key is missing although the key has moved.
func TestNothingIsReadFromTheReplicasOfACluster(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]redis.ClusterOptions{
		"read only": {ReadOnly: true}, "by latency": {RouteByLatency: true}, "randomly": {RouteRandomly: true},
	} {
		o.Addrs = []string{"127.0.0.1:1"}
		rdb := redis.NewClusterClient(&o)
		own := newClient(t, rdb).nodes.own[0].(*redis.ClusterClient).Options()
		require.False(t, own.ReadOnly || own.RouteByLatency || own.RouteRandomly, name)
		require.NoError(t, rdb.Close())
	}
}

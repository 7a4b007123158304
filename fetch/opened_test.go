package fetch_test

import (
	"bytes"
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
)

// refills publishes templates, and runs a refiller for their buckets until the test ends.
func refills(t *testing.T, rdb redis.UniversalClient, list ...policy.Template) {
	t.Helper()
	publish(t, rdb, 1, list...)
	set, err := policy.NewTemplates(1, list, nil)
	require.NoError(t, err)
	r, err := refill.New(refill.Config{Redis: rdb, Templates: set, Version: 1, Logger: hclog.NewNullLogger()})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
}

// If Redis has lost a bucket, its next take creates it full, even though a refiller still remembers the bucket.
func TestATemplatesBucketThatRedisLostComesBackFull(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	slow := refilledTemplate("user:", 60)
	slow.Policy.Interval = 20 * time.Millisecond
	refills(t, rdb, slow)
	c := client(t, rdb)
	r, err := c.Take(ctx, "user:1", 60)
	require.NoError(t, err)
	require.True(t, r.OK)
	require.Eventually(t, func() bool { // the refiller knows the bucket
		index, err := rdb.Get(ctx, lua.IndexKey("user:1")).Int64()
		return err == nil && index > 2
	}, 20*time.Second, time.Millisecond)
	// All three keys are deleted at once. Otherwise a refill could find a bucket that lost only one of its keys.
	require.NoError(t, rdb.Del(ctx, "user:1", lua.IndexKey("user:1"), lua.ControlKey("user:1")).Err())
	r, err = c.Take(ctx, "user:1", 59, fetch.WithRequestID("afterwards"))
	require.NoError(t, err)
	require.True(t, r.OK)
	require.EqualValues(t, 1, r.Remaining)
}

// gate holds back the first script call that a client makes for a bucket, not counting calls that open it.
type gate struct {
	pass   func() // the call waits until it returns
	once   sync.Once
	passed atomic.Bool
}

// dial makes a connection with the gate.
func (g *gate) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, addr)
	return gatedConn{conn, g}, err
}

type gatedConn struct {
	net.Conn
	*gate
}

// Write lasts as long as a short trip over a network. Otherwise callers would make their calls themselves, and could
// not leave while the gate is closed.
func (c gatedConn) Write(b []byte) (int, error) {
	time.Sleep(2 * time.Millisecond)
	has := func(s string) bool { return bytes.Contains(b, []byte(s)) }
	if has("eval") && has("{user:") && !has(":override") {
		c.once.Do(c.pass)
		c.passed.Store(true)
	}
	return c.Conn.Write(b)
}

// onBothGated is onBoth with another client, whose calls a gate holds back.
func onBothGated(t *testing.T, test func(t *testing.T, rdb, gated redis.UniversalClient, g *gate)) {
	t.Run("Redis", func(t *testing.T) {
		t.Parallel()
		server, g := testenv.Redis(t), &gate{}
		o := server.ClientOptions()
		o.Dialer = g.dial
		gated := redis.NewClient(o)
		t.Cleanup(func() { _ = gated.Close() })
		test(t, server.Client(), gated, g)
	})
	t.Run("Cluster", func(t *testing.T) {
		t.Parallel()
		cluster, g := testenv.Cluster(t), &gate{}
		gated := redis.NewClusterClient(&redis.ClusterOptions{Addrs: cluster.Addrs(), Dialer: g.dial})
		t.Cleanup(func() { _ = gated.Close() })
		test(t, cluster.Client(), gated, g)
	})
}

// A bucket is opened. Then a refill finds it full, and removes it from the active set. Only then a script takes tokens
// from it. The bucket is refilled nevertheless.
func TestABucketIsRefilledAfterAScriptTakesFromItLate(t *testing.T) {
	t.Parallel()
	const key = "user:1"
	id := fetch.WithRequestID("a")
	for name, take := range map[string]func(ctx context.Context, c *fetch.Client, g *gate) error{
		"Reserve": func(ctx context.Context, c *fetch.Client, _ *gate) error {
			_, err := c.Reserve(ctx, key, 40, time.Minute, fetch.WithReservationID("a"))
			return err
		},
		"TakeWithRequestID": func(ctx context.Context, c *fetch.Client, _ *gate) error {
			_, err := c.Take(ctx, key, 40, id)
			return err
		},
		"TakeAllWithRequestID": func(ctx context.Context, c *fetch.Client, _ *gate) error {
			_, err := c.TakeAll(ctx, []fetch.Request{{Key: key, N: 40}}, id)
			return err
		},
		"TakeAll": func(ctx context.Context, c *fetch.Client, _ *gate) error {
			_, err := c.TakeAll(ctx, []fetch.Request{{Key: key, N: 40}})
			return err
		},
		"Lease": func(ctx context.Context, c *fetch.Client, g *gate) (err error) {
			for range 8 { // a block begins with the last take, and its keeper asks for tokens once
				_, err = c.Take(ctx, key, 1)
			}
			for err == nil && !g.passed.Load() {
				time.Sleep(time.Millisecond)
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onBothGated(t, func(t *testing.T, rdb, gated redis.UniversalClient, g *gate) {
				takenLongAfterOpen(t, rdb, gated, g, take, false)
			})
		})
		if name == "TakeAll" || name == "Lease" {
			continue // tokens of a caller that left go back, and no caller waits for a block
		}
		t.Run(name+"WhoseCallerLeaves", func(t *testing.T) {
			t.Parallel()
			onBothGated(t, func(t *testing.T, rdb, gated redis.UniversalClient, g *gate) {
				takenLongAfterOpen(t, rdb, gated, g, take, true)
			})
		})
	}
}

func takenLongAfterOpen(t *testing.T, rdb, gated redis.UniversalClient, g *gate,
	take func(ctx context.Context, c *fetch.Client, g *gate) error, leaves bool) {
	const key = "user:1"
	refills(t, rdb, policy.Template{Prefix: "user:", Policy: policy.Policy{Capacity: 60, Rate: policy.PerSecond(1000),
		Interval: 20 * time.Millisecond}})
	require.NoError(t, lua.Load(t.Context(), rdb)) // otherwise the call that the gate holds back runs nothing
	c := client(t, gated, fetch.WithLease(64, time.Minute))
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	var index atomic.Int64
	left := make(chan struct{})
	g.pass = func() {
		index.Store(untilFullAndIdle(t, rdb, key))
		if leaves {
			leave()
			<-left
		}
	}
	err := take(ctx, c, g)
	close(left)
	if leaves {
		require.ErrorIs(t, err, context.Canceled)
	} else {
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		now, err := rdb.Get(t.Context(), lua.IndexKey(key)).Int64()
		return err == nil && index.Load() > 0 && now > index.Load() && rdb.Get(t.Context(), key).Val() == "60"
	}, 20*time.Second, time.Millisecond, "a refill fills the bucket")
}

// untilFullAndIdle waits until the bucket is full and has left the active set, and returns its index.
func untilFullAndIdle(t *testing.T, rdb redis.UniversalClient, key string) int64 {
	ctx, active := context.WithoutCancel(t.Context()), lua.ActiveKey("user:", lua.ActiveShard(key))
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		index, err := rdb.Get(ctx, lua.IndexKey(key)).Int64()
		if err == nil && index > 1 && rdb.Get(ctx, key).Val() == "60" && !rdb.SIsMember(ctx, active, key).Val() {
			return index
		}
	}
	t.Error("the full bucket is still in the active set")
	return 0
}

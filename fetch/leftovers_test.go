package fetch

import (
	"context"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// At a distance many new buckets of a template are used at once. Otherwise a bucket that isn't in the active sets would
// not be refilled.
func TestAllNewBucketsAreInTheActiveSetsAtADistance(t *testing.T) {
	t.Parallel()
	const users, each = 128, 10
	d := newDistant(t, 60*time.Millisecond)
	c := newClient(t, wrapped{d.redis(t, nil)}, slow()) // the active sets may be in other slots, as on a Cluster
	require.NoError(t, c.Ready(t.Context()))
	var wg sync.WaitGroup
	for i := range users {
		wg.Go(func() {
			for k := range each {
				if err := granted(c.Take(t.Context(), "user:"+strconv.Itoa(i*each+k), 1)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, c.Close(t.Context()), "Close waits until the buckets are in the sets")
	entered := int64(0)
	for shard := range lua.ActiveShards {
		n, err := d.direct.SCard(t.Context(), lua.ActiveKey("user:", shard)).Result()
		require.NoError(t, err)
		entered += n
	}
	require.EqualValues(t, users*each, entered)
}

func TestAnAbandonedTakeAllAtADistanceKeepsNothing(t *testing.T) {
	t.Parallel()
	d := newDistant(t, 60*time.Millisecond)
	c := d.steady(t, slow(), WithConcurrency(1), WithPublishedTemplates(false))
	reqs := make([]Request, MaxAll)
	for i := range reqs {
		reqs[i] = Request{Key: "bucket " + strconv.Itoa(i), N: 3}
		createBucket(t, d.direct, reqs[i].Key, hourly(10))
	}
	require.NoError(t, d.proxy.Stall(faultproxy.ToClient))
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := c.TakeAll(ctx, reqs)
		left <- err
	}()
	eventually(t, func() bool { return tokens(t, d.direct, reqs[0].Key) == 7 }, "the server makes the takes")
	cancel()
	require.ErrorIs(t, <-left, context.Canceled)
	require.NoError(t, d.proxy.Heal())
	require.NoError(t, d.proxy.Delay(faultproxy.Both, d.trip/2, 0))
	began := time.Now()
	require.NoError(t, granted(c.Take(t.Context(), "steady", 1)))
	require.Less(t, time.Since(began), 10*d.trip, "a caller waits while the tokens of another are given back")
	require.NoError(t, c.Close(t.Context()))
	for _, r := range reqs {
		require.EqualValues(t, 10, tokens(t, d.direct, r.Key), "%s: %+v", r.Key, c.Stats())
	}
}

// abandoning is a connection. Once it is armed, abandon is called after it has read a reply and before it returns it.
type abandoning struct {
	net.Conn
	armed   *atomic.Bool
	abandon func(net.Conn)
}

func (c abandoning) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 && c.armed.CompareAndSwap(true, false) {
		c.abandon(c.Conn)
	}
	return n, err
}

// The caller of a lone take has left when the reply comes. Then the server hangs, so the tokens can't be given back.
func TestALoneCallerWhoLeftDoesNotWaitForItsTokens(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	createBucket(t, server.Client(), "checkout", hourly(1000))
	o, armed := server.ClientOptions(), new(atomic.Bool)
	ctx, cancel := context.WithCancel(t.Context())
	left := time.Time{}
	abandon := func(conn net.Conn) {
		cancel()
		eventually(t, func() bool { return conn.SetWriteDeadline(time.Time{}) != nil }, "the Client closes the connection")
		left = time.Now()
		server.Pause()
	}
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, addr)
		return abandoning{conn, armed, abandon}, err
	}
	rdb := redis.NewClient(o)
	t.Cleanup(func() { require.NoError(t, rdb.Close()) })
	c := newClient(t, rdb, slow(), WithPublishedTemplates(false)) // which would be read meanwhile
	t.Cleanup(server.Resume)                                      // before the Client is closed
	eventually(t, func() bool {
		before := c.nodes.express.PoolStats().Hits
		require.NoError(t, granted(c.Take(ctx, "checkout", 1)))
		return c.nodes.express.PoolStats().Hits > before
	}, "the caller makes its call itself")
	armed.Store(true)
	_, err := c.Take(ctx, "checkout", 1)
	require.ErrorIs(t, err, context.Canceled)
	require.Less(t, time.Since(left), 500*time.Millisecond)
}

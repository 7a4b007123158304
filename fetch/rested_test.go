package fetch

import (
	"bytes"
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// reopening makes connections that hold back a call which opens a bucket after another call of a script for it.
type reopening struct {
	asked    atomic.Bool
	released chan struct{} // closed when the connections hold back nothing any more
}

func (r *reopening) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, addr)
	return reopeningConn{conn, r}, err
}

type reopeningConn struct {
	net.Conn
	*reopening
}

func (c reopeningConn) Write(b []byte) (int, error) {
	has := func(s string) bool { return bytes.Contains(b, []byte(s)) }
	if has("{user:1}:override") {
		if c.asked.Load() {
			<-c.released
		}
	} else if has("eval") && has("{user:1}:ctl") {
		c.asked.Store(true)
	}
	return c.Conn.Write(b)
}

// rest changes a Client as if it had been unused for d. No call of the Client may be under way, except a reading of the
// templates.
func rest(t *testing.T, c *Client, key string, d time.Duration) {
	t.Helper()
	ts := c.templates
	eventually(t, func() bool {
		ts.mu.Lock()
		defer ts.mu.Unlock()
		return ts.flight == nil
	}, "the client has read the templates")
	ts.start = ts.start.Add(-d)
	c.buckets.update(key, func(i *info) { i.asOf = i.asOf.Add(-d) })
}

// A bucket became a template's while a consumer was idle. The consumer's next take extends the expiry of the bucket.
// Otherwise the bucket could expire just after the take, and come back full.
func TestARestedConsumerKeepsABucketThatBecameATemplates(t *testing.T) {
	t.Parallel()
	const key = "user:1"
	for name, take := range map[string]func(ctx context.Context, c *Client) (ok bool, err error){
		"Take": func(ctx context.Context, c *Client) (bool, error) {
			r, err := c.Take(ctx, key, 60)
			return r.OK, err
		},
		"TakeWithRequestID": func(ctx context.Context, c *Client) (bool, error) {
			r, err := c.Take(ctx, key, 60, WithRequestID("a"))
			return r.OK, err
		},
		"TakeAll": func(ctx context.Context, c *Client) (bool, error) {
			r, err := c.TakeAll(ctx, []Request{{Key: key, N: 60}})
			return r.OK, err
		},
		"Wait": func(ctx context.Context, c *Client) (bool, error) {
			r, err := c.Wait(ctx, key, 60)
			return r.OK, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, server := t.Context(), testenv.Redis(t)
			rdb := server.Client()
			require.NoError(t, lua.Load(ctx, rdb))
			createBucket(t, rdb, key, hourly(60))
			held := &reopening{released: make(chan struct{})}
			o := server.ClientOptions()
			o.Dialer = held.dial
			behind := redis.NewClient(o)
			t.Cleanup(func() { _ = behind.Close() })
			rested, other := newClient(t, behind, slow()), newClient(t, rdb, slow())
			t.Cleanup(func() { close(held.released) })
			_, err := rested.Take(ctx, key, 1)
			require.NoError(t, err)
			publishUsers(t, rdb, 2, 60, policy.EnforceRefilled)
			r, err := other.Take(ctx, key, 1)
			require.NoError(t, err)
			require.True(t, r.OK)
			held.asked.Store(false)
			rest(t, rested, key, templatesSeldom+policyMaxAge)
			// A refill that fills the bucket does the same, long before the bucket expires.
			require.NoError(t, rdb.SRem(ctx, lua.ActiveKey("user:", lua.ActiveShard(key)), key).Err())
			require.NoError(t, rdb.Set(ctx, key, 60, redis.KeepTTL).Err())
			for _, k := range []string{key, lua.IndexKey(key), lua.ControlKey(key)} {
				require.True(t, rdb.PExpire(ctx, k, time.Second).Val())
			}
			ok, err := take(ctx, rested)
			require.NoError(t, err)
			require.True(t, ok)
			eventually(t, func() bool {
				return rdb.Exists(ctx, key).Val() == 0 || rdb.PTTL(ctx, key).Val() > time.Minute
			}, "the bucket has expired or has a longer lifetime")
			r, err = other.Take(ctx, key, 60)
			require.NoError(t, err)
			require.False(t, r.OK, "the bucket gives its capacity only once")
		})
	}
}

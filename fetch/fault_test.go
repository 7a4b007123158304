package fetch

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// faulty is a server with bucket "checkout" of 100 tokens, reached through a
// proxy by a client that leaves everything to go-redis's defaults: it retries and
// ignores deadlines.
type faulty struct {
	server *testenv.RedisServer
	direct *redis.Client
	proxy  *faultproxy.Proxy
	rdb    redis.UniversalClient
}

func newFaulty(t *testing.T, change func(*redis.Options)) *faulty {
	t.Helper()
	f := &faulty{server: testenv.Redis(t)}
	f.direct = f.server.Client()
	createBucket(t, f.direct, "checkout", hourly(100))
	f.proxy = testenv.Proxy(t, f.server.Addr(), 0)
	o := &redis.Options{Addr: f.proxy.Addr()}
	if change != nil {
		change(o)
	}
	f.rdb = redis.NewClient(o)
	t.Cleanup(func() { _ = f.rdb.Close() })
	return f
}

// wrapped is a client of a type that the SDK doesn't know. The SDK uses such a client as it is.
type wrapped struct{ redis.UniversalClient }

// bothWays runs a test with two clients. The SDK uses only the options of the first, and uses the second as it is.
func bothWays(t *testing.T, change func(*redis.Options), test func(t *testing.T, f *faulty)) {
	t.Run("connections of its own", func(t *testing.T) { test(t, newFaulty(t, change)) })
	t.Run("the client as it is", func(t *testing.T) {
		f := newFaulty(t, change)
		f.rdb = wrapped{f.rdb}
		test(t, f)
	})
}

// warm loads the scripts, and makes calls until there is a connection for each way in which a call can be sent.
func (f *faulty) warm(t *testing.T, c *Client) {
	t.Helper()
	require.NoError(t, lua.Load(t.Context(), f.direct))
	_, err := c.Take(t.Context(), "checkout", 1, WithTimeout(patience))
	require.NoError(t, err)
	require.NoError(t, c.Return(t.Context(), "checkout", 1, WithTimeout(patience)))
	eventually(t, func() bool {
		_, err := c.Peek(t.Context(), "checkout", WithTimeout(patience))
		require.NoError(t, err)
		for _, own := range c.nodes.own {
			if own.(*redis.Client).PoolStats().TotalConns == 0 {
				return false
			}
		}
		return true
	}, "connections")
}

func isScript(request []byte) bool { return bytes.Contains(request, []byte("\r\neval")) }

func TestALostReplyIsAnErrorAndChargesOnce(t *testing.T) {
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, slow())
	f.warm(t, c)
	charges := map[string]func() error{
		"take": func() error {
			_, err := c.Take(t.Context(), "checkout", 10)
			return err
		},
		"take up to": func() error {
			_, err := c.TakeUpTo(t.Context(), "checkout", 10)
			return err
		},
		"wait": func() error { return errOf(c.Wait(t.Context(), "checkout", 10)) },
	}
	for name, charge := range charges {
		t.Run(name, func(t *testing.T) {
			before := tokens(t, f.direct, "checkout")
			lost := f.proxy.LostReplies()
			require.NoError(t, f.proxy.CutAfterReply(1, isScript))
			err := charge()
			require.ErrorIs(t, err, ErrUnavailable)
			require.Equal(t, lost+1, f.proxy.LostReplies())
			require.Equal(t, before-10, tokens(t, f.direct, "checkout"))
		})
	}
	t.Run("return", func(t *testing.T) {
		before := tokens(t, f.direct, "checkout")
		require.NoError(t, f.proxy.CutAfterReply(1, isScript))
		require.ErrorIs(t, c.Return(t.Context(), "checkout", 10), ErrUnavailable)
		require.Equal(t, before+10, tokens(t, f.direct, "checkout"))
	})
	require.NoError(t, f.proxy.Heal())
	_, err := c.Take(t.Context(), "checkout", 1)
	require.NoError(t, err, "the client recovers from the faults")
}

func TestASilentServerHoldsNoCallerBeyondTheDeadline(t *testing.T) {
	calls := map[string]func(ctx context.Context, c *Client) error{
		"take": func(ctx context.Context, c *Client) error {
			_, err := c.Take(ctx, "checkout", 1)
			return err
		},
		"take up to": func(ctx context.Context, c *Client) error {
			_, err := c.TakeUpTo(ctx, "checkout", 1)
			return err
		},
		"wait": func(ctx context.Context, c *Client) error { return errOf(c.Wait(ctx, "checkout", 1)) },
		"peek": func(ctx context.Context, c *Client) error {
			_, err := c.Peek(ctx, "checkout")
			return err
		},
		"return": func(ctx context.Context, c *Client) error { return c.Return(ctx, "checkout", 1) },
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			// The socket's own timeout is far longer than the test allows.
			bothWays(t, func(o *redis.Options) { o.ReadTimeout = time.Hour }, func(t *testing.T, f *faulty) {
				c, err := New(f.rdb, WithTimeout(30*time.Millisecond))
				require.NoError(t, err)
				f.warm(t, c)
				require.NoError(t, f.proxy.Stall(faultproxy.Both))
				for range 2 {
					began := time.Now()
					err := call(t.Context(), c)
					require.ErrorIs(t, err, ErrUnavailable)
					require.ErrorIs(t, err, context.DeadlineExceeded)
					require.Less(t, time.Since(began), patience)

					ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
					err = call(ctx, c)
					cancel()
					require.ErrorIs(t, err, context.DeadlineExceeded)
					require.Equal(t, name != "wait", errors.Is(err, ErrUnavailable), "Wait's context bounds the wait for tokens")
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
				defer cancel()
				require.ErrorIs(t, c.Close(ctx), context.DeadlineExceeded, "calls are still under way")
				_, err = c.Take(t.Context(), "checkout", 1)
				require.ErrorIs(t, err, ErrClosed)
				require.NoError(t, f.proxy.Heal())
				require.NoError(t, c.Close(t.Context()))
				require.NoError(t, noWorkers())
			})
		})
	}
}

// If round trips are short and there is no other call, the caller makes the call itself. Then the reply is lost. The
// next call is made by a worker.
func TestTokensOfALateReplyComeBackOnce(t *testing.T) {
	bothWays(t, nil, func(t *testing.T, f *faulty) {
		_, asItIs := f.rdb.(wrapped)
		c := newClient(t, f.rdb, WithTimeout(30*time.Millisecond))
		f.warm(t, c)
		total := int64(0)
		for i, n := range []int64{40, 20} {
			require.NoError(t, f.proxy.Stall(faultproxy.ToClient)) // the take runs, and its reply is held back
			before := tokens(t, f.direct, "checkout")
			_, err := c.Take(t.Context(), "checkout", n)
			require.ErrorIs(t, err, ErrUnavailable)
			eventually(t, func() bool { return tokens(t, f.direct, "checkout") == before-n }, "the take runs")
			require.EqualValues(t, i+1, c.Stats().Abandoned)
			require.NoError(t, f.proxy.Heal())
			total += n
			eventually(t, func() bool { return c.Stats().Returned+c.Stats().Lost == total }, "the tokens come back")
			require.Equal(t, 100-c.Stats().Lost, tokens(t, f.direct, "checkout"))
		}
		if asItIs {
			require.Zero(t, c.Stats().Lost, "no caller makes its call itself")
		} else {
			require.Less(t, c.Stats().Lost, total, "a worker's call waits for the reply")
		}
	})
}

func TestACancelledCallerReturnsAtOnce(t *testing.T) {
	f := newFaulty(t, nil)
	f.rdb = wrapped{f.rdb}
	c := newClient(t, f.rdb, slow())
	f.warm(t, c)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := c.Take(ctx, "checkout", 1)
	require.ErrorIs(t, err, context.Canceled)
	require.EqualValues(t, 100, tokens(t, f.direct, "checkout"), "the cancelled take was not sent")

	require.NoError(t, f.proxy.Stall(faultproxy.ToClient))
	ctx, cancel = context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := c.Take(ctx, "checkout", 1)
		stopped <- err
	})
	eventually(t, func() bool { return tokens(t, f.direct, "checkout") == 99 }, "the take runs")
	cancel()
	select {
	case err := <-stopped:
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, ErrUnavailable)
	case <-time.After(patience):
		t.Fatal("a cancelled caller waits on the socket")
	}
	wg.Wait()
	require.NoError(t, f.proxy.Heal())
	eventually(t, func() bool { return tokens(t, f.direct, "checkout") == 100 }, "the take's token comes back")
}

func TestACancelledTakeIsNotSent(t *testing.T) {
	waits := map[string]struct {
		pool, workers int
	}{
		"wait for a connection": {pool: 1, workers: 8},
		"wait for a worker":     {pool: 8, workers: 1},
	}
	for name, w := range waits {
		t.Run(name, func(t *testing.T) {
			f := newFaulty(t, func(o *redis.Options) { o.PoolSize, o.MaxActiveConns = w.pool, w.pool })
			f.rdb = wrapped{f.rdb}
			c := newClient(t, f.rdb, WithTimeout(30*time.Millisecond), WithConcurrency(w.workers))
			f.warm(t, c)
			require.NoError(t, f.proxy.Stall(faultproxy.ToServer))
			for range 5 {
				_, err := c.Take(t.Context(), "checkout", 10)
				require.ErrorIs(t, err, ErrUnavailable)
			}
			require.NoError(t, f.direct.ConfigResetStat(t.Context()).Err())
			require.NoError(t, f.proxy.Heal())
			// Only the first take was sent, and its tokens come back.
			eventually(t, func() bool { return c.Stats().Returned == 10 }, "the tokens of the first take come back")
			eventually(t, func() bool { // this call is queued behind the others, if any are left
				_, err := c.Peek(t.Context(), "checkout")
				return err == nil
			}, "the client answers again")
			require.EqualValues(t, 100, tokens(t, f.direct, "checkout"))
			require.Equal(t, 1, commandCalls(t, f.direct)["decrby"])
		})
	}
}

func TestAStoppedServerIsUnavailable(t *testing.T) {
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, slow())
	f.warm(t, c)
	f.server.Kill()
	_, err := c.Take(t.Context(), "checkout", 1)
	require.ErrorIs(t, err, ErrUnavailable)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorIs(t, errOf(c.Wait(t.Context(), "checkout", 1)), ErrUnavailable)
}

func TestCloseWaitsForCallsUnderWayAndRefusesNewOnes(t *testing.T) {
	f := newFaulty(t, nil)
	c, err := New(f.rdb, slow())
	require.NoError(t, err)
	f.warm(t, c)
	require.NoError(t, f.proxy.Stall(faultproxy.ToClient))
	taken := make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := c.Take(t.Context(), "checkout", 1)
		taken <- err
	})
	eventually(t, func() bool { return tokens(t, f.direct, "checkout") == 99 }, "the take runs")

	closed := make(chan error, 1)
	wg.Go(func() { closed <- c.Close(t.Context()) })
	<-c.life.quit
	_, err = c.Take(t.Context(), "checkout", 1)
	require.ErrorIs(t, err, ErrClosed)
	select {
	case err := <-closed:
		t.Fatalf("Close returned with a call under way: %v", err)
	default:
	}
	require.NoError(t, f.proxy.Heal())
	require.NoError(t, <-taken, "the call under way succeeds")
	require.NoError(t, <-closed)
	wg.Wait()
	require.NoError(t, c.Close(t.Context()), "closing again is harmless")
	require.NoError(t, noWorkers())
	require.NoError(t, f.rdb.Ping(t.Context()).Err(), "the caller's client stays open")
}

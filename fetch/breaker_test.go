package fetch

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/faultproxy"
	"github.com/tokenrefill/refiller/internal/testenv"
	"github.com/tokenrefill/refiller/lua"
)

func TestABreakerOpensAfterFailuresInARowThatLast(t *testing.T) {
	b, now := &breaker{}, time.Now()
	at := func(d time.Duration) time.Time { return now.Add(d) }
	for range 10 * breakerFailures {
		require.False(t, b.fail(ReasonDeadline, now), "merged takes fail at one moment")
	}
	b.succeed()
	for i := range breakerFailures - 1 {
		require.False(t, b.fail(ReasonDeadline, at(time.Duration(i)*time.Second)), "too few")
	}
	require.Equal(t, ReasonNone, b.open())
	require.True(t, b.fail(ReasonLoading, at(time.Minute)))
	require.Equal(t, ReasonLoading, b.open())
	require.False(t, b.fail(ReasonDeadline, at(time.Minute)), "it opens once")
	require.Equal(t, ReasonLoading, b.open())
}

func TestBucketsOfOneSlotRangeShareABreaker(t *testing.T) {
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	t.Cleanup(func() { _ = cluster.Close() })
	bs := newBreakers(cluster)
	require.Len(t, bs, breakersOfCluster)
	twin, other := sameSlot()
	require.Same(t, bs.of(twin), bs.of(other))
	used := map[*breaker]bool{}
	for _, key := range []string{"a", "b", "c", "d", "e", "f"} {
		used[bs.of(key)] = true
	}
	require.Greater(t, len(used), 1)
}

// dead is a server that answers as err says.
type dead struct {
	mu    sync.Mutex
	err   error
	calls int
}

func (d *dead) set(err error) { d.mu.Lock(); defer d.mu.Unlock(); d.err = err }
func (d *dead) sent() int     { d.mu.Lock(); defer d.mu.Unlock(); n := d.calls; d.calls = 0; return n }

func (d *dead) Process(_ context.Context, cmd redis.Cmder) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls++
	cmd.SetErr(d.err)
	if d.err == nil {
		type setter interface{ SetVal(any) }
		cmd.(setter).SetVal([]any{int64(1), int64(1)}) // to a heartbeat
	}
	return d.err
}

// While the breaker is open only probes go out, ever less often but several a
// second; a few good ones in a row close it.
func TestAnOpenBreakerIsProbedUntilTheServerAnswersReliably(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
		c, err := New(rdb, WithPublishedTemplates(false))
		require.NoError(t, err)
		defer func() { require.NoError(t, errors.Join(c.Close(context.Background()), rdb.Close())) }()
		server := &dead{err: errors.New("connection reset by peer")}
		c.store = server
		take := func() error { _, err := c.Take(context.Background(), "b", 1); return err }
		for c.breakers[0].open() == ReasonNone {
			require.ErrorIs(t, take(), ErrUnavailable)
			time.Sleep(breakerSpan / 4)
		}
		require.Equal(t, breakerFailures, server.sent())
		for range 100 {
			err := take()
			require.ErrorIs(t, err, ErrUnavailable)
			require.Equal(t, ReasonConnection, ReasonOf(err), "why it opened")
		}
		require.Zero(t, server.sent(), "no take is sent")
		time.Sleep(10 * time.Second)
		probes := server.sent()
		require.GreaterOrEqual(t, probes, 25)
		require.LessOrEqual(t, probes, 90)

		// One good probe among bad ones doesn't close it.
		server.set(nil)
		for server.sent() == 0 {
			time.Sleep(time.Millisecond)
		}
		server.set(errors.New("connection reset by peer"))
		time.Sleep(time.Second)
		require.NotEqual(t, ReasonNone, c.breakers[0].open())

		server.set(nil)
		began := time.Now()
		for c.breakers[0].open() != ReasonNone {
			time.Sleep(time.Millisecond)
		}
		require.Less(t, time.Since(began), time.Second, "recovery")
		require.GreaterOrEqual(t, server.sent(), breakerProbes)
		require.EqualValues(t, 1, c.Stats().Shut)
	})
}

func TestAnOpenBreakerEndsWithItsClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
		c, err := New(rdb)
		require.NoError(t, err)
		c.store = &dead{err: errors.New("connection reset by peer")}
		for c.breakers[0].open() == ReasonNone {
			_, _ = c.Take(context.Background(), "b", 1)
			time.Sleep(breakerSpan)
		}
		require.NoError(t, c.Close(context.Background())) // the bubble ends only without goroutines
		require.NoError(t, rdb.Close())
	})
}

// A caller whose own deadline is shorter than the Client's learns nothing of the
// bucket, but the breaker does.
func TestCallersInAHurryOpenTheBreakerToo(t *testing.T) {
	bothWays(t, func(t *testing.T, f *faulty) {
		c := newClient(t, f.rdb, slow())
		f.warm(t, c)
		require.NoError(t, f.proxy.Stall(faultproxy.Both))
		eventually(t, func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), minSocketWait+5*time.Millisecond)
			defer cancel()
			_, err := c.Take(ctx, "checkout", 1)
			return errors.Is(err, ErrUnavailable)
		}, "takes are answered without a call")
		require.EqualValues(t, 1, c.Stats().Shut)
		require.NoError(t, f.proxy.Heal())
		eventually(t, func() bool { _, err := c.Take(t.Context(), "checkout", 1); return err == nil }, "it closes")
	})
}

// A take that was given up, or was never sent, stays that way when the server comes
// back.
func TestNothingIsSentLaterForTakesThatWereAnsweredMeanwhile(t *testing.T) {
	server := testenv.Redis(t)
	direct := server.Client()
	createBucket(t, direct, "checkout", hourly(1000))
	require.NoError(t, lua.Load(t.Context(), direct))
	c := newClient(t, server.Client(), WithDeadline(20*time.Millisecond))
	_, err := c.Take(t.Context(), "checkout", 1, slow().(TakeOption))
	require.NoError(t, err)
	server.Pause()
	sent := 0
	for c.breakers[0].open() == ReasonNone {
		_, err := c.Take(t.Context(), "checkout", 1)
		require.ErrorIs(t, err, ErrUnavailable)
		sent++
	}
	for range 1000 {
		_, err := c.Take(t.Context(), "checkout", 1)
		require.ErrorIs(t, err, ErrUnavailable)
	}
	server.Resume()
	eventually(t, func() bool { r, err := c.Take(t.Context(), "checkout", 1); return err == nil && r.OK }, "it recovers")
	require.GreaterOrEqual(t, tokens(t, direct, "checkout"), int64(1000-1-sent-1))
}

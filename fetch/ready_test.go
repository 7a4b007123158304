package fetch

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func TestAfterReadyATakeOpensNothing(t *testing.T) {
	t.Parallel()
	atDistances(t, func(t *testing.T, d *distant) {
		c := d.process(t)
		require.NoError(t, c.Ready(t.Context()))
		opened := d.proxy.Connections()
		require.GreaterOrEqual(t, time.Duration(c.nodes.of("user:1").distance()), d.trip)
		require.Less(t, time.Duration(c.nodes.of("user:1").distance()), 2*d.trip+noise)
		require.NotZero(t, c.templates.set.Load().Of("user:1"))
		require.NoError(t, granted(c.Take(t.Context(), "user:1", 1)))
		require.Equal(t, opened, d.proxy.Connections())
		require.NoError(t, c.Ready(t.Context()), "a second Ready succeeds")
	})
}

func TestReadyReachesEveryServer(t *testing.T) {
	t.Parallel()
	one := testenv.Redis(t)
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": one.Addr(), "b": testenv.Redis(t).Addr()}})
	t.Cleanup(func() { _ = ring.Close() })
	cluster := testenv.Cluster(t)
	for name, rdb := range map[string]redis.UniversalClient{
		"single": one.Client(), "Sentinel": testenv.Sentinel(t).Client(), "Cluster": cluster.Client(), "Ring": ring,
		"any other client": wrapped{one.Client()},
	} {
		t.Run(name, func(t *testing.T) {
			c := newClient(t, rdb)
			require.NoError(t, c.Ready(t.Context()))
			for s := range c.nodes.withKeys(t.Context()) {
				require.NotZero(t, s.distance())
			}
		})
	}
	c := newClient(t, cluster.Client())
	cluster.Nodes()[0].Pause()
	t.Cleanup(cluster.Nodes()[0].Resume)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	err := c.Ready(ctx)
	require.ErrorIs(t, err, ErrUnavailable)
	require.Equal(t, ReasonDeadline, ReasonOf(err))
}

func TestReadyNamesWhatFails(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb)
	require.NoError(t, f.proxy.Stall(faultproxy.Both))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err := c.Ready(ctx)
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	err = c.Ready(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, ErrUnavailable)
	f.proxy.Cut()
	err = c.Ready(t.Context())
	require.Equal(t, ReasonConnection, ReasonOf(err), "%v", err)
	require.NoError(t, f.proxy.Heal())
	require.NoError(t, c.Ready(t.Context()))

	locked := testenv.Redis(t, testenv.WithPassword("secret"))
	rdb := redis.NewClient(&redis.Options{Addr: locked.Addr()})
	t.Cleanup(func() { _ = rdb.Close() })
	stranger := newClient(t, rdb)
	err = stranger.Ready(t.Context())
	require.Equal(t, ReasonRefused, ReasonOf(err), "%v", err)
	require.ErrorContains(t, err, "NOAUTH")

	require.NoError(t, stranger.Close(t.Context()))
	require.ErrorIs(t, stranger.Ready(t.Context()), ErrClosed)
}

// To print the table of docs/sdk.md: go test -v -run TestFiguresByDistance ./fetch. The calls have a long timeout.
// Otherwise they could fail because this process does not run for longer than the default timeout.
func TestFiguresByDistance(t *testing.T) {
	t.Parallel()
	atDistances(t, func(t *testing.T, d *distant) {
		createBucket(t, d.direct, "checkout", hourly(100))
		times := map[string][]time.Duration{}
		timed := func(name string, call func() error) {
			began := time.Now()
			require.NoError(t, call(), name)
			times[name] = append(times[name], time.Since(began))
		}
		timeout := time.Duration(0)
		for i := range 3 {
			c := d.process(t)
			timed("first take", func() error { return granted(c.Take(t.Context(), "checkout", 1, slow())) })
			c = d.process(t, WithRescue(false)) // refillers are alive
			require.NoError(t, c.Ready(t.Context()))
			for range 5 {
				timed("steady take", func() error { return granted(c.Take(t.Context(), "checkout", 1, slow())) })
			}
			key := fmt.Sprint("empty", i)
			createBucket(t, d.direct, key, hourly(1))
			require.NoError(t, granted(c.Take(t.Context(), key, 1, slow())))
			timed("first denial", func() error { return denied(c.Take(t.Context(), key, 1, slow())) })
			timeout = c.nodes.of(key).distance().timeout()
		}
		median := func(name string) time.Duration {
			slices.Sort(times[name])
			return times[name][len(times[name])/2].Round(time.Millisecond)
		}
		t.Logf("round trip %s: default timeout %s, first take %s, steady take %s, first denial %s", d.trip,
			timeout.Round(time.Millisecond), median("first take"), median("steady take"), median("first denial"))
	})
}

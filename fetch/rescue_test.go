package fetch

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// If no refiller runs, consumers in several processes still get tokens at the bucket's rate, and never more than its
// bound.
func TestConsumersWithoutARefillerGoOnAtTheRateAndWithinTheBound(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb := server.Client()
	clock := func() time.Time {
		now, err := rdb.Time(t.Context()).Result()
		require.NoError(t, err)
		return now
	}

	const processes, callers = 4, 8
	var taken, rescued atomic.Int64
	began := clock()
	// The bucket is empty at first and holds two seconds of the rate, so that a late rescue loses nothing.
	p := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(500), Interval: 50 * time.Millisecond, Initial: new(int64)}
	createBucket(t, rdb, "checkout", p)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	clients := make([]*Client, processes)
	for i := range clients {
		clients[i] = newClient(t, server.Client(), slow())
		for range callers {
			wg.Go(func() {
				for ctx.Err() == nil {
					r, err := clients[i].Take(context.Background(), "checkout", 1)
					if err != nil {
						t.Error(err)
						return
					}
					taken.Add(r.Taken)
					if r.Source.Kind == SourceRescued {
						rescued.Add(1)
					}
					if !r.OK {
						time.Sleep(time.Millisecond)
					}
				}
			})
		}
	}
	// If these processes didn't run for longer than one refill can credit, the test runs on until the mean rate is high
	// enough.
	const enough, atLeast = 2 * time.Second, 0.6
	for elapsed := time.Duration(0); elapsed < enough || elapsed < patience &&
		float64(taken.Load()) < atLeast*500*elapsed.Seconds(); elapsed = clock().Sub(began) {
		time.Sleep(10 * time.Millisecond)
	}
	stop()
	wg.Wait()
	ended := clock().Sub(began).Seconds()

	total := float64(taken.Load())
	require.LessOrEqual(t, total, 500*ended+1)
	require.Less(t, ended, patience.Seconds(), "the takes got only %.0f tokens in time", total)
	require.Positive(t, rescued.Load())
	won := int64(0)
	for _, c := range clients {
		won += c.Stats().Rescues
	}
	require.LessOrEqual(t, won, int64(ended/0.1)+1, "a rescue comes two intervals after the previous refill")
	t.Logf("%.0f of %.0f tokens; %d rescues", total, 500*ended, won)
}

func TestARescueServesWaitTakeUpToAndSeveralBuckets(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	p := policy.Policy{Capacity: 10, Rate: policy.PerSecond(20), Interval: 20 * time.Millisecond, Initial: new(int64)}
	for _, key := range []string{"wait", "line", "upto", "all", "other"} {
		createBucket(t, rdb, key, p)
	}
	c := newClient(t, rdb, slow())
	require.NoError(t, errOf(c.Wait(t.Context(), "wait", 3)))
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			if _, err := c.Wait(t.Context(), "line", 2); err != nil {
				t.Error(err)
			}
		})
	}
	eventually(t, func() bool {
		r, err := c.TakeUpTo(t.Context(), "upto", 5)
		require.NoError(t, err)
		return r.OK
	}, "TakeUpTo gets tokens")
	eventually(t, func() bool {
		r, err := c.TakeAll(t.Context(), []Request{{Key: "all", N: 3}, {Key: "other", N: 1}})
		require.NoError(t, err)
		return r.OK
	}, "TakeAll gets tokens")
	wg.Wait()
	require.GreaterOrEqual(t, c.Stats().Rescues, int64(5))
}

func TestBucketsThatConsumersDoNotRefill(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	empty := new(int64)
	overdue := policy.Policy{Capacity: 10, Rate: policy.PerSecond(1000), Interval: time.Millisecond, Initial: empty}
	createBucket(t, rdb, "off", overdue)
	createBucket(t, rdb, "large", overdue)
	createBucket(t, rdb, "steps", policy.Policy{Capacity: 10, Steps: policy.Every(time.Millisecond), StepTokens: 5,
		Interval: time.Millisecond, Initial: empty})
	createBucket(t, rdb, "fresh", policy.Policy{Capacity: 10_000, Rate: policy.PerSecond(1), Interval: policy.MaxInterval,
		Initial: empty})
	_, err := lua.Add(t.Context(), rdb, "foreign", 0, 10, 0)
	require.NoError(t, err)
	time.Sleep(5 * time.Millisecond) // several intervals
	off, on := newClient(t, rdb, slow(), WithRescue(false), WithDenyCache(false)),
		newClient(t, rdb, slow(), WithDenyCache(false))
	for _, tc := range []struct {
		c   *Client
		key string
		n   int64
	}{{off, "off", 1}, {on, "large", 11}, {on, "steps", 1}, {on, "fresh", 1}, {on, "foreign", 1}, {on, "typo", 1}} {
		for range 3 {
			r, _ := tc.c.Take(t.Context(), tc.key, tc.n)
			require.False(t, r.OK, tc.key)
		}
		require.Zero(t, tc.c.Stats().Rescues, tc.key)
	}
	require.Zero(t, rdb.Exists(t.Context(), "typo").Val())

	r, err := on.Take(t.Context(), "off", 1)
	require.NoError(t, err)
	require.True(t, r.OK)
	require.Equal(t, Source{Kind: SourceRescued}, r.Source)
	require.EqualValues(t, 1, on.Stats().Rescues)
}

func TestRescuesOfABucketComeOnceAnInterval(t *testing.T) {
	var m mark
	now := time.Now()
	require.False(t, m.active(now))
	require.True(t, m.claim(time.Second, now))
	require.True(t, m.active(now.Add(time.Second-1)))
	require.False(t, m.claim(time.Second, now.Add(time.Second-1)))
	require.False(t, m.active(now.Add(time.Second)))
	require.True(t, m.claim(time.Second, now.Add(time.Second)))
}

// The server's clock went back by an hour, as after a failover to another host, so the last refill is in the future. No
// refiller runs. Consumers begin a new era, and get tokens at the bucket's rate.
func TestConsumersWithoutARefillerGoOnAfterTheClockWentBack(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	p := policy.Policy{Capacity: 100, Rate: policy.PerSecond(50), Interval: 20 * time.Millisecond, Initial: new(int64)}
	createBucket(t, rdb, "checkout", p)
	before, err := lua.Peek(ctx, rdb, "checkout", 1)
	require.NoError(t, err)
	ahead := before.Last + time.Hour.Microseconds()
	st := fmt.Sprintf("%16d %16d %d 0", ahead, ahead, before.Version.Index)
	require.NoError(t, rdb.HSet(ctx, lua.ControlKey("checkout"), "st", st).Err())
	c := newClient(t, rdb)
	taken := int64(0)
	began := time.Now()
	require.Eventually(t, func() bool {
		r, err := c.Take(ctx, "checkout", 1)
		require.NoError(t, err)
		taken += r.Taken
		return taken >= 10
	}, patience, time.Millisecond)
	require.LessOrEqual(t, float64(taken), 50*time.Since(began).Seconds()+1)
}

package fetch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/faultproxy"
	"github.com/tokenrefill/refiller/internal/testenv"
	"github.com/tokenrefill/refiller/policy"
)

// bothWays runs a test with a client whose callers make the calls and with one
// whose workers do.
func bothWays(t *testing.T, test func(t *testing.T, f *faulty)) {
	for name, prompt := range map[string]bool{"callers make the calls": true, "workers make the calls": false} {
		t.Run(name, func(t *testing.T) {
			test(t, newFaulty(t, func(o *redis.Options) {
				o.ContextTimeoutEnabled = prompt
				o.ReadTimeout = time.Minute
			}))
		})
	}
}

// waitingTakes is how many takes of a key wait for the call under way.
func waitingTakes(c *Client, key string) int {
	n := 0
	for i := range c.coalescer.shards {
		shard := &c.coalescer.shards[i]
		shard.Lock()
		if q := shard.queues[key]; q != nil {
			for p := q.first; p != nil; p = p.next {
				if p.state.Load() == queued {
					n++
				}
			}
		}
		shard.Unlock()
	}
	return n
}

// inOrder starts takes of the amounts behind one of a single token whose reply
// waits, one after the other, and returns their results when the reply has come.
func inOrder(t *testing.T, f *faulty, c *Client, amounts ...int64) []Result {
	t.Helper()
	before := tokens(t, f.direct, "checkout")
	require.NoError(t, f.proxy.Stall(faultproxy.ToClient))
	results := make([]Result, 1+len(amounts))
	var wg sync.WaitGroup
	take := func(i int, n int64) {
		wg.Go(func() {
			var err error
			if results[i], err = c.Take(context.Background(), "checkout", n); err != nil {
				t.Error(err)
			}
		})
	}
	take(0, 1)
	eventually(t, func() bool { return tokens(t, f.direct, "checkout") == before-1 }, "the first runs")
	for i, n := range amounts {
		take(1+i, n)
		eventually(t, func() bool { return waitingTakes(c, "checkout") == 1+i }, "it waits")
	}
	require.NoError(t, f.proxy.Heal())
	wg.Wait()
	return results[1:]
}

func TestTakesThatComeDuringACallGoTogetherInTheOrderOfTheirArrival(t *testing.T) {
	bothWays(t, func(t *testing.T, f *faulty) {
		c := newClient(t, f.rdb, slow())
		f.warm(t, c)
		_, err := c.Take(t.Context(), "checkout", 80)
		require.NoError(t, err)
		require.NoError(t, f.direct.ConfigResetStat(t.Context()).Err())

		// 19 are left. A take that doesn't fit leaves the tokens to those behind it.
		results := inOrder(t, f, c, 4, 4, 12, 5, 7, 2, 2, 4, 1)
		want := []struct {
			ok   bool
			left int64
		}{{true, 15}, {true, 11}, {false, 0}, {true, 6}, {false, 0}, {true, 4}, {true, 2}, {false, 0}, {true, 1}}
		for i, w := range want {
			require.Equal(t, w.ok, results[i].OK, "take %d", i)
			require.EqualValues(t, 100, results[i].Limit)
			if w.ok {
				require.Equal(t, w.left, results[i].Remaining, "take %d", i)
				continue
			}
			require.Zero(t, results[i].Taken)
			require.EqualValues(t, 1, results[i].Remaining)
			require.Greater(t, results[i].RetryAfter, 30*time.Minute)
		}
		require.EqualValues(t, 1, tokens(t, f.direct, "checkout"))
		require.Equal(t, 2, commandCalls(t, f.direct)["evalsha"]+commandCalls(t, f.direct)["eval"]/2, "one call for all that waited")
		require.Equal(t, Stats{}, c.Stats())
	})
}

func TestATakeMergedWithOthersIsRefusedAloneIfItExceedsTheCapacity(t *testing.T) {
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, slow())
	f.warm(t, c)
	require.NoError(t, f.proxy.Stall(faultproxy.ToClient))
	errs := make(chan error, 3)
	var wg sync.WaitGroup
	for i, n := range []int64{1, 101, 2} {
		wg.Go(func() {
			_, err := c.Take(t.Context(), "checkout", n)
			if n > 100 != errors.Is(err, ErrExceedsCapacity) {
				errs <- fmt.Errorf("take of %d: %w", n, err)
			}
		})
		if i == 0 {
			eventually(t, func() bool { return tokens(t, f.direct, "checkout") == 99 }, "the first runs")
		}
	}
	eventually(t, func() bool { return waitingTakes(c, "checkout") == 2 }, "they wait")
	require.NoError(t, f.proxy.Heal())
	wg.Wait()
	close(errs)
	require.NoError(t, <-errs)
	require.EqualValues(t, 97, tokens(t, f.direct, "checkout"))
}

func TestACancelledTakeInTheQueueIsDroppedAndNotCharged(t *testing.T) {
	bothWays(t, func(t *testing.T, f *faulty) {
		c := newClient(t, f.rdb, slow())
		f.warm(t, c)
		require.NoError(t, f.proxy.Stall(faultproxy.ToClient))
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = c.Take(context.Background(), "checkout", 1) })
		eventually(t, func() bool { return tokens(t, f.direct, "checkout") == 99 }, "the first runs")

		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 2)
		for range 2 { // one of them would lead the next call
			wg.Go(func() {
				_, err := c.Take(ctx, "checkout", 30)
				ended <- err
			})
		}
		eventually(t, func() bool { return waitingTakes(c, "checkout") == 2 }, "they wait")
		wg.Go(func() {
			if _, err := c.Take(context.Background(), "checkout", 5); err != nil {
				t.Error(err)
			}
		})
		eventually(t, func() bool { return waitingTakes(c, "checkout") == 3 }, "it waits")
		cancel()
		require.ErrorIs(t, <-ended, context.Canceled)
		require.ErrorIs(t, <-ended, context.Canceled)
		require.NoError(t, f.proxy.Heal())
		wg.Wait()
		require.EqualValues(t, 94, tokens(t, f.direct, "checkout"))
		require.Equal(t, Stats{}, c.Stats(), "nothing was under way for those who left")
	})
}

func TestACancelledTakeThatSleepsIsNotChargedAndReturnsSoon(t *testing.T) {
	for name, tc := range map[string]struct{ trip, within time.Duration }{
		"its call is about to depart":   {time.Millisecond, time.Millisecond},
		"the call before it takes long": {time.Second, 2 * vigilPause},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBank(map[string]policy.Policy{"checkout": hourly(100)})
				c := newClient(t, b, slow())
				_, err := c.Take(t.Context(), "checkout", 1)
				require.NoError(t, err)
				b.trip = tc.trip
				var wg sync.WaitGroup
				take := func(ctx context.Context, n int64) {
					wg.Go(func() {
						if _, err := c.Take(ctx, "checkout", n); err != nil {
							t.Error(err)
						}
					})
					synctest.Wait()
				}
				take(context.Background(), 1)
				take(context.Background(), 5) // it leads the next call
				ctx, cancel := context.WithCancel(context.Background())
				cancelled, ended := time.Now(), make(chan error, 1)
				go func() {
					_, err := c.Take(ctx, "checkout", 30)
					ended <- err
				}()
				synctest.Wait()
				cancel()
				require.ErrorIs(t, <-ended, context.Canceled)
				require.LessOrEqual(t, time.Since(cancelled), tc.within)
				wg.Wait()
				b.with("checkout", func(bucket *policy.Bucket) { require.EqualValues(t, 93, *bucket.Tokens) })
				require.Equal(t, Stats{}, c.Stats())
				require.NoError(t, c.Close(context.Background()))
			})
		})
	}
}

func TestTokensOfThoseWhoLeaveAMergedCallComeBack(t *testing.T) {
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, slow())
	f.warm(t, c)
	require.NoError(t, f.proxy.Stall(faultproxy.ToClient))
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	take := func(ctx context.Context, n int64) {
		wg.Go(func() { _, _ = c.Take(ctx, "checkout", n) })
	}
	take(context.Background(), 1)
	eventually(t, func() bool { return tokens(t, f.direct, "checkout") == 99 }, "the first runs")
	take(context.Background(), 10)
	take(ctx, 20)
	take(ctx, 30)
	eventually(t, func() bool { return waitingTakes(c, "checkout") == 3 }, "they wait")
	require.NoError(t, f.proxy.Heal())
	// Either they are charged and left before the answer, or answered: in both
	// cases their tokens are where Take says.
	cancel()
	wg.Wait()
	eventually(t, func() bool {
		return tokens(t, f.direct, "checkout") == 89-50+c.Stats().Returned || tokens(t, f.direct, "checkout") == 89
	}, "the tokens come back")
}

func TestAnIdleKeyLeavesNothingInTheCoalescer(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	c := newClient(t, rdb, slow())
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 200 {
				_, err := c.Take(t.Context(), "user:"+strconv.Itoa((i+j)%50), 1)
				if !errors.Is(err, ErrUnknownBucket) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	eventually(t, func() bool {
		left := 0
		for i := range c.coalescer.shards {
			shard := &c.coalescer.shards[i]
			shard.Lock()
			left += len(shard.queues)
			shard.Unlock()
		}
		return left == 0
	}, "workers pass the last lead")
}

// roundTrips counts the commands that share a pipeline.
type roundTrips struct{ pipelines, shared atomic.Int64 }

func (*roundTrips) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}
func (*roundTrips) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (r *roundTrips) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if len(cmds) > 1 {
			r.pipelines.Add(1)
			r.shared.Add(int64(len(cmds)))
		}
		return next(ctx, cmds)
	}
}

func TestCallsForDistinctKeysShareRoundTripsOnlyWhenThereAreMany(t *testing.T) {
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, slow())
	f.warm(t, c)
	var trips roundTrips
	f.rdb.AddHook(&trips)
	for i := range 40 {
		createBucket(t, f.direct, "user:"+strconv.Itoa(i), hourly(10))
	}
	_, err := c.Take(t.Context(), "user:0", 1)
	require.NoError(t, err)
	require.Zero(t, trips.pipelines.Load(), "a lone call goes alone")

	l := c.store.(*lanes)
	l.mu.Lock()
	l.taken += lanesWide                    // as if that many round trips were under way
	l.departure = time.Now().Add(time.Hour) // none is stuck
	l.mu.Unlock()
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			r, err := c.Take(t.Context(), "user:"+strconv.Itoa(i), 2)
			if err != nil || !r.OK {
				t.Error(r, err)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	wg.Go(func() {
		_, err := c.Take(ctx, "checkout", 50)
		gone <- err
	})
	eventually(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		n := 0
		for p := l.first; p != nil; p = p.next {
			n++
		}
		return n == 41
	}, "all wait")
	cancel()
	require.ErrorIs(t, <-gone, context.Canceled)
	eventually(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		for p := l.first; p != nil; p = p.next {
			if p.seat.Load() == left {
				return true
			}
		}
		return false
	}, "its call leaves the line")
	for range lanesWide {
		l.free()
	}
	wg.Wait()
	require.LessOrEqual(t, trips.pipelines.Load(), int64(lanesWide))
	require.GreaterOrEqual(t, trips.shared.Load(), int64(39))
	require.EqualValues(t, 100, tokens(t, f.direct, "checkout"), "what was given up was not sent")
	require.Zero(t, l.taken)
	require.Equal(t, Stats{Abandoned: 1}, c.Stats())
}

func TestCallsThatShareARoundTripShareItsFailure(t *testing.T) {
	var refuses atomic.Bool
	f := newFaulty(t, func(o *redis.Options) {
		o.OnConnect = func(context.Context, *redis.Conn) error {
			if refuses.Load() {
				return redisError("BUSY Redis is busy running a script.")
			}
			return nil
		}
	})
	c := newClient(t, f.rdb, slow(), WithBreaker(false))
	f.warm(t, c)
	refuses.Store(true)
	f.proxy.Reset()
	l := c.store.(*lanes)
	l.mu.Lock()
	l.taken += lanesWide                    // as if that many round trips were under way
	l.departure = time.Now().Add(time.Hour) // none is stuck
	l.mu.Unlock()
	const calls = 5
	errs := make(chan error, calls)
	for i := range calls {
		go func() {
			_, err := c.Take(t.Context(), "user:"+strconv.Itoa(i), 1)
			errs <- err
		}()
	}
	eventually(t, func() bool { l.mu.Lock(); defer l.mu.Unlock(); return l.queued == calls }, "all wait")
	for range lanesWide {
		l.free()
	}
	for range calls {
		require.Equal(t, ReasonBusy, ReasonOf(<-errs))
	}
	require.Zero(t, c.Stats().Lost, "nothing was sent")
}

func TestStuckRoundTripsDoNotHoldUpOthers(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "checkout", hourly(10))
	c := newClient(t, rdb, slow())
	l := c.store.(*lanes)
	l.mu.Lock()
	l.taken = lanesWide // and none of them comes back
	l.mu.Unlock()
	for range 3 {
		r, err := c.Take(t.Context(), "checkout", 1)
		require.NoError(t, err)
		require.True(t, r.OK)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	require.Equal(t, lanesWide, l.taken)
}

// seeded is a source of REFILLER_SEED, or of a new seed; it is printed so that a
// run can be repeated.
func seeded(t *testing.T) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	if v := os.Getenv("REFILLER_SEED"); v != "" {
		n, err := strconv.ParseUint(v, 10, 64)
		require.NoError(t, err)
		seed = n
	}
	t.Logf("REFILLER_SEED=%d repeats this run", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

package fetch

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/faultproxy"
	"github.com/tokenrefill/refiller/internal/testenv"
	"github.com/tokenrefill/refiller/policy"
)

const (
	consumerEnv  = "REFILLER_TEST_CONSUMER" // the address of the Redis that the test binary, run as a consumer, takes from
	consumersEnd = "consumers:"             // begins its last line
)

// consumers takes from a healthy Redis in each of three ways, and prints what became of that.
func consumers(addr string) error {
	ways := map[string]struct {
		rdb  *redis.Options
		opts []Option
	}{
		"default": {&redis.Options{Addr: addr}, nil},
		"context": {&redis.Options{Addr: addr, ContextTimeoutEnabled: true}, nil},
		"leases":  {&redis.Options{Addr: addr}, []Option{WithLease(1000, time.Second)}},
	}
	var out strings.Builder
	for name, way := range ways {
		rdb := redis.NewClient(way.rdb)
		c, err := New(rdb, way.opts...)
		if err != nil {
			return err
		}
		for i := range 5 { // opens connections, and loads the script
			if _, err := c.Take(context.Background(), fmt.Sprint("checkout", i), 1, slow()); err != nil {
				return err
			}
		}
		var takes, failed atomic.Int64
		var last atomic.Pointer[error]
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				ticker := time.NewTicker(10 * time.Millisecond)
				defer ticker.Stop()
				for end := time.Now().Add(2 * time.Second); time.Now().Before(end); <-ticker.C {
					takes.Add(1)
					if _, err := c.Take(context.Background(), fmt.Sprint("checkout", i%5), 1); err != nil {
						failed.Add(1)
						last.Store(&err)
					}
				}
			})
		}
		wg.Wait()
		fmt.Fprintf(&out, "%s %s takes %d failed %d opened %d", consumersEnd, name, takes.Load(), failed.Load(), c.Stats().BreakerOpened)
		if err := last.Load(); err != nil {
			fmt.Fprintf(&out, " (%v)", *err)
		}
		fmt.Fprintln(&out)
		if err := c.Close(context.Background()); err != nil {
			return err
		}
		if err := rdb.Close(); err != nil {
			return err
		}
	}
	fmt.Print(out.String(), consumersEnd, " done\n")
	return nil
}

// A process that is stopped for most of the time, as by a quota of its processor, takes as before: its own slowness is none of
// the server's.
func TestAConsumerThatIsStoppedHasNoErrors(t *testing.T) {
	for _, stop := range []struct{ of, every time.Duration }{
		{50 * time.Millisecond, 70 * time.Millisecond}, {80 * time.Millisecond, 100 * time.Millisecond},
		{150 * time.Millisecond, 170 * time.Millisecond}, {300 * time.Millisecond, 320 * time.Millisecond},
	} {
		t.Run(fmt.Sprintf("%s of %s", stop.of, stop.every), func(t *testing.T) {
			t.Parallel()
			server := testenv.Redis(t)
			for i := range 5 {
				createBucket(t, server.Client(), fmt.Sprint("checkout", i), hourly(policy.MaxTokens))
			}
			p := testenv.StartCommand(t, testenv.Command{Path: os.Args[0], Env: []string{consumerEnv + "=" + server.Addr()}})
			for p.Running() {
				p.Signal(syscall.SIGSTOP)
				time.Sleep(stop.of)
				p.Signal(syscall.SIGCONT)
				time.Sleep(stop.every - stop.of)
			}
			report := regexp.MustCompile(consumersEnd+` (\w+) takes (\d+) failed (\d+) opened (\d+).*`).FindAllStringSubmatch(p.Log(), -1)
			require.Len(t, report, 3, p.Log())
			for _, r := range report {
				require.Equal(t, "0", r[3], r[0])
				require.Equal(t, "0", r[4], r[0])
				require.NotEqual(t, "0", r[2], r[0])
			}
		})
	}
}

// More goroutines than the processors can serve make takes slow, and fail none before its timeout.
func TestOverloadIsNoOutage(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	for i := range 100 {
		createBucket(t, rdb, fmt.Sprint("checkout", i), hourly(policy.MaxTokens))
	}
	testenv.Start(t, "/bin/sh", "-c", "while :; do :; done") // a neighbour
	for _, goroutines := range []int{256, 1024} {
		for name, o := range map[string]*redis.Options{
			"default options": {Addr: rdb.Options().Addr}, "context timeouts": {Addr: rdb.Options().Addr, ContextTimeoutEnabled: true},
		} {
			own := redis.NewClient(o)
			c := newClient(t, own)
			var wg sync.WaitGroup
			var failed atomic.Int64
			var last atomic.Pointer[error]
			end := time.Now().Add(time.Second)
			for g := range goroutines {
				wg.Go(func() {
					for i := g; time.Now().Before(end); i++ {
						if _, err := c.Take(context.Background(), fmt.Sprint("checkout", i%100), 1); err != nil {
							failed.Add(1)
							last.Store(&err)
						}
					}
				})
			}
			wg.Wait()
			if err := last.Load(); err != nil {
				require.NoError(t, *err, "%s, %d goroutines: one of %d", name, goroutines, failed.Load())
			}
			require.Zero(t, c.Stats().BreakerOpened)
			require.NoError(t, own.Close())
		}
	}
}

// A silent server is answered for within the timeout; the breaker opens, and closes soon after the server is back, whatever the
// round trip.
func TestTheBreakerFollowsTheServer(t *testing.T) {
	for _, trip := range []time.Duration{100 * time.Microsecond, 20 * time.Millisecond, 60 * time.Millisecond, 200 * time.Millisecond} {
		for name, timeout := range map[string]time.Duration{"default timeout": DefaultTimeout, "no timeout of its own": 0} {
			if trip >= timeout && timeout > 0 {
				timeout = 2 * trip
			}
			t.Run(fmt.Sprintf("%s/%s", trip, name), func(t *testing.T) {
				t.Parallel()
				f := newFaulty(t, nil)
				createBucket(t, f.direct, "mail", hourly(policy.MaxTokens))
				require.NoError(t, f.proxy.Delay(faultproxy.ToClient, trip, 0))
				c := newClient(t, f.rdb, WithTimeout(timeout))
				take := func(within time.Duration, opts ...CallOption) (time.Duration, error) {
					ctx, cancel := context.WithTimeout(t.Context(), within)
					defer cancel()
					began := time.Now()
					_, err := c.Take(ctx, "mail", 1, opts...)
					return time.Since(began), err
				}
				for range 5 {
					_, err := take(patience, slow())
					require.NoError(t, err)
				}
				require.NoError(t, f.proxy.Stall(faultproxy.Both))
				bound := timeout
				if bound == 0 {
					bound = 3 * trip / 2 // the caller's own
				}
				var wg sync.WaitGroup
				for range 20 {
					wg.Go(func() {
						for c.Stats().BreakerOpened == 0 {
							if took, _ := take(max(bound, 50*time.Millisecond) + 10*time.Millisecond); took > bound+patience/10 {
								t.Errorf("answered after %s", took)
								return
							}
						}
					})
				}
				wg.Wait()
				require.Positive(t, c.Stats().BreakerOpened)
				_, err := take(patience)
				require.ErrorIs(t, err, ErrUnavailable)
				require.NoError(t, f.proxy.Heal())
				require.NoError(t, f.proxy.Delay(faultproxy.ToClient, trip, 0))
				healed := time.Now()
				eventually(t, func() bool { _, err := take(patience); return err == nil }, "the breaker closes")
				require.Less(t, time.Since(healed), 2*time.Second+patienceForNoise)
			})
		}
	}
}

// patienceForNoise is what a test allows a busy machine beyond a promised time.
const patienceForNoise = 3 * time.Second

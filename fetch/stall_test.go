package fetch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"sync"
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
	loadEnv      = "REFILLER_TEST_LOAD"     // its goroutines; each takes a hundred times a second if they are paced, else at once
	pacedLoad    = 20
	consumersEnd = "consumers:" // begins what it prints
	buckets      = 100
)

// consumers takes from a healthy Redis in each of three ways, and prints what became of that.
func consumers(addr string) error {
	goroutines, err := strconv.Atoi(os.Getenv(loadEnv))
	if err != nil {
		return err
	}
	for _, way := range []struct {
		name  string
		keeps bool
		opts  []Option
	}{{"default", false, nil}, {"context", true, nil}, {"leases", false, []Option{WithLease(1000, time.Second)}}} {
		rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: way.keeps})
		c, err := New(rdb, way.opts...)
		if err != nil {
			return err
		}
		for range 20 { // opens connections, and loads the script
			if _, err := c.Take(context.Background(), bucketOf(0), 1, slow()); err != nil {
				return err
			}
		}
		takes, failed, cause := load(c, goroutines)
		fmt.Printf("%s %s takes %d failed %d opened %d (%v)\n", consumersEnd, way.name, takes, failed, c.Stats().BreakerOpened, cause)
		if err := errors.Join(c.Close(context.Background()), rdb.Close()); err != nil {
			return err
		}
	}
	return nil
}

func bucketOf(i int) string { return fmt.Sprint("checkout", i%buckets) }

// load takes for some time, and counts.
func load(c *Client, goroutines int) (takes, failed int64, cause error) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	end := time.Now().Add(1500 * time.Millisecond)
	for g := range goroutines {
		wg.Go(func() {
			ticker := time.NewTicker(10 * time.Millisecond)
			defer ticker.Stop()
			for i := g; time.Now().Before(end); i++ {
				_, err := c.Take(context.Background(), bucketOf(i), 1)
				mu.Lock()
				if takes++; err != nil {
					failed++
					cause = err
				}
				mu.Unlock()
				if goroutines == pacedLoad {
					<-ticker.C
				}
			}
		})
	}
	wg.Wait()
	return takes, failed, cause
}

// startConsumers runs the test binary as a consumer of a Redis. Where that is allowed both, and a busy neighbour, run
// before other processes: what this is about is the consumer's own slowness, and not what else the machine does.
func startConsumers(t *testing.T, goroutines int, neighbour bool) (consumers *testenv.Process, stop func()) {
	t.Helper()
	server := testenv.Redis(t)
	if err := syscall.Setpriority(syscall.PRIO_PROCESS, server.Pid(), -19); err != nil {
		t.Logf("processes run like others: %v", err)
	}
	for i := range buckets {
		createBucket(t, server.Client(), bucketOf(i), hourly(policy.MaxTokens))
	}
	stop = server.Kill
	if neighbour {
		p := testenv.Start(t, "/usr/bin/nice", "-n", "-19", "/bin/sh", "-c", "while :; do :; done")
		stop = func() {
			p.Kill()
			server.Kill()
		}
	}
	return testenv.StartCommand(t, testenv.Command{
		Path: "/usr/bin/nice", Args: []string{"-n", "-19", os.Args[0]},
		Env: []string{consumerEnv + "=" + server.Addr(), loadEnv + "=" + strconv.Itoa(goroutines)},
	}), stop
}

// requireFewErrors runs consumers of whose takes no more than that many in a hundred may fail. The machine itself may
// stand still for longer than twice a timeout, when they rightly do: they then have another try.
func requireFewErrors(t *testing.T, most int64, run func() (consumers *testenv.Process, stop func())) {
	t.Helper()
	for tries := 4; ; tries-- {
		p, stop := run()
		<-p.Exited()
		stop()
		report := regexp.MustCompile(consumersEnd+` \w+ takes (\d+) failed (\d+) opened (\d+).*`).FindAllStringSubmatch(p.Log(), -1)
		require.Len(t, report, 3, p.Log())
		bad := slices.IndexFunc(report, func(r []string) bool {
			takes, _ := strconv.ParseInt(r[1], 10, 64)
			failed, _ := strconv.ParseInt(r[2], 10, 64)
			return takes == 0 || 100*failed > most*takes || r[3] != "0"
		})
		if bad < 0 {
			return
		}
		t.Log(report[bad][0])
		require.Positive(t, tries, report[bad][0])
	}
}

// A process that is stopped for most of the time, as by a quota of its processor, takes as before: its own slowness is
// none of the server's.
func TestAConsumerThatIsStoppedHasNoErrors(t *testing.T) {
	for _, stop := range []struct{ of, every time.Duration }{
		{50 * time.Millisecond, 70 * time.Millisecond}, {80 * time.Millisecond, 100 * time.Millisecond},
		{150 * time.Millisecond, 170 * time.Millisecond}, {300 * time.Millisecond, 320 * time.Millisecond},
	} {
		t.Run(fmt.Sprintf("%s of %s", stop.of, stop.every), func(t *testing.T) {
			t.Parallel()
			requireFewErrors(t, 0, func() (*testenv.Process, func()) {
				p, end := startConsumers(t, pacedLoad, false)
				for p.Running() {
					p.Signal(syscall.SIGSTOP)
					time.Sleep(stop.of)
					p.Signal(syscall.SIGCONT)
					time.Sleep(stop.every - stop.of)
				}
				return p, end
			})
		})
	}
}

// More goroutines than the processors can serve make takes slow, and fail none before its timeout. Where other programs
// take most of the processors' time as well some may wait for longer; no breaker opens for that.
func TestOverloadIsNoOutage(t *testing.T) {
	for _, goroutines := range []int{256, 1024} {
		requireFewErrors(t, 1, func() (*testenv.Process, func()) { return startConsumers(t, goroutines, true) })
	}
}

// A silent server is answered for within the timeout; the breaker opens, and closes soon after the server is back,
// whatever the round trip.
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
							if took, _ := take(bound); took > bound+10*time.Millisecond+noise {
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
				require.Less(t, time.Since(healed), 2*time.Second+noise)
			})
		}
	}
}

// noise is what a test allows a busy machine beyond a promised time.
const noise = time.Second

package fetch

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/policy"
)

// preferred gives this test's session a higher priority until the test ends, and reports whether that was allowed.
// These tests are about a slow consumer. Without the priority, other programs could make the server slow, too.
func preferred(t *testing.T) bool {
	const session = "/proc/self/autogroup"
	if err := syscall.Setpriority(syscall.PRIO_PROCESS, 0, -19); err != nil {
		t.Logf("processes have no higher priority: %v", err)
		return false
	}
	if _, err := os.Stat(session); err == nil { // a priority of processes has no effect between sessions
		if err := os.WriteFile(session, []byte("-19"), 0); err != nil {
			t.Logf("processes have no higher priority: %v", err)
			return false
		}
		t.Cleanup(func() { require.NoError(t, os.WriteFile(session, []byte("0"), 0)) })
	}
	return true
}

// startConsumers starts consumers with a Redis of their own. If they are not preferred, their timeout is a second
// instead of the default.
func startConsumers(t *testing.T, preferred bool, goroutines int, pace time.Duration) *testenv.Process {
	t.Helper()
	const buckets = 100
	server, timeout := testenv.Redis(t), time.Second
	if preferred {
		require.NoError(t, syscall.Setpriority(syscall.PRIO_PROCESS, server.Pid(), -19))
		timeout = DefaultTimeout
	}
	for i := range buckets {
		createBucket(t, server.Client(), fmt.Sprint("checkout", i), hourly(policy.MaxTokens))
	}
	return testenv.Start(t, "/usr/bin/nice", "-n", "-19", testenv.Build(t, "./fetch/internal/consumers"),
		"-addr", server.Addr(), "-prefix", "checkout", "-buckets", fmt.Sprint(buckets), "-timeout", timeout.String(),
		"-goroutines", fmt.Sprint(goroutines), "-pace", pace.String())
}

// withoutErrors waits for consumers to end, and reports whether no take has failed and no breaker opened.
func withoutErrors(t *testing.T, p *testenv.Process) bool {
	t.Helper()
	<-p.Exited()
	reports := regexp.MustCompile(`\w+: takes (\d+) failed (\d+) opened (\d+).*`).FindAllStringSubmatch(p.Log(), -1)
	require.Len(t, reports, 3, p.Log())
	none := true
	for _, r := range reports {
		assert.NotEqual(t, "0", r[1], r[0])
		if r[2] != "0" || r[3] != "0" {
			t.Log(r[0])
			none = false
		}
	}
	return none
}

// A process that is stopped for most of the time, for example because of a CPU quota, still takes tokens without
// errors. Its own slowness doesn't count as the server's.
func TestAConsumerThatIsStoppedHasNoErrors(t *testing.T) {
	first := preferred(t)
	for _, stop := range []struct{ of, every time.Duration }{
		{50 * time.Millisecond, 70 * time.Millisecond}, {80 * time.Millisecond, 100 * time.Millisecond},
		{150 * time.Millisecond, 170 * time.Millisecond}, {300 * time.Millisecond, 320 * time.Millisecond},
	} {
		t.Run(fmt.Sprintf("%s of %s", stop.of, stop.every), func(t *testing.T) {
			t.Parallel()
			p := startConsumers(t, first, 20, 10*time.Millisecond)
			for p.Running() {
				p.Signal(syscall.SIGSTOP)
				time.Sleep(stop.of)
				p.Signal(syscall.SIGCONT)
				time.Sleep(stop.every - stop.of)
			}
			require.True(t, withoutErrors(t, p))
		})
	}
}

// If there are more goroutines than the processors can serve, and another busy process, takes become slow but don't
// fail.
func TestOverloadIsNoOutage(t *testing.T) {
	first := preferred(t)
	testenv.Start(t, "/usr/bin/nice", "-n", "-19", "/bin/sh", "-c", "while :; do :; done")
	for _, goroutines := range []int{256, 1024} {
		t.Run(fmt.Sprint(goroutines), func(t *testing.T) {
			served := false
			for tries := 0; !served && tries < 3; tries++ { // other programs may keep the server, too, from running
				served = withoutErrors(t, startConsumers(t, first, goroutines, 0))
			}
			require.True(t, served)
		})
	}
}

// While a server is silent, calls end within the timeout and the breaker opens. It closes soon after the server answers
// again, whatever the round trip.
func TestTheBreakerFollowsTheServer(t *testing.T) {
	preferred(t)
	for _, trip := range []time.Duration{100 * time.Microsecond, 20 * time.Millisecond, 60 * time.Millisecond,
		200 * time.Millisecond} {
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
					bound = 3 * trip / 2 // the caller's own timeout
				}
				var wg sync.WaitGroup
				end := time.Now().Add(patience)
				for range 20 {
					wg.Go(func() {
						for c.Stats().BreakerOpened == 0 && time.Now().Before(end) {
							if took, _ := take(bound); took > bound+10*time.Millisecond+noise {
								t.Errorf("a take was answered only after %s", took)
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
				eventually(t, func() bool {
					_, err := take(patience)
					return err == nil
				}, "the breaker closes")
				require.Less(t, time.Since(healed), 2*time.Second+noise)
			})
		}
	}
}

// The breaker gives a server as much time for a reply as the Client's calls have.
func TestTheBreakerIsAsPatientAsTheClient(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, slow())
	f.warm(t, c)
	require.NoError(t, f.proxy.Stall(faultproxy.Both))
	var wg sync.WaitGroup
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		wg.Go(func() {
			if _, err := c.Take(t.Context(), "checkout", 1); err != nil {
				t.Error(err)
			}
		})
	}
	require.NoError(t, f.proxy.Heal())
	wg.Wait()
	require.Zero(t, c.Stats().BreakerOpened)
}

// noise is how much longer than a promised time a test allows, for a busy machine.
const noise = time.Second

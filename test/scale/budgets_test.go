package scale

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/tokenrefill/refiller/fetch"
)

var (
	budgets = flag.Int("budgets", 300, "how many drained budgets TestBudgets has")
	// The budgets are drained after a step. Their cost is measured until the next step, and then they are drained again.
	period = flag.Duration("period", 4*time.Second, "time between two steps of the budgets")
)

// TestBudgets measures the cost of drained budgets between two steps, and the cost of the takes after a step. After the
// step, many goroutines make takes as fast as they can, each take from another budget. A few other takes, at a steady
// rate, show the latency meanwhile.
func TestBudgets(t *testing.T) {
	const workers = 128
	s := startStore(t, false)
	every := *period
	config := fmt.Sprintf("redis: {url: %q}\nversion: 1\nlisten: 127.0.0.1:0\n"+
		"templates:\n  - {prefix: %q, every: %s, tokens: 100, capacity: 100}\n", s.url, prefix, every)
	r := startReplica(t, "refiller", config)
	client, err := fetch.New(s.rdb, fetch.WithTimeout(10*time.Second))
	require.NoError(t, err)
	defer func() { require.NoError(t, client.Close(context.Background())) }()
	require.NoError(t, client.Ready(t.Context()))
	sc := scenario{}
	empty := s.usage(t)
	drain := func() (credited int64, took time.Duration) {
		var n atomic.Int64
		begin := time.Now()
		g, ctx := errgroup.WithContext(t.Context())
		for w := range workers {
			g.Go(func() error {
				for i := w; i < *budgets; i += workers {
					r, err := client.Take(ctx, sc.key(i), 100)
					if err != nil {
						return err
					}
					if r.OK {
						n.Add(1)
					}
				}
				return nil
			})
		}
		require.NoError(t, g.Wait())
		return n.Load(), time.Since(begin)
	}
	sleepUntil := func(at time.Time) { time.Sleep(time.Until(at)) }
	sleepUntil(time.Now().Truncate(every).Add(every + 100*time.Millisecond))
	created, _ := drain()
	require.EqualValues(t, *budgets, created)
	bytes := (s.usage(t).memory - empty.memory) / float64(*budgets)

	window := min(10*time.Second, every/8)
	before, beforeReplica := s.usage(t), r.scrape(t)
	time.Sleep(window)
	after, afterReplica := s.usage(t), r.scrape(t)
	redisCores := (after.cpu - before.cpu) / window.Seconds()
	refillerCores := (afterReplica.cpu - beforeReplica.cpu) / window.Seconds()

	step := time.Now().Truncate(every).Add(every)
	sleepUntil(step.Add(-100 * time.Millisecond))
	beside, stop := context.WithCancel(t.Context())
	latencies := paced(beside, t, client, sc)
	sleepUntil(step.Add(20 * time.Millisecond))
	atStep := s.usage(t)
	credited, took := drain()
	perTake := (s.usage(t).cpu - atStep.cpu) / float64(credited)
	stop()
	p50, p99 := quantiles(latencies())
	require.EqualValues(t, *budgets, credited, "each take credits the step of its budget")
	t.Logf("%s drained budgets, %.0f bytes each: between steps %.4f of a core of Redis and %.4f of the refiller; at the "+
		"step %.0f first takes a second, of %.1f µs of Redis each; takes beside them: median %.2f ms, p99 %.2f ms",
		thousands(*budgets), bytes, redisCores, refillerCores, float64(credited)/took.Seconds(), perTake*1e6, p50, p99)
}

// paced takes from other budgets at a steady rate until its context ends. The returned function waits for the end, and
// returns the latencies.
func paced(ctx context.Context, t *testing.T, client *fetch.Client, sc scenario) func() []time.Duration {
	t.Helper()
	var mu sync.Mutex
	var latencies []time.Duration
	var wg sync.WaitGroup
	pace := time.NewTicker(time.Second / takesPerSecond)
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer pace.Stop()
		for i := *budgets; ; i++ {
			select {
			case <-ctx.Done():
				wg.Wait()
				return
			case <-pace.C:
			}
			wg.Go(func() {
				begin := time.Now()
				_, err := client.Take(context.WithoutCancel(ctx), sc.key(i), 1)
				took := time.Since(begin)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					t.Errorf("take: %v", err)
				}
				latencies = append(latencies, took)
			})
		}
	}()
	return func() []time.Duration {
		<-done
		return latencies
	}
}

// quantiles returns the median and the 99th percentile in milliseconds.
func quantiles(latencies []time.Duration) (p50, p99 float64) {
	if len(latencies) == 0 {
		return 0, 0
	}
	slices.Sort(latencies)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	return ms(latencies[len(latencies)/2]), ms(latencies[len(latencies)*99/100])
}

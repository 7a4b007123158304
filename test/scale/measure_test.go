package scale

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
)

// measure runs one scenario. It has three parts, each as long as the window: takes
// without refillers, refillers without takes, and both at the same time.
func measure(t *testing.T, sc scenario, window time.Duration) figures {
	s := startStore(t, sc.Cluster)
	f := figures{scenario: sc}
	empty := s.usage(t)
	if sc.Configured {
		f.replicas(t, s) // they create the buckets
	} else {
		s.fill(t, sc)
		f.BytesPerBucket = (s.usage(t).memory - empty.memory) / float64(sc.Keys)
		f.TakeAlone = takes(t, s, sc, window)
		f.replicas(t, s)
	}
	f.settle(t, s)
	if sc.Configured {
		f.BytesPerBucket = (s.usage(t).memory - empty.memory) / float64(sc.Keys)
	}
	f.refills(t, s, window)
	f.TakeBeside = takes(t, s, sc, window)
	if sc.Configured { // these buckets need the replicas first, so takes without them are measured at the end
		for _, r := range f.running {
			r.Stop()
		}
		f.TakeAlone = takes(t, s, sc, window)
	}
	return f
}

// replicas starts the replicas.
func (f *figures) replicas(t *testing.T, s *store) {
	t.Helper()
	config := f.config(s.url)
	for i := range f.Replicas {
		r := startReplica(t, fmt.Sprintf("refiller%d", i), config)
		f.running = append(f.running, r)
		f.Startup = max(f.Startup, r.started.Seconds())
	}
}

// settle waits until the replicas refill all active buckets and have shared the shards.
func (f *figures) settle(t *testing.T, s *store) {
	t.Helper()
	require.Eventually(t, func() bool {
		applied := 0.0
		active := 0.0
		shards := 0.0
		for _, r := range f.running {
			c := r.scrape(t)
			applied += c.applied
			active += c.active
			shards += c.shards
		}
		if f.Configured {
			return applied >= float64(f.Keys)
		}
		n, occupied := s.active(t)
		return n == int64(f.Active) && int(active) == f.Active && int(shards) >= occupied && int(applied) >= f.Active
	}, patience, 200*time.Millisecond, "the replicas know all buckets")
	time.Sleep(5 * f.Interval) // shards move between the replicas until each has about as many
}

// refills measures the cost of refills.
func (f *figures) refills(t *testing.T, s *store, window time.Duration) {
	t.Helper()
	window = max(window, 3*f.Interval)
	sum := func() (all counts) {
		all.lag = map[float64]float64{}
		for _, r := range f.running {
			c := r.scrape(t)
			all.applied += c.applied
			all.cpu += c.cpu
			all.memory = max(all.memory, c.memory)
			for le, n := range c.lag {
				all.lag[le] += n
			}
		}
		return all
	}
	before := sum()
	used := s.usage(t)
	begin := time.Now()
	time.Sleep(window)
	seconds := time.Since(begin).Seconds()
	usedAfter := s.usage(t)
	after := sum()

	refills := after.applied - before.applied
	f.RefillsPerSecond = refills / seconds
	f.RedisCores = (usedAfter.cpu - used.cpu) / seconds
	f.RefillerCores = (after.cpu - before.cpu) / seconds
	f.MemoryMB = after.memory / 1e6
	f.Commands = (usedAfter.commands - used.commands) / seconds / float64(f.Replicas)
	if refills > 0 {
		f.PerRedisSecond = refills / (usedAfter.cpu - used.cpu)
		f.CPUPerMillion = (after.cpu - before.cpu) / refills * 1e6
		f.LagP50, f.LagP99 = quantile(before.lag, after.lag, 0.5), quantile(before.lag, after.lag, 0.99)
	}
}

// quantile returns a quantile, in seconds, of the values that a cumulative histogram got between
// before and after. It interpolates between the bounds.
func quantile(before, after map[float64]float64, q float64) float64 {
	bounds := make([]float64, 0, len(after))
	for le := range after {
		bounds = append(bounds, le)
	}
	slices.Sort(bounds)
	all := 0.0
	if n := len(bounds); n > 0 {
		all = after[bounds[n-1]] - before[bounds[n-1]]
	}
	low, below := 0.0, 0.0
	for i, le := range bounds {
		n := after[le] - before[le]
		if n >= q*all && n > below {
			if i == len(bounds)-1 {
				return low // beyond all bounds
			}
			return low + (le-low)*(q*all-below)/(n-below)
		}
		low, below = le, n
	}
	return low
}

// takesPerSecond is how often consumers take while latency is measured.
const takesPerSecond = 200

// takes takes from random active buckets at a steady rate for as long as the window. It
// returns the 99th percentile of the latency in milliseconds.
func takes(t *testing.T, s *store, sc scenario, window time.Duration) float64 {
	t.Helper()
	template := s.template(sc)
	keys, rng := max(1, sc.Active), rand.New(rand.NewPCG(1, 2))
	var mu sync.Mutex
	var latencies []time.Duration
	var wg sync.WaitGroup
	ctx, cancel := context.WithTimeout(t.Context(), window+patience)
	defer cancel()
	pace := time.NewTicker(time.Second / takesPerSecond)
	defer pace.Stop()
	for end := time.Now().Add(window); time.Now().Before(end); {
		<-pace.C
		key := sc.key(rng.IntN(keys))
		wg.Go(func() {
			begin := time.Now()
			var err error
			if sc.Configured {
				_, err = lua.Take(ctx, s.rdb, key, 1, false)
			} else {
				err = s.take(ctx, key, template, 1)
			}
			took := time.Since(begin)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Errorf("take: %v", err)
			}
			latencies = append(latencies, took)
		})
	}
	wg.Wait()
	require.NotEmpty(t, latencies)
	slices.Sort(latencies)
	return float64(latencies[len(latencies)*99/100].Microseconds()) / 1000
}

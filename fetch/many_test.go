package fetch

import (
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
)

// fleet has what many consumers of one bucket measured. Each of them wants a thousand tokens a second, in single takes.
type fleet struct {
	consumers int
	calls     float64 // to Redis, in a second
	admitted  float64 // the part of the tokens that were both due and wanted
	jain      float64 // Jain's index of fairness: 1 if all consumers got the same
	late      float64 // tokens of a consumer that joined late, divided by the mean
	beyond    int64   // tokens admitted beyond capacity and credit
}

// simulate runs a fleet for some time, and then measures it for the same time. During the measurement, one more
// consumer joins.
func simulate(t *testing.T, consumers int, rate int64, opts ...Option) (f fleet) {
	const (
		tick     = 20 * time.Millisecond
		interval = 100 * time.Millisecond
		window   = 2 * time.Second
	)
	f.consumers = consumers
	synctest.Test(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(1, uint64(rate)))
		capacity := rate
		b := newFake(map[string]policy.Policy{"checkout": {Capacity: capacity, Rate: policy.PerSecond(rate),
			Interval: interval}})
		b.trip = time.Millisecond
		got := make([]atomic.Int64, consumers+1)
		var wg sync.WaitGroup
		run := func(i int, end time.Time) {
			c := newClient(t, b, opts...)
			offset := time.Duration(rng.Int64N(int64(tick)))
			wg.Go(func() {
				time.Sleep(offset)
				for next := time.Now(); next.Before(end); time.Sleep(time.Until(next)) {
					for range int(1000 * tick / time.Second) {
						if r, err := c.Take(t.Context(), "checkout", 1); err == nil && r.OK {
							got[i].Add(1)
						}
					}
					next = next.Add(tick)
				}
			})
		}
		end := time.Now().Add(3 * window)
		for i := range consumers {
			run(i, end)
		}
		time.Sleep(window + interval/2) // so that no refill is at an end of the window
		calls := b.total()
		before := make([]int64, consumers)
		left := inBucket(b)
		held := outstanding(b)
		for i := range before {
			before[i] = got[i].Load()
		}
		run(consumers, end)
		time.Sleep(window)
		f.calls = float64(b.total()-calls) / window.Seconds()
		sum, squares := 0.0, 0.0
		for i := range before {
			n := float64(got[i].Load() - before[i])
			sum, squares = sum+n, squares+n*n
		}
		due := float64(rate) * window.Seconds()
		wanted := 1000 * window.Seconds() * float64(consumers+1)
		f.admitted = (sum + float64(got[consumers].Load())) / min(due, wanted)
		f.jain = sum * sum / (float64(consumers) * squares)
		f.late = float64(got[consumers].Load()) / (sum / float64(consumers))
		f.beyond = int64(sum) + got[consumers].Load() - left - int64(due)
		wg.Wait()
		require.LessOrEqual(t, f.beyond, held+int64(consumers),
			"the tokens of blocks when the window began, and one take for each consumer")
	})
	return f
}

// total returns the number of calls.
func (f *fake) total() (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, calls := range f.calls {
		n += calls
	}
	return n
}

// TestManyConsumersOfOneBucket prints the figures of docs/sdk.md with REFILLER_CONSUMERS=10000. By default there are
// few consumers, because the race detector needs a second for each of them.
func TestManyConsumersOfOneBucket(t *testing.T) {
	consumers := 20
	if v := os.Getenv("REFILLER_CONSUMERS"); v != "" {
		var err error
		consumers, err = strconv.Atoi(v)
		require.NoError(t, err)
	}
	lease := []Option{WithLease(10_000, time.Second)}
	for _, part := range []int64{1000, 100_000, 10_000_000} { // tokens a second for each consumer, in thousandths
		for name, opts := range map[string][]Option{"with leases": lease, "without": nil} {
			rate := max(1, int64(consumers)*1_000_000/part)
			if name == "without" && consumers > 1000 {
				continue // each take is a call, so fewer consumers give the same figures
			}
			f := simulate(t, consumers, rate, opts...)
			t.Logf("%d consumers, %d/s, %s: %.0f calls/s, admitted %.3f of due, Jain's index %.3f, late joiner %.2f of "+
				"the mean, %d beyond", f.consumers, rate, name, f.calls, f.admitted, f.jain, f.late, f.beyond)
			require.Greater(t, f.admitted, 0.5)
		}
	}
}

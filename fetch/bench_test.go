package fetch

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// bareTake is the shortest script that makes a take.
var bareTake = redis.NewScript(`local left = redis.call('DECRBY', KEYS[1], ARGV[1]) if left < 0 then redis.call('INCRBY', KEYS[1], ARGV[1]) end return left`)

// BenchmarkTake compares a take with the bare commands, which are its lower bound. It does so with one caller and with
// many concurrent callers, and with one bucket and with many.
func BenchmarkTake(b *testing.B) {
	ctx := context.Background()
	rdb := testenv.Redis(b).Client()
	require.NoError(b, bareTake.Load(ctx, rdb).Err())
	const buckets = 10_000
	keys := make([]string, buckets)
	for i := range keys {
		keys[i] = "bench:" + strconv.Itoa(i)
		createBucket(b, rdb, keys[i], policy.Policy{Capacity: policy.MaxTokens, Rate: policy.PerSecond(1)})
	}
	take := func(opts ...Option) func(context.Context, string) error {
		c := newClient(b, rdb, opts...)
		return func(ctx context.Context, key string) error {
			_, err := c.Take(ctx, key, 1)
			return err
		}
	}
	calls := []struct {
		name string
		call func(context.Context, string) error
	}{
		{"decrby", func(ctx context.Context, key string) error { return rdb.DecrBy(ctx, key, 1).Err() }},
		{"evalsha", func(ctx context.Context, key string) error {
			return bareTake.EvalSha(ctx, rdb, []string{key}, 1).Err()
		}},
		{"take", take(slow())},
	}
	for _, goroutines := range []int{1, 16, 64, 256} {
		for _, spread := range []int{1, buckets} {
			for _, tc := range calls {
				require.NoError(b, tc.call(ctx, keys[0])) // connects, loads scripts
				b.Run(fmt.Sprintf("goroutines=%d/buckets=%d/%s", goroutines, spread, tc.name), func(b *testing.B) {
					b.ReportAllocs()
					next := func(i int) string { return keys[(i*7919)%spread] }
					if goroutines == 1 {
						i := 0
						for b.Loop() {
							i++
							if err := tc.call(ctx, next(i)); err != nil {
								b.Fatal(err)
							}
						}
						return
					}
					b.SetParallelism(goroutines / 2)
					b.RunParallel(func(pb *testing.PB) {
						for i := 0; pb.Next(); i++ {
							if err := tc.call(ctx, next(i)); err != nil {
								b.Error(err)
								return
							}
						}
					})
				})
			}
		}
	}
}

// BenchmarkOverdueDenials takes from 20,000 empty buckets whose refills are overdue.
func BenchmarkOverdueDenials(b *testing.B) {
	ctx, rdb := context.Background(), testenv.Redis(b).Client()
	p := hourly(1)
	p.Initial = new(int64)
	p.Interval = time.Millisecond
	const buckets = 20_000
	for i := range buckets {
		createBucket(b, rdb, strconv.Itoa(i), p)
	}
	c := newClient(b, rdb, slow(), WithDenyCache(false))
	b.SetParallelism(32)
	var next atomic.Int64
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if r, err := c.Take(ctx, strconv.FormatInt(next.Add(1)%buckets, 10), 1); err != nil || r.OK {
				b.Error(r, err)
				return
			}
		}
	})
}

// BenchmarkManyKeys takes from more and more buckets in turn, and reports how much processor time of Redis a take
// needs.
func BenchmarkManyKeys(b *testing.B) {
	ctx, server := context.Background(), testenv.Redis(b)
	rdb := server.Client()
	set, err := policy.NewTemplates(1, []policy.Template{{Policy: hourly(policy.MaxTokens)}}, nil)
	require.NoError(b, err)
	_, err = lua.PublishTemplates(ctx, rdb, set)
	require.NoError(b, err)
	for _, keys := range []int64{30_000, 100_000} {
		b.Run("keys="+strconv.FormatInt(keys, 10), func(b *testing.B) {
			c := newClient(b, rdb, slow())
			var next atomic.Int64
			take := func() error {
				_, err := c.Take(ctx, "k"+strconv.FormatInt(next.Add(1)%keys, 10), 1)
				return err
			}
			var wg sync.WaitGroup
			for range 64 {
				wg.Go(func() {
					for next.Load() < keys {
						if err := take(); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			before := redisCPU(b, rdb)
			b.ResetTimer()
			b.SetParallelism(32)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if err := take(); err != nil {
						b.Error(err)
						return
					}
				}
			})
			b.ReportMetric(float64((redisCPU(b, rdb)-before).Nanoseconds())/1000/float64(b.N), "µs-of-redis/op")
		})
	}
}

// redisCPU returns the processor time that a server has used.
func redisCPU(b *testing.B, rdb redis.UniversalClient) (sum time.Duration) {
	info, err := rdb.Info(context.Background(), "cpu").Result()
	require.NoError(b, err)
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if name == "used_cpu_user" || name == "used_cpu_sys" {
			seconds, err := strconv.ParseFloat(value, 64)
			require.NoError(b, err)
			sum += time.Duration(seconds * float64(time.Second))
		}
	}
	return sum
}

package fetch

import (
	"context"
	"fmt"
	"strconv"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/policy"
)

// bareTake is the least that a take can be as a script.
var bareTake = redis.NewScript(`local left = redis.call('DECRBY', KEYS[1], ARGV[1]) if left < 0 then redis.call('INCRBY', KEYS[1], ARGV[1]) end return left`)

// BenchmarkTake sets a take beside the bare commands that it can't beat, one
// caller at a time and with many at once, of one bucket and of many.
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

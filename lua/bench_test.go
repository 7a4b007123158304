package lua_test

import (
	"context"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// cpu returns the time that the server's process has computed, in seconds.
func cpu(ctx context.Context, t testing.TB, rdb *redis.Client) float64 {
	t.Helper()
	info, err := rdb.InfoMap(ctx, "cpu").Result()
	require.NoError(t, err)
	sum := 0.0
	for _, field := range []string{"used_cpu_user", "used_cpu_sys"} {
		v, err := strconv.ParseFloat(info["CPU"][field], 64)
		require.NoError(t, err, field)
		sum += v
	}
	return sum
}

// busy returns a bucket whose refills are never early and seldom full.
func busy(now int64) policy.Bucket {
	b := buckettest.Bucket(0, now, 1)
	b.Control.Terms.Interval, b.Control.Terms.Capacity = 1, 1<<40
	return b
}

// perCPU measures what run does, n at a time, in units per second of the server's
// processor.
func perCPU(b *testing.B, rdb *redis.Client, n int, unit string, run func()) {
	ctx, done := b.Context(), 0
	begin := cpu(ctx, b, rdb)
	for b.Loop() {
		run()
		done += n
	}
	if used := cpu(ctx, b, rdb) - begin; used > 0 {
		b.ReportMetric(float64(done)/used, unit+"/cpu-s")
	}
	b.ReportMetric(float64(done)/b.Elapsed().Seconds(), unit+"/s")
}

func BenchmarkRefill(b *testing.B) {
	ctx, rdb := b.Context(), testenv.Redis(b).Client()
	require.NoError(b, lua.Load(ctx, rdb))
	store(ctx, b, rdb, "bucket", busy(serverTime(ctx, b, rdb)))
	version := policy.Version{Era: buckettest.Era, Index: buckettest.Index}
	terms := busy(0).Control.Terms
	perCPU(b, rdb, 1, "refills", func() {
		out, err := lua.Refill(ctx, rdb, "bucket", policy.Call{Version: version, Create: policy.CreateLost, Terms: &terms})
		if err != nil || out.Status != policy.StatusApplied {
			b.Fatal(out.Status, err)
		}
		version = out.Version
	})
}

func BenchmarkRefillBatch(b *testing.B) {
	const buckets = 1000
	for _, perCall := range []int{1, 20, 100} {
		b.Run(fmt.Sprintf("perCall=%d", perCall), func(b *testing.B) {
			ctx, rdb := b.Context(), testenv.Redis(b).Client()
			require.NoError(b, lua.Load(ctx, rdb))
			terms := busy(0).Control.Terms
			calls := make([]lua.RefillCall, buckets)
			for i := range calls {
				key := fmt.Sprintf("bucket%d", i)
				store(ctx, b, rdb, key, busy(serverTime(ctx, b, rdb)))
				calls[i] = lua.RefillCall{Key: key, Call: policy.Call{Version: policy.Version{Era: buckettest.Era,
					Index: buckettest.Index}, Create: policy.CreateLost, Terms: &terms}}
			}
			perCPU(b, rdb, buckets, "refills", func() {
				for i, r := range lua.RefillBatch(ctx, rdb, calls, perCall) {
					if r.Err != nil || r.Status != policy.StatusApplied {
						b.Fatal(r.Status, r.Err)
					}
					calls[i].Version, calls[i].Seen = r.Version, r.Seen
				}
			})
		})
	}
}

// BenchmarkTake compares a take that fits with a script that does next to nothing.
func BenchmarkTake(b *testing.B) {
	const pipelined = 100
	setup := func(b *testing.B) (context.Context, *redis.Client) {
		ctx, rdb := b.Context(), testenv.Redis(b).Client()
		require.NoError(b, lua.Load(ctx, rdb))
		bucket := busy(serverTime(ctx, b, rdb))
		*bucket.Tokens = 1 << 40
		store(ctx, b, rdb, "bucket", bucket)
		return ctx, rdb
	}
	for _, withTerms := range []bool{false, true} {
		b.Run(fmt.Sprintf("take/terms=%t", withTerms), func(b *testing.B) {
			ctx, rdb := setup(b)
			perCPU(b, rdb, 1, "takes", func() {
				if r, err := takeOne(ctx, rdb, "bucket", 1, withTerms); err != nil || !r.OK {
					b.Fatal(r, err)
				}
			})
		})
	}
	bare := redis.NewScript(`return redis.call('DECRBY', KEYS[1], ARGV[1])`)
	b.Run("bare", func(b *testing.B) {
		ctx, rdb := setup(b)
		require.NoError(b, bare.Load(ctx, rdb).Err())
		perCPU(b, rdb, 1, "takes", func() {
			if err := bare.EvalSha(ctx, rdb, []string{"bucket"}, 1).Err(); err != nil {
				b.Fatal(err)
			}
		})
	})
	// In a pipeline, the server's work takes more time than the round trip.
	for _, c := range []struct {
		name  string
		words []any
	}{
		{"take", lua.TakesWords(lua.Takes{Key: "bucket", Runs: one(1)})},
		{"whole", lua.TakesWords(lua.Takes{Key: "bucket", Runs: one(1), Whole: true})},
		{"bare", []any{"evalsha", bare.Hash(), 1, "bucket", 1}},
	} {
		b.Run("pipelined/"+c.name, func(b *testing.B) {
			ctx, rdb := setup(b)
			require.NoError(b, bare.Load(ctx, rdb).Err())
			perCPU(b, rdb, pipelined, "takes", func() {
				_, err := rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
					for range pipelined {
						p.Do(ctx, c.words...)
					}
					return nil
				})
				if err != nil {
					b.Fatal(err)
				}
			})
		})
	}
}

// BenchmarkTakeOfTemplate compares what takes of templates' buckets cost the server.
func BenchmarkTakeOfTemplate(b *testing.B) {
	const pipelined = 100
	terms := policy.Policy{Capacity: 1_000_000_000, Rate: policy.PerSecond(1),
		Interval: time.Second}.Terms(policy.Fence{Epoch: 7})
	template := lua.NewTemplate(ruled(templateCall{Prefix: "user:", Terms: terms.Encode()}), false)
	refilled := func(key string) []any {
		return lua.TakesWords(lua.Takes{Key: key, Runs: one(1), Whole: true, Template: template})
	}
	lazy := func(key string) []any {
		return []any{"evalsha", lua.LazySHA(), 2, lua.LazyKey(key), lua.OverrideKey(key), 1, 0, terms.Tokens, terms.Per,
			terms.Capacity, 1, 1, 0}
	}
	configured := func(key string) []any {
		return lua.TakesWords(lua.Takes{Key: key, Runs: one(1)})
	}
	for _, c := range []struct {
		name string
		args func(key string) []any
		key  func(i int) string
	}{
		{"configured", configured, func(int) string { return "bucket" }},
		{"refilled", refilled, func(int) string { return "user:1" }},
		{"lazy", lazy, func(int) string { return "user:1" }},
		{"refilled/new", refilled, func(i int) string { return fmt.Sprintf("user:%d", i) }},
		{"lazy/new", lazy, func(i int) string { return fmt.Sprintf("user:%d", i) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			ctx, rdb := b.Context(), testenv.Redis(b).Client()
			require.NoError(b, lua.Load(ctx, rdb))
			bucket := busy(serverTime(ctx, b, rdb))
			*bucket.Tokens = 1 << 40
			store(ctx, b, rdb, "bucket", bucket)
			i := 0
			perCPU(b, rdb, pipelined, "takes", func() {
				_, err := rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
					for range pipelined {
						p.Do(ctx, c.args(c.key(i))...)
						i++
					}
					return nil
				})
				if err != nil {
					b.Fatal(err)
				}
			})
		})
	}
}

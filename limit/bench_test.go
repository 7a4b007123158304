package limit_test

import (
	"context"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/pacing"
	"github.com/tokenrefill/refiller/limit/schedule"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/policy"
)

// serverSeconds returns the processor time that the server's process has used.
func serverSeconds(b *testing.B, rdb *redis.Client) (sum float64) {
	info, err := rdb.InfoMap(b.Context(), "cpu").Result()
	require.NoError(b, err)
	for _, field := range []string{"used_cpu_user", "used_cpu_sys"} {
		v, err := strconv.ParseFloat(info["CPU"][field], 64)
		require.NoError(b, err)
		sum += v
	}
	return sum
}

// BenchmarkTake takes from 1,000 keys in turn, one take after the other.
func BenchmarkTake(b *testing.B) {
	rdb := testenv.Redis(b).Client()
	burst := lazy.Config{Name: "burst", Capacity: 1 << 30, Rate: policy.PerSecond(1000)}
	daily := window.Config{Name: "daily", Limit: 1 << 40, Window: time.Hour}
	slid := window.Config{Name: "slid", Kind: window.Sliding, Limit: 1 << 40, Window: time.Hour}
	buckets, err := lazy.New(rdb, burst)
	require.NoError(b, err)
	fixed, err := window.New(rdb, daily)
	require.NoError(b, err)
	sliding, err := window.New(rdb, slid)
	require.NoError(b, err)
	queue, err := pacing.New(rdb, pacing.Config{Rate: policy.PerSecond(1_000_000), MaxWait: time.Hour})
	require.NoError(b, err)
	many, err := limit.NewMany(rdb, burst, daily, slid)
	require.NoError(b, err)
	sched, err := schedule.New(rdb, schedule.Config{Windows: []schedule.Window{
		{Limit: 1, Length: time.Minute}, {Limit: 5, Length: time.Hour}, {Limit: 10, Length: 24 * time.Hour}}})
	require.NoError(b, err)
	local, err := lazy.NewLocal(burst, time.Now)
	require.NoError(b, err)
	keys := make([]string, 1000)
	i := 0
	at := time.Now().Add(time.Hour)
	for k := range keys {
		keys[k] = fmt.Sprint("user:", k)
	}
	for _, c := range []struct {
		name string
		take func(ctx context.Context, key string) error
	}{
		{"lazy", func(ctx context.Context, key string) error {
			_, err := buckets.Take(ctx, key, 1)
			return err
		}},
		{"window-fixed", func(ctx context.Context, key string) error {
			_, err := fixed.Take(ctx, key, 1)
			return err
		}},
		{"window-sliding", func(ctx context.Context, key string) error {
			_, err := sliding.Take(ctx, key, 1)
			return err
		}},
		{"pacing", func(ctx context.Context, key string) error {
			_, err := queue.Reserve(ctx, key, 1)
			return err
		}},
		{"schedule", func(ctx context.Context, key string) error {
			_, err := sched.Reserve(ctx, key, fmt.Sprint("id", i), at.Add(time.Duration(i%5000)*time.Minute))
			return err
		}},
		{"many-3", func(ctx context.Context, key string) error {
			_, err := many.Take(ctx, key, 1)
			return err
		}},
		{"local", func(ctx context.Context, key string) error {
			_, err := local.Take(ctx, key, 1)
			return err
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			before := serverSeconds(b, rdb)
			b.ReportAllocs()
			for b.Loop() {
				i++
				if err := c.take(b.Context(), keys[i%len(keys)]); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric((serverSeconds(b, rdb)-before)/float64(b.N)*1e6, "server-µs/op")
		})
	}
}

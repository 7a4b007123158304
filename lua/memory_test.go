package lua_test

import (
	"flag"
	"fmt"
	"strconv"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// The server's tables grow by doubling, so an eighth of 200,000 buckets costs as
// much for each, save for what the server needs once: some 20 bytes more.
var memoryKeys = flag.Int("keys", 25_000, "buckets over which memory is measured")

// A bucket of a template that is not full costs at most so many bytes of Redis, all
// keys, expiries and the active set's entry included.
func TestMemoryOfATemplatesBucket(t *testing.T) {
	t.Parallel()
	const batch = 1000
	keys := *memoryKeys
	for _, c := range []struct {
		name string
		most int
		args func(key string) []any
	}{
		{"refilled", 540, func(key string) []any {
			return lua.TakesWords(lua.Takes{Key: key, Runs: one(30), Whole: true, Template: users})[1:]
		}},
		{"lazy", 150, func(key string) []any {
			return []any{lua.LazySHA(), 2, lua.LazyKey(key), lua.OverrideKey(key), 1, 0, userTerms.Tokens, userTerms.Per,
				userTerms.Capacity, 50, 1, 0}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ctx, rdb := t.Context(), testenv.Redis(t).Client()
			require.NoError(t, lua.Load(ctx, rdb))
			used := func() int {
				info, err := rdb.InfoMap(ctx, "memory").Result()
				require.NoError(t, err)
				n, err := strconv.Atoi(info["Memory"]["used_memory"])
				require.NoError(t, err)
				return n
			}
			each := func(call func(p redis.Pipeliner, key string)) {
				for from := 0; from < keys; from += batch {
					_, err := rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
						for i := range batch {
							call(p, fmt.Sprintf("user:%d", 100_000+from+i))
						}
						return nil
					})
					require.NoError(t, err)
				}
			}
			each(func(p redis.Pipeliner, key string) { p.Do(ctx, append([]any{"exists"}, c.args(key)...)...) })
			before := used() // with the connection's buffers
			each(func(p redis.Pipeliner, key string) { p.Do(ctx, append([]any{"evalsha"}, c.args(key)...)...) })
			// Each access moves the growth of a table on by a step, until it is done.
			for range 4 {
				each(func(p redis.Pipeliner, key string) { p.Exists(ctx, key, lua.IndexKey(key), lua.OverrideKey(key)) })
			}
			per := (used() - before) / keys
			t.Logf("%d bytes per bucket over %d buckets", per, keys)
			if keys >= 200_000 {
				c.most -= 20
			}
			require.LessOrEqual(t, per, c.most)
		})
	}
}

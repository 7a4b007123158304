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

// memoryKeys is the number of buckets over which memory is measured. The server's tables grow by doubling. So 25,000
// buckets, an eighth of 200,000, need as much memory per bucket, except for some 20 bytes more that the server needs
// only once.
var memoryKeys = flag.Int("keys", 25_000, "buckets over which memory is measured")

// A template's bucket that is not full needs a limited number of bytes in Redis. This includes all keys, their expiries
// and the name in the active set.
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
			// A table grows in steps. Each access makes one step, until the growth is complete.
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

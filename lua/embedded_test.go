package lua_test

import (
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const embeddedNow = int64(1_700_000_000_000_000)

func embedded(t testing.TB) (*miniredis.Miniredis, *redis.Client) {
	m := miniredis.RunT(t)
	m.SetTime(time.UnixMicro(embeddedNow))
	rdb := redis.NewClient(&redis.Options{Addr: m.Addr()})
	t.Cleanup(func() { _ = rdb.Close() })
	return m, rdb
}

// withEmbedded runs a test on a real server and on the embedded store.
func withEmbedded(t *testing.T, test func(*testing.T, *redis.Client)) {
	t.Run("Redis", func(t *testing.T) { test(t, testenv.Redis(t).Client()) })
	t.Run("Embedded", func(t *testing.T) {
		_, rdb := embedded(t)
		test(t, rdb)
	})
}

func TestTheEmbeddedStoreFollowsEveryRule(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	for _, c := range buckettest.Cases() {
		b, call := c.Setup(embeddedNow)
		store(ctx, t, rdb, c.Name, b)
		got, err := lua.Refill(ctx, rdb, c.Name, call)
		require.NoError(t, err, c.Name)
		require.Equal(t, embeddedNow, got.Now)
		require.Equal(t, b.Refill(call, embeddedNow), got, c.Name)
		require.Equal(t, b, load(ctx, t, rdb, c.Name), c.Name)
		if got.Status.Wrote() {
			require.Equal(t, c.Want.Tokens, got.Tokens, c.Name)
			require.Equal(t, c.Carry, b.Control.Carry, c.Name)
		}
	}
}

func TestTheEmbeddedStoreRunsEveryScript(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	for name, call := range operations {
		b := buckettest.Bucket(100, embeddedNow, 100_000)
		store(ctx, t, rdb, name, b)
		require.NoError(t, rdb.ScriptFlush(ctx).Err())
		require.NoError(t, call(ctx, rdb, name), name)
	}
	for name, want := range map[string]string{"Take": "95", "TakeWithTerms": "95", "TakeDenied": "100", "TakeUpTo": "95",
		"TakeOnce": "95", "TakeAll": "95", "Return": "105", "Peek": "100", "Grant": "105", "Reset": "5", "Refill": "150",
		"Reserve": "95", "Settle": "100", "Lease": "95", "Sweep": "100", "Add": "105"} {
		require.Equal(t, want, rdb.Get(ctx, name).Val(), name)
	}
	denied, err := takeOne(ctx, rdb, "TakeDenied", 160, false)
	require.NoError(t, err)
	model := load(ctx, t, rdb, "TakeDenied")
	require.Equal(t, model.Wait(160, embeddedNow), denied.Wait.Microseconds())

	require.ErrorIs(t, operations["Take"](ctx, rdb, "typo"), lua.ErrUnknownBucket)
	require.False(t, m.Exists("typo"))
	for i, name := range []string{lua.TokensKey("b"), lua.IndexKey("b"), lua.ControlKey("b")} {
		store(ctx, t, rdb, "b", buckettest.Bucket(100, embeddedNow, 100_000))
		require.NoError(t, rdb.Del(ctx, name).Err())
		require.NoError(t, rdb.LPush(ctx, name, 1).Err())
		for _, op := range []string{"Refill", "Peek", "TakeUpTo", "Grant", "TakeDenied"} {
			if i == 1 && !readsIndex[op] {
				continue
			}
			err := operations[op](ctx, rdb, "b")
			require.ErrorIs(t, err, lua.ErrMalformedBucket, "%s, key %d", op, i+1)
			require.ErrorContains(t, err, name)
		}
	}

	terms := buckettest.Terms()
	for _, perCall := range []int{1, 3, 100} {
		require.NoError(t, rdb.FlushAll(ctx).Err())
		require.NoError(t, rdb.ScriptFlush(ctx).Err())
		for _, r := range lua.RefillBatch(ctx, rdb, batch(10, &terms), perCall) {
			require.NoError(t, r.Err)
			require.Equal(t, policy.StatusInitialised, r.Status)
		}
	}
}

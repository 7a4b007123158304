package lua_test

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// This is the contract of the two-script token bucket (package db, db.go, on go-redis 6). The tests have the names of
// its functions: CheckKeyValid, FetchToken, AddToken, GetKeyNum and GetKeyIdx. Our takes and its client with plain
// commands work on the same tokens. They differ only for a missing bucket: the client's take is denied and leaves a 0,
// and our take returns an error and leaves nothing.
func TestCasesOfTheTwoScriptBucket(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	number := func(t *testing.T, key string) int64 {
		n, err := rdb.Get(ctx, key).Int64()
		require.NoError(t, err)
		return n
	}
	add := func(t *testing.T, key string, index, n, limit int64) int64 {
		now, err := lua.Add(ctx, rdb, key, n, limit, index)
		require.NoError(t, err)
		return now
	}
	fetchers := map[string]func(key string) (bool, error){
		"take": func(key string) (bool, error) {
			r, err := lua.Take(ctx, rdb, key, 1, false)
			return r.OK, err
		},
		"plain commands": func(key string) (bool, error) { return plainFetch(ctx, rdb, key) },
	}
	t.Run("CheckKeyValid", func(t *testing.T) {
		for _, key := range []string{"key", "{", "k{ey"} {
			require.NoError(t, lua.CheckKey(key), "%q", key)
		}
		for _, key := range []string{"", "}", "{key}", "ke}y"} {
			require.ErrorIs(t, lua.CheckKey(key), lua.ErrInvalidKey, "%q", key)
		}
	})
	t.Run("AddToken begins a bucket, once for an index", func(t *testing.T) {
		require.EqualValues(t, 1, add(t, "first", 0, 10, 100))
		require.EqualValues(t, 1, add(t, "first", 0, 10, 100), "an add with the same index adds nothing")
		require.EqualValues(t, 1, add(t, "first", 7, 10, 100), "an add with a later index adds nothing")
		require.EqualValues(t, 10, number(t, "first"))
		require.EqualValues(t, 2, add(t, "first", 1, 10, 100))
		require.EqualValues(t, 20, number(t, "first"))
		require.EqualValues(t, 2, number(t, "{first}"), "the index counts both adds")
	})
	t.Run("AddToken adds up to the limit", func(t *testing.T) {
		add(t, "full", 0, 90, 100)
		require.EqualValues(t, 2, add(t, "full", 1, 90, 100))
		require.EqualValues(t, 100, number(t, "full"))
		require.EqualValues(t, 3, add(t, "full", 2, 1, 50), "a lower limit cuts tokens off")
		require.EqualValues(t, 50, number(t, "full"))
	})
	t.Run("AddToken of many at once adds once for an index", func(t *testing.T) {
		var adding sync.WaitGroup
		for range 16 {
			adding.Go(func() { _, _ = lua.Add(ctx, rdb, "raced", 5, 1000, 0) })
		}
		adding.Wait()
		require.Equal(t, []int64{5, 1}, []int64{number(t, "raced"), number(t, "{raced}")})
	})
	for name, fetch := range fetchers {
		t.Run("FetchToken by "+name+" takes each token once", func(t *testing.T) {
			key := "of " + name
			add(t, key, 0, 25, 25)
			var fetching sync.WaitGroup
			var got atomic.Int64
			for range 40 {
				fetching.Go(func() {
					if ok, err := fetch(key); err == nil && ok {
						got.Add(1)
					}
				})
			}
			fetching.Wait()
			require.EqualValues(t, 25, got.Load())
			require.Zero(t, number(t, key), "a denial leaves no debt")
			ok, err := fetch(key)
			require.NoError(t, err)
			require.False(t, ok)
		})
		t.Run("FetchToken by "+name+" of a text that is no number fails", func(t *testing.T) {
			require.NoError(t, rdb.Set(ctx, "text", "abc", 0).Err())
			_, err := fetch("text")
			require.Error(t, err)
			require.Equal(t, "abc", rdb.Get(ctx, "text").Val())
		})
	}
	t.Run("FetchToken of a key that isn't there", func(t *testing.T) {
		ok, err := fetchers["plain commands"]("absent")
		require.NoError(t, err)
		require.False(t, ok)
		require.Zero(t, number(t, "absent"))
		_, err = fetchers["take"]("missing")
		require.ErrorIs(t, err, lua.ErrUnknownBucket)
		require.Zero(t, rdb.Exists(ctx, "missing", "{missing}").Val())
	})
	t.Run("AddToken after DelKey and DelKeyIdx creates the bucket again", func(t *testing.T) {
		add(t, "again", 0, 10, 100)
		require.NoError(t, rdb.Del(ctx, "again", "{again}").Err())
		require.Zero(t, add(t, "again", 1, 10, 100), "an add with the index of the deleted bucket adds nothing")
		require.Zero(t, rdb.Exists(ctx, "again").Val())
		require.EqualValues(t, 1, add(t, "again", 0, 10, 100))
	})
}

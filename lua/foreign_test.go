package lua_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// plainFetch takes a token with plain commands, as a foreign client does.
func plainFetch(ctx context.Context, rdb *redis.Client, key string) (bool, error) {
	left, err := rdb.Decr(ctx, key).Result()
	if err != nil || left >= 0 {
		return err == nil, err
	}
	return false, rdb.Incr(ctx, key).Err()
}

// plainAdd adds tokens with plain commands, as a foreign client does. It returns the most tokens that it added.
func plainAdd(ctx context.Context, rdb *redis.Client, key string, expected, n, limit int64) (added, index int64,
	err error) {
	index, err = rdb.Incr(ctx, lua.IndexKey(key)).Result()
	if err != nil {
		return 0, 0, err
	}
	if index != expected+1 {
		index, err = rdb.Decr(ctx, lua.IndexKey(key)).Result()
		return 0, index, err
	}
	tokens, err := rdb.IncrBy(ctx, key, n).Result()
	if err == nil && tokens > limit {
		err = rdb.Set(ctx, key, limit, redis.KeepTTL).Err()
	}
	return n, index, err
}

// A foreign adder and one of ours each add the tokens of an interval. A foreign add moves the index away from its copy.
// So the stretch that it paid for is not credited again, and the two together never exceed the rate of one.
func TestAForeignAdderBesideOursNeverOverIssues(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	rng := rand.New(rand.NewPCG(seed(t), 0))
	const interval, perInterval = 100_000, 50
	for name, add := range map[string]func(expected int64) (added, index int64){
		"PlainCommands": func(expected int64) (int64, int64) {
			added, index, err := plainAdd(ctx, rdb, "b", expected, perInterval, 1<<40)
			require.NoError(t, err)
			return added, index
		},
		"AsScripts": func(expected int64) (int64, int64) {
			before := load(ctx, t, rdb, "b")
			index, err := lua.Add(ctx, rdb, "b", perInterval, 1<<40, expected)
			require.NoError(t, err)
			after := load(ctx, t, rdb, "b")
			return *after.Tokens - *before.Tokens, index
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := buckettest.Bucket(0, serverTime(ctx, t, rdb), 0)
			b.Control.Terms.Capacity = 1 << 40
			store(ctx, t, rdb, "b", b)
			ours, theirs := policy.Version{Era: buckettest.Era, Index: buckettest.Index}, int64(buckettest.Index)
			issued := int64(0)
			credited := int64(0)
			foreign := 0
			elapsed := int64(0)
			for range 150 {
				// An interval passes. Both call in it, in random order.
				back(ctx, t, rdb, "b", interval)
				elapsed += interval
				for _, who := range rng.Perm(2) {
					if who == 0 {
						var added int64
						added, theirs = add(theirs)
						issued += added
						continue
					}
					out, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: ours})
					require.NoError(t, err)
					ours = out.Version
					issued, credited = issued+out.Added, credited+out.Added
					if out.Status == policy.StatusForeign {
						foreign++
					}
				}
			}
			require.Positive(t, foreign, "some refills detect the foreign client")
			// The server's clock also ran a little by itself.
			elapsed += load(ctx, t, rdb, "b").Control.Last - b.Control.Last
			require.LessOrEqual(t, issued, elapsed*perInterval/interval+perInterval, "two clients add no more than the rate")
			require.Greater(t, issued, int64(0))
			t.Logf("issued %d of %d due tokens, %d by us, %d intervals left to the other", issued, elapsed*perInterval/interval,
				credited, foreign)
		})
	}
}

// Foreign takers with plain commands and ours drain one bucket at once. No more tokens are taken than were put in.
func TestForeignAndOwnTakersNeverTakeMoreThanThereIs(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	require.NoError(t, lua.Load(ctx, rdb))
	b := buckettest.Bucket(500, serverTime(ctx, t, rdb), 0)
	store(ctx, t, rdb, "b", b)
	var taken, put atomic.Int64
	put.Store(500)
	var wg sync.WaitGroup
	failed := make(chan error, 8)
	run := func(step func() error) {
		wg.Go(func() {
			for range 300 {
				if err := step(); err != nil {
					failed <- err
					return
				}
			}
		})
	}
	for range 2 {
		run(func() error {
			ok, err := plainFetch(ctx, rdb, "b")
			if ok {
				taken.Add(1)
			}
			return err
		})
		run(func() error {
			r, err := takeOne(ctx, rdb, "b", 3, false)
			taken.Add(r.Taken)
			return err
		})
	}
	version := policy.Version{Era: buckettest.Era, Index: buckettest.Index}
	run(func() error {
		out, err := lua.Refill(ctx, rdb, "b", policy.Call{Version: version})
		version = out.Version
		put.Add(out.Added)
		return err
	})
	theirs := int64(buckettest.Index)
	run(func() error {
		added, index, err := plainAdd(ctx, rdb, "b", theirs, 7, 1000)
		theirs = index
		put.Add(added)
		return err
	})
	wg.Wait()
	close(failed)
	for err := range failed {
		require.NoError(t, err)
	}
	require.LessOrEqual(t, taken.Load(), put.Load())
	left, err := rdb.Get(ctx, "b").Int64()
	require.NoError(t, err)
	require.GreaterOrEqual(t, left, int64(0))
	require.LessOrEqual(t, left, int64(1000))
}

package lua_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

var errKilled = errors.New("the process is killed")

// killed makes a client's process die once it has had the answer to a command, or before it sends that: it sends
// nothing more.
type killed struct {
	at     string
	before bool // it isn't sent either
	dead   bool
}

func (*killed) DialHook(next redis.DialHook) redis.DialHook { return next }

func (k *killed) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		mine := cmd.Name() == k.at
		k.dead = k.dead || mine && k.before
		if k.dead {
			cmd.SetErr(errKilled)
			return errKilled
		}
		err := next(ctx, cmd)
		k.dead = mine
		return err
	}
}

func (k *killed) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			k.dead = k.dead || k.before && cmd.Name() == k.at
			if k.dead {
				for _, cmd := range cmds {
					cmd.SetErr(errKilled)
				}
				return errKilled
			}
		}
		return next(ctx, cmds)
	}
}

// On a Cluster the active set and the count are in other slots than the bucket. Wherever a process is killed between
// the two halves of what concerns both, what it left is put right: by the next refill if a name stayed, by a client's
// take that asks for the policy or is denied, if one is missing.
func TestRefillRepairsHalfWrittenPairs(t *testing.T) {
	t.Parallel()
	ctx, c := t.Context(), testenv.Cluster(t)
	rdb := c.Client()
	dying := func(k *killed) redis.UniversalClient {
		client := c.Client()
		client.AddHook(k)
		return client
	}
	bounded := user()
	bounded.CrossSlot, bounded.MaxKeys = true, 1000
	many := lua.NewTemplate(ruled(bounded), true)
	alive := func() int64 { return rdb.ZCard(ctx, lua.AliveKey("user:")).Val() }
	// full fills a bucket, whose last refill takes it out of the active set.
	full := func(key string) {
		require.NoError(t, rdb.Set(ctx, key, 59, redis.KeepTTL).Err())
		rewind(ctx, t, rdb, key, 5*time.Second)
	}
	// refilled checks that the bucket becomes full and leaves.
	refilled := func(key string) {
		t.Helper()
		require.True(t, isActive(ctx, t, rdb, key), key)
		for range 12 {
			rewind(ctx, t, rdb, key, 5*time.Second)
			refillUser(ctx, t, rdb, key, userTerms)
		}
		require.EqualValues(t, 60, *load(ctx, t, rdb, key).Tokens, key)
		require.False(t, isActive(ctx, t, rdb, key), key)
	}
	// Takes that a bucket in want of its entry meets.
	heals := map[string]func(key string){
		"asks for the policy": func(key string) { require.True(t, takeUser(ctx, t, rdb, key, bounded, 1)) },
		"is denied": func(key string) {
			r, err := takeTemplate(ctx, rdb, key, bounded, one(60), false, false)
			require.NoError(t, err)
			require.False(t, r.OK)
			require.NoError(t, many.Enter(ctx, rdb, key, r.Till))
		},
	}

	// The consumer dies after the take: neither entered nor counted.
	for how, heal := range heals {
		key := "user:taken, then " + how
		r, err := takeTemplate(ctx, rdb, key, bounded, one(5), false, false)
		require.NoError(t, err)
		require.NotZero(t, r.Till)
		require.False(t, isActive(ctx, t, rdb, key))
		heal(key)
		refilled(key)
	}
	require.EqualValues(t, len(heals), alive(), "what heals them counts them")
	require.NoError(t, rdb.Del(ctx, lua.AliveKey("user:")).Err())

	// The replica dies before it removes the full bucket's name, or after that and before it reads the bucket again, from
	// which a consumer has taken meanwhile.
	for how, heal := range heals {
		key := "user:filled, then " + how
		require.True(t, takeUser(ctx, t, rdb, key, bounded, 1))
		full(key)
		refillUser(ctx, t, dying(&killed{at: "srem", before: true}), key, userTerms)
		require.EqualValues(t, 60, *load(ctx, t, rdb, key).Tokens)
		require.True(t, isActive(ctx, t, rdb, key), "its name stays")
		rewind(ctx, t, rdb, key, 5*time.Second)
		require.True(t, refillUser(ctx, t, rdb, key, userTerms).Left, "until the next refill")
		require.False(t, isActive(ctx, t, rdb, key))

		require.True(t, takeUser(ctx, t, rdb, key, bounded, 1))
		full(key)
		replica := dying(&killed{at: "srem"})
		replica.AddHook(before{"srem", func() { require.True(t, takeUser(ctx, t, rdb, key, bounded, 5)) }})
		refillUser(ctx, t, replica, key, userTerms)
		require.EqualValues(t, 55, *load(ctx, t, rdb, key).Tokens)
		require.False(t, isActive(ctx, t, rdb, key), "it isn't full, and its entry is lost")
		heal(key)
		refilled(key)
	}
	require.EqualValues(t, len(heals), alive())

}

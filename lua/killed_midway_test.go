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

// killed makes a client's process die after the reply to the command at or, if before is set, before it sends that
// command. Then the client sends nothing more.
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

// On a Cluster the active set and the count are in other slots than the bucket, so a change of both needs two commands.
// If a process is killed between the two, the state is repaired. A name that stayed in the set is removed by the next
// refill. A missing name is added by the next take that asks for the policy or is denied.
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
	// full lets the next refill fill a bucket, so that the bucket leaves the active set.
	full := func(key string) {
		require.NoError(t, rdb.Set(ctx, key, 59, redis.KeepTTL).Err())
		rewind(ctx, t, rdb, key, 5*time.Second)
	}
	// refilled checks that refills fill the bucket, and that it then leaves the active set.
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
	// heals has the takes that add the missing name of a bucket.
	heals := map[string]func(key string){
		"asks for the policy": func(key string) { require.True(t, takeUser(ctx, t, rdb, key, bounded, 1)) },
		"is denied": func(key string) {
			r, err := takeTemplate(ctx, rdb, key, bounded, one(60), false, false)
			require.NoError(t, err)
			require.False(t, r.OK)
			require.NoError(t, many.Enter(ctx, rdb, key, r.Till))
		},
	}

	// The consumer dies after the take, so that the bucket is neither in the active set nor counted.
	for how, heal := range heals {
		key := "user:taken, then " + how
		r, err := takeTemplate(ctx, rdb, key, bounded, one(5), false, false)
		require.NoError(t, err)
		require.NotZero(t, r.Till)
		require.False(t, isActive(ctx, t, rdb, key))
		heal(key)
		refilled(key)
	}
	require.EqualValues(t, len(heals), alive(), "the takes that add the names count the buckets")
	require.NoError(t, rdb.Del(ctx, lua.AliveKey("user:")).Err())

	// First the replica dies before it removes the full bucket's name. Then it dies after the removal, before it reads the
	// bucket again. Meanwhile a consumer has taken from the bucket.
	for how, heal := range heals {
		key := "user:filled, then " + how
		require.True(t, takeUser(ctx, t, rdb, key, bounded, 1))
		full(key)
		refillUser(ctx, t, dying(&killed{at: "srem", before: true}), key, userTerms)
		require.EqualValues(t, 60, *load(ctx, t, rdb, key).Tokens)
		require.True(t, isActive(ctx, t, rdb, key), "the bucket's name stays")
		rewind(ctx, t, rdb, key, 5*time.Second)
		require.True(t, refillUser(ctx, t, rdb, key, userTerms).Left, "the next refill removes the name")
		require.False(t, isActive(ctx, t, rdb, key))

		require.True(t, takeUser(ctx, t, rdb, key, bounded, 1))
		full(key)
		replica := dying(&killed{at: "srem"})
		replica.AddHook(before("srem", func() { require.True(t, takeUser(ctx, t, rdb, key, bounded, 5)) }))
		refillUser(ctx, t, replica, key, userTerms)
		require.EqualValues(t, 55, *load(ctx, t, rdb, key).Tokens)
		require.False(t, isActive(ctx, t, rdb, key), "the name of a bucket that isn't full is missing")
		heal(key)
		refilled(key)
	}
	require.EqualValues(t, len(heals), alive())

}

package lua_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// The numbers wanted are worked out by hand.

// The value of a lazy bucket's key is how much earlier than the key's end the bucket is full, in units of 1/tokens of a
// microsecond. The rate is 3 tokens in 2 seconds in the cases whose rate isn't given.
func TestWhatALazyKeyHolds(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	const rate, high = 3, 999_999
	for _, c := range []struct {
		name      string
		tokens    int64
		value     any
		expires   time.Duration // 0: never
		want      time.Duration // until the bucket is full
		malformed bool
	}{
		{"no units", rate, 0, time.Second, time.Second, false},
		{"one unit, so a third of a microsecond", rate, 1, time.Second, time.Second, false},
		{"three units, so a microsecond", rate, 3, time.Second, time.Second - time.Microsecond, false},
		{"more than a millisecond, stored under another rate", rate, 9_000_000, time.Second,
			time.Second - time.Millisecond, false},
		{"all units of the last millisecond", rate, 3000, time.Millisecond, 0, false},
		{"below 0", rate, -1, time.Second, 0, true},
		{"without an end", rate, 1, 0, 0, true},
		{"2 hours of 999,999 units a microsecond, which are more than half of 2^53", high, 0, 2 * time.Hour,
			4_503_604_131 * time.Microsecond, false},
	} {
		p := policy.Policy{Capacity: 10, Rate: policy.Rate{Tokens: c.tokens, Per: 2 * time.Second}, Interval: time.Second}
		terms := policy.Template{Policy: p}.Terms(policy.Fence{Epoch: 7})
		key := lua.LazyKey("user:1")
		require.NoError(t, rdb.Del(ctx, key).Err())
		require.NoError(t, rdb.Set(ctx, key, c.value, 0).Err())
		if c.expires > 0 {
			require.NoError(t, rdb.PExpireAt(ctx, key, time.UnixMicro(embeddedNow).Add(c.expires)).Err())
		}
		peek, err := lua.LazyPeek(ctx, rdb, "user:1", &terms, 1)
		if c.malformed {
			require.ErrorIs(t, err, lua.ErrMalformedBucket, c.name)
			continue
		}
		require.NoError(t, err, c.name)
		require.Equal(t, c.want, peek.Reset, c.name)
	}
}

func TestALazyBucketToWhichAllComesBackIsFull(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	require.NoError(t, lua.Load(ctx, rdb))
	call := func(what, n int64) []any {
		reply, err := rdb.Do(ctx, "EVALSHA", lua.LazySHA(), 1, lua.LazyKey("user:1"), what, 0, 1, second, 10, n, 1, 0).Slice()
		require.NoError(t, err)
		return reply
	}
	require.Equal(t, []any{int64(1), int64(4), int64(6 * second), embeddedNow, ""}, call(1, 6))
	require.Equal(t, []any{int64(1), int64(10), int64(0), embeddedNow, ""}, call(-1, 6))
	require.Zero(t, rdb.Exists(ctx, lua.LazyKey("user:1")).Val())
}

func TestALazyBucketThatIsFullDoesNotExist(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	reply, err := lua.SetOverride(ctx, rdb, "user:1", userTerms, userTerms, policy.EnforceLazy)
	require.NoError(t, err)
	require.False(t, reply.Exists)
	_, err = lua.LazyTake(ctx, rdb, "user:1", &userTerms, one(1), false)
	require.NoError(t, err)
	reply, err = lua.SetOverride(ctx, rdb, "user:1", userTerms, userTerms, policy.EnforceLazy)
	require.NoError(t, err)
	require.True(t, reply.Exists)
	require.EqualValues(t, userTerms.Capacity-1, reply.Tokens)
}

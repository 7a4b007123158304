package lua_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// The instants at which the keys of a template's buckets expire, and how many of them are alive. The numbers wanted are
// worked out by hand.

// The bucket's life is 120 s. A take renews its expiry unless more than 90 s are left.
func TestWhenATakeRenewsTheExpiryOfABucket(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	begin := time.UnixMicro(embeddedNow)
	for _, c := range []struct {
		name    string
		at      time.Duration // of the take, after the beginning
		persist string        // loses its expiry before the take
		hold    time.Duration
		want    time.Duration // the expiry, after the beginning
	}{
		{"more than 90 s are left", 29_999 * time.Millisecond, "", 0, 120 * time.Second},
		{"90 s are left", 30 * time.Second, "", 0, 150 * time.Second},
		{"K has no expiry", time.Second, "user:1", 0, 121 * time.Second},
		{"the index has no expiry", time.Second, "{user:1}", 0, 121 * time.Second},
		{"the state has no expiry", time.Second, "{user:1}:ctl", 0, 121 * time.Second},
		{"a quarter more than the 1,150 s of a reservation of 1,000 s", 0, "", 1000 * time.Second, 1438 * time.Second},
		{"a quarter more than the 151 s of a reservation of a second", 0, "", time.Second, 189 * time.Second},
	} {
		m.FlushAll()
		m.SetTime(begin)
		_, err := takeTemplate(ctx, rdb, "user:1", user(), one(5), false, false)
		require.NoError(t, err)
		m.SetTime(begin.Add(c.at))
		if c.persist != "" {
			require.NoError(t, rdb.Persist(ctx, c.persist).Err())
		}
		call := user()
		call.Hold = c.hold
		_, err = takeTemplate(ctx, rdb, "user:1", call, one(1), false, false)
		require.NoError(t, err)
		for _, key := range []string{"user:1", "{user:1}", "{user:1}:ctl"} {
			at, err := rdb.PExpireTime(ctx, key).Result()
			require.NoError(t, err)
			require.Equal(t, time.Duration(begin.UnixMilli())*time.Millisecond+c.want, at, "%s: %s", c.name, key)
		}
	}
}

// A template bounded to one bucket, whose set of the buckets alive can't be read.
func TestATakeThatCanNotCountTheBucketsAliveIsMade(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		require.NoError(t, rdb.Set(ctx, lua.AliveKey("user:"), "text", 0).Err())
		call := user()
		call.MaxKeys = 1
		reply, err := takeTemplate(ctx, rdb, "user:1", call, one(5), false, false)
		require.NoError(t, err)
		require.True(t, reply.OK)
	})
}

func TestTheSetOfTheBucketsAliveLivesAsLongAsTheLastOne(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	call := user()
	call.MaxKeys = 5
	for i, after := range []time.Duration{0, 50 * time.Second} {
		m.SetTime(time.UnixMicro(embeddedNow).Add(after))
		_, err := takeTemplate(ctx, rdb, fmt.Sprint("user:", i), call, one(5), false, false)
		require.NoError(t, err)
		at, err := rdb.PExpireTime(ctx, lua.AliveKey("user:")).Result()
		require.NoError(t, err)
		require.Equal(t, time.Duration(embeddedNow)*time.Microsecond+after+120*time.Second, at)
	}
}

func TestABucketThatIsFullAfterASecondLivesForAMinute(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	p := policy.Policy{Capacity: 60, Rate: policy.PerSecond(60), Interval: time.Second}
	call := user()
	call.Terms = policy.Template{Policy: p}.Terms(policy.Fence{Epoch: 7}).Encode()
	_, err := takeTemplate(ctx, rdb, "user:1", call, one(5), false, false)
	require.NoError(t, err)
	require.Equal(t, time.Minute, rdb.PTTL(ctx, "user:1").Val())
}

// The caller enters a bucket's expiry in the sets of its template if they are in other slots.
func TestWhichTakesReturnTheExpiryOfTheBucket(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	for crossSlot, want := range map[bool]int64{false: 0, true: embeddedNow/second + 120} {
		call := user()
		call.CrossSlot = crossSlot
		reply, err := takeTemplate(ctx, rdb, fmt.Sprint("user:", crossSlot), call, one(5), false, false)
		require.NoError(t, err)
		require.Equal(t, want, reply.Till)
	}
	storeCase(ctx, t, rdb, "b", 10)
	reply, err := takeWhole(ctx, rdb, lua.Takes{Key: "b", Runs: one(1)})
	require.NoError(t, err)
	require.Zero(t, reply.Till)
}

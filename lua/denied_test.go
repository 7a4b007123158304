package lua_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// When takes are denied, how long they wait, and what counts as denied. The numbers wanted are worked out by hand.

// The bucket has 9 tokens, so in most cases 1 more is due. It was last refilled at the present, which is 0 here, and gets
// a token a second, with a refill each 100 ms.
func TestTheTimeUntilTokensAreDue(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	const us = time.Microsecond
	stepped := func(step, next int64) func(*policy.Control) {
		return func(c *policy.Control) {
			c.Terms = scheduled(3)
			c.Step = embeddedNow + step
			c.Next = embeddedNow + next
		}
	}
	granted := func(tokens, grantTokens, grantEnd int64) func(*policy.Control) {
		return func(c *policy.Control) {
			c.Terms.Pool = true
			c.Terms.PoolsVersion = 3
			c.Terms.Tokens = tokens
			c.Terms.GrantTokens = grantTokens
			c.Terms.GrantEnd = embeddedNow + grantEnd
			c.Terms.GrantEra = buckettest.Era
		}
	}
	last := func(after int64) func(*policy.Control) {
		return func(c *policy.Control) { c.Last = embeddedNow + after }
	}
	for _, c := range []struct {
		name   string
		change func(*policy.Control)
		n      int64
		want   time.Duration
	}{
		{"it has them", last(0), 9, 0},
		{"one is due in a second", last(0), 10, time.Second},
		{"beyond the capacity", last(0), 1001, -us},
		{"due in a microsecond", last(-second + 1), 10, us},
		{"due now, so overdue", last(-second), 10, 50 * time.Millisecond},
		{"the clock went back within the tolerance", last(50_000), 10, 1050 * time.Millisecond},
		{"the clock went back further", last(50_001), 10, time.Second},
		{"the next step is known", stepped(-5, second), 10, time.Second},
		{"the next step isn't known", stepped(second, second), 10, -us},
		{"a grant has just enough, and there is no rate", granted(0, 2, second/2), 10, time.Second / 2},
		{"a grant has too little, and there is no rate", granted(0, 2, second/2), 11, -us},
		{"a grant of half a token, then the rate", granted(1, 2, second/4), 10, 800 * time.Millisecond},
		{"a grant ended before the last refill", func(c *policy.Control) {
			granted(1, 1000, -1)(c)
			c.Terms.Per = second + 3
		}, 10, 1100 * time.Millisecond},
		{"a refill each millisecond, and a grant that ended", func(c *policy.Control) {
			granted(1, 1000, -1)(c)
			c.Terms.Per = second + 3
			c.Terms.Interval = 1000
		}, 10, 1001 * time.Millisecond},
	} {
		b := buckettest.Bucket(9, embeddedNow, 0)
		b.Control.Terms.Tokens = 1
		b.Control.Terms.Per = second
		c.change(b.Control)
		store(ctx, t, rdb, "b", b)
		peek, err := lua.Peek(ctx, rdb, "b", c.n)
		require.NoError(t, err, c.name)
		require.Equal(t, c.want, peek.Wait, c.name)
	}
}

func TestATakeFromABucketWithoutStateIsDenied(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		require.NoError(t, rdb.Set(ctx, "b", 2, 0).Err())
		reply, err := lua.TakeOnce(ctx, rdb, "b", "request", policy.Run{N: 3, Count: 1}, time.Minute)
		require.NoError(t, err)
		require.Equal(t, lua.TakeReply{Remaining: 2, Wait: -time.Microsecond, Refilled: reply.Refilled}, reply)
		require.Zero(t, reply.Version)
		require.Zero(t, reply.Last)
	})
}

// A pool's bucket and one in shadow mode count the tokens that they deny, also if they have flows. Other buckets don't.
// A take that is made creates no count.
func TestWhichBucketsCountWhatTheyDeny(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		for _, c := range []struct {
			name   string
			change func(*policy.Terms)
			want   string
		}{
			{"plain", func(*policy.Terms) {}, ""},
			{"with flows", func(t *policy.Terms) { t.Divided = true }, ""},
			{"in shadow mode", func(t *policy.Terms) { t.Shadow = true }, "1000"},
			{"in shadow mode, with flows", func(t *policy.Terms) { t.Shadow, t.Divided = true, true }, "1000"},
			{"a pool's", func(t *policy.Terms) { t.Pool, t.PoolsVersion = true, 3 }, "1000"},
		} {
			b := buckettest.Bucket(10, serverTime(ctx, t, rdb), 0)
			c.change(&b.Control.Terms)
			store(ctx, t, rdb, "b", b)
			_, replies, err := lua.TakeAll(ctx, rdb, []lua.Demand{{Key: "b", N: 1}})
			require.NoError(t, err)
			require.EqualValues(t, 9, replies[0].Remaining, c.name)
			_, err = takeFor(ctx, rdb, "b", "", 1)
			require.NoError(t, err)
			require.False(t, rdb.HExists(ctx, "{b}:ctl", "denied").Val(), c.name)
			for _, n := range []int64{1000, 1001} { // the second is more than the capacity
				ok, _, err := lua.TakeAll(ctx, rdb, []lua.Demand{{Key: "b", N: n}})
				require.NoError(t, err)
				require.Equal(t, b.Control.Terms.Shadow, ok, c.name)
			}
			require.Equal(t, c.want, rdb.HGet(ctx, "{b}:ctl", "denied").Val(), c.name)
		}
	})
}

// 87% of 146 are 127.02, so 128 tokens stay.
func TestAPercentageThatATakeLeavesIsRoundedUp(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		b := buckettest.Bucket(146, serverTime(ctx, t, rdb), 0)
		b.Control.Terms.Capacity = 146
		b.Control.Terms.Initial = 146
		store(ctx, t, rdb, "b", b)
		for n, want := range map[int64]bool{19: false, 18: true} {
			ok, _, err := lua.TakeAll(ctx, rdb, []lua.Demand{{Key: "b", N: n, Leave: policy.Leave{Percent: 87}}})
			require.NoError(t, err)
			require.Equal(t, want, ok, "%d tokens", n)
			store(ctx, t, rdb, "b", b)
		}
	})
}

func TestWhatTheScriptOfOneCommandTakes(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		require.NoError(t, lua.Load(ctx, rdb))
		require.NoError(t, rdb.RPush(ctx, "list", "element").Err())
		sha := lua.TakesWords(lua.Takes{Key: "b", Runs: one(1)})[1]
		for _, c := range []struct {
			name    string
			numbers []any // tokens to take of each bucket, and bounds
			want    []any
		}{
			{"the last token", []any{10, 1, 1}, []any{int64(0), int64(-1), int64(-1)}},
			{"one more than there is", []any{11, 1, 1}, []any{int64(-1), int64(-1), int64(-1)}},
			{"below the bound", []any{4, 1, 1, 1, 0, 11}, []any{int64(6), int64(-1), int64(-1)}},
			{"at the bound", []any{4, 1, 1, 1, 0, 10}, []any{int64(-1), int64(-1), int64(-1)}},
			{"what must be left stays", []any{4, 1, 1, 1, 6, -1}, []any{int64(6), int64(-1), int64(-1)}},
			{"it does not stay", []any{4, 1, 1, 1, 7, -1}, []any{int64(-1), int64(-1), int64(-1)}},
		} {
			require.NoError(t, rdb.Set(ctx, "b", 10, 0).Err())
			words := append([]any{"evalsha", sha, 3, "b", "missing", "list"}, c.numbers...)
			left, err := rdb.Do(ctx, words...).Slice()
			require.NoError(t, err)
			require.Equal(t, c.want, left, c.name)
		}
	})
}

func TestARequestOfSeveralBucketsIsRememberedForItsTime(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	m, rdb := embedded(t)
	m.ClockTTL(true)
	storeCase(ctx, t, rdb, "b", 10)
	demands := []lua.Demand{{Key: "b", N: 4}}
	for _, repeated := range []bool{false, true} {
		ok, replies, err := lua.TakeAllOnce(ctx, rdb, "request", time.Minute, demands)
		require.NoError(t, err)
		require.True(t, ok)
		reply := replies[0]
		require.EqualValues(t, 6, reply.Remaining)
		require.Zero(t, reply.Wait)
		if repeated {
			require.Zero(t, reply.Version.Index)
			require.Zero(t, reply.Last)
		}
		require.Equal(t, time.Minute, rdb.PTTL(ctx, lua.RequestKey("b", "request")).Val())
	}
	require.NoError(t, rdb.Del(ctx, lua.RequestKey("b", "request")).Err())
	require.NoError(t, rdb.RPush(ctx, lua.RequestKey("b", "request"), "element").Err())
	_, _, err := lua.TakeAllOnce(ctx, rdb, "request", time.Minute, demands)
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
	require.ErrorContains(t, err, lua.RequestKey("b", "request"))
}

func TestARequestOfABucketWithoutStateOrTokens(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	take := func(key, id string, run policy.Run) lua.TakeReply {
		reply, err := lua.TakeOnce(ctx, rdb, key, id, run, time.Minute)
		require.NoError(t, err)
		return reply
	}
	half := policy.Leave{Percent: 50}

	require.NoError(t, rdb.Set(ctx, "plain", 1, 0).Err())
	plain := take("plain", "1", policy.Run{N: 1, Count: 1, Leave: half})
	require.True(t, plain.OK, "half of an unknown capacity is 0")
	require.False(t, plain.Repeated)
	require.Zero(t, plain.Version)

	b := storeCase(ctx, t, rdb, "b", 10)
	require.NoError(t, rdb.Del(ctx, "b").Err())
	lost := take("b", "2", policy.Run{N: 1, Count: 1})
	require.False(t, lost.OK)
	require.Zero(t, lost.Remaining)

	b.Control.Terms.Tokens = 1
	b.Control.Terms.Per = second
	b.Control.Last = embeddedNow
	b.Tokens = new(int64)
	store(ctx, t, rdb, "b", b)
	empty := take("b", "3", policy.Run{N: 1, Count: 5, UpTo: true})
	require.False(t, empty.OK)
	require.Equal(t, time.Second, empty.Wait, "for one token")
}

func TestATakeFromOneTokenOfAForeignClient(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		require.NoError(t, rdb.Set(ctx, "plain", 1, 0).Err())
		runs := []policy.Run{{N: 1, Count: 1, Leave: policy.Leave{Percent: 50}}}
		plain, err := takeWhole(ctx, rdb, lua.Takes{Key: "plain", Runs: runs})
		require.NoError(t, err)
		require.True(t, plain.OK, "half of an unknown capacity is 0")
		require.Zero(t, plain.Version)
		require.Zero(t, plain.Last)
		plain, err = takeWhole(ctx, rdb, lua.Takes{Key: "plain", Runs: runs})
		require.NoError(t, err)
		require.Equal(t, -time.Microsecond, plain.Runs[0].Wait)

		require.NoError(t, rdb.Set(ctx, "user:1", 1, 0).Err())
		adopted, err := takeTemplate(ctx, rdb, "user:1", user(), one(1), false, false)
		require.NoError(t, err)
		require.True(t, adopted.OK)
		require.Zero(t, adopted.Remaining, "the bucket is adopted, and not created")
	})
}

// Takes of more than the capacity of 1000 can never be made.
func TestWhichTakesOfARunCountAsDenied(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, rdb := embedded(t)
	for _, c := range []struct {
		tokens int64
		run    policy.Run
		want   string
	}{
		{2, policy.Run{N: 1, Count: 5}, "3"},
		{2, policy.Run{N: 1, Count: 1001}, "999"},
		{2, policy.Run{N: 1000, Count: 1}, "1000"},
		{2, policy.Run{N: 999, Count: 1, Leave: policy.Leave{Tokens: 1}}, "999"},
		{2, policy.Run{N: 1000, Count: 1, Leave: policy.Leave{Tokens: 1}}, ""},
		{2, policy.Run{N: 1001, Count: 1}, ""},
		{2, policy.Run{N: 1, Count: 5, UpTo: true}, ""},
		{0, policy.Run{N: 1, Count: 1000, UpTo: true}, "1000"},
		{0, policy.Run{N: 1, Count: 1001, UpTo: true}, ""},
	} {
		b := buckettest.Bucket(c.tokens, embeddedNow, 0)
		b.Control.Terms.Pool = true
		b.Control.Terms.PoolsVersion = 3
		store(ctx, t, rdb, "b", b)
		_, err := takeWhole(ctx, rdb, lua.Takes{Key: "b", Runs: []policy.Run{c.run}})
		require.NoError(t, err)
		require.Equal(t, c.want, rdb.HGet(ctx, "{b}:ctl", "denied").Val(), "%+v", c.run)
	}
}

// The table has room for ten unlisted flows, and for a team more. Flows of a team that has its place count under it,
// also after the table became full.
func TestATeamThatIsCountedKeepsItsPlace(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeDivided(ctx, t, rdb, "b")
		plan := listing(2)
		plan.Most = 10
		require.NoError(t, planned(ctx, rdb, "b", plan))
		flows := []string{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "team/a", "other/b", "team/c"}
		for _, flow := range flows {
			_, err := takeFor(ctx, rdb, "b", flow, 1)
			require.NoError(t, err)
		}
		use := rdb.HGetAll(ctx, lua.UseKey("b")).Val()
		require.Equal(t, "2", use["team/"], "%v", use)
		require.Equal(t, "1", use["/"], "%v", use)
	})
}

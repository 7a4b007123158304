package fetch

import (
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/faultproxy"
	"github.com/tokenrefill/refiller/internal/testenv"
	"github.com/tokenrefill/refiller/lua"
)

func TestARepeatedRequestIsChargedOnceAndGetsTheFirstAnswer(t *testing.T) {
	servers := map[string]func(t *testing.T) redis.UniversalClient{
		"single":  func(t *testing.T) redis.UniversalClient { return testenv.Redis(t).Client() },
		"cluster": func(t *testing.T) redis.UniversalClient { return testenv.Cluster(t).Client() },
	}
	for name, start := range servers {
		t.Run(name, func(t *testing.T) {
			rdb := start(t)
			createBucket(t, rdb, "checkout", hourly(100))
			c, other := newClient(t, rdb, slow()), newClient(t, rdb, slow())
			first, err := c.Take(t.Context(), "checkout", 30, WithRequestID("r1"))
			require.NoError(t, err)
			require.Equal(t, Result{OK: true, Taken: 30, Remaining: 70, Limit: 100, ResetAfter: 30 * time.Hour}, timeless(first))
			_, err = c.Take(t.Context(), "checkout", 60)
			require.NoError(t, err)
			for _, client := range []*Client{c, other} {
				again, err := client.Take(t.Context(), "checkout", 30, WithRequestID("r1"))
				require.NoError(t, err)
				require.Equal(t, first, again)
			}
			require.EqualValues(t, 10, tokens(t, rdb, "checkout"))

			_, err = c.Take(t.Context(), "checkout", 1, WithRequestID("r1"))
			require.ErrorIs(t, err, ErrRequestReused)

			denied, err := c.Take(t.Context(), "checkout", 20, WithRequestID("r2"))
			require.NoError(t, err)
			require.False(t, denied.OK)
			require.NoError(t, other.Return(t.Context(), "checkout", 20))
			granted, err := c.Take(t.Context(), "checkout", 20, WithRequestID("r2"))
			require.NoError(t, err)
			require.True(t, granted.OK, "a denial is not remembered for the request, nor a cached one its answer")
			_, err = c.Take(t.Context(), "checkout", 101, WithRequestID("r3"))
			require.ErrorIs(t, err, ErrExceedsCapacity)
		})
	}
}

func TestARequestWhoseReplyIsLostIsMadeAgainAndChargedOnce(t *testing.T) {
	bothWays(t, nil, func(t *testing.T, f *faulty) {
		c := newClient(t, f.rdb, slow())
		f.warm(t, c)
		require.NoError(t, f.proxy.CutAfterReply(1, isScript))
		r, err := c.Take(t.Context(), "checkout", 10, WithRequestID("r1"))
		require.NoError(t, err, "the client asked again by itself")
		require.Equal(t, 1, f.proxy.LostReplies())
		require.EqualValues(t, 90, r.Remaining)
		require.EqualValues(t, 90, tokens(t, f.direct, "checkout"))

		require.NoError(t, f.proxy.CutAfterReply(2, isScript))
		_, err = c.Take(t.Context(), "checkout", 10, WithRequestID("r2"))
		require.ErrorIs(t, err, ErrUnavailable, "it asks again once")
		require.Equal(t, 3, f.proxy.LostReplies())
		require.Zero(t, c.Stats().Lost, "what it took is the request's")
		require.NoError(t, f.proxy.Heal())
		r, err = c.Take(t.Context(), "checkout", 10, WithRequestID("r2"))
		require.NoError(t, err)
		require.EqualValues(t, 80, r.Remaining)
		require.EqualValues(t, 80, tokens(t, f.direct, "checkout"))
	})
}

func TestTokensOfARequestThatWasGivenUpStayItsOwn(t *testing.T) {
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, WithTimeout(30*time.Millisecond))
	f.warm(t, c)
	require.NoError(t, lua.Load(t.Context(), f.direct))
	require.NoError(t, f.proxy.Stall(faultproxy.ToClient))
	_, err := c.Take(t.Context(), "checkout", 40, WithRequestID("r1"))
	require.ErrorIs(t, err, ErrUnavailable)
	eventually(t, func() bool { return tokens(t, f.direct, "checkout") == 60 }, "the take runs")
	require.NoError(t, f.proxy.Heal())
	r, err := c.Take(t.Context(), "checkout", 40, WithRequestID("r1"), slow())
	require.NoError(t, err)
	require.True(t, r.OK)
	require.EqualValues(t, 60, tokens(t, f.direct, "checkout"), "neither charged again nor given back")
	require.Zero(t, c.Stats().Returned)
}

func TestRequestOptionsOutOfRangeAreRefused(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "checkout", hourly(5))
	c := newClient(t, rdb, slow())
	for _, o := range []CallOption{
		WithRequestID(""), WithRequestID("a b"), WithRequestID(strings.Repeat("x", lua.MaxRequestIDLen+1)),
		WithRequestMemory(0), WithRequestMemory(time.Microsecond), WithRequestMemory(lua.MaxRequestMemory + time.Millisecond),
	} {
		_, err := c.Take(t.Context(), "checkout", 1, o)
		require.ErrorIs(t, err, ErrInvalidOption)
	}
	_, err := New(rdb, WithRequestMemory(-time.Second))
	require.ErrorIs(t, err, ErrInvalidOption)
	require.EqualValues(t, 5, tokens(t, rdb, "checkout"))
	_, err = c.Take(t.Context(), "checkout", 1, WithRequestID("r"), WithRequestMemory(time.Hour))
	require.NoError(t, err)
	left, err := rdb.PTTL(t.Context(), lua.RequestKey("checkout", "r")).Result()
	require.NoError(t, err)
	require.Greater(t, left, 59*time.Minute)
}

package fetch

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
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
			require.Equal(t, Result{OK: true, Taken: 30, Remaining: 70, Limit: 100, ResetAfter: 30 * time.Hour,
				MoreAfter: time.Hour}, timeless(first))
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
			require.True(t, granted.OK, "a request may be granted after a denial")
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
		require.NoError(t, err, "the client repeated the request itself")
		require.Equal(t, 1, f.proxy.LostReplies())
		require.EqualValues(t, 90, r.Remaining)
		require.EqualValues(t, 90, tokens(t, f.direct, "checkout"))

		require.NoError(t, f.proxy.CutAfterReply(2, isScript))
		_, err = c.Take(t.Context(), "checkout", 10, WithRequestID("r2"))
		require.ErrorIs(t, err, ErrUnavailable, "the client repeats the request only once")
		require.Equal(t, 3, f.proxy.LostReplies())
		require.Zero(t, c.Stats().Lost, "the tokens belong to the request and are not lost")
		require.NoError(t, f.proxy.Heal())
		r, err = c.Take(t.Context(), "checkout", 10, WithRequestID("r2"))
		require.NoError(t, err)
		require.EqualValues(t, 80, r.Remaining)
		require.EqualValues(t, 80, tokens(t, f.direct, "checkout"))
	})
}

// The caller has enough time for one round trip, but the connection fails. So the degraded mode decides.
func TestALostReplyWithoutTimeForAnotherDegrades(t *testing.T) {
	d := newDistant(t, 200*time.Millisecond)
	c := d.steady(t)
	p := hourly(100)
	p.Degraded = policy.DegradedOpen
	createBucket(t, d.direct, "checkout", p)
	_, err := c.Take(t.Context(), "checkout", 1)
	require.NoError(t, err)
	lost := d.proxy.LostReplies()
	require.NoError(t, d.proxy.CutAfterReply(1, isScript))
	// The first connection ends half a round trip after the call was sent, so there is not enough time for a second try.
	// From then on replies need a minute. Otherwise a reply could arrive before a busy machine checks the deadline.
	require.NoError(t, d.proxy.Delay(faultproxy.ToClient, time.Minute, 0))
	r, err := c.Take(t.Context(), "checkout", 10, WithRequestID("r1"), WithTimeout(d.trip*11/10))
	require.NoError(t, err)
	require.Equal(t, lost+1, d.proxy.LostReplies())
	require.True(t, r.OK)
	require.Equal(t, Source{Kind: SourceFallback, Reason: ReasonConnection}, r.Source)
}

func TestTokensOfARequestThatWasGivenUpStayItsOwn(t *testing.T) {
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, WithTimeout(30*time.Millisecond))
	f.warm(t, c)
	require.NoError(t, lua.Load(t.Context(), f.direct))
	require.NoError(t, f.proxy.Stall(faultproxy.ToClient))
	_, err := c.Take(t.Context(), "checkout", 40, WithRequestID("r1"))
	require.ErrorIs(t, err, ErrUnavailable)
	eventually(t, func() bool { return tokens(t, f.direct, "checkout") == 60 }, "the server runs the take")
	require.NoError(t, f.proxy.Heal())
	r, err := c.Take(t.Context(), "checkout", 40, WithRequestID("r1"), slow())
	require.NoError(t, err)
	require.True(t, r.OK)
	require.EqualValues(t, 60, tokens(t, f.direct, "checkout"), "the request was neither charged again nor returned")
	require.Zero(t, c.Stats().Returned)
}

// lined returns a Client with a waiter for 50 tokens of an empty bucket, which has denied them. The waiter waits until
// end is called.
func lined(t *testing.T, leave policy.Leave) (rdb *redis.Client, c *Client, end func()) {
	t.Helper()
	rdb = testenv.Redis(t).Client()
	empty := hourly(100)
	empty.Initial = new(int64)
	createBucket(t, rdb, "line", empty)
	c = newClient(t, rdb, slow())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- errOf(c.Wait(ctx, "line", 50, leaveOption(leave))) }()
	eventually(t, func() bool {
		_, yes := c.buckets.find("line").behind("", policy.Run{N: 1, Count: 1, Leave: leave}, false)
		return yes
	}, "denied")
	return rdb, c, func() {
		cancel()
		require.ErrorIs(t, <-done, context.Canceled)
	}
}

// TakeAll and Reserve always ask the bucket. They leave the tokens in it that a line of waiters wants.
func TestTakeAllAndReserveDoNotOvertakeALine(t *testing.T) {
	rdb, c, end := lined(t, policy.Leave{})
	_, err := lua.Return(t.Context(), rdb, "line", 20, 0) // not through the Client, so that the line gets no signal
	require.NoError(t, err)
	takes := map[string]func() (Result, error){
		"take all": func() (Result, error) {
			all, err := c.TakeAll(t.Context(), []Request{{Key: "line", N: 1}})
			return Result{OK: all.OK, RetryAfter: all.RetryAfter}, err
		},
		"reserve": func() (Result, error) {
			r, err := c.Reserve(t.Context(), "line", 1, time.Minute)
			if err != nil {
				return Result{}, err
			}
			return r.Result, nil
		},
	}
	for name, take := range takes {
		r, err := take()
		require.NoError(t, err, name)
		require.False(t, r.OK, name)
		require.Greater(t, r.RetryAfter, 29*time.Hour, name)
	}
	end()
	for name, take := range takes {
		r, err := take()
		require.NoError(t, err, name)
		require.True(t, r.OK, name)
	}
}

// A reservation leaves the given percentage of the bucket even if the Client has forgotten the bucket's capacity,
// because it has used many other keys.
func TestAReservationLeavesItsPercentOfAForgottenBucket(t *testing.T) {
	rdb, c, end := lined(t, policy.Leave{Percent: 20})
	_, err := lua.Return(t.Context(), rdb, "line", 15, 0)
	require.NoError(t, err)
	forgetUnused(c)
	r, err := c.Reserve(t.Context(), "line", 1, time.Minute, WithLeavePercent(20))
	require.NoError(t, err)
	require.False(t, r.OK)
	end()
}

// Without a server, TakeUpTo gets no more tokens than the degraded mode may grant, even if no server has the key.
func TestTakeUpToWithoutAServerLeavesSome(t *testing.T) {
	server := testenv.Redis(t)
	rdb := redis.NewRing(&redis.RingOptions{
		Addrs: map[string]string{"a": server.Addr()}, HeartbeatFrequency: 10 * time.Millisecond, MaxRetries: -1,
	})
	defer func() { require.NoError(t, rdb.Close()) }()
	p := hourly(100)
	p.Degraded = policy.DegradedOpen
	createBucket(t, server.Client(), "mail", p)
	c := newClient(t, rdb, slow())
	_, err := c.Take(t.Context(), "mail", 1)
	require.NoError(t, err)
	server.Kill()
	eventually(t, func() bool {
		_, err := rdb.GetShardClientForKey("mail")
		return err != nil
	}, "no shard is left")
	for _, once := range [][]CallOption{{}, {WithRequestID("a")}} {
		r, err := c.TakeUpTo(t.Context(), "mail", 1000, append(once, WithLeavePercent(20))...)
		require.NoError(t, err)
		require.EqualValues(t, 80, r.Taken)
		require.Equal(t, SourceFallback, r.Source.Kind)
	}
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

// A repeated reply has the state of the bucket at the time of the first call. The bucket was drained since then.
func TestARepeatedRequestChangesNoShare(t *testing.T) {
	server := testenv.Redis(t)
	rdb := server.Client()
	p := hourly(100)
	p.Degraded = policy.DegradedLocal
	createBucket(t, rdb, "b", p)
	c := newClient(t, rdb, WithTimeout(time.Second))
	_, err := c.Take(t.Context(), "b", 1, WithRequestID("r"))
	require.NoError(t, err)
	countsConsumers(t, c, "b", 1)
	r, err := c.Take(t.Context(), "b", 99)
	require.NoError(t, err)
	require.True(t, r.OK)
	_, err = c.Take(t.Context(), "b", 1, WithRequestID("r"))
	require.NoError(t, err)
	server.Pause()
	defer server.Resume()
	r, err = c.Take(t.Context(), "b", 50)
	require.NoError(t, err)
	require.Equal(t, SourceFallback, r.Source.Kind)
	require.False(t, r.OK, "the bucket was drained")
}

// A request is still remembered after the bucket has begun another era. The reply to its repetition does not change the
// era that the Client remembers.
func TestARepeatedRequestReturnsNoEra(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "b", hourly(10))
	_, err := newClient(t, rdb, slow()).Take(t.Context(), "b", 1, WithRequestID("r"))
	require.NoError(t, err)
	require.NoError(t, rdb.Del(t.Context(), "b", "{b}", "{b}:ctl").Err())
	createBucket(t, rdb, "b", hourly(10))
	c := newClient(t, rdb, slow()) // it knows nothing of the bucket yet
	_, err = c.Take(t.Context(), "b", 1, WithRequestID("r"))
	require.NoError(t, err)
	r, err := c.Take(t.Context(), "b", 4)
	require.NoError(t, err)
	require.True(t, r.OK)
	require.NoError(t, c.Undo(t.Context(), "b", r))
	require.EqualValues(t, 10, tokens(t, rdb, "b"))
}

// Only the bucket remembers ids of requests and reservations. During an outage, the share is charged for each
// repetition, and after the outage the bucket is charged, too.
func TestARepetitionDuringAnOutageIsChargedAgain(t *testing.T) {
	f, c, left := shareOf(t, 100, 10)
	take := func() Result {
		r, err := c.Take(t.Context(), "b", 30, WithRequestID("order-7"))
		require.NoError(t, err)
		return r
	}
	for i := range int64(2) {
		require.True(t, take().OK)
		require.EqualValues(t, 90-(i+1)*30, left())
	}
	for i := range int64(2) {
		r, err := c.Reserve(t.Context(), "b", 5, time.Minute, WithReservationID("job-17"))
		require.NoError(t, err)
		require.True(t, r.OK)
		require.EqualValues(t, 30-(i+1)*5, left())
	}
	require.False(t, take().OK)
	require.NoError(t, f.proxy.Heal())
	eventually(t, func() bool { return take().Source.Kind != SourceFallback }, "the bucket answers")
	require.True(t, take().OK)
	require.EqualValues(t, 60, tokens(t, f.direct, "b"), "the bucket is charged once")
}

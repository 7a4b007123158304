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

func reserve(t *testing.T, c *Client, n int64, ttl time.Duration, opts ...CallOption) *Reservation {
	t.Helper()
	r, err := c.Reserve(t.Context(), "llm", n, ttl, opts...)
	require.NoError(t, err)
	return r
}

func TestAReservationReturnsWhatWasNotUsed(t *testing.T) {
	servers := map[string]func(t *testing.T) redis.UniversalClient{
		"single":  func(t *testing.T) redis.UniversalClient { return testenv.Redis(t).Client() },
		"cluster": func(t *testing.T) redis.UniversalClient { return testenv.Cluster(t).Client() },
	}
	for name, start := range servers {
		t.Run(name, func(t *testing.T) {
			rdb := start(t)
			createBucket(t, rdb, "llm", hourly(100))
			c, other := newClient(t, rdb, slow()), newClient(t, rdb, slow())
			r := reserve(t, c, 40, time.Hour)
			require.True(t, r.OK)
			require.EqualValues(t, 60, r.Remaining)
			require.InDelta(t, time.Now().Add(time.Hour).Unix(), r.Until.Unix(), 60)
			denied := reserve(t, c, 61, time.Hour)
			require.False(t, denied.OK)
			require.Equal(t, time.Hour, denied.RetryAfter.Round(time.Hour))
			_, err := denied.Settle(t.Context(), 1)
			require.ErrorIs(t, err, ErrNotHeld)
			require.NoError(t, denied.Cancel(t.Context()))

			first, err := r.Settle(t.Context(), 25)
			require.NoError(t, err)
			require.Equal(t, Settlement{Settlement: policy.Settlement{Returned: 15}, Remaining: 75}, first)
			again, err := other.Settle(t.Context(), "llm", r.ID, 3)
			require.NoError(t, err)
			require.Equal(t, Settlement{Settlement: first.Settlement, Remaining: 75, Again: true}, again)
			require.NoError(t, r.Cancel(t.Context()), "Cancel does nothing after a settlement")

			cancelled := reserve(t, c, 75, time.Hour)
			require.NotEqual(t, r.ID, cancelled.ID)
			require.EqualValues(t, 0, tokens(t, rdb, "llm"))
			require.NoError(t, cancelled.Cancel(t.Context()))
			require.EqualValues(t, 75, tokens(t, rdb, "llm"))
		})
	}
}

func TestAReservationOfAProcessThatDiedGoesBackByItself(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "llm", hourly(100))
	c := newClient(t, rdb, slow())
	r := reserve(t, c, 80, 5*time.Millisecond)
	eventually(t, func() bool {
		return reserve(t, c, 90, time.Hour, WithReservationID("next")).OK // it needs the tokens that the first one held
	}, "the first reservation ends")
	require.EqualValues(t, 10, tokens(t, rdb, "llm"))
	late, err := r.Settle(t.Context(), 7)
	require.NoError(t, err)
	require.EqualValues(t, 7, late.Charged, "the tokens that were used are charged")
	require.EqualValues(t, 3, late.Remaining)
}

func TestWhatWasUsedBeyondAReservationIsForgivenOrOwed(t *testing.T) {
	for _, tc := range []struct {
		overrun policy.Overrun
		want    policy.Settlement
	}{
		{policy.OverrunClamp, policy.Settlement{Charged: 60, Forgiven: 20}},
		{policy.OverrunDebt, policy.Settlement{Charged: 60, Owed: 20}},
	} {
		rdb := testenv.Redis(t).Client()
		createBucket(t, rdb, "llm", hourly(100))
		s, err := reserve(t, newClient(t, rdb, slow()), 40, time.Hour, WithOverrun(tc.overrun)).Settle(t.Context(), 120)
		require.NoError(t, err)
		require.Equal(t, tc.want, s.Settlement)
		require.Equal(t, tc.want.Owed, lua.Sweep(t.Context(), rdb, []string{"llm"}, 1)[0].Debt)
	}
}

func TestALostReplyToAReservationOrSettlementChangesNothing(t *testing.T) {
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, slow())
	f.warm(t, c)
	require.NoError(t, f.proxy.CutAfterReply(1, isScript))
	r, err := c.Reserve(t.Context(), "checkout", 40, time.Hour)
	require.NoError(t, err, "the client repeated the call itself")
	require.Equal(t, 1, f.proxy.LostReplies())
	require.EqualValues(t, 60, tokens(t, f.direct, "checkout"))

	require.NoError(t, f.proxy.CutAfterReply(2, isScript))
	_, err = r.Settle(t.Context(), 10)
	require.ErrorIs(t, err, ErrUnavailable, "the client repeats the call only once")
	require.Equal(t, 3, f.proxy.LostReplies())
	require.NoError(t, f.proxy.Heal())
	s, err := r.Settle(t.Context(), 10)
	require.NoError(t, err)
	require.True(t, s.Again)
	require.EqualValues(t, 30, s.Returned)
	require.EqualValues(t, 90, tokens(t, f.direct, "checkout"))
}

func TestWithoutTheirServerReservationsGetTheDegradedMode(t *testing.T) {
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, slow())
	p := hourly(100)
	p.Degraded = policy.DegradedOpen
	createBucket(t, f.direct, "open", p)
	f.warm(t, c)
	_, err := c.Take(t.Context(), "open", 1)
	require.NoError(t, err)
	f.server.Kill()
	_, err = c.Reserve(t.Context(), "checkout", 1, time.Hour)
	require.ErrorIs(t, err, ErrUnavailable)
	r, err := c.Reserve(t.Context(), "open", 5, time.Hour)
	require.NoError(t, err)
	require.True(t, r.OK)
	require.Equal(t, SourceFallback, r.Source.Kind)
	require.Zero(t, r.Until)
	s, err := r.Settle(t.Context(), 2)
	require.NoError(t, err, "the reservation is in no bucket")
	require.Equal(t, Settlement{}, s)
}

// If a reservation was made before an outage, only its bucket can settle it, whatever the degraded mode does meanwhile.
func TestAReservationIsSettledOnceItsServerIsBack(t *testing.T) {
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, slow())
	f.warm(t, c)
	held, err := c.Reserve(t.Context(), "checkout", 40, time.Hour)
	require.NoError(t, err)
	f.proxy.Cut()
	eventually(t, func() bool {
		_, err := c.Reserve(t.Context(), "checkout", 1, time.Hour)
		require.ErrorIs(t, err, ErrUnavailable)
		return c.Stats().BreakerOpened == 1
	}, "the breaker opens")
	connections := f.proxy.Connections()
	for _, call := range []func() error{
		func() error {
			_, err := c.Reserve(t.Context(), "checkout", 1, time.Hour)
			return err
		},
		func() error {
			_, err := held.Settle(t.Context(), 10)
			return err
		},
		func() error { return held.Cancel(t.Context()) },
		func() error { return c.Return(t.Context(), "checkout", 1) },
		func() error {
			_, err := c.Peek(t.Context(), "checkout")
			return err
		},
	} {
		err := call()
		var shut *openError
		require.ErrorAs(t, err, &shut, "the client makes no call")
		require.ErrorIs(t, err, ErrUnavailable)
		require.Equal(t, ReasonConnection, ReasonOf(err))
	}
	require.Equal(t, connections, f.proxy.Connections())
	require.NoError(t, f.proxy.Heal())
	var s Settlement
	eventually(t, func() bool {
		s, err = held.Settle(t.Context(), 10)
		return err == nil
	}, "the settlement succeeds")
	require.Equal(t, Settlement{Settlement: policy.Settlement{Returned: 30}, Remaining: 90}, s)
	require.EqualValues(t, 90, tokens(t, f.direct, "checkout"))
}

func TestAReservationOfTheLocalShareGoesBackToTheShare(t *testing.T) {
	f := newFaulty(t, nil)
	p := hourly(10)
	p.Degraded = policy.DegradedLocal
	createBucket(t, f.direct, "local", p)
	c := newClient(t, f.rdb, slow())
	f.warm(t, c)
	_, err := c.Take(t.Context(), "local", 2)
	require.NoError(t, err)
	countsConsumers(t, c, "local", 1)
	f.proxy.Cut()
	reserve := func(n int64) *Reservation {
		r, err := c.Reserve(t.Context(), "local", n, time.Hour)
		require.NoError(t, err)
		return r
	}
	r := reserve(8)
	require.True(t, r.OK)
	require.Equal(t, Source{Kind: SourceFallback, Reason: ReasonConnection}, r.Source)
	require.Zero(t, r.Until)
	require.False(t, reserve(1).OK)
	s, err := r.Settle(t.Context(), 3)
	require.NoError(t, err)
	require.Equal(t, Settlement{Settlement: policy.Settlement{Returned: 5}}, s)
	s, err = r.Settle(t.Context(), 0)
	require.NoError(t, err)
	require.Equal(t, Settlement{Again: true}, s)
	other := reserve(5)
	require.True(t, other.OK)
	require.NoError(t, other.Cancel(t.Context()))
	require.True(t, reserve(5).OK)

	require.NoError(t, f.proxy.Heal())
	require.NoError(t, r.Cancel(t.Context()))
	_, err = c.Settle(t.Context(), "local", r.ID, 3)
	require.ErrorIs(t, err, ErrNotHeld, "the bucket does not know the reservation")
	require.EqualValues(t, 8, tokens(t, f.direct, "local"))
}

func TestAReservationOfWhatABucketInShadowModeLacksIsInNoBucket(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	p := hourly(10)
	p.Shadow = true
	createBucket(t, rdb, "llm", p)
	c := newClient(t, rdb, slow())
	held := reserve(t, c, 8, time.Hour)
	require.Equal(t, SourceShared, held.Source.Kind)
	shadow := reserve(t, c, 5, time.Hour)
	require.True(t, shadow.OK)
	require.True(t, shadow.Shadow)
	require.EqualValues(t, 5, shadow.Taken)
	require.Zero(t, shadow.Until)
	s, err := shadow.Settle(t.Context(), 1)
	require.NoError(t, err)
	require.Equal(t, Settlement{}, s)
	require.NoError(t, shadow.Cancel(t.Context()))
	require.EqualValues(t, 2, tokens(t, rdb, "llm"))
	require.NoError(t, held.Cancel(t.Context()))
	require.EqualValues(t, 10, tokens(t, rdb, "llm"))
	require.EqualValues(t, 1, c.Stats().Shadowed)
}

// If a bucket in shadow mode admits a reservation that the share can't grant, its settlement returns nothing to the
// share.
func TestASettlementReturnsOnlyWhatTheShareGave(t *testing.T) {
	server := testenv.Redis(t)
	p := hourly(100)
	p.Degraded = policy.DegradedLocal
	p.Shadow = true
	createBucket(t, server.Client(), "b", p)
	c := newClient(t, server.Client(), WithTimeout(500*time.Millisecond))
	require.NoError(t, errOf(c.Take(t.Context(), "b", 1)))
	s := countsConsumers(t, c, "b", 1)
	server.Pause()
	defer server.Resume()
	granted, err := c.Reserve(t.Context(), "b", 60, time.Minute)
	require.NoError(t, err)
	require.True(t, granted.OK)
	require.False(t, granted.Shadow)
	require.NoError(t, errOf(c.Take(t.Context(), "b", 39)))
	require.Zero(t, tokensIn(s, c.consumers.now()))
	r, err := c.Reserve(t.Context(), "b", 50, time.Minute)
	require.NoError(t, err)
	require.True(t, r.OK)
	require.True(t, r.Shadow)
	done, err := r.Settle(t.Context(), 0)
	require.NoError(t, err)
	require.Zero(t, done.Returned, "neither the bucket nor the share gave the tokens")
	require.Zero(t, tokensIn(s, c.consumers.now()))
	done, err = granted.Settle(t.Context(), 20)
	require.NoError(t, err)
	require.EqualValues(t, 40, done.Returned)
	require.EqualValues(t, 40, tokensIn(s, c.consumers.now()))
}

func TestAReservationIsRescued(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "llm", policy.Policy{Capacity: 10, Rate: policy.PerSecond(1000), Interval: time.Millisecond,
		Initial: new(int64)})
	c := newClient(t, rdb, slow())
	time.Sleep(5 * time.Millisecond) // several intervals
	r := reserve(t, c, 4, time.Hour)
	require.True(t, r.OK)
	require.Equal(t, Source{Kind: SourceRescued}, r.Source)
	require.NotZero(t, r.Until)
	s, err := r.Settle(t.Context(), 1)
	require.NoError(t, err)
	require.EqualValues(t, 3, s.Returned)
}

func TestAnAbandonedReservationWithoutAnIdIsCancelled(t *testing.T) {
	for name, tc := range map[string]struct {
		opts []CallOption
		left int64
	}{"random id": {nil, 100}, "own id": {[]CallOption{WithReservationID("job")}, 60}} {
		t.Run(name, func(t *testing.T) {
			f := newFaulty(t, nil)
			c := newClient(t, wrapped{f.rdb}, slow())
			f.warm(t, c)
			require.NoError(t, f.proxy.Stall(faultproxy.ToClient))
			_, err := c.Reserve(t.Context(), "checkout", 40, time.Hour, append(tc.opts, WithTimeout(30*time.Millisecond))...)
			require.ErrorIs(t, err, ErrUnavailable)
			eventually(t, func() bool { return tokens(t, f.direct, "checkout") == 60 }, "the reservation is made")
			require.NoError(t, f.proxy.Heal())
			require.NoError(t, c.Close(t.Context())) // waits until the reservation is cancelled
			require.EqualValues(t, tc.left, tokens(t, f.direct, "checkout"))
			require.Equal(t, tc.left-60, c.Stats().Returned)
			r, err := newClient(t, f.direct, slow()).Reserve(t.Context(), "checkout", 40, time.Hour, tc.opts...)
			require.NoError(t, err)
			require.True(t, r.OK)
			require.EqualValues(t, 60, tokens(t, f.direct, "checkout"))
		})
	}
}

// After the reservation, the Client asks the bucket for the instants of its schedule. If their reply is late, the
// reservation is kept nevertheless.
func TestAReservationIsKeptThoughItsBucketsInstantsComeLate(t *testing.T) {
	f := newFaulty(t, nil)
	terms := policy.Policy{Capacity: 100, Steps: policy.Every(24 * time.Hour), StepTokens: 40}.Terms(policy.Fence{})
	next := f.direct.Time(t.Context()).Val().Add(time.Hour).UnixMicro()
	_, err := lua.Refill(t.Context(), f.direct, "daily",
		policy.Call{Create: policy.CreateInitial, Terms: &terms, Next: next})
	require.NoError(t, err)
	stall := &onReturn{key: "daily", do: func() { _ = f.proxy.Stall(faultproxy.ToClient) }}
	c := newClient(t, twoPhases(t, f, stall), slow())
	f.warm(t, c)
	before := commandCalls(t, f.direct)["evalsha"]
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	reserved := make(chan *Reservation, 1)
	go func() {
		r, err := c.Reserve(ctx, "daily", 30, time.Hour)
		if err != nil {
			t.Error(err)
		}
		reserved <- r
	}()
	eventually(t, func() bool { return commandCalls(t, f.direct)["evalsha"] == before+2 }, "the client reads the instants")
	cancel()
	r := <-reserved
	require.NotNil(t, r)
	require.True(t, r.OK)
	require.NoError(t, f.proxy.Heal())
	require.NoError(t, c.Close(t.Context())) // waits until the late answer is handled
	s, err := newClient(t, f.direct, slow()).Settle(t.Context(), "daily", r.ID, 20)
	require.NoError(t, err)
	require.False(t, s.Again, "no other call has ended the reservation")
	require.EqualValues(t, 80, tokens(t, f.direct, "daily"))
}

func TestReservationsOutOfRangeAreRefused(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "llm", hourly(100))
	c, err := New(rdb, slow())
	require.NoError(t, err)
	for _, tc := range []struct {
		key  string
		n    int64
		ttl  time.Duration
		opt  CallOption
		want error
	}{
		{"missing", 1, time.Hour, nil, ErrUnknownBucket},
		{"", 1, time.Hour, nil, ErrInvalidKey},
		{"llm", 0, time.Hour, nil, ErrInvalidAmount},
		{"llm", policy.MaxTokens + 1, time.Hour, nil, ErrInvalidAmount},
		{"llm", 101, time.Hour, nil, ErrExceedsCapacity},
		{"llm", 1, policy.MinHold - 1, nil, ErrInvalidTTL},
		{"llm", 1, policy.MaxHold + 1, nil, ErrInvalidTTL},
		{"llm", 1, time.Hour, WithReservationID(""), ErrInvalidOption},
		{"llm", 1, time.Hour, WithReservationID(strings.Repeat("x", lua.MaxIDLen+1)), ErrInvalidOption},
		{"llm", 1, time.Hour, WithOverrun(2), ErrInvalidOption},
		{"llm", 1, time.Hour, WithTimeout(-1), ErrInvalidOption},
	} {
		opts := []CallOption{}
		if tc.opt != nil {
			opts = append(opts, tc.opt)
		}
		r, err := c.Reserve(t.Context(), tc.key, tc.n, tc.ttl, opts...)
		require.ErrorIs(t, err, tc.want)
		require.Nil(t, r)
	}
	require.EqualValues(t, 100, tokens(t, rdb, "llm"))
	r := reserve(t, c, 1, time.Hour, WithReservationID("job"))
	_, err = c.Reserve(t.Context(), "llm", 2, time.Hour, WithReservationID("job"))
	require.ErrorIs(t, err, ErrIDInUse)
	_, err = r.Settle(t.Context(), -1)
	require.ErrorIs(t, err, ErrInvalidAmount)
	_, err = c.Settle(t.Context(), "llm", "", 1)
	require.ErrorIs(t, err, ErrInvalidID)
	_, err = c.Settle(t.Context(), "llm", "nothing", 1)
	require.ErrorIs(t, err, ErrNotHeld)
	require.Zero(t, c.Stats().BreakerOpened, "the server's refusals open no breaker")
	require.NoError(t, c.Close(t.Context()))
	_, err = c.Reserve(t.Context(), "llm", 1, time.Hour)
	require.ErrorIs(t, err, ErrClosed)
	_, err = r.Settle(t.Context(), 1)
	require.ErrorIs(t, err, ErrClosed)
}

// The tokens of a reservation go back only once, by Settle.
func TestUndoOfAReservationGivesNothingBack(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "llm", hourly(100))
	c := newClient(t, rdb, slow())
	_, err := c.Take(t.Context(), "llm", 50)
	require.NoError(t, err)
	r := reserve(t, c, 30, time.Hour)
	require.NoError(t, c.Undo(t.Context(), "llm", r.Result))
	require.EqualValues(t, 20, tokens(t, rdb, "llm"))
	require.NoError(t, r.Cancel(t.Context()))
	require.NoError(t, c.Undo(t.Context(), "llm", r.Result))
	require.EqualValues(t, 50, tokens(t, rdb, "llm"))
}

// The bucket is lost, and begins again without tokens. An Undo then drops the tokens of a take that was made before the
// loss, whatever call came before that take.
func TestATakeAfterAReservationKnowsItsEra(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "b", hourly(10))
	c := newClient(t, rdb, slow())
	res, err := c.Reserve(t.Context(), "b", 1, time.Minute)
	require.NoError(t, err)
	require.True(t, res.OK)
	r, err := c.Take(t.Context(), "b", 3)
	require.NoError(t, err)
	require.True(t, r.OK)
	require.Equal(t, r.Era, res.Era)

	require.NoError(t, rdb.FlushAll(t.Context()).Err())
	p := hourly(10)
	p.Initial = new(int64)
	createBucket(t, rdb, "b", p)
	require.NoError(t, c.Undo(t.Context(), "b", r))
	require.Zero(t, tokens(t, rdb, "b"), "the new era gets no tokens of the old one")
}

func TestAnEndedReservationIsNotGrantedAgain(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "b", hourly(10))
	c := newClient(t, rdb, slow(), WithRescue(false))
	res, err := c.Reserve(t.Context(), "b", 6, 20*time.Millisecond, WithReservationID("job"))
	require.NoError(t, err)
	eventually(t, func() bool { return rdb.Time(t.Context()).Val().After(res.Until) }, "the reservation expires")
	_, err = c.Reserve(t.Context(), "b", 6, time.Minute, WithReservationID("job"))
	require.ErrorIs(t, err, ErrIDInUse)
	other, err := c.Reserve(t.Context(), "b", 10, time.Minute)
	require.NoError(t, err)
	require.True(t, other.OK, "another reservation has the tokens now")
}

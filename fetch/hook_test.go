package fetch

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/policy"
)

type recorder struct{ seen []string }

type recorderKey struct{}

func (r *recorder) Begin(ctx context.Context, call Call) context.Context {
	return context.WithValue(ctx, recorderKey{}, fmt.Sprintf("%s of %d of %q", call.Op, call.Tokens, call.Key))
}

func (r *recorder) End(ctx context.Context, call Call, o Outcome) {
	if o.Duration <= 0 {
		r.seen = append(r.seen, "no duration")
	}
	r.seen = append(r.seen, fmt.Sprintf("%s: ok %t, taken %d, %s, %s, error %t", ctx.Value(recorderKey{}), o.Result.OK,
		o.Result.Taken, o.Result.Source.Kind, o.Reason, o.Err != nil))
}

func TestAHookObservesEveryCall(t *testing.T) {
	f := newFaulty(t, nil)
	createBucket(t, f.direct, "quota", hourly(100))
	createBucket(t, f.direct, "mail", hourly(5))
	open := hourly(5)
	open.Degraded = policy.DegradedOpen
	createBucket(t, f.direct, "open", open)
	r := &recorder{}
	c := newClient(t, f.rdb, slow(), WithHook(r))
	ctx := t.Context()
	_, _ = c.Take(ctx, "quota", 90)
	_, _ = c.Take(ctx, "quota", 90)
	_, _ = c.Take(ctx, "quota", 91)
	_, _ = c.TakeUpTo(ctx, "quota", 20)
	_, _ = c.TakeAll(ctx, []Request{{Key: "mail", N: 1}, {Key: "mail", N: 2}})
	_, _ = c.Wait(ctx, "mail", 1)
	_, _ = c.Peek(ctx, "mail")
	_ = c.Return(ctx, "mail", 1)
	_, _ = c.Wait(ctx, "open", 1)
	_, _ = c.Take(ctx, "typo", 1)
	_, _ = c.Take(ctx, "quota", 1, WithLeave(-1))
	_, _ = c.TakeAll(ctx, []Request{{Key: "mail", N: 1}}, WithReservationID("r"))
	f.proxy.Cut()
	_, _ = c.Take(ctx, "mail", 1)
	_, _ = c.Wait(ctx, "open", 1)
	require.Equal(t, []string{
		`take of 90 of "quota": ok true, taken 90, shared, none, error false`,
		`take of 90 of "quota": ok false, taken 0, shared, none, error false`,
		`take of 91 of "quota": ok false, taken 0, cached, none, error false`,
		`take_up_to of 20 of "quota": ok true, taken 10, shared, none, error false`,
		`take_all of 3 of "mail": ok true, taken 3, shared, none, error false`,
		`wait of 1 of "mail": ok true, taken 1, shared, none, error false`,
		`peek of 0 of "mail": ok true, taken 0, shared, none, error false`,
		`return of 1 of "mail": ok true, taken 0, shared, none, error false`,
		`wait of 1 of "open": ok true, taken 1, shared, none, error false`,
		`take of 1 of "typo": ok false, taken 0, shared, none, error true`,
		`take of 1 of "quota": ok false, taken 0, shared, none, error true`,
		`take_all of 1 of "mail": ok false, taken 0, shared, none, error true`,
		`take of 1 of "mail": ok false, taken 0, shared, connection, error true`,
		`wait of 1 of "open": ok true, taken 1, fallback, connection, error false`,
	}, r.seen)
	_, err := New(testenv.Redis(t).Client(), WithHook(nil))
	require.ErrorIs(t, err, ErrInvalidOption)
}

type breakerRecorder struct {
	recorder
	events chan string
}

func (r *breakerRecorder) Breaker(server string, why Reason) { r.events <- server + " " + why.String() }

// The hook gets an event when a breaker opens or closes. Stats has the breakers that are open.
func TestAHookObservesBreakers(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, nil)
	r := &breakerRecorder{events: make(chan string, 10)}
	c := newClient(t, f.rdb, WithHook(r))
	f.warm(t, c)
	require.Nil(t, c.Stats().BreakersOpen)
	f.proxy.Cut()
	eventually(t, func() bool {
		_, _ = c.Take(t.Context(), "checkout", 1)
		return len(r.events) > 0
	}, "the breaker opens")
	require.Equal(t, f.proxy.Addr()+" connection", <-r.events)
	require.Equal(t, map[string]Reason{f.proxy.Addr(): ReasonConnection}, c.Stats().BreakersOpen)
	require.EqualValues(t, 1, c.Stats().BreakerOpened)
	require.NoError(t, f.proxy.Heal())
	require.Equal(t, f.proxy.Addr()+" none", <-r.events)
	eventually(t, func() bool { return c.Stats().BreakersOpen == nil }, "the breaker is closed")
	_, err := c.Take(t.Context(), "checkout", 1, slow())
	require.NoError(t, err)
	require.Empty(t, r.events)
}

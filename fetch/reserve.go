package fetch

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Reservation is the answer to a Reserve: tokens that are held until they are settled or their time is over, or a
// denial. Its methods are safe for concurrent use.
type Reservation struct {
	// Result is the bucket's answer. If OK is false nothing is held.
	Result
	// Key is the bucket, and ID names the reservation in it. Any Client that knows both can settle it.
	Key, ID string
	// Until is when the reservation ends, by Redis' clock; zero unless the bucket holds the tokens.
	Until time.Time

	client *Client
	once   sync.Once
}

// Settlement describes what happened to the tokens of a reservation.
type Settlement struct {
	policy.Settlement
	// Remaining is the number of tokens in the bucket after the call.
	Remaining int64
	// Again reports that the bucket had settled the reservation before. Settlement then repeats the first answer. It is
	// also true if the Client itself repeated the call after its connection failed, and the first try had settled the
	// reservation.
	Again bool
}

// Reserve takes n tokens, all or none, for work whose cost is known only later; n is 1 to policy.MaxTokens. Settle the
// Reservation with the number of tokens that were used. If it is never settled, for example after a crash, its tokens
// go back when ttl has passed. This happens at the bucket's next refill or reservation, and in a budget also before a
// take is denied. ttl is policy.MinHold to policy.MaxHold. The options are WithTimeout, WithLeave, WithLeavePercent,
// WithFlow, WithReservationID and WithOverrun.
//
// A denial is a Reservation whose OK is false, with a nil error. If a degraded mode granted a reservation
// (SourceFallback), or a bucket in shadow mode lacked the tokens (Shadow), no bucket holds its tokens, and its Settle
// makes no call.
//
// The errors are those of Take, ErrInvalidTTL and ErrIDInUse. If the connection fails and the timeout leaves time, the
// Client repeats the call once. After ErrUnavailable or the context's own error, tokens may be held until ttl is over.
// With WithReservationID it is safe to repeat the call.
//
// For a bucket without a policy the error is ErrUnknownBucket. For a bucket of a lazy template it is ErrLazyBucket.
func (c *Client) Reserve(ctx context.Context, key string, n int64, ttl time.Duration, opts ...CallOption) (*Reservation,
	error) {
	var r *Reservation
	call := Call{Op: OpReserve, Key: key, Tokens: n}
	_, err := c.call(ctx, call, n, opts, func(ctx context.Context, cfg *callConfig) (Result, error) {
		var err error
		r, err = c.reserve(ctx, key, n, ttl, cfg)
		if err != nil {
			return Result{}, err
		}
		return r.Result, nil
	})
	return r, err
}

func (c *Client) reserve(ctx context.Context, key string, n int64, ttl time.Duration, cfg *callConfig) (*Reservation,
	error) {
	if err := lua.CheckTTL(ttl); err != nil {
		return nil, err
	}
	t := c.begin(budgetOf(ctx, cfg), key)
	call := lua.ReserveCall{ID: cfg.reservation, N: n, TTL: ttl, Overrun: cfg.overrun, Leave: t.leave(n),
		Flow: t.namedFlow()}
	if call.ID == "" {
		call.ID = rand.Text()
	}
	until := int64(0)
	a := t.ask(n+call.Leave.Of(t.info.limit()), true, func() (err error) {
		until, err = t.askReservation(call)
		return err
	})
	result, err := t.toResult(a, policy.Run{N: n, Count: 1, Leave: cfg.leave})
	if err != nil {
		return nil, err
	}
	r := &Reservation{Result: c.shadow(result, t.info, n), Key: key, ID: call.ID, client: c}
	if until > 0 {
		r.Until = time.UnixMicro(until)
	}
	r.lacked = r.Taken // Settle gives the tokens back, and not Undo
	return r, nil
}

// askReservation asks for a reservation, keeps the answer and returns when the reservation ends; 0 if it was denied.
func (t *task) askReservation(call lua.ReserveCall) (until int64, err error) {
	if err := t.kind.open(t, call.TTL); err != nil {
		return 0, err
	}
	c, key := t.c, t.key
	kind := t.kind
	own := t.cfg.reservation == "" // no other caller has the id
	undo := func(ctx context.Context, by lua.Client, cmd redis.Cmder) {
		if own { // if this caller leaves, the reservation ends
			c.cancelLate(ctx, by, key, call.ID)
		} else if reply, err := lua.Reserve(ctx, replayed{cmd}, key, call); err == nil {
			c.reopen(kind, key, &reply.TakeReply)
		}
	}
	asked := time.Now()
	reply, err := lua.Reserve(t.ctx, &undoable{task: t, undo: undo}, key, call)
	if errors.Is(err, lua.ErrIDInUse) && own { // the first try has used it
		return 0, fmt.Errorf("%w: the reservation ended before its reply came", ErrUnavailable)
	}
	if err != nil {
		return 0, err
	}
	c.reopen(kind, key, &reply.TakeReply)
	t.got = answer{reply: reply.TakeReply, info: t.applyReply(call.N, call.Leave, &reply.TakeReply, asked)}
	return reply.Until, nil
}

// cancelLate ends a reservation after its caller has left. If that fails its tokens go back when its time is over.
func (c *Client) cancelLate(ctx context.Context, by lua.Client, key, id string) {
	if s, err := settleBy(ctx, by, c.buckets.find(key).known.Load(), key, id, 0); err == nil {
		c.stats.returned.Add(s.Returned + s.Clamped)
		c.stats.clamped.Add(s.Clamped)
	}
	c.moreTokens(key)
}

// Settle ends the reservation id of the bucket with the number of tokens that were used, 0 to policy.MaxTokens:
//
//   - Tokens that were not used go back, as far as the bucket has room and is in the same era.
//   - If more were used than reserved, the difference is taken from the bucket. If the bucket has too few tokens, the
//     rest is forgiven or owed, as WithOverrun says.
//   - If the time of the reservation is over, its tokens have gone back. Then all tokens that were used count as used
//     beyond the reservation.
//
// If the reservation was made for a flow (WithFlow), the flow gets the right back that it paid for the tokens that go
// back. It pays for tokens that were used beyond the reservation.
//
// Settle has no degraded mode: while the bucket's server is unavailable it returns ErrUnavailable, at once if the
// breaker is open. If a reservation is not settled before its time is over, its tokens go back as if none had been
// used. So try again: a settlement that arrives up to policy.HoldMemory later still charges the tokens that were used.
// A second settlement changes nothing. For policy.HoldMemory it returns the answer of the first one, even if it reports
// another number. The Client itself repeats the call once if its connection fails and the timeout leaves time.
//
// The error is ErrNotHeld if the id is unknown, and ErrIDInUse if it is in use for something else. The other errors are
// ErrInvalidAmount, ErrInvalidID and those about the bucket.
func (c *Client) Settle(ctx context.Context, key, id string, used int64, opts ...CallOption) (Settlement, error) {
	var s Settlement
	call := Call{Op: OpSettle, Key: key, Tokens: used}
	_, err := c.call(ctx, call, 1, opts, func(ctx context.Context, cfg *callConfig) (Result, error) {
		var err error
		s, err = c.settle(ctx, key, id, used, cfg)
		return Result{OK: err == nil}, err
	})
	return s, err
}

func (c *Client) settle(ctx context.Context, key, id string, used int64, cfg *callConfig) (Settlement, error) {
	if err := errors.Join(lua.CheckID(id), checkUsed(used)); err != nil {
		return Settlement{}, err
	}
	t := c.begin(budgetOf(ctx, cfg), key)
	var reply lua.SettleReply
	err := t.attempt(true, func() (err error) {
		if asBudget(t.kind) != nil { // the present period is charged for tokens beyond the reservation
			if err := t.kind.open(t, 0); err != nil {
				return err
			}
		}
		reply, err = settleBy(t.ctx, t, t.info, key, id, used)
		if l, ok := t.kind.(*lazy); ok && errors.Is(err, lua.ErrUnknownBucket) {
			err = l.open(t, 0)
		}
		return err
	})
	c.moreTokens(key)
	if err != nil {
		return Settlement{}, err
	}
	if !reply.Again {
		c.stats.clamped.Add(reply.Clamped)
	}
	return Settlement{reply.Settlement, max(0, reply.Remaining), reply.Again}, nil
}

// settleBy settles a reservation of a bucket. i records whether the bucket has flows. If that is right, one call is
// enough.
func settleBy(ctx context.Context, by lua.Client, i *info, key, id string, used int64) (lua.SettleReply, error) {
	if i.divided() {
		return lua.SettleDivided(ctx, by, key, id, used)
	}
	return lua.Settle(ctx, by, key, id, used)
}

func checkUsed(used int64) error {
	if used < 0 || used > policy.MaxTokens {
		return fmt.Errorf("%w: %d tokens used; want 0 to %d", ErrInvalidAmount, used, int64(policy.MaxTokens))
	}
	return nil
}

// Settle ends the reservation as Client.Settle does. For a denial it returns ErrNotHeld. If no bucket holds the tokens,
// it makes no call. If a share gave them (policy.DegradedLocal), the unused tokens then go back to the share, unless
// the bucket has answered a take since.
func (r *Reservation) Settle(ctx context.Context, used int64) (Settlement, error) {
	switch {
	case !r.OK:
		return Settlement{}, fmt.Errorf("%w: the reservation of bucket %q was denied", ErrNotHeld, r.Key)
	case r.Source.Kind != SourceFallback && !r.Shadow:
		return r.client.Settle(ctx, r.Key, r.ID, used)
	}
	if err := r.client.check(ctx, r.Key, 1); err != nil {
		return Settlement{}, err
	}
	if err := checkUsed(used); err != nil {
		return Settlement{}, err
	}
	s := Settlement{Again: true}
	r.once.Do(func() {
		s.Again = false
		if used < r.Taken {
			s.Returned = r.client.giveToShare(r.Key, r.loan, r.Taken-used)
		}
	})
	return s, nil
}

// Cancel settles the reservation with nothing used. It does nothing if the reservation was denied, is settled, or has
// ended. So a caller may defer it. While the bucket's server is unavailable it returns ErrUnavailable, as Settle does.
// The tokens then go back when the reservation's time is over.
func (r *Reservation) Cancel(ctx context.Context) error {
	if !r.OK {
		return nil
	}
	if _, err := r.Settle(ctx, 0); !errors.Is(err, ErrNotHeld) {
		return err
	}
	return nil
}

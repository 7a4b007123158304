package fetch

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Reservation is the answer to a Reserve: tokens that are held until they are
// settled or their time is over, or a denial. Its methods are safe for concurrent
// use.
type Reservation struct {
	// Result is the bucket's answer. If OK is false nothing is held.
	Result
	// Key is the bucket and ID names the reservation in it: with both any Client
	// can settle it.
	Key, ID string
	// Until is when the reservation ends, by Redis' clock; zero unless the bucket
	// holds the tokens.
	Until time.Time

	client *Client
	share  *stand // whose tokens they are in degraded mode local; nil otherwise
	once   sync.Once
}

// Settlement is what became of the tokens of a reservation.
type Settlement struct {
	policy.Settlement
	// Remaining is the number of tokens in the bucket after the call.
	Remaining int64
	// Again reports that the reservation was settled before: Settlement is what
	// that answered.
	Again bool
}

// ReserveOption changes one reservation. A DeadlineOption is one too.
type ReserveOption interface{ applyReserve(*reserveConfig) error }

// reserveConfig is what the options of a reservation say.
type reserveConfig struct {
	deadline time.Duration // 0: none
	id       string        // empty: a random one
	overrun  policy.Overrun
}

// WithReservationID names a reservation: 1 to lua.MaxIDLen bytes, unlike any other
// of the bucket. However often a Reserve with the id and the same n is made, the
// tokens are taken once while the reservation lasts. Without it the id is random.
func WithReservationID(id string) ReserveOption { return reservationIDOption(id) }

type reservationIDOption string

func (id reservationIDOption) applyReserve(r *reserveConfig) error {
	if err := lua.CheckID(string(id)); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	r.id = string(id)
	return nil
}

// WithOverrun says what happens if more is used than was reserved and than the
// bucket then holds: policy.OverrunClamp, the default, forgives it,
// policy.OverrunDebt has later refills pay it before they add tokens, up to the
// bucket's capacity.
func WithOverrun(o policy.Overrun) ReserveOption { return overrunOption(o) }

type overrunOption policy.Overrun

func (o overrunOption) applyReserve(r *reserveConfig) error {
	if policy.Overrun(o) != policy.OverrunClamp && policy.Overrun(o) != policy.OverrunDebt {
		return fmt.Errorf("%w: overrun %d; want policy.OverrunClamp or policy.OverrunDebt", ErrInvalidOption, o)
	}
	r.overrun = policy.Overrun(o)
	return nil
}

func (d DeadlineOption) applyReserve(r *reserveConfig) error {
	t := takeConfig{}
	if err := d.applyTake(&t); err != nil {
		return err
	}
	r.deadline = t.deadline
	return nil
}

// Reserve takes n tokens, all or none, for work whose use is known later; n is 1
// to policy.MaxTokens. Settle the Reservation with what was used. One that nobody
// settles, as after a crash, goes back by itself when ttl, policy.MinHold to
// policy.MaxHold, is over: at the bucket's next refill or reservation.
//
// A denial is a Reservation whose OK is false, and a nil error. A reservation by a
// degraded mode (SourceFallback) or of what a bucket in shadow mode lacks
// (SourceShadow) is in no bucket: its Settle makes no call.
//
// The errors are Take's, ErrInvalidTTL, and ErrIDInUse. The Client asks again, once,
// if its connection fails and the deadline leaves time. After ErrUnavailable or the
// context's own error tokens may be held until ttl is over; with
// WithReservationID it is safe to ask again.
//
// A bucket without a policy can't be reserved from, which is ErrUnknownBucket, nor one
// of a lazy template: ErrLazyBucket.
func (c *Client) Reserve(ctx context.Context, key string, n int64, ttl time.Duration, opts ...ReserveOption) (*Reservation, error) {
	cfg := reserveConfig{deadline: c.config.deadline}
	for _, o := range opts {
		if o == nil {
			return nil, fmt.Errorf("%w: an option is nil", ErrInvalidOption)
		}
		if err := o.applyReserve(&cfg); err != nil {
			return nil, err
		}
	}
	var r *Reservation
	_, err := c.observed(ctx, Call{OpReserve, key, n}, func(ctx context.Context) (Result, error) {
		var err error
		if r, err = c.reserve(ctx, key, n, ttl, cfg); err != nil {
			return Result{}, err
		}
		return r.Result, nil
	})
	return r, err
}

func (c *Client) reserve(ctx context.Context, key string, n int64, ttl time.Duration, cfg reserveConfig) (*Reservation, error) {
	if err := check(key, n); err != nil {
		return nil, err
	}
	if err := lua.CheckTTL(ttl); err != nil {
		return nil, err
	}
	call := lua.ReserveCall{ID: cfg.id, N: n, TTL: ttl, Overrun: cfg.overrun}
	if cfg.id == "" {
		call.ID = rand.Text()
	}
	a, until := c.askReserve(ctx, key, call, cfg)
	if err := a.err; err != nil {
		var ok bool
		if a, ok = c.degraded(key, n, err); !ok {
			return nil, err
		}
	}
	if err := a.known.exceeded(key, n); err != nil && !a.reply.OK {
		return nil, err
	}
	r := &Reservation{Result: c.shadow(c.result(ctx, key, a), a.known, n), Key: key, ID: call.ID, client: c}
	if until > 0 {
		r.Until = time.UnixMicro(until)
	}
	if a.source.Kind == SourceFallback && a.reply.OK && a.known.terms != nil && a.known.terms.Degraded == policy.DegradedLocal {
		r.share = a.known.stand
	}
	return r, nil
}

// askReserve is ask for a reservation; it also tells when that ends, Unix µs.
func (c *Client) askReserve(ctx context.Context, key string, call lua.ReserveCall, cfg reserveConfig) (a answer, until int64) {
	if why := c.breakers.of(key).open(); why != ReasonNone {
		return answer{err: shut(why)}, 0
	}
	var late func(context.Context, lua.ReserveReply)
	if cfg.id == "" { // nobody else can know it
		late = func(ctx context.Context, reply lua.ReserveReply) { c.cancelLate(ctx, key, call, reply) }
	}
	put := func() {
		reply, err := twice(ctx, c, cfg.deadline, func(ctx context.Context) (lua.ReserveReply, error) {
			if err := c.open(ctx, key, call.TTL); err != nil {
				return lua.ReserveReply{}, err
			}
			return lua.Reserve(ctx, c.store, key, call)
		}, late)
		if err != nil {
			a, until = answer{err: err}, 0
			return
		}
		k, _ := c.terms.get(key, time.Now())
		a, until = answer{reply: reply.TakeReply, known: c.learn(key, k, call.N, reply.TakeReply)}, reply.Until
	}
	began := time.Now()
	put()
	c.note(key, began, a.err)
	c.saw(a)
	if a.err == nil {
		if again, ours := c.rescue(ctx, key, call.N, cfg.deadline, a.reply); again {
			put()
			if ours {
				a.source.Kind = SourceRescued
			}
		}
	}
	return a, until
}

// cancelLate ends a reservation that nobody waits for any more. If that fails its
// tokens go back when its time is over.
func (c *Client) cancelLate(ctx context.Context, key string, call lua.ReserveCall, reply lua.ReserveReply) {
	if !reply.OK {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lateGrace)
	defer cancel()
	if s, err := lua.Settle(ctx, c.store, key, call.ID, 0); err == nil {
		c.stats.returned.Add(s.Returned + s.Clamped)
		c.stats.clamped.Add(s.Clamped)
	}
	c.terms.forgive(key)
}

// Settle ends the reservation id of the bucket, of which used tokens, 0 to
// policy.MaxTokens, were used. What was not used goes back, as far as the bucket has
// room and is in the same era; what was used beyond it is taken from the bucket, and
// what that lacks is forgiven or owed as WithOverrun says. Of a reservation whose
// time is over, which went back, all that was used counts as used beyond it.
//
// It has no degraded mode: while the bucket's server is away it is ErrUnavailable, at
// once if the breaker is open. A reservation that is not settled before its time is
// over goes back as if nothing had been used, so go on trying; what was used is then
// charged by the settlement that arrives, up to policy.HoldMemory later.
//
// Settle it once more and nothing changes: for policy.HoldMemory the answer is that
// of the first time, whatever is said to have been used. So after ErrUnavailable or
// the context's own error it is safe to settle again, and the Client does so itself,
// once, if its connection fails and the deadline leaves time.
//
// The errors are ErrInvalidAmount, ErrInvalidID, ErrNotHeld if nothing is known of
// the id, ErrIDInUse if it is of something else, and those about the bucket.
func (c *Client) Settle(ctx context.Context, key, id string, used int64) (Settlement, error) {
	var s Settlement
	_, err := c.observed(ctx, Call{OpSettle, key, used}, func(ctx context.Context) (Result, error) {
		var err error
		s, err = c.settle(ctx, key, id, used)
		return Result{OK: err == nil}, err
	})
	return s, err
}

func (c *Client) settle(ctx context.Context, key, id string, used int64) (Settlement, error) {
	if err := lua.CheckKey(key); err != nil {
		return Settlement{}, err
	}
	if err := lua.CheckID(id); err != nil {
		return Settlement{}, err
	}
	if err := checkUsed(used); err != nil {
		return Settlement{}, err
	}
	if why := c.breakers.of(key).open(); why != ReasonNone {
		return Settlement{}, shut(why)
	}
	began := time.Now()
	reply, err := twice(ctx, c, c.config.deadline, func(ctx context.Context) (lua.SettleReply, error) {
		reply, err := lua.Settle(ctx, c.store, key, id, used)
		if t := c.templates.of(ctx, key); t != nil && t.Enforce == policy.EnforceLazy && errors.Is(err, lua.ErrUnknownBucket) {
			err = lazyBucket(key, t)
		}
		return reply, err
	}, nil)
	c.note(key, began, err)
	c.terms.forgive(key)
	if err != nil {
		return Settlement{}, err
	}
	if !reply.Again {
		c.stats.clamped.Add(reply.Clamped)
	}
	return Settlement{reply.Settlement, reply.Remaining, reply.Again}, nil
}

func checkUsed(used int64) error {
	if used < 0 || used > policy.MaxTokens {
		return fmt.Errorf("%w: %d tokens used; want 0 to %d", ErrInvalidAmount, used, int64(policy.MaxTokens))
	}
	return nil
}

// Settle ends the reservation as Client.Settle does. A denial is ErrNotHeld. One that
// is in no bucket needs no server: of a degraded mode's share (policy.DegradedLocal)
// what was not used goes back to the share; otherwise nothing happens.
func (r *Reservation) Settle(ctx context.Context, used int64) (Settlement, error) {
	switch {
	case !r.OK:
		return Settlement{}, fmt.Errorf("%w: the reservation of bucket %q was denied", ErrNotHeld, r.Key)
	case r.Source.Kind != SourceFallback && r.Source.Kind != SourceShadow:
		return r.client.Settle(ctx, r.Key, r.ID, used)
	}
	if err := checkUsed(used); err != nil {
		return Settlement{}, err
	}
	s := Settlement{Again: true}
	r.once.Do(func() {
		s.Again = false
		if r.share != nil && used < r.Taken {
			s.Returned = r.Taken - used
			r.share.giveBack(s.Returned)
		}
	})
	return s, nil
}

// Cancel settles the reservation with nothing used. It does nothing if the
// reservation was denied, is settled, or has ended, so that it may be deferred. While
// the bucket's server is away it is ErrUnavailable, as Settle is; the tokens go back
// by themselves when the reservation's time is over.
func (r *Reservation) Cancel(ctx context.Context) error {
	if !r.OK {
		return nil
	}
	if _, err := r.Settle(ctx, 0); !errors.Is(err, ErrNotHeld) {
		return err
	}
	return nil
}

package lua

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// MaxIDLen is the longest id of a reservation or lease, in bytes.
const MaxIDLen = 64

// CheckID returns an error if id can't name a reservation or lease.
func CheckID(id string) error {
	if id == "" || len(id) > MaxIDLen {
		return fmt.Errorf("%w %q: it has %d bytes; want 1 to %d", ErrInvalidID, id, len(id), MaxIDLen)
	}
	return nil
}

// CheckTTL returns an error if tokens can't be held for ttl.
func CheckTTL(ttl time.Duration) error {
	if ttl < policy.MinHold || ttl > policy.MaxHold {
		return fmt.Errorf("%w: %s; want %s to %s", ErrInvalidTTL, ttl, policy.MinHold, policy.MaxHold)
	}
	return nil
}

// ReserveCall is a reservation to make.
type ReserveCall struct {
	ID      string        // of 1 to MaxIDLen bytes, different from all other ids of the bucket
	N       int64         // tokens, as for Take
	TTL     time.Duration // policy.MinHold to policy.MaxHold
	Overrun policy.Overrun
	Leave   policy.Leave
	Flow    Flow // for which flow of the bucket
}

// ReserveReply is the reply to a reservation. It has the reply to the take, whose Now is always set, and the end of the
// reservation.
type ReserveReply struct {
	TakeReply
	Until int64 // Unix µs on the server's clock; 0 if denied
}

// Reserve takes n tokens, all or nothing, and holds them until they are settled or the TTL is over. When the TTL is
// over, the next reservation, settlement, lease or sweep of the bucket returns them. If the same call is sent again
// while the reservation lasts, it takes nothing and gets the same reply.
//
// The errors are those of Take, ErrInvalidID, ErrInvalidTTL, and ErrIDInUse if the id is in use for something else.
func Reserve(ctx context.Context, c Client, key string, call ReserveCall) (ReserveReply, error) {
	if err := checkTake(call.N, call.Leave); err != nil {
		return ReserveReply{}, err
	}
	if err := CheckID(call.ID); err != nil {
		return ReserveReply{}, err
	}
	if err := CheckTTL(call.TTL); err != nil {
		return ReserveReply{}, err
	}
	keys, args, err := call.Flow.append(outstandingKeys(key), []any{call.N, call.TTL.Microseconds(), int64(call.Overrun),
		call.Leave.String()}, key)
	if err != nil {
		return ReserveReply{}, err
	}
	r, code, err := reserveScript.askHeld(ctx, c, keys, call.ID, args, codeDone, codeDenied)
	if IsTryAgain(err) && call.Flow.Divided {
		call.Flow.Divided = false
		return Reserve(ctx, c, key, call)
	}
	if err != nil {
		return ReserveReply{}, err
	}
	if code == codeDenied {
		denied, err := r.denial()
		return ReserveReply{TakeReply: denied}, err
	}
	reply := ReserveReply{TakeReply: TakeReply{OK: true, Taken: call.N, Remaining: r.Int()}, Until: r.Int()}
	reply.Now = r.Int()
	reply.Version.Era = r.Int()
	reply.Terms = r.terms()
	return reply, r.End()
}

// SettleReply is the reply to a settlement.
type SettleReply struct {
	Now       int64 // the call, Unix µs on the server's clock
	Remaining int64
	Again     bool // the reservation was settled before, and this is the reply of that time
	policy.Settlement
}

// Settle ends a reservation with the number of tokens that were used, 0 to policy.MaxTokens. If it is sent again within
// policy.HoldMemory, it changes nothing and gets the same reply, even with another number.
//
// If the reservation was made for a flow, the flow gets back the right that it paid for the returned tokens. If more
// tokens were used than reserved, the flow also pays for the difference.
//
// The errors are ErrInvalidAmount, ErrInvalidID, ErrIDInUse if the id is a lease's, ErrNotHeld, and those about the
// bucket.
func Settle(ctx context.Context, c Client, key, id string, used int64) (SettleReply, error) {
	return settle(ctx, c, key, id, used, false)
}

// SettleDivided is like Settle, for a reservation of a bucket that has flows. It needs one call where Settle needs two.
// For a bucket without flows it needs two calls while a Cluster moves the bucket's slot.
func SettleDivided(ctx context.Context, c Client, key, id string, used int64) (SettleReply, error) {
	return settle(ctx, c, key, id, used, true)
}

func settle(ctx context.Context, c Client, key, id string, used int64, divided bool) (SettleReply, error) {
	if err := checkFrom(0, used); err != nil {
		return SettleReply{}, err
	}
	if err := CheckID(id); err != nil {
		return SettleReply{}, err
	}
	r, err := settleFlow(ctx, c, key, id, used, divided)
	if IsTryAgain(err) {
		err = settleMoving(ctx, c, key, id, err)
	}
	if err != nil {
		return SettleReply{}, err
	}
	reply := SettleReply{Now: r.Int(), Remaining: r.Int(), Again: r.Int() == 1}
	reply.Settlement = policy.Settlement{Returned: r.Int(), Clamped: r.Int(), Void: r.Int(), Charged: r.Int(),
		Owed: r.Int(), Forgiven: r.Int()}
	return reply, r.End()
}

// settleFlow makes the call of a settlement. The call has the keys of the plan if divided is set. Otherwise it is first
// made without them, and again with them if the reply reports that the reservation is a flow's. It doesn't have them
// while a Cluster moves the bucket's slot and the plan is on another server.
func settleFlow(ctx context.Context, c Client, key, id string, used int64, divided bool) (*Reply, error) {
	keys := outstandingKeys(key)
	if divided {
		r, _, err := settleScript.askHeld(ctx, c, append(keys, FlowsKey(key), UseKey(key)), id, []any{used}, codeDone)
		if !IsTryAgain(err) {
			return r, err
		}
	}
	r, code, err := settleScript.askHeld(ctx, c, keys, id, []any{used, flag(divided)}, codeDone, codeOfFlow)
	if err == nil && code == codeOfFlow {
		return settleFlow(ctx, c, key, id, used, true)
	}
	return r, err
}

// settleMoving returns the error of a settlement that a Cluster refused with TRYAGAIN, because the bucket's slot moves
// and one of the keys is missing. If the bucket or the reservation doesn't exist, the error is the one that the script
// would return. To find out, settleMoving reads the keys one by one: a command with one key is redirected to the server
// that has the key.
func settleMoving(ctx context.Context, c Client, key, id string, refused error) error {
	keys := outstandingKeys(key)
	there, err := exists(ctx, c, ControlKey(key))
	switch {
	case err != nil:
		return refused
	case !there:
		return unknown(keys)
	}
	record, err := hget(ctx, c, keys[3], id)
	if err != nil || record != "" {
		return refused
	}
	return fmt.Errorf("%w: %q of bucket %q", ErrNotHeld, id, key)
}

// LeaseCall reports how a consumer used its block of tokens and asks for more.
type LeaseCall struct {
	ID   string // of 1 to MaxIDLen bytes, different for each block
	Seq  int64  // 1 for the block's first call, one more with every further call
	Keep int64  // tokens that the consumer still holds
	Back int64  // tokens that it gives back; the other tokens that it held are spent
	Want int64  // most tokens to add
	TTL  time.Duration
	Flow Flow // whose block it is
}

// LeaseReply is the reply to a LeaseCall.
type LeaseReply struct {
	Now       int64 // the call, Unix µs on the server's clock
	Remaining int64 // in the bucket
	Granted   int64 // added to the block, at most half of the bucket's tokens
	Clamped   int64 // tokens given back that the full bucket could not hold
	Era       int64 // of the bucket, and of all tokens of the block
	Terms     *policy.Terms
}

// Lease takes, renews, gives back or ends a block of tokens. If the last call of a block is sent again, it changes
// nothing and gets the same reply. A block ends when nothing is left in it, or when its time is over. In the second
// case its tokens count as spent, because the consumer may have used them.
//
// The errors are ErrInvalidAmount, ErrInvalidID and ErrInvalidTTL, ErrOtherEra and
// ErrNotHeld if the block has ended, ErrIDInUse, and those about the bucket.
func Lease(ctx context.Context, c Client, key string, call LeaseCall) (LeaseReply, error) {
	for _, n := range []int64{call.Keep, call.Back, call.Want} {
		if err := checkFrom(0, n); err != nil {
			return LeaseReply{}, err
		}
	}
	if err := CheckID(call.ID); err != nil {
		return LeaseReply{}, err
	}
	if err := CheckTTL(call.TTL); err != nil {
		return LeaseReply{}, err
	}
	keys, args, err := call.Flow.append(outstandingKeys(key), []any{call.Seq, call.Keep, call.Back, call.Want,
		call.TTL.Microseconds()}, key)
	if err != nil {
		return LeaseReply{}, err
	}
	r, code, err := leaseScript.askHeld(ctx, c, keys, call.ID, args, codeDone, codeOtherEra)
	if IsTryAgain(err) && call.Flow.Divided {
		call.Flow.Divided = false
		return Lease(ctx, c, key, call)
	}
	if err != nil {
		return LeaseReply{}, err
	}
	if code == codeOtherEra {
		return LeaseReply{Now: r.Int()}, r.fail(fmt.Errorf("%w: %q", ErrOtherEra, key))
	}
	reply := LeaseReply{Now: r.Int(), Remaining: r.Int(), Granted: r.Int(), Clamped: r.Int(), Era: r.Int(),
		Terms: r.terms()}
	if err := r.End(); err != nil {
		return LeaseReply{}, err
	}
	if reply.Terms == nil || reply.Granted < 0 {
		return LeaseReply{}, fmt.Errorf("%w: a lease of %d tokens, or without a policy", ErrBadReply, reply.Granted)
	}
	return reply, nil
}

// SweepResult is the result of a sweep of one bucket, or an error.
type SweepResult struct {
	Now    int64 // the call, Unix µs on the server's clock
	Tokens int64
	policy.Swept
	Outstanding, Due, Debt int64 // as in policy.Control
	Err                    error
}

// Sweep ends reservations and leases whose time is over, in one round trip. most is the largest number of them that it
// ends in each bucket. The results are in the order of the keys.
func Sweep(ctx context.Context, rdb redis.UniversalClient, keys []string, most int) []SweepResult {
	results := make([]SweepResult, len(keys))
	if most < 1 {
		for i := range results {
			results[i].Err = fmt.Errorf("refiller: sweep: %d records; want at least 1", most)
		}
		return results
	}
	cmds, errs := sweepScript.pipelined(ctx, rdb, len(keys),
		func(i int) ([]string, []any) { return outstandingKeys(keys[i]), []any{most} })
	for i, key := range keys {
		if errs[i] != nil {
			results[i].Err = errs[i]
			continue
		}
		r, _, err := open(cmds[i].Val(), outstandingKeys(key), codeDone)
		if err != nil {
			results[i].Err = err
			continue
		}
		results[i] = SweepResult{
			Now: r.Int(), Tokens: r.Int(), Swept: policy.Swept{Returned: r.Int(), Clamped: r.Int(), Void: r.Int(),
				Dropped: r.Int()},
			Outstanding: r.Int(), Due: r.Int(), Debt: r.Int(),
		}
		results[i].Err = r.End()
	}
	return results
}

// SweepOne ends reservations and leases of one bucket whose time is over. most is the largest number of them that it
// ends.
func SweepOne(ctx context.Context, c Client, key string, most int) error {
	return SweepStep(key, most).Do(ctx, c)
}

// SweepStep returns the call of SweepOne.
func SweepStep(key string, most int) *Step {
	keys := outstandingKeys(key)
	return &Step{sweepScript, words(keys, []any{most}), func(v any) error {
		_, _, err := open(v, keys, codeDone)
		return err
	}}
}

// askHeld is like ask, for the scripts of reservations and leases, whose first argument is the id.
func (s *script) askHeld(ctx context.Context, c Client, keys []string, id string, args []any, want ...int64) (*Reply,
	int64, error) {
	want = append(want, codeReused, codeNotHeld)
	r, code, err := s.ask(ctx, c, keys, append([]any{id}, args...), want...)
	if err != nil || code != codeReused && code != codeNotHeld {
		return r, code, err
	}
	err = ErrIDInUse
	if code == codeNotHeld {
		err = ErrNotHeld
	}
	return nil, code, r.fail(fmt.Errorf("%w: %q of bucket %q", err, id, keys[0]))
}

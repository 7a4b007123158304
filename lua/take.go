package lua

import (
	"context"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// Refilled is the state of a bucket's refills at a call that found too few tokens. A consumer that refills the bucket
// itself needs it.
type Refilled struct {
	Version policy.Version
	Last    int64 // the last refill, Unix µs on the server's clock
	Now     int64 // the call, Unix µs on the server's clock
}

// TakeReply is the reply to a take.
type TakeReply struct {
	OK        bool
	Taken     int64
	Remaining int64
	// Wait is set on a denial: the time until the tokens are due. It is negative if they will never be due, or if the
	// bucket has no policy.
	Wait time.Duration
	// Terms is the policy in force; nil if the bucket has none, or if the take
	// fit and didn't ask for it. Its GrantEra is 0 unless a grant is in force.
	Terms *policy.Terms
	// Repeated reports that the tokens were taken by an earlier call of the same request. All fields but Terms are then
	// those of that call.
	Repeated bool
	// Paid is for a take of a flow: the number of tokens for which the flow paid with its right. ReturnPaid gives the
	// right back.
	Paid int64
	Refilled
}

// Take takes n tokens, all or nothing; n is 1 to policy.MaxTokens. If withTerms is set, the reply has the policy even
// if the take fits. A denial is a reply, not an error. The errors are ErrUnknownBucket, ErrMalformedBucket and
// ErrInvalidAmount; then nothing was taken. Take makes a TakesCall.
func Take(ctx context.Context, c Client, key string, n int64, withTerms bool) (TakeReply, error) {
	reply, err := takeRuns(ctx, c, Takes{Key: key, Runs: []policy.Run{{N: n, Count: 1}}, Whole: withTerms,
		Terms: withTerms})
	return reply.one(n), err
}

// TakeUpTo takes as many tokens as there are, up to n. n and the errors are as for Take.
func TakeUpTo(ctx context.Context, c Client, key string, n int64) (TakeReply, error) {
	reply, err := takeRuns(ctx, c, Takes{Key: key, Runs: []policy.Run{{N: 1, Count: n, UpTo: true}}, Whole: true,
		Terms: true})
	one := reply.one(n)
	if err == nil && !reply.OK && reply.Runs[0].Taken > 0 {
		one.OK = true
		one.Taken = reply.Runs[0].Taken
		one.Wait = 0
	}
	return one, err
}

// takeRuns takes from one bucket. If the takes are not Whole, it first makes a call that reads only the tokens. If the
// takes don't fit, it then makes a Whole call.
func takeRuns(ctx context.Context, c Client, takes Takes) (TakesReply, error) {
	var call TakesCall
	for {
		replies, err := call.Do(ctx, c, []Takes{takes})
		switch {
		case err != nil:
			return TakesReply{}, err
		case !replies[0].Missed:
			return replies[0], replies[0].Err
		}
		takes.Whole = true
	}
}

// one returns the reply to a single take of n tokens.
func (r TakesReply) one(n int64) TakeReply {
	reply := TakeReply{OK: r.OK, Remaining: r.Remaining, Terms: r.Terms, Refilled: r.Refilled}
	if r.OK {
		reply.Taken = n
	} else if len(r.Runs) > 0 {
		reply.Wait = r.Runs[0].Wait
	}
	return reply
}

func (r *Reply) denial() (TakeReply, error) {
	reply := TakeReply{Remaining: r.Int(), Wait: micros(r.Int())}
	reply.Refilled = r.refilled()
	reply.Terms = r.terms()
	return reply, r.End()
}

func (r *Reply) refilled() Refilled {
	return Refilled{Version: policy.Version{Era: r.Int(), Index: r.Int()}, Last: r.Int(), Now: r.Int()}
}

// micros converts a number of microseconds to a Duration, as far as a Duration can hold it.
func micros(us int64) time.Duration {
	const most = int64(1<<63-1) / int64(time.Microsecond)
	return time.Duration(min(max(us, -most), most)) * time.Microsecond
}

// ReturnReply is the reply to a return.
type ReturnReply struct {
	Remaining int64
	Clamped   int64 // tokens that the full bucket could not hold
}

// ReturnCall describes the tokens of a return.
type ReturnCall struct {
	N   int64 // as for Take
	Era int64 // in which they were taken; 0 for any
	// Flow is the flow for which the tokens were taken. Paid is the number of tokens for which the flow paid with its
	// right; 0 for none. The flow gets that right back.
	Flow string
	Paid int64
}

// Return gives n tokens back, up to the capacity; n is as for Take. era is the era in which they were taken; 0 for any.
// If the bucket is in another era, nothing is returned and the error is ErrOtherEra.
func Return(ctx context.Context, c Client, key string, n, era int64) (ReturnReply, error) {
	return ReturnPaid(ctx, c, key, ReturnCall{N: n, Era: era})
}

// ReturnPaid is like Return, for tokens for which a flow may have paid with its right. While a Cluster moves the
// bucket's slot and the plan of the flows is on another server, the flow gets no right back.
func ReturnPaid(ctx context.Context, c Client, key string, call ReturnCall) (ReturnReply, error) {
	if err := checkAmount(call.N); err != nil {
		return ReturnReply{}, err
	}
	if call.Paid < 0 || call.Paid > call.N {
		return ReturnReply{}, fmt.Errorf("%w: a flow paid for %d of %d tokens", ErrInvalidAmount, call.Paid, call.N)
	}
	keys, args := bucketKeys(key), []any{call.N, call.Era}
	if call.Paid > 0 {
		keys, args = append(keys, FlowsKey(key)), append(args, call.Flow, call.Paid)
	}
	r, code, err := returnScript.askExisting(ctx, c, keys, args, codeDone, codeOtherEra)
	if IsTryAgain(err) && call.Paid > 0 {
		call.Paid = 0
		return ReturnPaid(ctx, c, key, call)
	}
	if err != nil {
		return ReturnReply{}, err
	}
	reply := ReturnReply{Remaining: r.Int()}
	if code == codeOtherEra {
		return reply, r.fail(fmt.Errorf("%w: %q", ErrOtherEra, key))
	}
	reply.Clamped = r.Int()
	return reply, r.End()
}

// PeekReply is the state of a bucket.
type PeekReply struct {
	Tokens int64
	Wait   time.Duration // until the tokens asked about are due; negative as in TakeReply
	Terms  *policy.Terms // nil if the bucket has no policy
	Carry  int64
	Step   int64 // stepped: the last instant credited, Unix µs
	Next   int64 // stepped: the instant to come, Unix µs

	Outstanding int64 // tokens held in reservations and leases
	Due         int64 // when the first of them ends, Unix µs; 0 if there is none; or policy.Uncounted
	Debt        int64 // tokens that refills pay before they add any

	Lost  bool  // the key of the tokens is missing
	Moved int64 // by how much another program has raised the index
	Refilled
}

// Peek returns the state of the bucket, and the time until n tokens are due. It writes nothing.
func Peek(ctx context.Context, c Client, key string, n int64) (PeekReply, error) {
	r, _, err := peekScript.askExisting(ctx, c, bucketKeys(key), []any{n}, codeDone)
	if err != nil {
		return PeekReply{}, err
	}
	reply := PeekReply{Tokens: r.Int(), Wait: micros(r.Int())}
	reply.Refilled = r.refilled()
	reply.Terms = r.terms()
	reply.Carry = r.Int()
	reply.Step = r.Int()
	reply.Next = r.Int()
	reply.Outstanding = r.Int()
	reply.Due = r.Int()
	reply.Debt = r.Int()
	reply.Lost = r.Int() == 1
	reply.Moved = r.Int()
	return reply, r.End()
}

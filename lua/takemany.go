package lua

import (
	"context"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// RunReply is what became of a run of takes.
type RunReply struct {
	Taken int64         // how many of them were taken: the first ones
	Wait  time.Duration // as in TakeReply, after the last run; 0 if all were taken
}

// TakeManyReply is the answer to several takes.
type TakeManyReply struct {
	OK        bool       // all were taken; Runs is nil and Refilled is not set
	Remaining int64      // after the last
	Runs      []RunReply // in the order of the call
	Terms     *policy.Terms
	Refilled
}

// TakeMany makes several takes of one bucket in one call. The answers are those
// of the same takes made one by one, in the order of the runs: each take is all
// or nothing, and one that doesn't fit leaves the tokens to those behind it. The
// tokens of all takes together are 1 to policy.MaxTokens. withTerms and the
// errors are as for Take.
func TakeMany(ctx context.Context, c Client, key string, runs []policy.Run, withTerms bool) (TakeManyReply, error) {
	return takeMany(ctx, c, key, runs, withTerms, false)
}

// TakeInLine is TakeMany for takes that may not overtake each other: none is made
// behind one that doesn't fit.
func TakeInLine(ctx context.Context, c Client, key string, runs []policy.Run, withTerms bool) (TakeManyReply, error) {
	return takeMany(ctx, c, key, runs, withTerms, true)
}

func takeMany(ctx context.Context, c Client, key string, runs []policy.Run, withTerms, inLine bool) (TakeManyReply, error) {
	total := int64(0)
	args := make([]any, 3, 3+2*len(runs))
	for _, r := range runs {
		if r.N < 1 || r.Count < 1 || r.N > (policy.MaxTokens-total)/r.Count {
			return TakeManyReply{}, fmt.Errorf("%w: %d takes of %d tokens; want at least 1 of each and %d together",
				ErrInvalidAmount, r.Count, r.N, int64(policy.MaxTokens))
		}
		total += r.N * r.Count
		args = append(args, r.N, r.Count)
	}
	if err := checkAmount(total); err != nil {
		return TakeManyReply{}, err
	}
	args[0], args[1], args[2] = total, 0, 0
	if withTerms {
		args[1] = 1
	}
	if inLine {
		args[2] = 1
	}
	v, err := manyScript.run(ctx, c, bucketKeys(key), args...)
	if err != nil {
		return TakeManyReply{}, err
	}
	if left, ok := v.(int64); ok {
		return TakeManyReply{OK: true, Remaining: left}, nil
	}
	r, code, err := open(v, key, codeDone, codeDenied)
	if err != nil {
		return TakeManyReply{}, err
	}
	reply := TakeManyReply{OK: code == codeDone, Remaining: r.int()}
	if reply.OK {
		reply.Terms = r.terms()
		return reply, r.end()
	}
	reply.Refilled = r.refilled()
	reply.Terms = r.terms()
	reply.Runs = r.runs(runs)
	return reply, r.end()
}

package lua

import (
	"context"
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
	reply, err := takeRuns(ctx, c, Takes{Key: key, Runs: runs, InLine: inLine, Whole: withTerms, Terms: withTerms})
	return reply.many(), err
}

// many is the reply to several takes.
func (r TakesReply) many() TakeManyReply {
	return TakeManyReply{OK: r.OK, Remaining: r.Remaining, Runs: r.Runs, Terms: r.Terms, Refilled: r.Refilled}
}

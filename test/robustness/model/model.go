// Package model is the sequential model with which histories are compared. It has one bucket, as package policy defines
// it, and the operations of clients, replicas and faults on the bucket. It is for tests only.
package model

import (
	"fmt"
	"strings"

	"github.com/anishathalye/porcupine"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// State is the state of a bucket. It is comparable. The zero State means that the bucket doesn't exist.
type State struct {
	HasTokens, HasIndex, HasControl bool
	Tokens, Index                   int64
	Control                         policy.Control
}

func (s State) bucket() *policy.Bucket {
	b := &policy.Bucket{}
	if s.HasTokens {
		b.Tokens = &s.Tokens
	}
	if s.HasIndex {
		b.Index = &s.Index
	}
	if s.HasControl {
		b.Control = &s.Control
	}
	return b
}

func stateOf(b *policy.Bucket) State {
	var s State
	if b.Tokens != nil {
		s.HasTokens, s.Tokens = true, *b.Tokens
	}
	if b.Index != nil {
		s.HasIndex, s.Index = true, *b.Index
	}
	if b.Control != nil {
		s.HasControl, s.Control = true, *b.Control
	}
	return s
}

// Input is one operation. Exactly one of its fields is set. It is comparable.
type Input struct {
	Op     *record.Op // the call of a client
	Refill *Refill    // the refill call of a replica
	Lose   string     // the effect of a fault: which of tokens, index and control were lost
}

// Unanswered returns the operation without its answer.
func (in Input) Unanswered() Input {
	if in.Op != nil {
		op := *in.Op
		op.Result = record.Unknown
		in.Op = &op
	}
	if in.Refill != nil {
		refill := *in.Refill
		refill.Want = nil
		in.Refill = &refill
	}
	return in
}

// Refill is a refill call at an instant of the server's clock. Want is nil if the answer never came.
type Refill struct {
	Call policy.Call
	Now  int64
	Want *policy.Outcome
}

// Step applies an operation to a state. It reports whether the model gives the same answer, and returns the new state.
func Step(s State, in Input) (bool, State) {
	b := s.bucket()
	switch {
	case in.Refill != nil:
		// Sweeps are not recorded. No tokens are held in the buckets that the model checks. So a sweep that counts the
		// records of a new bucket only changes Due, and the next answer shows the new Due.
		want := in.Refill.Want
		if want != nil && want.Due == 0 && b.Control != nil && b.Control.Due == policy.Uncounted {
			b.Control.Due = 0
		}
		got := b.Refill(in.Refill.Call, in.Refill.Now)
		return want == nil || got == *want, stateOf(b)
	case in.Op != nil:
		ok := client(b, *in.Op)
		return ok, stateOf(b)
	default:
		for part := range strings.FieldsSeq(in.Lose) {
			switch part {
			case "tokens":
				b.Tokens = nil
			case "index":
				b.Index = nil
			case "control":
				b.Control = nil
			}
		}
		return true, stateOf(b)
	}
}

func client(b *policy.Bucket, op record.Op) bool {
	unknown := op.Result == record.Unknown
	if op.Kind == record.Return {
		clamped, known := b.Return(op.N)
		switch {
		case unknown:
			return true
		case !known:
			return op.Result == record.Missing
		}
		left := int64(0)
		if b.Tokens != nil {
			left = *b.Tokens
		}
		return op.Result == record.Done && clamped == op.Clamped && left == op.Left
	}
	n := op.N
	if op.Kind == record.UpTo && b.Tokens != nil {
		n = max(1, min(n, *b.Tokens))
	}
	had := b.Tokens != nil
	got := b.Take(n, 0)
	if op.Kind == record.UpTo && !had && !got.OK {
		b.Tokens = nil // reading an absent bucket writes nothing
	}
	switch {
	case unknown:
		return true
	case !got.Known:
		return op.Result == record.Missing
	case got.OK:
		return op.Result == record.Done && op.Taken == got.Taken && op.Left == got.Tokens
	}
	if op.Result != record.Denied || op.Left != got.Tokens {
		return false
	}
	if b.Control == nil {
		return op.Era == 0
	}
	index := b.Control.Index
	if b.Index != nil {
		index = *b.Index
	}
	return op.Era == b.Control.Era && op.Index == index && op.Last == b.Control.Last
}

// Model returns the model for the checker.
func Model() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return State{} },
		Step: func(state, input, _ any) (bool, any) { return Step(state.(State), input.(Input)) },
		Hash: func(state any) uint64 {
			s := state.(State)
			return uint64(s.Tokens)*0x9e3779b97f4a7c15 ^ uint64(s.Index)*0xc2b2ae3d27d4eb4f ^ uint64(s.Control.Last)
		},
		DescribeOperation: func(input, _ any) string { return Describe(input.(Input)) },
		DescribeState: func(state any) string {
			s := state.(State)
			return fmt.Sprintf("tokens %d, era %d, index %d, last %d, carry %d", s.Tokens, s.Control.Era, s.Index,
				s.Control.Last, s.Control.Carry)
		},
	}
}

// Describe returns the operation in words.
func Describe(in Input) string {
	switch {
	case in.Refill != nil && in.Refill.Want == nil:
		return fmt.Sprintf("refill (era %d, index %d) at %d → no answer", in.Refill.Call.Version.Era,
			in.Refill.Call.Version.Index, in.Refill.Now)
	case in.Refill != nil:
		return fmt.Sprintf("refill (era %d, index %d) → %s %+v", in.Refill.Call.Version.Era,
			in.Refill.Call.Version.Index, in.Refill.Want.Status, *in.Refill.Want)
	case in.Op != nil:
		return fmt.Sprintf("%s %d → %s, taken %d, left %d", in.Op.Kind, in.Op.N, in.Op.Result, in.Op.Taken, in.Op.Left)
	}
	return "lose " + in.Lose
}

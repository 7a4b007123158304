package verify

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/tokenrefill/refiller/test/robustness/model"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// decideWithin is the time limit of the search for an order of one bucket's calls.
const decideWithin = 30 * time.Second

// maxReaders is the number of replicas whose calls without a write are included in the search. The more calls read the
// same state, the more equivalent orders there are.
const maxReaders = 4

// calls returns the calls before the cut, each with the times of the call and of its answer. A call without an answer
// may be made at any time after it was sent. If it was never made, it is put at the end of the order, where it affects
// no other call.
func (h *bucketHistory) calls() (calls []porcupine.Operation, err error) {
	// add leaves out the answer to a call that ends after the cut, because calls after the cut may have affected it.
	add := func(client int, in model.Input, from, to int64) {
		if from < h.cut {
			if to > h.cut {
				in, to = in.Unanswered(), math.MaxInt64
			}
			calls = append(calls, porcupine.Operation{ClientId: client, Input: in, Call: from, Return: to})
		}
	}
	for i := range h.ops {
		op := &h.ops[i]
		to := op.Return
		if op.Result == record.Unknown {
			to = math.MaxInt64
		}
		add(0, model.Input{Op: op}, op.Call, to)
	}
	readers := map[string]bool{}
	for _, f := range h.refills {
		if f.Outcome == nil {
			continue
		}
		if !f.Outcome.Status.Wrote() {
			if !readers[f.Replica] && len(readers) == maxReaders {
				continue
			}
			readers[f.Replica] = true
		}
		call, err := f.Call()
		if err != nil {
			return nil, err
		}
		add(1, model.Input{Refill: &model.Refill{Call: call, Now: f.Outcome.Now, Want: f.Outcome}}, f.Sent, f.Replied)
	}
	for _, w := range h.writes {
		if w.outcome == nil {
			add(1, model.Input{Refill: &model.Refill{Call: *w.call, Now: w.now}}, w.from, w.to)
		}
	}
	for _, f := range h.faults {
		if f.Effect == record.Lose {
			parts := f.Parts
			if len(parts) == 0 {
				parts = []string{"tokens", "index", "control"}
			}
			add(2, model.Input{Lose: strings.Join(parts, " ")}, f.Start, f.End)
		}
	}
	return calls, nil
}

// checkLinear checks that there is an order of the calls in which the model gives the same answers.
func (h *bucketHistory) checkLinear(r *Result) {
	calls, err := h.calls()
	if err != nil {
		r.violate(Linear, h.bucket.Key, "%v", err)
		return
	}
	if h.cut < math.MaxInt64 {
		r.remark("%s: linearizability is decided for %d calls only: after them the server forgot writes, or no client "+
			"knows the answer of one", h.bucket.Key, len(calls))
	}
	result, info := porcupine.CheckOperationsVerbose(model.Model(), calls, decideWithin)
	switch {
	case result == porcupine.Ok:
		r.Decided++
	case result == porcupine.Unknown:
		r.remark("%s: no order of %d calls found nor excluded within %s", h.bucket.Key, len(calls), decideWithin)
	case h.excused:
		r.remark("%s: no order of %d calls: a write may have come and been lost unseen before a loss", h.bucket.Key,
			len(calls))
	default:
		r.violate(Linear, h.bucket.Key, "no order of %d calls gives these answers; %s", len(calls), stuck(info, calls))
	}
}

// stuck describes where the search for an order stopped: the state after the longest order, and the call that doesn't
// fit.
func stuck(info porcupine.LinearizationInfo, calls []porcupine.Operation) string {
	for _, partial := range info.PartialLinearizationsOperations() {
		var longest []porcupine.Operation
		for _, order := range partial {
			if len(order) > len(longest) {
				longest = order
			}
		}
		state := model.State{}
		for _, c := range longest {
			_, state = model.Step(state, c.Input.(model.Input))
		}
		var next porcupine.Operation
		next.Return = math.MaxInt64
		for _, c := range calls {
			placed := slices.ContainsFunc(longest, func(o porcupine.Operation) bool { return o.Input == c.Input })
			if !placed && c.Return < next.Return {
				next = c
			}
		}
		if next.Input == nil {
			continue
		}
		return fmt.Sprintf("after %d of them the bucket holds %d tokens, era %d, index %d, last %d, carry %d, which "+
			"doesn't go with: %s",
			len(longest), state.Tokens, state.Control.Era, state.Index, state.Control.Last, state.Control.Carry,
			model.Describe(next.Input.(model.Input)))
	}
	return "none begins"
}

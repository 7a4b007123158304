package refill

import (
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill/flow"
)

// FlowsRead is what a replica has read of a bucket's flows with one of its refills. The replica that wins a refill
// reads what was asked for since any replica last read it, so nothing is read twice.
type FlowsRead struct {
	Covered time.Duration // the time in which it was asked for, above 0
	Flows   []FlowUse     // in no order
	flow.Summary
}

// FlowUse is what a flow asked for.
type FlowUse struct {
	Name   string // that of a team, with a slash at its end, for flows that aren't told apart
	Asked  int64  // tokens, taken or denied
	Denied int64  // tokens
	Listed bool   // the plan has a right for it
}

// read is what the replica has read, before the planner is told of it.
func (d *division) readOf(use policy.Use) *FlowsRead {
	read := &FlowsRead{Covered: micros(use.Covered), Flows: make([]FlowUse, 0, len(use.Asked))}
	for name, asked := range use.Asked {
		read.Flows = append(read.Flows, FlowUse{name, asked, use.Denied[name], d.planner.Lists(name)})
	}
	return read
}

// flowsRead is what was read of the flows of the i-th bucket; nil if nothing was.
func (t *trip) flowsRead(i int) *FlowsRead {
	k, divided := slices.BinarySearchFunc(t.divided, i, func(d divided, i int) int { return d.at - i })
	if !divided {
		return nil
	}
	d := t.divided[k].division
	read := d.read
	d.read = nil
	return read
}

package refill

import (
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill/flow"
)

// FlowsRead is the demand of a bucket's flows that a replica has read after one of its refills. It covers the time
// since any replica last read the demand, so no demand is read twice.
type FlowsRead struct {
	Covered time.Duration // the time in which the demand was counted, above 0
	Flows   []FlowUse     // in no order
	flow.Summary
}

// FlowUse is the demand of one flow.
type FlowUse struct {
	Name   string // a flow's; or a team's, with a slash at its end, for its flows that are counted together
	Asked  int64  // tokens, taken or denied
	Denied int64  // tokens
	Listed bool   // the plan has a right for it
}

// readOf returns the demand that was read after a refill. It must be called before the planner observes that demand.
func (d *division) readOf(use policy.Use) *FlowsRead {
	read := &FlowsRead{Covered: micros(use.Covered), Flows: make([]FlowUse, 0, len(use.Asked))}
	for name, asked := range use.Asked {
		read.Flows = append(read.Flows, FlowUse{name, asked, use.Denied[name], d.planner.Lists(name)})
	}
	return read
}

// flowsRead returns the demand that was read of the i-th bucket's flows, and forgets it; nil if there is none.
func (t *trip) flowsRead(i int) *FlowsRead {
	k, divided := slices.BinarySearchFunc(t.divided, i, func(d divided, i int) int { return d.index - i })
	if !divided {
		return nil
	}
	d := t.divided[k].division
	read := d.read
	d.read = nil
	return read
}

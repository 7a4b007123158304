package refill

import (
	"context"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill/flow"
)

// division is the state with which a replica divides a bucket among its flows. The replica that wins a refill reads the
// demand of the flows. It also writes a plan, which it computed from the demand of earlier reads.
type division struct {
	flows   *policy.Flows
	pooled  bool        // the bucket is a pool's, whose rate and capacity come with its terms
	about   flow.Bucket // the capacity, rate and interval by which it plans
	planner *flow.Planner
	next    policy.Plan    // the plan to write with the next refill
	base    policy.Version // of the last plan that this replica wrote
	listAll bool           // the plan after next lists all flows
	err     error          // why the last plan could not be written
	read    *FlowsRead     // the demand that was read with the last plan; nil for none, or after it was reported
}

// newDivision returns the division of a bucket with the policy; nil if it has no flows.
func newDivision(p policy.Policy, terms *policy.Terms) *division {
	if p.Flows == nil {
		return nil
	}
	d := &division{flows: p.Flows, about: flow.Bucket{
		Capacity: p.Capacity, Rate: p.Rate.PerSecond(), Interval: micros(terms.Interval),
	}}
	d.begin()
	return d
}

// begin forgets the demand of the flows. The plan in force stays until the demand has been read.
func (d *division) begin() {
	d.planner = flow.New(d.flows)
	d.next = d.planner.Plan(true, d.about)
	d.listAll = true
}

// continues returns the division to use after a change of the configuration. It is old, if that divides the same bucket
// in the same way; otherwise it is d.
func (d *division) continues(old *division) *division {
	if d == nil || old == nil || !d.flows.Equal(old.flows) || d.pooled != old.pooled || !d.pooled && d.about != old.about {
		return d
	}
	return old
}

// follow makes the division of a pool's bucket use the terms that are in force in an era, at an instant of the server's
// clock. It returns false if the rate is 0, so that there is nothing to divide.
func (d *division) follow(t *policy.Terms, era, now int64) bool {
	tokens := t.Tokens
	if t.Granted(era, now) {
		tokens = t.GrantTokens
	}
	if tokens == 0 {
		return false
	}
	d.about = flow.Bucket{
		Capacity: t.Capacity, Rate: policy.Rate{Tokens: tokens, Per: micros(t.Per)}.PerSecond(), Interval: micros(t.Interval),
	}
	if d.planner == nil {
		d.begin()
	}
	return true
}

// apply applies the reply to a plan that was sent after a refill, at an instant of the server's clock. The plan may not
// have been written, because another replica wrote the last one, or because the plan in Redis was lost. Then the next
// plan lists all flows, by the demand that this replica knows. Otherwise replicas that win refills in turn could never
// write a plan.
func (d *division) apply(version policy.Version, at int64, r *lua.PlanResult) {
	d.err = r.Err
	if r.Err != nil || r.Stale {
		d.listAll = true
		d.planner.Missed(at, d.about)
	} else {
		d.base = version
	}
	if r.Use.Covered > 0 {
		d.read = d.readOf(r.Use)
		d.planner.Observe(r.Use, at, d.about)
	}
	d.next = d.planner.Plan(d.listAll, d.about)
	d.listAll = d.next.Kept
	if d.read != nil {
		d.read.Summary = d.planner.Summary()
	}
}

// divided is a bucket of a trip that has flows.
type divided struct {
	index    int // in the trip
	division *division
}

// plan writes the plans of the buckets that the trip refilled under the policy of this replica.
func (t *trip) plan(ctx context.Context, s store) {
	var calls []lua.PlanCall
	var planned []divided
	for _, d := range t.divided {
		r, call := &t.results[d.index], &t.calls[d.index]
		if !d.division.planned(call.Terms, r) {
			continue
		}
		plan := d.division.next
		plan.Version = r.Version
		planned = append(planned, d)
		calls = append(calls, lua.PlanCall{Key: call.Key, Plan: plan, Base: d.division.base})
	}
	if len(calls) == 0 {
		return
	}
	for i, r := range s.plan(ctx, calls) {
		planned[i].division.apply(calls[i].Plan.Version, t.results[planned[i].index].Now, &r)
	}
}

// planned reports whether a plan is to be sent after a refill. The refill must have written, and the terms of the call
// must be in force. For a pool's bucket it is enough that terms of a pool are in force, and that no replica has sent a
// later version of the pools: the terms have no flows, and the later version may divide the bucket in another way.
func (d *division) planned(terms *policy.Terms, r *lua.RefillResult) bool {
	if r.Err != nil || !r.Status.Wrote() || terms == nil {
		return false
	}
	if d.pooled {
		return r.Pool && terms.PoolsVersion >= r.PoolsVersion && d.follow(terms, r.Version.Era, r.Now)
	}
	return !r.Differs && r.Fence == terms.Fence
}

// warnUndivided adds a warning if a bucket can't be divided among its flows. undivided reports whether the last attempt
// failed; then the warning was given already.
func warnUndivided(to *notices, key string, d *division, undivided *bool) {
	failed := d != nil && d.err != nil && ownFault(d.err)
	if failed && !*undivided {
		to.add(hclog.Warn, "bucket can't be divided among its flows", "bucket", key, "error", d.err)
	}
	*undivided = failed
}

func micros(us int64) time.Duration { return time.Duration(us) * time.Microsecond }

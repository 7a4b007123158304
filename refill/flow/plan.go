package flow

import (
	"math"
	"strconv"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// Planner plans how one bucket is divided. It serves one goroutine at a time.
type Planner struct {
	flows   *policy.Flows
	root    *team
	teams   map[string]*team   // by their names, including the root
	known   map[string]*member // flows that are counted separately
	dropped []string           // flows of the last plan that are not known any more
	seen    float64            // the weight of all that was observed: 0 before, 1 after a long time
	until   int64              // the end of the time that was observed or missed so far; µs of the server's clock
	unread  int                // plans since the demand was last read
}

// New returns a planner without observations.
func New(flows *policy.Flows) *Planner {
	root := &team{name: policy.RootTeam}
	return &Planner{flows: flows, root: root, teams: map[string]*team{policy.RootTeam: root}, known: map[string]*member{}}
}

// Bucket has the numbers of a bucket that its plan depends on.
type Bucket struct {
	Capacity int64
	Rate     float64 // tokens per second
	Interval time.Duration
}

const (
	// The floor is the number of tokens of intervalsOfFloor intervals, and at least leastFloor.
	intervalsOfFloor = 1.5
	leastFloor       = 10
	leastUnlisted    = 5
	// contended is the part of the rate up to which demand is low. Then there are enough tokens for all flows, so no
	// tokens are kept for flows that ask for little. A flow that is alone may take all tokens of the bucket at once.
	contended = 0.5
	// intervalsOfSpan is the number of intervals for which a flow saves its right. intervalsOfPlan is the number of
	// intervals that a plan lasts.
	intervalsOfSpan = 2
	leastSpan       = time.Second
	intervalsOfPlan = 5
	leastLasts      = 2 * time.Second
	// fieldsOfFlow is the number of counters of a flow: for the tokens that it asked for, and for those of them that were
	// denied.
	fieldsOfFlow = 2
	// enough is the weight of observations from which a planner makes its own plan. It is reached after a seventh of a
	// half-life.
	enough = 0.1
	// namesOfRead is the number of names that can be read with each refill. If there are more, they are read less often.
	namesOfRead = 1000
)

// Floor returns the number of tokens that a flow without a right must leave in a bucket. These are the tokens of 1.5
// intervals, but at least the headroom and at least ten tokens. They are at most three quarters of the capacity.
func Floor(flows *policy.Flows, b Bucket) int64 {
	least := max(int64(math.Ceil(intervalsOfFloor*b.Rate*b.Interval.Seconds())),
		flows.HeadroomOf(b.Capacity), leastFloor)
	return min(least, b.Capacity-b.Capacity/4)
}

// Plan returns the next plan: all of it if whole is set, otherwise the changes since the last one. A planner with too
// few observations keeps the plan in force, and only makes the script return the demand.
func (p *Planner) Plan(whole bool, b Bucket) policy.Plan {
	floor := Floor(p.flows, b)
	demand := p.root.sum()
	level := p.root.levelAt(b.Rate)
	plan := policy.Plan{
		Whole: whole, Kept: p.seen < enough, Floor: floor, Most: fieldsOfFlow * p.flows.Most,
		Unlisted: min(max(leastUnlisted, int64(math.Ceil(level))), floor/2),
		Span:     max(leastSpan, intervalsOfSpan*b.Interval).Microseconds(),
		Lasts:    max(leastLasts, intervalsOfPlan*b.Interval).Microseconds(),
	}
	if !plan.Kept && demand <= contended*b.Rate {
		plan.Floor = 0
	}
	p.root.share(b.Rate, level, demand, float64(plan.Unlisted)/b.Interval.Seconds())
	p.root.rest = 0
	p.unread++
	if p.unread*namesOfRead >= len(p.known) {
		plan.Read = true
		p.unread = 0
	}
	p.root.list(whole, &plan)
	if !whole {
		plan.Dropped = append(plan.Dropped, p.dropped...)
	}
	p.dropped = nil
	return plan
}

// list adds the team, and the teams and flows in it, to a plan.
func (t *team) list(whole bool, plan *policy.Plan) {
	listed := false
	for _, m := range t.members {
		if m.team != nil {
			m.team.list(whole, plan)
			continue
		}
		listed = listed || m.listed
		switch {
		case m.listed && (whole || !m.planned):
			plan.Listed = append(plan.Listed, policy.PlannedFlow{Name: m.name, Weight: m.weight, Took: m.last})
		case !m.listed && m.planned && !whole:
			plan.Dropped = append(plan.Dropped, m.name)
		}
		m.planned = m.listed
	}
	planned := t.rest > 0 || listed || t.name == policy.RootTeam
	if planned {
		plan.Teams = append(plan.Teams, policy.PlannedTeam{Name: t.name, Price: price(t.level), Rest: price(t.rest)})
	} else if t.planned && !whole {
		plan.Dropped = append(plan.Dropped, t.name)
	}
	t.planned = planned
}

// price returns the time in which a level gives one token, in µs; 0 for none. It is rounded to the digits that
// FormatPrice writes.
func price(level float64) float64 {
	if level <= 0 {
		return 0
	}
	price, _ := strconv.ParseFloat(policy.FormatPrice(1e6/level), 64) // the text is a valid number
	return price
}

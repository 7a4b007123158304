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
	teams   map[string]*team   // by their names, root among them
	known   map[string]*member // flows that are counted separately
	dropped []string           // flows of the last plan that are not known any more
	seen    float64            // the weight of all that was observed: 0 before, 1 after a long time
	until   int64              // what was asked for until then is observed or missed; µs of the server's clock
	unread  int                // plans since what was asked for was read
}

// New returns a planner that has seen nothing.
func New(flows *policy.Flows) *Planner {
	root := &team{name: policy.RootTeam}
	return &Planner{flows: flows, root: root, teams: map[string]*team{policy.RootTeam: root}, known: map[string]*member{}}
}

// Bucket is what a plan has to know of its bucket.
type Bucket struct {
	Capacity int64
	Rate     float64 // tokens per second
	Interval time.Duration
}

const (
	// intervalsOfFloor is how many intervals' tokens the floor is, and leastFloor how many tokens it is at least.
	intervalsOfFloor = 1.5
	leastFloor       = 10
	leastUnlisted    = 5
	// contended is the part of the rate up to which nothing is kept for flows that ask for little: there is enough for
	// all, and a flow that is alone may take all that the bucket holds at once.
	contended = 0.5
	// intervalsOfSpan is for how many intervals a flow saves its right, and intervalsOfPlan how many a plan lasts.
	intervalsOfSpan = 2
	leastSpan       = time.Second
	intervalsOfPlan = 5
	leastLasts      = 2 * time.Second
	// fieldsOfFlow is how many numbers are counted for a flow: what it asked for, and what of it was denied.
	fieldsOfFlow = 2
	// enough is the weight from which on what was observed is planned by: a seventh of a half-life.
	enough = 0.1
	// namesOfRead is how many names are read with each refill; if there are more they are read less often.
	namesOfRead = 1000
)

// Floor returns what a flow without a right leaves in a bucket: the tokens of 1.5 intervals, at least the headroom and
// ten tokens, at most three quarters of the capacity.
func Floor(flows *policy.Flows, b Bucket) int64 {
	least := max(int64(math.Ceil(intervalsOfFloor*b.Rate*b.Interval.Seconds())),
		flows.HeadroomOf(b.Capacity), leastFloor)
	return min(least, b.Capacity-b.Capacity/4)
}

// Plan returns the next plan, whole or what has changed since the last one. A planner that has seen too little leaves
// the plan that is there as it is, and has what was asked for read.
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

// price returns the time in which a level gives one token, in µs; 0 for none. It is the number that its text has.
func price(level float64) float64 {
	if level <= 0 {
		return 0
	}
	price, _ := strconv.ParseFloat(policy.FormatPrice(1e6/level), 64) // it doesn't fail
	return price
}

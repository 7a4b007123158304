package flow

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

const (
	shortestHalfLife = 2 * time.Second
	longestHalfLife  = 10 * time.Minute
	// intervalsOfHalfLife is the least number of refill intervals in a half-life. tokensOfHalfLife is the number of tokens
	// that each flow could get within a half-life.
	intervalsOfHalfLife = 10
	tokensOfHalfLife    = 5
)

// halfLife returns the time in which an observation loses half of its weight.
func halfLife(flows int, b Bucket) time.Duration {
	each := longestHalfLife
	if s := tokensOfHalfLife * float64(flows) / b.Rate; s < longestHalfLife.Seconds() {
		each = time.Duration(s * float64(time.Second))
	}
	return max(shortestHalfLife, intervalsOfHalfLife*b.Interval, each)
}

// hidden is the factor by which the demand of a flow exceeds the tokens that it asked for, if some of these were
// denied. Part of the demand is hidden, because clients remember a denial and ask for nothing meanwhile. Without the
// factor, the demand of a flow that gets less than its part would appear to be no higher than what the flow gets.
const hidden = 1.25

// Observe records how many tokens the flows asked for in a period, and how many of these were denied. The period has
// the length use.Covered, which is above 0, and ended at the instant at, in µs of the server's clock. If the period
// began after the last observation ended, the time between them counts as missed.
func (p *Planner) Observe(use policy.Use, at int64, b Bucket) {
	covered := time.Duration(use.Covered) * time.Microsecond
	fresh := 1 - p.kept(use.Covered, b)
	p.weigh(p.kept(at-use.Covered-p.until, b) * (1 - fresh))
	p.until = at
	p.seen += fresh
	for name, n := range use.Asked {
		rate := fresh * float64(n) / covered.Seconds()
		if use.Denied[name] > 0 {
			rate *= hidden
		}
		if isTeam(name) {
			t := p.teamOf(name)
			t.asked += rate
			t.seen(at)
			continue
		}
		m := p.flowOf(name)
		m.in.seen(at)
		m.asked += rate
		m.last = n
		m.periods++
	}
	p.forget()
	for _, t := range p.teams {
		t.unnamed = t.asked / p.seen
		for _, m := range t.members {
			m.demand = m.asked / p.seen
		}
	}
}

// Missed records that this planner doesn't know the demand until an instant: another replica read it, or none did.
// Earlier observations lose weight, as they do with a new observation. An instant before the last one costs no weight.
func (p *Planner) Missed(until int64, b Bucket) {
	p.weigh(p.kept(until-p.until, b))
	p.until = until
}

// kept returns the part of its weight that an observation still has after a time in µs. It returns 1 for a time below
// 0.
func (p *Planner) kept(time int64, b Bucket) float64 {
	return math.Exp2(-float64(max(0, time)) / float64(halfLife(len(p.known), b).Microseconds()))
}

// weigh multiplies the weight of all observations by part.
func (p *Planner) weigh(part float64) {
	p.seen *= part
	for _, t := range p.teams {
		t.asked *= part
		for _, m := range t.members {
			m.asked *= part
			m.last = 0
		}
	}
}

// forgotten is a part of the level. A flow that asks for nothing any more is dropped when its demand is below that
// part.
const forgotten = 0.01

// forget drops the flows that ask for the fewest tokens, so that at most p.flows.Most remain. Their demand then counts
// for their teams. Of the teams without flows, at most the same number remain.
func (p *Planner) forget() {
	for _, t := range p.teams {
		least := forgotten * t.level * p.seen
		t.drop(p, func(m *member) bool { return m.last == 0 && m.asked < least*float64(m.weight) })
	}
	if excess := len(p.known) - int(p.flows.Most); excess > 0 {
		rates := make([]float64, 0, len(p.known))
		for _, m := range p.known {
			rates = append(rates, m.asked)
		}
		slices.Sort(rates)
		most := rates[excess-1]
		for _, t := range p.teams {
			t.drop(p, func(m *member) bool { return m.asked <= most })
		}
	}
	p.dropTeams()
}

// drop drops the flows of a team for which goes returns true.
func (t *team) drop(p *Planner, goes func(*member) bool) {
	t.members = slices.DeleteFunc(t.members, func(m *member) bool {
		if m.team != nil || !goes(m) {
			return false
		}
		t.asked += m.asked
		if m.planned {
			p.dropped = append(p.dropped, m.name)
		}
		delete(p.known, m.name)
		return true
	})
}

// dropTeams drops the teams without members that ask for next to nothing. If too many remain, it drops those that ask
// for the fewest tokens.
func (p *Planner) dropTeams() {
	empty := make([]*team, 0)
	for _, t := range p.teams {
		if len(t.members) == 0 && t != p.root {
			empty = append(empty, t)
		}
	}
	slices.SortFunc(empty, func(a, b *team) int {
		return cmp.Or(cmp.Compare(b.asked, a.asked), cmp.Compare(a.name, b.name))
	})
	gone := map[*team]bool{}
	above := map[*team]bool{}
	for i, t := range empty {
		if i < int(p.flows.Most) && t.asked >= forgotten*forgotten*t.level*p.seen {
			continue
		}
		gone[t] = true
		above[t.up] = true
		t.up.asked += t.asked
		if t.planned {
			p.dropped = append(p.dropped, t.name)
		}
		delete(p.teams, t.name)
	}
	for up := range above {
		up.members = slices.DeleteFunc(up.members, func(m *member) bool { return gone[m.team] })
	}
}

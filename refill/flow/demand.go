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
	// intervalsOfHalfLife is how many refill intervals a half-life has at least, and tokensOfHalfLife how many tokens each
	// flow could take in it.
	intervalsOfHalfLife = 10
	tokensOfHalfLife    = 5
)

// halfLife returns the time in which what was observed loses half of its weight.
func halfLife(flows int, b Bucket) time.Duration {
	each := longestHalfLife
	if s := tokensOfHalfLife * float64(flows) / b.Rate; s < longestHalfLife.Seconds() {
		each = time.Duration(s * float64(time.Second))
	}
	return max(shortestHalfLife, intervalsOfHalfLife*b.Interval, each)
}

// hidden is how much more a flow wants than it asked for, as a factor, if some of that was denied: its clients remember
// denials, and ask for nothing meanwhile. Otherwise a flow that gets less than its part would be taken to want no more.
const hidden = 1.25

// Observe reports what the flows asked for, and what of it was denied, in a time above 0. The time ended at an instant,
// in µs of the server's clock. If it began after the last observation ended, the time between was missed.
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

// Missed reports that another replica, or none, read what was asked for until an instant. What was observed before
// loses weight, as it does when something is observed. An instant before the last one costs no weight.
func (p *Planner) Missed(until int64, b Bucket) {
	p.weigh(p.kept(until-p.until, b))
	p.until = until
}

// kept returns the part of its weight that an observation keeps for a time in µs, all of it for a time below 0.
func (p *Planner) kept(time int64, b Bucket) float64 {
	return math.Exp2(-float64(max(0, time)) / float64(halfLife(len(p.known), b).Microseconds()))
}

// weigh has all that was observed count for a part of what it did.
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

// forgotten is the part of the level below which the demand of a flow is forgotten once it asks for nothing.
const forgotten = 0.01

// forget drops the flows that ask for least, so that not too many names remain. What they ask for counts for their
// teams. As many teams without flows may remain.
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

// drop drops the flows of a team that are to go.
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
// for least.
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

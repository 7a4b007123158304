package flow

import (
	"strings"

	"github.com/tokenrefill/refiller/policy"
)

// member is a flow, or a team, within a team.
type member struct {
	name   string
	weight int64
	demand float64 // tokens per second
	listed bool    // it asks for more than half of its part
	team   *team   // nil for a flow
	in     *team   // to which it belongs

	// Of a flow.
	asked   float64 // what it asked for, tokens per second, each at its weight
	last    int64   // tokens asked for in the last period
	periods int     // in which it asked for some
	planned bool    // the last plan lists it
}

// team is those of a bucket's flows that share a part of it.
type team struct {
	name    string
	up      *team // nil of the root
	members []*member
	asked   float64 // the sum of the flows that are counted together, as asked of a member
	unnamed float64 // their demand
	level   float64 // tokens per second that a member of weight 1 may have
	rest    float64 // tokens per second for flows that aren't listed; 0 for no rest
	planned bool    // the last plan has the team
	active  int64   // when the last period ended in which its flows asked for something; µs of the server's clock
	periods int     // in which they did
}

// seen counts that flows of a team asked for something in the period that ended at an instant, once for each period.
func (t *team) seen(at int64) {
	for ; t != nil && (t.active != at || t.periods == 0); t = t.up {
		t.active = at
		t.periods++
	}
}

// teamOf returns the team of a name, and makes it and those above it.
func (p *Planner) teamOf(name string) *team {
	if t := p.teams[name]; t != nil {
		return t
	}
	t := &team{name: name, up: p.teamOf(above(name))}
	p.teams[name] = t
	t.up.members = append(t.up.members, &member{name: name, team: t, in: t.up, weight: p.flows.WeightOf(name, t.up.name)})
	return t
}

// flowOf returns a flow, and makes it.
func (p *Planner) flowOf(name string) *member {
	if m := p.known[name]; m != nil {
		return m
	}
	teams := policy.TeamsOf(name)
	t := p.teamOf(teams[len(teams)-1])
	m := &member{name: name, in: t, weight: p.flows.WeightOf(name, t.name)}
	t.members = append(t.members, m)
	p.known[name] = m
	return m
}

// isTeam reports whether a name is that of a team.
func isTeam(name string) bool { return strings.HasSuffix(name, "/") }

// above returns the team of a team.
func above(name string) string {
	if i := strings.LastIndexByte(name[:len(name)-1], '/'); i >= 0 {
		return name[:i+1]
	}
	return policy.RootTeam
}

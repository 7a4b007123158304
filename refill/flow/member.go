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
	in     *team   // the team to which it belongs

	// Of a flow.
	asked   float64 // tokens per second that it asked for, each observation at its weight
	last    int64   // tokens asked for in the last period
	periods int     // number of periods in which it asked for tokens
	planned bool    // the last plan lists it
}

// team is a group of a bucket's flows that share a part of the bucket.
type team struct {
	name    string
	up      *team // the team above; nil for the root
	members []*member
	asked   float64 // the sum for the flows that are counted together; in units of member.asked
	unnamed float64 // the demand of these flows
	level   float64 // tokens per second that a member of weight 1 may have
	rest    float64 // tokens per second for flows that aren't listed; 0 for no rest
	planned bool    // the last plan has the team
	active  int64   // end of the last period in which its flows asked for tokens; µs of the server's clock
	periods int     // number of such periods
}

// seen counts a period in which flows of a team, and so of the teams above, asked for tokens. The period ended at the
// instant at. Each period counts once.
func (t *team) seen(at int64) {
	for ; t != nil && (t.active != at || t.periods == 0); t = t.up {
		t.active = at
		t.periods++
	}
}

// teamOf returns the team with a name. It makes the team and those above if they don't exist.
func (p *Planner) teamOf(name string) *team {
	if t := p.teams[name]; t != nil {
		return t
	}
	t := &team{name: name, up: p.teamOf(above(name))}
	p.teams[name] = t
	t.up.members = append(t.up.members, &member{name: name, team: t, in: t.up, weight: p.flows.WeightOf(name, t.up.name)})
	return t
}

// flowOf returns the flow with a name. It makes the flow if it doesn't exist.
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

// above returns the name of the team above a team.
func above(name string) string {
	if i := strings.LastIndexByte(name[:len(name)-1], '/'); i >= 0 {
		return name[:i+1]
	}
	return policy.RootTeam
}

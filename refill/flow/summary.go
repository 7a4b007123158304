package flow

// Summary has the numbers of a planner about the flows of its bucket.
type Summary struct {
	Seen   int     // flows that are counted separately
	Listed int     // flows that the last plan lists
	Level  float64 // tokens per second that the last plan gives to a flow, or team, of weight 1
}

// Summary returns the numbers of the planner about the flows.
func (p *Planner) Summary() Summary {
	s := Summary{Seen: len(p.known), Level: p.root.level}
	for _, m := range p.known {
		if m.planned {
			s.Listed++
		}
	}
	return s
}

// Lists reports whether the last plan lists a flow.
func (p *Planner) Lists(name string) bool {
	m := p.known[name]
	return m != nil && m.planned
}

package flow

// Level returns the part of the rate that a flow of weight 1 may have, in tokens per second, by the last plan.
func (p *Planner) Level() float64 { return p.root.level }

// Teams returns the number of known teams. The root, which has all flows, doesn't count.
func (p *Planner) Teams() int { return len(p.teams) - 1 }

// Counts returns how many flows are counted separately, and how many of them the last plan lists.
func (p *Planner) Counts() (known, listed int) {
	for _, m := range p.known {
		if m.planned {
			listed++
		}
	}
	return len(p.known), listed
}

package pool

import (
	"math"

	"github.com/tokenrefill/refiller/policy"
)

// Divide returns the rate of each region, in tokens per second, after a change of demand or of settings is complete. A
// coordinator aims at these rates. demand has the demand of the regions that are alive, in tokens per second. silent
// has the floors of regions that don't report: such a region keeps that floor or its new one, whichever is more. All
// other regions use nothing.
func (p Pool) Divide(demand, silent map[string]float64) map[string]float64 {
	u := p.unit()
	shares, rest := map[string]float64{}, u.total
	var live []policy.Claimant
	for i, part := range p.parts() {
		region := p.Regions[i].Name
		shares[region] = 0
		if d, alive := demand[region]; alive {
			wants := int64(math.Round(min(u.units(d), float64(u.total))))
			live = append(live, part.claimant(region, wants, part.ceiling))
		} else if had, ok := silent[region]; ok {
			keeps := max(part.floor, int64(math.Round(u.units(had))))
			shares[region] = u.perSecond(keeps)
			rest -= keeps
		}
	}
	for i, n := range policy.Allocate(max(0, rest), live) {
		shares[live[i].Name] = u.perSecond(n)
	}
	return shares
}

// Floors returns what the regions may always use, in tokens per second.
func (p Pool) Floors() map[string]float64 {
	u, floors := p.unit(), map[string]float64{}
	for i, part := range p.parts() {
		floors[p.Regions[i].Name] = u.perSecond(part.floor)
	}
	return floors
}

// claimant returns the claimant of a region that could use demand and may get at most most; 0 for no limit.
func (p part) claimant(region string, demand, most int64) policy.Claimant {
	return policy.Claimant{Name: region, Weight: p.weight, Floor: p.floor, Demand: demand, Ceiling: most}
}

package pool

import (
	"math"

	"github.com/tokenrefill/refiller/policy"
)

// Divide returns the rate at which a coordinator aims for each region. All rates are in tokens per second. demand has
// the demand of each region that is alive. silent has the floor of each region that doesn't report. Such a region keeps
// this floor, or its floor in p if that is higher. A region in neither map has rate 0.
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

// Floors returns the floor of each region, in tokens per second.
func (p Pool) Floors() map[string]float64 {
	u, floors := p.unit(), map[string]float64{}
	for i, part := range p.parts() {
		floors[p.Regions[i].Name] = u.perSecond(part.floor)
	}
	return floors
}

// claimant returns the region's input for policy.Allocate. The region could use the rate demand, and may get up to
// most; 0 means no limit.
func (p part) claimant(region string, demand, most int64) policy.Claimant {
	return policy.Claimant{Name: region, Weight: p.weight, Floor: p.floor, Demand: demand, Ceiling: most}
}

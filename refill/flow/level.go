package flow

import (
	"math"

	"github.com/tokenrefill/refiller/policy"
)

const (
	// listedFrom is a fraction. A flow is listed if its demand exceeds that fraction of its part of the rate, or of what
	// an unlisted flow gets, whichever is less.
	listedFrom = 0.5
	// periodsOfListed is the number of periods in which a flow, or a team, must have asked for tokens before the plan
	// lists it. Otherwise names that are invented for one take would fill the plan.
	periodsOfListed = 2
	// leastRest is the least part of a team's rate that its unlisted flows have together.
	leastRest = 0.01
)

// sum returns the demand of all members together, and sets the demands of the teams among them.
func (t *team) sum() float64 {
	sum := t.unnamed
	for _, m := range t.members {
		if m.team != nil {
			m.demand = m.team.sum()
		}
		sum += m.demand
	}
	return sum
}

// share divides a rate at a level among the members. demand is what they ask for together. unlisted is the number of
// tokens per second that an unlisted flow gets, whatever its weight. share lists the members that ask for more than
// half of their part or of unlisted, whichever is less.
func (t *team) share(rate, level, demand, unlisted float64) {
	t.level = level
	left := rate
	for _, m := range t.members {
		part := t.level * float64(m.weight)
		m.listed = m.demand > listedFrom*min(part, unlisted) && (m.team != nil || m.periods >= periodsOfListed)
		if m.team != nil {
			m.team.share(part, m.team.levelAt(part), m.demand, unlisted)
		}
		if m.listed {
			left -= min(m.demand, part)
		}
	}
	t.rest = 0
	if demand > listedFrom*rate && t.periods >= periodsOfListed {
		t.rest = max(left, leastRest*rate)
	}
}

// unitsOfRate is the number of units into which a rate is divided. It is high, so that even the slowest buckets are
// divided exactly.
const unitsOfRate = 1 << 40

// levelAt returns the level at which the demands add up to a rate. The demand that is largest in proportion to its
// weight counts as unlimited. The flows that are counted together ask for less than their part. So they are served
// first, but get no more than half of the rate.
func (t *team) levelAt(rate float64) float64 {
	bounds := make([]policy.Bounds, 0, len(t.members)+1)
	largest := -1
	for i, m := range t.members {
		bounds = append(bounds, policy.Bounds{Weight: m.weight, Most: units(m.demand, rate)})
		if largest < 0 || m.demand*float64(t.members[largest].weight) > t.members[largest].demand*float64(m.weight) {
			largest = i
		}
	}
	if largest < 0 {
		return rate
	}
	bounds[largest].Most = unitsOfRate
	bounds = append(bounds, policy.Bounds{Weight: policy.MaxWeight, Most: units(min(t.unnamed, rate/2), rate)})
	num, den, reached := policy.Level(unitsOfRate, bounds)
	if !reached { // no other flow has a demand
		return rate / float64(t.members[largest].weight)
	}
	return float64(num) / float64(den) / unitsOfRate * rate
}

// units returns a demand in units of the rate, at most all of it.
func units(demand, rate float64) int64 {
	return int64(math.Min(demand/rate, 1) * unitsOfRate)
}

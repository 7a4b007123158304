package pool

import (
	"cmp"
	"math/bits"
	"slices"
)

// Claimant is a region as allocation sees it. All rates are whole numbers of one unit, from 0 to policy.MaxTokens.
type Claimant struct {
	Name    string // distinct; decides between equals
	Weight  int64  // 1 to MaxWeight
	Floor   int64  // what it gets in any case
	Demand  int64  // what it could use
	Ceiling int64  // the most it may get, at least the floor; 0 for no ceiling
}

// MaxWeight is the largest weight of a region.
const MaxWeight = 1_000_000

// Allocate divides total among the claimants and returns their shares in the order of the claimants.
//
// Everyone gets the floor. If the demands fit, everyone gets the demand and a part of what is spare, by weight. If they
// don't, rates are levelled: nobody has less than the demand while another has more for its weight, floors aside. The
// shares add up to total, unless ceilings leave a rest; floors that don't fit into total are levelled as demands are.
//
// Whole units go where the next one raises the level least, and not to the largest remainders: with these, more demand
// of one region can bring another a unit more, here it never does.
func Allocate(total int64, claimants []Claimant) []int64 {
	n := len(claimants)
	floors := make([]bounds, n)
	wants := make([]bounds, n)
	rooms := make([]bounds, n)
	var allFloors, allWants int64
	for i, c := range claimants {
		ceiling := c.Ceiling
		if ceiling <= 0 {
			ceiling = max(total, c.Floor)
		}
		want := min(max(c.Floor, c.Demand), max(ceiling, c.Floor), max(total, c.Floor))
		floors[i] = bounds{name: c.Name, weight: c.Weight, hi: c.Floor}
		wants[i] = bounds{name: c.Name, weight: c.Weight, lo: c.Floor, hi: want}
		rooms[i] = bounds{name: c.Name, weight: c.Weight, hi: max(0, ceiling-want)}
		allFloors += c.Floor
		allWants += want
	}
	switch {
	case allFloors >= total:
		return fill(total, floors)
	case allWants >= total:
		return fill(total, wants)
	}
	shares := fill(total-allWants, rooms)
	for i := range shares {
		shares[i] += wants[i].hi
	}
	return shares
}

// bounds of one share: it rises with the level in proportion to the weight, from lo to hi.
type bounds struct {
	name           string
	weight, lo, hi int64
}

// fill finds the level at which clamp(⌊level·weight⌋, lo, hi) adds up to total, and hands the units that rounding
// leaves over to those whose next unit comes at the lowest level. It expects Σlo ≤ total, and returns the his if their
// sum is below total.
//
// With x(level) never falling, a higher hi of one share can only lower the level
// at which total is reached, so no other share rises.
func fill(total int64, all []bounds) []int64 {
	shares := make([]int64, len(all))
	var most int64
	for i, b := range all {
		shares[i] = b.hi
		most += b.hi
	}
	if most <= total {
		return shares
	}
	num, den := level(total, all)
	rest := total
	for i, b := range all {
		shares[i] = min(max(mulDiv(num, b.weight, den), b.lo), b.hi)
		rest -= shares[i]
	}
	for ; rest > 0; rest-- { // less than a unit for each share
		shares[nextToRise(all, shares)]++
	}
	return shares
}

// nextToRise is the share whose next unit comes at the lowest level; some share is below its hi.
func nextToRise(all []bounds, shares []int64) int {
	first := -1
	for i, b := range all {
		if shares[i] == b.hi {
			continue
		}
		if first < 0 || cmp.Or(compareFractions(shares[i]+1, b.weight, shares[first]+1, all[first].weight),
			cmp.Compare(b.name, all[first].name)) < 0 {
			first = i
		}
	}
	return first
}

// level is the fraction at which clamp(level·weight, lo, hi) adds up to total, without rounding; Σlo ≤ total < Σhi. It
// goes through the levels at which a share starts or stops rising, in order.
func level(total int64, all []bounds) (num, den int64) {
	type turn struct{ at, weight, rising int64 } // at/weight is the level
	turns := make([]turn, 0, 2*len(all))
	var still, rising int64 // units of shares that stand still; weight of those that rise
	for _, b := range all {
		still += b.lo
		if b.hi > b.lo {
			turns = append(turns, turn{b.lo, b.weight, 1}, turn{b.hi, b.weight, -1})
		}
	}
	slices.SortFunc(turns, func(a, b turn) int { return compareFractions(a.at, a.weight, b.at, b.weight) })
	for _, t := range turns {
		// total reached before this turn: still + rising·level = total
		if rising > 0 && compareFractions(total-still, rising, t.at, t.weight) <= 0 {
			break
		}
		still -= t.rising * t.at
		rising += t.rising * t.weight
	}
	return total - still, max(rising, 1)
}

// compareFractions compares a/b with c/d, of which none is negative and b and d are positive.
func compareFractions(a, b, c, d int64) int {
	hi1, lo1 := bits.Mul64(uint64(a), uint64(d))
	hi2, lo2 := bits.Mul64(uint64(c), uint64(b))
	return cmp.Or(cmp.Compare(hi1, hi2), cmp.Compare(lo1, lo2))
}

// mulDiv is ⌊a·b/c⌋, at most the largest int64; a and b aren't negative, c is positive.
func mulDiv(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi >= uint64(c) {
		return 1<<63 - 1
	}
	n, _ := bits.Div64(hi, lo, uint64(c))
	return int64(min(n, 1<<63-1))
}

// mulDivUp is ⌈a·b/c⌉.
func mulDivUp(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	lo, carry := bits.Add64(lo, uint64(c-1), 0)
	hi += carry
	if hi >= uint64(c) {
		return 1<<63 - 1
	}
	n, _ := bits.Div64(hi, lo, uint64(c))
	return int64(min(n, 1<<63-1))
}

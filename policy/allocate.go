package policy

import (
	"cmp"
	"math/bits"
	"slices"
)

// Claimant is one of those among whom Allocate divides a rate, such as a region of a pool. All rates are whole numbers
// of one unit, from 0 to MaxTokens.
type Claimant struct {
	Name    string // distinct; decides between equals
	Weight  int64  // 1 to MaxWeight
	Floor   int64  // what it gets in any case
	Demand  int64  // what it could use
	Ceiling int64  // the most it may get, at least the floor; 0 for no ceiling
}

// MaxWeight is the largest weight of a claimant.
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
	floors := make([]Bounds, n)
	wants := make([]Bounds, n)
	rooms := make([]Bounds, n)
	var allFloors, allWants int64
	for i, c := range claimants {
		ceiling := c.Ceiling
		if ceiling <= 0 {
			ceiling = max(total, c.Floor)
		}
		want := min(max(c.Floor, c.Demand), max(ceiling, c.Floor), max(total, c.Floor))
		floors[i] = Bounds{Name: c.Name, Weight: c.Weight, Most: c.Floor}
		wants[i] = Bounds{Name: c.Name, Weight: c.Weight, Least: c.Floor, Most: want}
		rooms[i] = Bounds{Name: c.Name, Weight: c.Weight, Most: max(0, ceiling-want)}
		allFloors += c.Floor
		allWants += want
	}
	switch {
	case allFloors >= total:
		return MaxMin(total, floors)
	case allWants >= total:
		return MaxMin(total, wants)
	}
	shares := MaxMin(total-allWants, rooms)
	for i := range shares {
		shares[i] += wants[i].Most
	}
	return shares
}

// Bounds are those of one share: it rises with the level in proportion to the weight, from Least to Most. All are whole
// numbers of one unit, from 0 to MaxTokens; the weight is from 1 to MaxWeight.
type Bounds struct {
	Name                string // distinct; decides between equals
	Weight, Least, Most int64
}

// MaxMin divides total by weighted max-min and returns the shares in the order of their bounds. It finds the level at
// which clamp(⌊level·weight⌋, least, most) adds up to total, and hands the units that rounding leaves over to those
// whose next unit comes at the lowest level. The sum of all Least must not exceed total. If that of all Most is less,
// each share is its Most.
//
// With x(level) never falling, a higher Most of one share can only lower the level
// at which total is reached, so no other share rises.
func MaxMin(total int64, all []Bounds) []int64 {
	shares := make([]int64, len(all))
	var most int64
	for i, b := range all {
		shares[i] = b.Most
		most += b.Most
	}
	if most <= total {
		return shares
	}
	num, den := level(total, all)
	rest := total
	for i, b := range all {
		shares[i] = min(max(MulDiv(num, b.Weight, den), b.Least), b.Most)
		rest -= shares[i]
	}
	for ; rest > 0; rest-- { // less than a unit for each share
		shares[nextToRise(all, shares)]++
	}
	return shares
}

// nextToRise is the share whose next unit comes at the lowest level; some share is below its most.
func nextToRise(all []Bounds, shares []int64) int {
	first := -1
	for i, b := range all {
		if shares[i] == b.Most {
			continue
		}
		if first < 0 || cmp.Or(compareFractions(shares[i]+1, b.Weight, shares[first]+1, all[first].Weight),
			cmp.Compare(b.Name, all[first].Name)) < 0 {
			first = i
		}
	}
	return first
}

// level is the fraction at which clamp(level·weight, least, most) adds up to total, without rounding; Σleast ≤ total <
// Σmost. It goes through the levels at which a share starts or stops rising, in order.
func level(total int64, all []Bounds) (num, den int64) {
	type turn struct{ at, weight, rising int64 } // at/weight is the level
	turns := make([]turn, 0, 2*len(all))
	var still, rising int64 // units of shares that stand still; weight of those that rise
	for _, b := range all {
		still += b.Least
		if b.Most > b.Least {
			turns = append(turns, turn{b.Least, b.Weight, 1}, turn{b.Most, b.Weight, -1})
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

// MulDiv is ⌊a·b/c⌋, at most the largest int64; a and b aren't negative, c is positive.
func MulDiv(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi >= uint64(c) {
		return 1<<63 - 1
	}
	n, _ := bits.Div64(hi, lo, uint64(c))
	return int64(min(n, 1<<63-1))
}

package policy

import (
	"cmp"
	"container/heap"
	"math/bits"
	"slices"
)

// Claimant gets a part of the rate that Allocate divides. A region of a pool is a claimant. All rates are whole numbers
// of one unit, from 0 to MaxTokens.
type Claimant struct {
	Name    string // different for each claimant; decides between equals
	Weight  int64  // 1 to MaxWeight
	Floor   int64  // the rate that it gets in any case
	Demand  int64  // the rate that it could use
	Ceiling int64  // the highest rate that it may get, at least the floor; 0 for no ceiling
}

// MaxWeight is the largest weight of a claimant.
const MaxWeight = 1_000_000

// Allocate divides total among the claimants and returns their shares in the order of the claimants.
//
// Every claimant gets its floor. The rest depends on the demands:
//
//   - If the demands together fit into total, every claimant gets its demand and, by weight, a part of the rest.
//   - If they don't fit, rates are levelled. If a claimant gets less than its demand, no other claimant gets more in
//     proportion to its weight, unless its floor requires it.
//   - If not even the floors fit, they are levelled in the same way.
//
// The shares add up to total, unless ceilings leave a rest.
//
// Rounding leaves units over. Each of them goes to the claimant whose next unit comes at the lowest level, and not to
// the largest remainder. With largest remainders, more demand of one region could bring another region a unit more.
// Here it never does.
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

// Bounds limit one share of a division. The share rises with the level in proportion to its weight, from Least to Most.
// Least and Most are whole numbers of one unit, from 0 to MaxTokens. The weight is from 1 to MaxWeight.
type Bounds struct {
	Name                string // different for each share; decides between equals
	Weight, Least, Most int64
}

// MaxMin divides total by weighted max-min and returns the shares in the order of their bounds. It finds the level at
// which clamp(⌊level·weight⌋, least, most) adds up to total. The units that rounding leaves over go to the shares whose
// next unit comes at the lowest level. The sum of all Least must not exceed total. If the sum of all Most is less than
// total, each share is its Most.
//
// No share falls when the level rises. So a higher Most of one share can only lower the level at which total is
// reached, and no other share rises by it.
func MaxMin(total int64, all []Bounds) []int64 {
	shares := make([]int64, len(all))
	num, den, reached := Level(total, all)
	if !reached {
		for i, b := range all {
			shares[i] = b.Most
		}
		return shares
	}
	rest := total
	for i, b := range all {
		shares[i] = min(max(MulDiv(num, b.Weight, den), b.Least), b.Most)
		rest -= shares[i]
	}
	handOut(rest, all, shares)
	return shares
}

// handOut adds rest units to the shares, one by one. Each unit goes to the share whose next unit comes at the lowest
// level. There are fewer units than shares, and the shares together have room for them.
func handOut(rest int64, all []Bounds, shares []int64) {
	if rest == 0 {
		return
	}
	rising := &risers{all: all, shares: shares}
	for i := range all {
		if shares[i] < all[i].Most {
			rising.first = append(rising.first, i)
		}
	}
	heap.Init(rising)
	for ; rest > 0; rest-- {
		i := rising.first[0]
		shares[i]++
		if shares[i] < all[i].Most {
			heap.Fix(rising, 0)
		} else {
			heap.Pop(rising)
		}
	}
}

// risers is a heap of the shares that may rise. The first one is the share whose next unit comes at the lowest level.
type risers struct {
	all    []Bounds
	shares []int64
	first  []int
}

func (r *risers) Len() int { return len(r.first) }

func (r *risers) Less(i, j int) bool {
	a := r.first[i]
	b := r.first[j]
	return cmp.Or(compareFractions(r.shares[a]+1, r.all[a].Weight, r.shares[b]+1, r.all[b].Weight),
		cmp.Compare(r.all[a].Name, r.all[b].Name)) < 0
}

func (r *risers) Swap(i, j int) { r.first[i], r.first[j] = r.first[j], r.first[i] }
func (r *risers) Push(i any)    { r.first = append(r.first, i.(int)) }

func (r *risers) Pop() any {
	last := len(r.first) - 1
	i := r.first[last]
	r.first = r.first[:last]
	return i
}

// Level returns the level, as a fraction, at which clamp(level·weight, least, most) adds up to total without rounding.
// reached is false if all Most together don't exceed total, so that there is no such level. The sum of all Least must
// not exceed total.
func Level(total int64, all []Bounds) (num, den int64, reached bool) {
	var still, most, rising int64 // units of the shares that don't rise, sum of all Most, weight of the shares that rise
	turns := make([]turn, 0, 2*len(all))
	for _, b := range all {
		most += b.Most
		switch {
		case b.Most == b.Least:
			still += b.Least
			continue
		case b.Least > 0:
			still += b.Least
			turns = append(turns, turn{b.Least, b.Weight, 1})
		default:
			rising += b.Weight
		}
		turns = append(turns, turn{b.Most, b.Weight, -1})
	}
	if most <= total {
		return 0, 0, false
	}
	slices.SortFunc(turns, compareTurns)
	for _, t := range turns {
		// total is reached before this turn, at the level for which still + rising·level = total
		if rising > 0 && compareFractions(total-still, rising, t.at, t.weight) <= 0 {
			break
		}
		still -= t.rising * t.at
		rising += t.rising * t.weight
	}
	return total - still, max(rising, 1), true
}

// turn is a level, at ÷ weight, at which a share starts or stops rising.
type turn struct{ at, weight, rising int64 }

func compareTurns(a, b turn) int {
	if a.weight == b.weight {
		return cmp.Compare(a.at, b.at)
	}
	return compareFractions(a.at, a.weight, b.at, b.weight)
}

// compareFractions compares a/b with c/d. a and c must not be negative, and b and d must be positive.
func compareFractions(a, b, c, d int64) int {
	hi1, lo1 := bits.Mul64(uint64(a), uint64(d))
	hi2, lo2 := bits.Mul64(uint64(c), uint64(b))
	return cmp.Or(cmp.Compare(hi1, hi2), cmp.Compare(lo1, lo2))
}

// MulDiv returns ⌊a·b/c⌋, at most the largest int64; a and b aren't negative, c is positive.
func MulDiv(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi >= uint64(c) {
		return 1<<63 - 1
	}
	n, _ := bits.Div64(hi, lo, uint64(c))
	return int64(min(n, 1<<63-1))
}

package policy

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// three returns claimants eu, us and ap with the given demands. Their weights are 2, 1 and 1, and their floors 200, 100
// and 100.
func three(eu, us, ap int64) []Claimant {
	return []Claimant{
		{Name: "eu", Weight: 2, Floor: 200, Demand: eu},
		{Name: "us", Weight: 1, Floor: 100, Demand: us},
		{Name: "ap", Weight: 1, Floor: 100, Demand: ap},
	}
}

func TestAllocateKnownAnswers(t *testing.T) {
	ceiling := func(c []Claimant, name string, most int64) []Claimant {
		for i := range c {
			if c[i].Name == name {
				c[i].Ceiling = most
			}
		}
		return c
	}
	for _, test := range []struct {
		name  string
		total int64
		in    []Claimant
		want  []int64
	}{
		// No demand: the floors add up to 400, and the rest, 600, is divided 2:1:1.
		{"idle", 1000, three(0, 0, 0), []int64{500, 250, 250}},
		// Demands and floors add up to 500+150+100 = 750. The rest, 250, is divided 2:1:1 into 125, 62.5 and 62.5. The odd
		// unit goes to the first claimant by name.
		{"demands fit", 1000, three(500, 150, 50), []int64{625, 212, 163}},
		{"demands fit exactly", 1000, three(600, 200, 200), []int64{600, 200, 200}},
		// All ask for more than they get, so the total is divided by weight.
		{"every claimant gets less than its demand", 1000, three(2000, 2000, 2000), []int64{500, 250, 250}},
		// ap gets its floor, 100. The other 900 are levelled 2:1.
		{"one claimant with a low demand", 1000, three(2000, 2000, 10), []int64{600, 300, 100}},
		// us gets its demand, 150. eu and ap share 850 as 2:1, which gives 566.67 and 283.33 at the level 283.33. eu's next
		// unit (567) comes at the level 283.5, and ap's (284) at 284.
		{"rounding", 1000, three(2000, 150, 2000), []int64{567, 150, 283}},
		// The floors add up to the total, so the demands have no effect.
		{"floors take all", 400, three(2000, 2000, 2000), []int64{200, 100, 100}},
		// The total is one below the sum of the floors. The level is 99.75: eu gets 199, us and ap get 99. The next units of
		// all three come at the level 100. So the two units that are left go to ap and eu, the first two by name.
		{"floors don't fit", 399, three(0, 0, 0), []int64{200, 99, 100}},
		// eu stops at its ceiling, 450. The rest, 1000 − 450 − 100 − 100 = 350, goes to us and ap.
		{"ceiling", 1000, ceiling(three(900, 0, 0), "eu", 450), []int64{450, 275, 275}},
		// All have ceilings, so that only 700 of 1000 are divided.
		{"a part stays undivided", 1000, ceiling(ceiling(ceiling(three(900, 900, 900), "eu", 300), "us", 200), "ap", 200),
			[]int64{300, 200, 200}},
		{"alone", 1000, []Claimant{{Name: "eu", Weight: 7, Floor: 10}}, []int64{1000}},
		{"no claimants", 1000, nil, []int64{}},
		{"a total of zero", 0, three(5, 5, 5), []int64{0, 0, 0}},
		// Three equal claimants share 10. The first one by name gets 4.
		{"equals", 10, []Claimant{{Name: "c", Weight: 1, Demand: 99}, {Name: "a", Weight: 1, Demand: 99},
			{Name: "b", Weight: 1, Demand: 99}}, []int64{3, 4, 3}},
		// The weights are 1000 and 1. The level 10/1001 gives 9.99 and 0.0099. The tenth unit of b comes at the level 0.010,
		// and the first unit of a at 1.
		{"very different weights", 10, []Claimant{{Name: "a", Weight: 1, Demand: 99}, {Name: "b", Weight: 1000, Demand: 99}},
			[]int64{0, 10}},
		{"large numbers", 1 << 50, []Claimant{{Name: "a", Weight: MaxWeight, Demand: 1 << 50},
			{Name: "b", Weight: MaxWeight, Demand: 1 << 50}}, []int64{1 << 49, 1 << 49}},
	} {
		t.Run(test.name, func(t *testing.T) { require.Equal(t, test.want, Allocate(test.total, test.in)) })
	}
}

// drawClaimants draws claimants and a total into which their floors fit. Some draws have small numbers, so that many
// are equal.
func drawClaimants(t *rapid.T) (int64, []Claimant) {
	most := rapid.SampledFrom([]int64{12, 1000, 1_000_000, 1 << 50}).Draw(t, "size")
	total := rapid.Int64Range(1, most).Draw(t, "total")
	list := make([]Claimant, rapid.IntRange(1, 8).Draw(t, "regions"))
	left := total
	for i := range list {
		list[i] = Claimant{
			Name:   fmt.Sprint("r", i),
			Weight: rapid.SampledFrom([]int64{1, 1, 2, 3, 10, 997, MaxWeight}).Draw(t, "weight"),
			Floor:  rapid.Int64Range(0, left/2).Draw(t, "floor"),
			Demand: rapid.Int64Range(0, 2*total).Draw(t, "demand"),
		}
		left -= list[i].Floor
		if rapid.IntRange(0, 4).Draw(t, "limited") == 0 {
			list[i].Ceiling = list[i].Floor + rapid.Int64Range(1, total).Draw(t, "ceiling")
		}
	}
	return total, list
}

// checkAllocation checks what holds for every allocation whose floors fit.
func checkAllocation(t require.TestingT, total int64, list []Claimant, shares []int64) {
	var sum, most int64
	for i, c := range list {
		require.GreaterOrEqual(t, shares[i], c.Floor, "%v: floor of %v", shares, c)
		ceiling := total
		if c.Ceiling > 0 {
			ceiling = min(c.Ceiling, total)
			require.LessOrEqual(t, shares[i], c.Ceiling, "%v: ceiling of %v", shares, c)
		}
		sum += shares[i]
		most += ceiling
	}
	require.Equal(t, min(total, most), sum, "%v of %+v", shares, list)
}

func TestAllocateIsExactAndKeepsFloorsAndCeilings(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		total, list := drawClaimants(t)
		checkAllocation(t, total, list, Allocate(total, list))
	})
}

func TestAllocateIsFair(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		total, list := drawClaimants(t)
		shares := Allocate(total, list)
		for i, c := range list {
			if want := max(c.Floor, c.Demand); shares[i] >= want || c.Ceiling > 0 && shares[i] >= c.Ceiling {
				continue
			}
			for j, other := range list {
				if shares[j] <= other.Floor {
					continue
				}
				// c got less than its demand. So the last unit of the other claimant came at no higher level than c's next unit
				// would.
				require.LessOrEqual(t, compareFractions(shares[j], other.Weight, shares[i]+1, c.Weight), 0,
					"%v has too little in comparison with %v: %v", c, other, shares)
			}
		}
	})
}

func TestRaisingOneDemandNeverRaisesAnotherShare(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		total, list := drawClaimants(t)
		before := Allocate(total, list)
		i := rapid.IntRange(0, len(list)-1).Draw(t, "who")
		list[i].Demand += rapid.Int64Range(1, total).Draw(t, "more")
		after := Allocate(total, list)
		for j := range list {
			if j == i {
				require.GreaterOrEqual(t, after[j], before[j])
			} else {
				require.LessOrEqual(t, after[j], before[j], "share %d of %+v: %v, then %v", j, list, before, after)
			}
		}
	})
}

func TestAllocateDoesNotDependOnTheOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		total, list := drawClaimants(t)
		want := map[string]int64{}
		for i, s := range Allocate(total, list) {
			want[list[i].Name] = s
		}
		shuffled := slices.Clone(list)
		rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "order"), 0)).Shuffle(len(shuffled),
			func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		for i, s := range Allocate(total, shuffled) {
			require.Equal(t, want[shuffled[i].Name], s, shuffled[i].Name)
		}
	})
}

func TestAllocateDoesNotDependOnTheScale(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		total, list := drawClaimants(t)
		if total > 1_000_000 {
			return
		}
		before := Allocate(total, list)
		k := rapid.Int64Range(2, 1000).Draw(t, "factor")
		heavier, larger := slices.Clone(list), slices.Clone(list)
		for i := range list {
			heavier[i].Weight *= k
			larger[i].Floor *= k
			larger[i].Demand *= k
			larger[i].Ceiling *= k
		}
		require.Equal(t, before, Allocate(total, heavier), "only the ratio of weights counts")
		// The unit of the rates makes a difference only because shares are whole numbers of it.
		for i, s := range Allocate(k*total, larger) {
			require.InDelta(t, k*before[i], s, float64(k*int64(len(list))), "%+v", list)
		}
	})
}

func FuzzAllocate(f *testing.F) {
	f.Add(uint64(1000), []byte("two regions of eight bytes: about"))
	f.Add(uint64(1), []byte{})
	f.Fuzz(func(t *testing.T, total uint64, data []byte) {
		limit := int64(total % (1 << 50))
		var list []Claimant
		left := limit
		for len(data) >= 8 && len(list) < 100 {
			n := binary.LittleEndian.Uint64(data)
			data = data[8:]
			c := Claimant{Name: fmt.Sprint(len(list)), Weight: 1 + int64(n%MaxWeight), Demand: int64(n % (1 << 50))}
			if left > 0 {
				c.Floor = int64(n>>20) % (left/2 + 1)
			}
			if n>>60 == 0 {
				c.Ceiling = c.Floor + int64(n%1000) + 1
			}
			left -= c.Floor
			list = append(list, c)
		}
		checkAllocation(t, limit, list, Allocate(limit, list))
	})
}

func BenchmarkAllocate(b *testing.B) {
	list := make([]Claimant, 50)
	for i := range list {
		list[i] = Claimant{Name: fmt.Sprint(i), Weight: int64(1 + i%7), Floor: 1000, Demand: int64(20_000 + 997*i%40_000)}
	}
	b.ReportAllocs()
	for b.Loop() {
		Allocate(1_000_000, list)
	}
}

func BenchmarkMaxMin(b *testing.B) {
	for _, n := range []int{1000, 10_000} {
		all := make([]Bounds, n)
		for i := range all {
			all[i] = Bounds{Name: fmt.Sprint(i), Weight: int64(1 + i%7), Most: int64(20_000 + 997*i%40_000)}
		}
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				MaxMin(int64(10_000*n), all)
			}
		})
	}
}

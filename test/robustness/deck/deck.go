// Package deck has the deployments from which random schedules draw. They are a deck of cards, each with a value for
// every dimension. Within a deck, every possible pair of values of two dimensions occurs on a card. So schedules for
// all cards of a deck try all pairs. Independent draws would leave out some pairs. The package doesn't plan the faults:
// see package schedule.
package deck

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
)

// Dimension is a property in which deployments differ.
type Dimension struct {
	Name   string
	Values []string
}

// The dimensions. Each constant is the index of the dimension on a card.
const (
	Redis     = iota // the kind of servers, and the fault that strikes them
	Distance         // the round-trip time from replicas and consumers to Redis
	Replicas         // the number of replicas
	Election         // how the replica that refills is chosen
	Files            // the replicas' versions of the configuration
	Consumers        // how tokens are taken
)

// Values of the dimensions that other packages need by name.
const (
	Race    = "race"
	Elected = "elected"

	Equal  = "equal"  // all replicas have the same file
	Older  = "older"  // the first replica has an older file than the others; if there is an election, it leads
	Newer  = "newer"  // while all replicas run, one reads a later file with other policies
	Raised = "raised" // while all replicas run, one reads the same file with a higher version

	SDK     = "sdk"     // by the SDK and its scripts
	Sidecar = "sidecar" // through one pool of connections to the sidecar
	Plain   = "plain"   // by the SDK, and by DECR and INCR of programs that don't use this project
)

// Dimensions are all dimensions.
var Dimensions = []Dimension{
	Redis: {"redis", []string{"single killed", "single frozen", "sentinel killed", "sentinel frozen",
		"cluster killed", "cluster frozen", "cluster moved"}},
	Distance:  {"distance", []string{"0s", "5ms", "20ms", "60ms", "150ms"}},
	Replicas:  {"replicas", []string{"1", "2", "3"}},
	Election:  {"election", []string{Race, Elected}},
	Files:     {"files", []string{Equal, Older, Newer, Raised}},
	Consumers: {"consumers", []string{SDK, Sidecar, Plain}},
}

// Card is a deployment. It has a value for each dimension.
type Card []string

func (c Card) String() string { return strings.Join(c, ", ") }

// Cell is a pair of values of different dimensions, in the order of the dimensions.
type Cell struct{ A, B Value }

// Value is a value of a dimension.
type Value struct {
	Dimension int
	Value     string
}

func (v Value) String() string { return Dimensions[v.Dimension].Name + " " + v.Value }

func (c Cell) String() string { return fmt.Sprintf("%s with %s", c.A, c.B) }

// possible reports whether the two values of a cell can occur together. A single replica can't have an older file than
// the others.
func (c Cell) possible() bool {
	return c != Cell{Value{Replicas, "1"}, Value{Files, Older}}
}

// Cells returns the cells of a card.
func (c Card) Cells() (cells []Cell) {
	for i := range c {
		for j := i + 1; j < len(c); j++ {
			cells = append(cells, Cell{Value{i, c[i]}, Value{j, c[j]}})
		}
	}
	return cells
}

// possible reports whether all values of the card can occur together.
func (c Card) possible() bool {
	return !slices.ContainsFunc(c.Cells(), func(cell Cell) bool { return !cell.possible() })
}

// Cells has all possible cells.
var Cells = func() (cells []Cell) {
	for i, a := range Dimensions {
		for j := i + 1; j < len(Dimensions); j++ {
			for _, x := range a.Values {
				for _, y := range Dimensions[j].Values {
					if cell := (Cell{Value{i, x}, Value{j, y}}); cell.possible() {
						cells = append(cells, cell)
					}
				}
			}
		}
	}
	return cells
}()

// Size is the number of cards of a deck.
const Size = 48

// Of returns the card of a seed. The Size seeds from a multiple of Size on have the cards of one deck.
func Of(seed uint64) Card { return deal(seed / Size)[seed%Size] }

// Fills reports whether the n seeds from first on include all seeds of a deck.
func Fills(first uint64, n int) bool {
	skipped := (Size - first%Size) % Size
	return uint64(n) >= skipped+Size
}

var dealt sync.Map // decks by their numbers

// deal returns the deck with a number. It draws decks until one has all cells.
func deal(number uint64) []Card {
	if cards, ok := dealt.Load(number); ok {
		return cards.([]Card)
	}
	for try := uint64(0); ; try++ {
		rng := rand.New(rand.NewPCG(number, try))
		if cards, whole := draw(rng); whole {
			rng.Shuffle(len(cards), func(i, j int) { cards[i], cards[j] = cards[j], cards[i] })
			dealt.Store(number, cards)
			return cards
		}
	}
}

// candidates is the number of cards from which draw chooses one. With more candidates, fewer cards would be needed for
// all cells.
const candidates = 10

// draw makes a deck card by card. Each time it chooses the candidate with the most cells that are still missing. It
// reports whether the deck has all cells.
func draw(rng *rand.Rand) (cards []Card, whole bool) {
	missing := map[Cell]bool{}
	for _, cell := range Cells {
		missing[cell] = true
	}
	for range Size {
		open := slices.DeleteFunc(slices.Clone(Cells), func(cell Cell) bool { return !missing[cell] })
		var best Card
		most := -1
		for range candidates {
			c := candidate(rng, missing, open)
			n := 0
			for _, cell := range c.Cells() {
				if missing[cell] {
					n++
				}
			}
			if n > most {
				best, most = c, n
			}
		}
		for _, cell := range best.Cells() {
			delete(missing, cell)
		}
		cards = append(cards, best)
	}
	return cards, len(missing) == 0
}

// candidate draws a card. The card begins with a random one of the open cells, which no card has yet, if there are any.
// Then each other dimension, in random order, gets the value that adds the most missing cells.
func candidate(rng *rand.Rand, missing map[Cell]bool, open []Cell) Card {
	c := make(Card, len(Dimensions))
	if len(open) > 0 {
		cell := open[rng.IntN(len(open))]
		c[cell.A.Dimension] = cell.A.Value
		c[cell.B.Dimension] = cell.B.Value
	}
	for _, i := range rng.Perm(len(Dimensions)) {
		if c[i] == "" {
			c.complete(i, rng, missing)
		}
	}
	return c
}

// complete gives the card a value of dimension i: the one that adds the most missing cells to the values that the card
// has. The value must be possible together with them.
func (c Card) complete(i int, rng *rand.Rand, missing map[Cell]bool) {
	most := -1
	for _, k := range rng.Perm(len(Dimensions[i].Values)) {
		with := slices.Clone(c)
		with[i] = Dimensions[i].Values[k]
		n := 0
		for _, cell := range with.Cells() {
			if missing[cell] {
				n++
			}
		}
		if n > most && with.possible() {
			c[i], most = with[i], n
		}
	}
}

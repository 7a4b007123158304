package deck_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/test/robustness/deck"
)

func TestEachDeckHasEveryCell(t *testing.T) {
	t.Parallel()
	for _, first := range []uint64{0, deck.Size, 17 * deck.Size, 1 << 40 / deck.Size * deck.Size} {
		require.True(t, deck.Fills(first, deck.Size))
		require.False(t, deck.Fills(first+1, deck.Size), "the seeds belong to two decks")
		require.True(t, deck.Fills(first+1, 2*deck.Size-1))
		met := map[deck.Cell]int{}
		for i := range uint64(deck.Size) {
			card := deck.Of(first + i)
			require.Equal(t, card, deck.Of(first+i), "a seed has one card")
			for _, cell := range card.Cells() {
				met[cell]++
			}
		}
		for _, cell := range deck.Cells {
			require.Positive(t, met[cell], "seed %d: no card has %s", first, cell)
		}
		require.Len(t, met, len(deck.Cells), "no card has an unknown cell")
	}
}

package dev

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
)

// refillsAt makes refills of one era at these milliseconds, with the indexes 1, 2, 3 ...
func refillsAt(ms ...int64) []refilled {
	list := make([]refilled, len(ms))
	for i, at := range ms {
		list[i] = refilled{version: policy.Version{Era: 7, Index: int64(i + 1)}, at: at * 1000}
	}
	return list
}

func TestTheGapIsTheLongestPauseAroundTheInstant(t *testing.T) {
	t.Parallel()
	otherEra := refillsAt(0, 100, 310, 410, 510)
	otherEra[3].version.Era++
	missed := refillsAt(0, 100, 310, 410, 510)
	for i := 3; i < len(missed); i++ {
		missed[i].version.Index++
	}
	for name, c := range map[string]struct {
		seen    []refilled
		at      int64 // ms
		gap     int64 // ms
		settled bool
	}{
		"the pause around the instant":                {refillsAt(0, 100, 310, 410, 510), 150, 210, true},
		"a last refill that was under way":            {refillsAt(0, 100, 151, 360, 460), 150, 209, true},
		"earlier pauses don't count":                  {refillsAt(0, 900, 1000, 1200, 1300, 1400), 1050, 200, true},
		"later pauses don't count":                    {refillsAt(0, 100, 200, 300, 900), 50, 100, true},
		"nothing before the instant":                  {refillsAt(100, 200, 300), 50, 0, true},
		"no refill yet":                               {refillsAt(0, 100), 150, 0, false},
		"too few refills yet":                         {refillsAt(0, 100, 310, 410), 150, 0, false},
		"no refill at all":                            {nil, 150, 0, false},
		"a refill that was missed hides the pause":    {missed, 150, 0, true},
		"a new era hides the pause":                   {otherEra, 150, 0, true},
		"a refill at the instant counts as before it": {refillsAt(0, 150, 350, 450, 550), 150, 200, true},
		"refills just before and after the instant":   {refillsAt(0, 149, 151, 251, 351), 150, 100, true},
	} {
		t.Run(name, func(t *testing.T) {
			var r refills
			for _, s := range c.seen {
				r.observe(s.version, s.at)
			}
			gap, settled := r.around(c.at * 1000)
			require.Equal(t, c.settled, settled)
			require.Equal(t, c.gap, gap.Milliseconds())
		})
	}
}

func TestRefillsAreRememberedOnceAndForAWhile(t *testing.T) {
	t.Parallel()
	var r refills
	for i := range int64(2 * keptRefills) {
		for range 3 { // readings between two refills
			r.observe(policy.Version{Index: i}, i*100_000)
		}
	}
	require.Len(t, r.seen, keptRefills)
	require.EqualValues(t, 2*keptRefills-1, r.seen[keptRefills-1].version.Index)
	require.Equal(t, 100*time.Millisecond, r.longestGap())
	r.observe(policy.Version{Index: 2*keptRefills + 5}, 1e12)
	require.Equal(t, 100*time.Millisecond, r.longestGap(), "a pause is not known when refills were missed")
}

func TestGapsAreSummedUpByMedianAndMaximum(t *testing.T) {
	t.Parallel()
	var g gaps
	require.Empty(t, g.String())
	g.add(30 * time.Millisecond)
	require.Equal(t, "p50 30 ms, max 30 ms over 1 kill", g.String())
	for _, d := range []time.Duration{10, 20, 40} {
		g.add(d * time.Millisecond)
	}
	require.Equal(t, "p50 30 ms, max 40 ms over 4 kills", g.String())
}

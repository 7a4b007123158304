package admin

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestATrendIsDrawnWhereItIsKnown(t *testing.T) {
	t.Parallel()
	trend := Trend{{Known: true, Fill: 1, Taken: 10}, {Known: true, Fill: 0.5, Taken: 5}, {}, {Known: true, Fill: -0.1}}
	require.Equal(t, "M0 24V0.0H1V24ZM1 24V12.0H2V24ZM3 24V24.0H4V24Z", trend.FillArea())
	require.Equal(t, "M0.5 1.0L1.5 12.0M3.5 23.0", trend.TakenLine(), "a gap is not drawn over")
	require.Equal(t, 10.0, trend.MostTaken())
	require.Zero(t, trend.LeastFill(), "a debt is no tokens")
	require.Empty(t, Trend{{Known: true, Fill: 1}}.TakenLine(), "nothing was taken")
	require.Equal(t, 1.0, Trend{{}}.LeastFill())
}

func TestCountsAreInWords(t *testing.T) {
	t.Parallel()
	require.Equal(t, "1 bucket", count(1, "bucket"))
	require.Equal(t, "0 buckets", count(0, "bucket"))
	require.Equal(t, "12\u202f345 refills", count(int64(12345), "refill"))
}

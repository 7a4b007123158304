package admin

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestATrendIsDrawnWhereItIsKnown(t *testing.T) {
	t.Parallel()
	trend := Trend{{Known: true, Fill: 1, Taken: 10}, {Known: true, Fill: 0.5, Taken: 5}, {}, {Known: true, Fill: -0.1}}
	require.Equal(t, "M0 24V0.0H1V24ZM1 24V12.0H2V24ZM3 24V24.0H4V24Z", trend.FillArea())
	require.Equal(t, "M0.5 1.0L1.5 12.0M3.5 23.0", trend.TakenLine(), "the line skips unknown points")
	require.Equal(t, 10.0, trend.MostTaken())
	require.Zero(t, trend.LeastFill(), "a debt counts as no tokens")
	require.Empty(t, Trend{{Known: true, Fill: 1}}.TakenLine(), "no tokens were taken")
	require.Equal(t, 1.0, Trend{{}}.LeastFill())
}

func TestASharesFloorAndWhatIsLentAreStacked(t *testing.T) {
	t.Parallel()
	trend := ShareTrend{{Known: true, Floor: 0.25, Lent: 0.5, Demand: 2}, {}, {Known: true, Floor: 0.25, Demand: 0.25}}
	require.Equal(t, "M0 24.0V18.0H1V24.0ZM2 24.0V18.0H3V24.0Z", trend.FloorBand())
	require.Equal(t, "M0 18.0V6.0H1V18.0Z", trend.LentBand())
	require.Equal(t, "M0 0.5H1M2 18.0H3", trend.DemandLine())
}

func TestTheSharesOfAllRegionsAreStacked(t *testing.T) {
	t.Parallel()
	half, quarter := ShareTrendPoint{Known: true, Floor: 0.25, Lent: 0.25}, ShareTrendPoint{Known: true, Floor: 0.25}
	s := Share{Regions: []RegionShare{
		{"ap", ShareTrend{half, half, quarter, half}}, {"eu", ShareTrend{{}, quarter, half, {}}}, {"us", ShareTrend{half}},
	}}
	s.Regions[2].Trend = append(s.Regions[2].Trend, ShareTrendPoint{}, ShareTrendPoint{}, ShareTrendPoint{})
	stack := s.Stack()
	require.Len(t, stack, 3)
	require.Equal(t, "M0 24.0V12.0H2V24.0ZM2 24.0V18.0H3V24.0ZM3 24.0V12.0H4V24.0Z", stack[0].Path)
	require.Equal(t, "M1 12.0V6.0H2V12.0ZM2 18.0V6.0H3V18.0Z", stack[1].Path, "eu is stacked on ap")
	require.Equal(t, "M0 12.0V0.0H1V12.0Z", stack[2].Path)
	require.Equal(t, 0.5, *stack[0].Now)
	require.Equal(t, 0.5, *stack[1].Now, "a last slot without a report has the share before it")
	require.Nil(t, stack[2].Now, "us has not reported for long")
	require.Equal(t, []int{0, 1, 2}, []int{stack[0].Colour, stack[1].Colour, stack[2].Colour})
	require.Empty(t, Share{}.Stack())
}

func TestCountsAreInWords(t *testing.T) {
	t.Parallel()
	require.Equal(t, "1 bucket", count(1, "bucket"))
	require.Equal(t, "0 buckets", count(0, "bucket"))
	require.Equal(t, "12\u202f345 refills", count(int64(12345), "refill"))
}

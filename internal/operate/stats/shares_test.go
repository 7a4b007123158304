package stats_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/stats"
)

func TestSharesHaveAQuarterOfAnHourOfExistingPools(t *testing.T) {
	t.Parallel()
	var shares stats.Shares
	start, half := time.Unix(1_000_000, 0), stats.SharePoint{Known: true, Floor: 0.1, Lent: 0.4, Demand: 2}
	require.Nil(t, shares.Trend("payments", start))
	shares.Add(start, map[string]stats.SharePoint{"payments": {Floor: 1}, "mail": half})
	shares.Add(start.Add(5*time.Second), map[string]stats.SharePoint{"payments": half, "mail": half})
	shares.Add(start.Add(30*time.Second), map[string]stats.SharePoint{"payments": {Floor: 0.1}})
	trend := shares.Trend("payments", start.Add(30*time.Second))
	require.Len(t, trend, stats.TrendSlots)
	last := stats.TrendSlots - 1
	require.Equal(t, stats.SharePoint{Known: true, Floor: 0.1}, trend[last])
	require.Equal(t, half, trend[last-3], "the last point of a slot stays")
	require.Equal(t, stats.SharePoint{}, trend[last-1])
	require.Equal(t, half, shares.Trend("mail", start.Add(30*time.Second))[last-3], "a share may be unknown for a while")
	require.Equal(t, stats.SharePoint{}, shares.Trend("payments", start.Add(time.Hour))[0], "older points are forgotten")

	many := map[string]stats.SharePoint{}
	for i := range 1000 {
		many[fmt.Sprint(i)] = half
	}
	shares.Add(start.Add(2*time.Hour), many)
	require.Nil(t, shares.Trend("mail", start.Add(2*time.Hour)), "a pool that left the configuration has no trend")
	known := 0
	for pool := range many {
		if shares.Trend(pool, start.Add(2*time.Hour)) != nil {
			known++
		}
	}
	require.Equal(t, 256, known, "the number of pools with a trend is bounded")
}

func TestSharesHaveTheHourByTheMinute(t *testing.T) {
	t.Parallel()
	var shares stats.Shares
	start := time.Unix(1_000_020, 0) // a whole minute
	add := func(after time.Duration, part float64) {
		shares.Add(start.Add(after), map[string]stats.SharePoint{"payments": {Floor: part / 4, Lent: part * 3 / 4}})
	}
	for _, hour := range shares.Hour("payments", start) {
		require.Nil(t, hour)
	}
	add(0, 0.5)
	add(10*time.Second, 0.25)
	add(2*time.Minute, 1)
	hour := shares.Hour("payments", start.Add(2*time.Minute))
	require.Len(t, hour, stats.Minutes)
	require.InDelta(t, 1, *hour[59], 1e-9)
	require.Nil(t, hour[58])
	require.InDelta(t, 0.375, *hour[57], 1e-9, "a minute has the average of its points")
	require.Nil(t, hour[56])
	hour = shares.Hour("payments", start.Add(59*time.Minute+59*time.Second))
	require.InDelta(t, 0.375, *hour[0], 1e-9)
	require.InDelta(t, 1, *hour[2], 1e-9)
	require.Nil(t, shares.Hour("payments", start.Add(time.Hour))[0], "older minutes are forgotten")
	add(62*time.Minute, 0.1)
	require.InDelta(t, 0.1, *shares.Hour("payments", start.Add(62*time.Minute))[59], 1e-9)
}

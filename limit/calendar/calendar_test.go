package calendar

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func TestSpans(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in       string
		unit     Unit
		at       string
		from, to string // in UTC
	}{
		{"UTC", Minute, "2027-03-01T00:00:59.999999Z", "2027-03-01T00:00:00Z", "2027-03-01T00:01:00Z"},
		{"UTC", Hour, "2027-03-01T00:00:00Z", "2027-03-01T00:00:00Z", "2027-03-01T01:00:00Z"},
		{"UTC", Day, "2027-02-28T23:59:59Z", "2027-02-28T00:00:00Z", "2027-03-01T00:00:00Z"},
		{"UTC", Week, "2027-01-01T12:00:00Z", "2026-12-28T00:00:00Z", "2027-01-04T00:00:00Z"},
		{"UTC", Week, "2027-01-03T23:59:59Z", "2026-12-28T00:00:00Z", "2027-01-04T00:00:00Z"},
		{"UTC", Month, "2028-02-29T12:00:00Z", "2028-02-01T00:00:00Z", "2028-03-01T00:00:00Z"},
		{"UTC", Month, "2026-12-31T23:59:59Z", "2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z"},
		{"UTC", Day, "1969-12-31T23:00:00Z", "1969-12-31T00:00:00Z", "1970-01-01T00:00:00Z"},
		// Offsets that aren't whole hours.
		{"Asia/Kathmandu", Hour, "2027-01-01T00:20:00Z", "2027-01-01T00:15:00Z", "2027-01-01T01:15:00Z"},
		{"Asia/Kathmandu", Day, "2027-01-01T00:20:00Z", "2026-12-31T18:15:00Z", "2027-01-01T18:15:00Z"},
		// A day with 23 hours, and a day with 25 hours, where the clock shows an hour twice.
		{"America/New_York", Day, "2027-03-14T12:00:00Z", "2027-03-14T05:00:00Z", "2027-03-15T04:00:00Z"},
		{"America/New_York", Day, "2027-11-07T12:00:00Z", "2027-11-07T04:00:00Z", "2027-11-08T05:00:00Z"},
		{"America/New_York", Hour, "2027-11-07T05:30:00Z", "2027-11-07T05:00:00Z", "2027-11-07T06:00:00Z"},
		{"America/New_York", Hour, "2027-11-07T06:30:00Z", "2027-11-07T06:00:00Z", "2027-11-07T07:00:00Z"},
		// The clock goes back by half an hour at 2:00: to 1:30.
		{"Australia/Lord_Howe", Hour, "2027-04-03T14:45:00Z", "2027-04-03T14:00:00Z", "2027-04-03T15:00:00Z"},
		{"Australia/Lord_Howe", Hour, "2027-04-03T15:15:00Z", "2027-04-03T15:00:00Z", "2027-04-03T15:30:00Z"},
		// No midnight: the clock jumps from 0:00 to 1:00.
		{"America/Santiago", Day, "2026-09-06T12:00:00Z", "2026-09-06T04:00:00Z", "2026-09-07T03:00:00Z"},
		// At the midnight of the 5th the clock goes back from 0:00 to 23:00, so there are two midnights.
		{"America/Santiago", Day, "2026-04-05T03:30:00Z", "2026-04-04T03:00:00Z", "2026-04-05T04:00:00Z"},
		// The 30th of December 2011 did not exist there.
		{"Pacific/Apia", Day, "2011-12-30T09:59:59Z", "2011-12-29T10:00:00Z", "2011-12-30T10:00:00Z"},
		{"Pacific/Apia", Day, "2011-12-30T10:00:00Z", "2011-12-30T10:00:00Z", "2011-12-31T10:00:00Z"},
		// The last day of a leap year.
		{"Europe/Berlin", Minute, "2028-12-31T14:30:10Z", "2028-12-31T14:30:00Z", "2028-12-31T14:31:00Z"},
		{"Europe/Berlin", Hour, "2028-12-31T14:30:10Z", "2028-12-31T14:00:00Z", "2028-12-31T15:00:00Z"},
		{"Europe/Berlin", Hour, "2040-12-31T23:59:59Z", "2040-12-31T23:00:00Z", "2041-01-01T00:00:00Z"},
		{"Europe/Berlin", Day, "2040-12-31T14:30:10Z", "2040-12-30T23:00:00Z", "2040-12-31T23:00:00Z"},
		{"Europe/Berlin", Week, "2028-12-31T14:30:10Z", "2028-12-24T23:00:00Z", "2028-12-31T23:00:00Z"},
		{"Europe/Berlin", Month, "2028-12-31T14:30:10Z", "2028-11-30T23:00:00Z", "2028-12-31T23:00:00Z"},
		{"Australia/Sydney", Hour, "2028-12-31T00:00:00Z", "2028-12-31T00:00:00Z", "2028-12-31T01:00:00Z"},
		{"Australia/Sydney", Hour, "2040-12-31T23:30:00Z", "2040-12-31T23:00:00Z", "2041-01-01T00:00:00Z"},
		{"Australia/Sydney", Day, "2028-12-31T14:00:00Z", "2028-12-31T13:00:00Z", "2029-01-01T13:00:00Z"},
		// In these zones, the year of UTC begins within an hour of the local clock.
		{"America/St_Johns", Hour, "2028-12-31T00:15:00Z", "2028-12-30T23:30:00Z", "2028-12-31T00:30:00Z"},
		{"America/St_Johns", Hour, "2026-12-31T23:45:00Z", "2026-12-31T23:30:00Z", "2027-01-01T00:30:00Z"},
		{"America/St_Johns", Hour, "2027-01-01T00:15:00Z", "2026-12-31T23:30:00Z", "2027-01-01T00:30:00Z"},
		{"Pacific/Chatham", Hour, "2041-01-01T00:10:00Z", "2040-12-31T23:15:00Z", "2041-01-01T00:15:00Z"},
	} {
		at, err := time.Parse(time.RFC3339Nano, c.at)
		require.NoError(t, err)
		from, to := c.unit.Span(at, testenv.Zone(t, c.in))
		require.Equal(t, c.from+" "+c.to, from.UTC().Format(time.RFC3339)+" "+to.UTC().Format(time.RFC3339), "%s %s %s", c.in,
			c.unit, c.at)
	}
}

// Stretches follow each other without a gap or an overlap, in zones that change their offset in every way.
func TestEachInstantIsInOneSpan(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"UTC", "America/New_York", "Australia/Lord_Howe", "America/Santiago", "America/St_Johns", "Pacific/Apia",
		"Asia/Kathmandu", "Africa/Casablanca", "America/Havana",
	} {
		in := testenv.Zone(t, name)
		for unit := Day; unit <= Month; unit++ {
			at := time.Date(2010, 1, 1, 0, 0, 0, 0, time.UTC)
			for at.Year() < 2013 {
				begin, end := unit.Span(at, in)
				require.False(t, at.Before(begin) || !at.Before(end), "%s %s %s: %s to %s", name, unit, at, begin, end)
				require.LessOrEqual(t, end.Sub(begin), unit.Longest(), "%s %s %s", name, unit, at)
				for _, inside := range []time.Time{begin, begin.Add((end.Sub(begin)) / 3), end.Add(-1)} {
					b, e := unit.Span(inside, in)
					require.True(t, b.Equal(begin) && e.Equal(end), "%s %s: %s is in %s to %s, not %s to %s", name, unit, inside, b, e,
						begin, end)
				}
				at = end
			}
		}
		// Hours around the changes of the offset, and the end of a leap year.
		for at := time.Date(2028, 1, 1, 0, 0, 0, 0, time.UTC); at.Before(time.Date(2029, 1, 3, 0, 0, 0, 0, time.UTC)); {
			begin, end := Hour.Span(at, in)
			require.False(t, at.Before(begin) || !at.Before(end), "%s %s", name, at)
			b, e := Hour.Span(end.Add(-1), in)
			require.True(t, b.Equal(begin) && e.Equal(end), "%s %s", name, at)
			at = end
		}
	}
}

func TestNamesOfUnits(t *testing.T) {
	t.Parallel()
	for u := Minute; u <= Month; u++ {
		got, err := Parse(u.String())
		require.NoError(t, err)
		require.Equal(t, u, got)
	}
	for _, s := range []string{"", "fortnight", "Day"} {
		_, err := Parse(s)
		require.ErrorContains(t, err, "minute, hour, day, week, month")
	}
	require.False(t, Unit(0).Valid())
}

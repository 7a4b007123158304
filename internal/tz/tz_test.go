package tz

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func TestChange(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ in, at, want string }{
		{"UTC", "2028-12-31T12:00:00Z", ""},
		{"Asia/Tokyo", "2028-12-31T12:00:00Z", ""},
		{"Europe/Berlin", "2027-03-28T00:59:59.999999999Z", "2027-03-28T01:00:00Z"},
		{"Europe/Berlin", "2027-03-28T01:00:00Z", "2027-10-31T01:00:00Z"},
		{"Europe/Berlin", "2027-10-31T01:00:00Z", "2028-03-26T01:00:00Z"},
		{"Europe/Berlin", "2028-10-29T01:00:00Z", "2029-03-25T01:00:00Z"},
		{"Europe/Berlin", "2028-12-30T23:59:59Z", "2029-03-25T01:00:00Z"},
		{"Europe/Berlin", "2028-12-31T00:00:00Z", "2029-03-25T01:00:00Z"},
		{"Europe/Berlin", "2040-12-31T23:59:59.5Z", "2041-03-31T01:00:00Z"},
		{"Australia/Sydney", "2028-12-31T12:00:00Z", "2029-03-31T16:00:00Z"},
		{"Australia/Sydney", "2040-12-31T12:00:00Z", "2041-04-06T16:00:00Z"},
		{"America/Ciudad_Juarez", "2022-11-29T06:00:00Z", "2022-11-30T06:00:00Z"},
	} {
		at, err := time.Parse(time.RFC3339Nano, c.at)
		require.NoError(t, err)
		got := Change(at.In(testenv.Zone(t, c.in)))
		if c.want == "" {
			require.Zero(t, got, c)
			continue
		}
		require.Equal(t, c.want, got.UTC().Format(time.RFC3339Nano), c)
		require.Equal(t, c.in, got.Location().String())
	}
}

// These rules belong to no real zone. They include a change within a day of another change for which ZoneBounds has no
// end, and changes that leave the offset as it is.
func TestChangeByAnyRule(t *testing.T) {
	t.Parallel()
	at := time.Date(2028, 12, 31, 18, 0, 0, 500, time.UTC)
	for rule, want := range map[string]string{
		"AAA0BBB,J1/12:34:56,J180": "2029-01-01T12:34:56Z",
		"AAA0BBB,J180,J1/12:34:56": "2029-01-01T11:34:56Z",
		"AAA0BBB,J180,J365/12":     "2029-06-29T02:00:00Z",
		"AAA0BBB-48,J88/0,J300":    "2029-03-29T00:00:00Z",
		"AAA0BBB0,J100,J200":       "",
	} {
		got := Change(at.In(testenv.ZoneRule(t, rule)))
		if want == "" {
			require.Zero(t, got, rule)
			continue
		}
		require.Equal(t, want, got.UTC().Format(time.RFC3339Nano), rule)
	}
}

// In every zone the offset stays the same until the change, and differs from then on. The test repeats this from each
// change to the next.
func TestTheOffsetChangesWithTheChangeOnly(t *testing.T) {
	t.Parallel()
	for name, in := range testenv.Zones(t) {
		for _, year := range []int{2018, 2022, 2028, 2040} {
			from, to := time.Date(year, 11, 25, 0, 0, 0, 0, in), time.Date(year+1, 1, 25, 0, 0, 0, 0, in)
			change := Change(from)
			_, offset := from.Zone()
			for at := from; at.Before(to); at = at.Add(time.Hour) {
				if !change.IsZero() && !at.Before(change) {
					_, offset = change.Zone()
					_, before := change.Add(-1).Zone()
					require.NotEqual(t, before, offset, "%s: %s", name, change)
					change = Change(change)
				}
				_, o := at.Zone()
				require.Equal(t, offset, o, "%s: %s", name, at)
			}
		}
	}
}

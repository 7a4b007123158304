package policy_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/policy"
)

func instant(t testing.TB, s string) time.Time {
	at, err := time.Parse(time.RFC3339, s)
	require.NoError(t, err)
	return at
}

func calendar(t testing.TB, spec string, z *time.Location) *policy.Calendar {
	c, err := policy.ParseCalendar(spec, z)
	require.NoError(t, err)
	return c
}

func TestEveryNamesMultiplesSinceTheEpoch(t *testing.T) {
	t.Parallel()
	every := policy.Every(90 * time.Second)
	require.Equal(t, "every 1m30s", every.String())
	for from, want := range map[int64]int64{0: 90_000_000, 1: 90_000_000, 89_999_999: 90_000_000, 90_000_000: 180_000_000,
		-1: 0, -90_000_000: 0, -90_000_001: -90_000_000} {
		require.Equal(t, time.UnixMicro(want).UTC(), every.Next(time.UnixMicro(from)), from)
	}
	require.Zero(t, policy.Every(0).Next(time.UnixMicro(now)), "a schedule without steps has no next instant")
}

func TestCalendarFollowsItsZone(t *testing.T) {
	t.Parallel()
	const berlin, york = "Europe/Berlin", "America/New_York"
	for _, c := range []struct {
		name, spec, zone, from string
		want                   []string
	}{
		{"DailyInUTC", "@daily", "UTC", "2026-01-31T10:00:00Z", []string{"2026-02-01T00:00:00Z", "2026-02-02T00:00:00Z"}},
		{"DailyInBerlin", "@daily", berlin, "2026-01-31T10:00:00Z", []string{"2026-01-31T23:00:00Z"}},
		{"MonthlyInNewYork", "0 0 1 * *", york, "2026-03-05T00:00:00Z", []string{"2026-04-01T04:00:00Z"}},
		{"Weekdays", "30 9 * * 1-5", york, "2026-01-02T20:00:00Z", []string{"2026-01-05T14:30:00Z"}},
		{"LeapDay", "0 0 29 2 *", "UTC", "2026-01-01T00:00:00Z", []string{"2028-02-29T00:00:00Z"}},

		{"ForwardKeepsTheLocalHourInBerlin", "0 12 * * *", berlin, "2026-03-28T12:00:00Z", []string{"2026-03-29T10:00:00Z"}},
		{"ForwardMovesTheMissingHourToItsEndInBerlin", "30 2 * * *", berlin, "2026-03-28T12:00:00Z",
			[]string{"2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"}},
		{"ForwardMovesTheMissingHourToItsEndInNewYork", "30 2 * * *", york, "2026-03-07T12:00:00Z",
			[]string{"2026-03-08T07:00:00Z", "2026-03-09T06:30:00Z"}},
		{"ForwardAtMidnightInCairo", "0 0 * * *", "Africa/Cairo", "2026-04-22T22:00:00Z",
			[]string{"2026-04-23T22:00:00Z", "2026-04-24T21:00:00Z"}},
		{"ForwardAtMidnightInSantiago", "@daily", "America/Santiago", "2026-09-05T04:00:00Z",
			[]string{"2026-09-06T04:00:00Z", "2026-09-07T03:00:00Z"}},
		{"ForwardAtMidnightInBeirut", "15 0 * * *", "Asia/Beirut", "2026-03-27T22:15:00Z",
			[]string{"2026-03-28T22:00:00Z", "2026-03-29T21:15:00Z"}},
		{"ForwardOverADayInApia", "0 9 * * *", "Pacific/Apia", "2011-12-29T19:00:00Z",
			[]string{"2011-12-30T10:00:00Z", "2011-12-30T19:00:00Z"}},
		{"ForwardMovesOtherDaysNot", "0 0 1 * *", "Africa/Cairo", "2026-04-02T00:00:00Z", []string{"2026-04-30T21:00:00Z"}},
		{"ForwardCountsWhatCoincidesOnce", "*/10 2,3 * * *", berlin, "2026-03-29T00:59:00Z",
			[]string{"2026-03-29T01:00:00Z", "2026-03-29T01:10:00Z"}},
		{"ForwardIsAnHourShorter", "0 * * * *", berlin, "2026-03-29T00:00:00Z",
			[]string{"2026-03-29T01:00:00Z", "2026-03-29T02:00:00Z"}},

		{"BackCountsAFixedHourOnceInBerlin", "30 2 * * *", berlin, "2026-10-24T12:00:00Z",
			[]string{"2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"}},
		{"BackCountsAFixedHourOnceInNewYork", "30 1 * * *", york, "2026-10-31T12:00:00Z",
			[]string{"2026-11-01T05:30:00Z", "2026-11-02T06:30:00Z"}},
		{"BackCountsSteppedHoursOnce", "0 */2 * * *", berlin, "2026-10-24T22:30:00Z",
			[]string{"2026-10-25T00:00:00Z", "2026-10-25T03:00:00Z"}},
		{"BackRepeatsEveryHour", "0 * * * *", berlin, "2026-10-24T23:30:00Z",
			[]string{"2026-10-25T00:00:00Z", "2026-10-25T01:00:00Z", "2026-10-25T02:00:00Z"}},
		{"BackByHalfAnHour", "45 1 * * *", "Australia/Lord_Howe", "2026-04-03T20:00:00Z",
			[]string{"2026-04-04T14:45:00Z", "2026-04-05T15:15:00Z"}},
		{"BackJustWhereTheRuleBegins", "30 23 * * *", "America/Ciudad_Juarez", "2022-11-29T12:00:00Z",
			[]string{"2022-11-30T05:30:00Z", "2022-12-01T06:30:00Z"}},

		{"EndOfALeapYearInBerlin", "0 9 * * *", berlin, "2028-12-30T08:00:00Z",
			[]string{"2028-12-31T08:00:00Z", "2029-01-01T08:00:00Z", "2029-01-02T08:00:00Z"}},
		{"EndOfALeapYearInNewYork", "*/30 20-23 * * *", york, "2040-12-31T02:00:00Z", // the year ends in UTC at 19:00
			[]string{"2040-12-31T02:30:00Z", "2040-12-31T03:00:00Z", "2040-12-31T03:30:00Z", "2040-12-31T04:00:00Z",
				"2040-12-31T04:30:00Z", "2041-01-01T01:00:00Z"}},
		{"EndOfALeapYearInSydney", "30 0 * * *", "Australia/Sydney", "2040-12-30T00:00:00Z",
			[]string{"2040-12-30T13:30:00Z", "2040-12-31T13:30:00Z", "2041-01-01T13:30:00Z"}},
		{"EndOfALeapYearHourly", "0 * * * *", "Australia/Sydney", "2028-12-31T22:30:00Z",
			[]string{"2028-12-31T23:00:00Z", "2029-01-01T00:00:00Z", "2029-01-01T01:00:00Z"}},
		{"NewYearAfterALeapYear", "0 0 1 1 *", berlin, "2027-12-31T23:00:00Z",
			[]string{"2028-12-31T23:00:00Z", "2029-12-31T23:00:00Z"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			at, steps := instant(t, c.from), calendar(t, c.spec, testenv.Zone(t, c.zone))
			for _, want := range c.want {
				at = steps.Next(at)
				require.Equal(t, want, at.UTC().Format(time.RFC3339))
			}
		})
	}
}

// TestCalendarAgreesWithEveryMinute compares Next with a simple form of its rule. That form goes over the zone's clock
// minute by minute. Where the clock is put forward, it also goes over the minutes that the clock skips.
func TestCalendarAgreesWithEveryMinute(t *testing.T) {
	t.Parallel()
	hours := map[string]func(h int) bool{
		"*": func(int) bool { return true }, "0": func(h int) bool { return h == 0 },
		"2": func(h int) bool { return h == 2 }, "23": func(h int) bool { return h == 23 },
		"*/2": func(h int) bool { return h%2 == 0 }, "0-3": func(h int) bool { return h <= 3 },
	}
	for _, name := range []string{
		"Africa/Cairo", "America/Santiago", "Asia/Beirut", "America/Sao_Paulo", "Europe/Berlin", "America/New_York",
		"Australia/Lord_Howe", "Pacific/Apia", "Africa/Casablanca", "Asia/Kathmandu",
	} {
		z := testenv.Zone(t, name)
		for year := 2010; year <= 2028; year += 6 {
			instants := []time.Time{time.Date(year, 12, 31, 12, 0, 0, 0, z)}
			for at := time.Date(year, 1, 1, 0, 0, 0, 0, z); at.Year() == year; at = at.Add(time.Hour) {
				if wallClock(at).Sub(wallClock(at.Add(-time.Hour))) != time.Hour {
					instants = append(instants, at)
				}
			}
			for _, change := range instants {
				for hour, in := range hours {
					steps := calendar(t, "*/20 "+hour+" * * *", z)
					from, to := change.Add(-26*time.Hour), change.Add(26*time.Hour)
					var got, want []time.Time
					for at := steps.Next(from); at.Before(to); at = steps.Next(at) {
						got = append(got, at.UTC())
					}
					seen := map[time.Time]bool{} // by local time
					for at := from.Truncate(time.Minute).Add(time.Minute); at.Before(to); at = at.Add(time.Minute) {
						wall := wallClock(at)
						comes := wall.Minute()%20 == 0 && in(wall.Hour()) && (hour == "*" || !seen[wall])
						seen[wall] = true
						left := wallClock(at.Add(-time.Minute)).Add(time.Minute)
						for ; hour != "*" && left.Before(wall); left = left.Add(time.Minute) {
							comes = comes || left.Minute()%20 == 0 && in(left.Hour())
						}
						if comes {
							want = append(want, at.UTC())
						}
					}
					require.Equal(t, want, got, "%s at %s", steps, change)
				}
			}
		}
	}
}

// The clock of this zone skips the 29th of March each year. No real zone has such a rule, but the zone data of a
// computer may be wrong.
func TestACalendarThatAZoneLeavesOutNeverComes(t *testing.T) {
	t.Parallel()
	gap := testenv.ZoneRule(t, "AAA0BBB-48,J88/0,J300")
	_, err := policy.ParseCalendar("0 * 29 3 *", gap)
	require.ErrorContains(t, err, "no such day comes")
	fixed := calendar(t, "0 9 29 3 *", gap)
	require.Equal(t, instant(t, "2028-03-29T00:00:00Z"), fixed.Next(instant(t, "2028-01-01T00:00:00Z")).UTC())
}

// wallClock returns the local time of t as if it were a time in UTC.
func wallClock(t time.Time) time.Time {
	_, offset := t.Zone()
	return t.UTC().Add(time.Duration(offset) * time.Second)
}

func TestCalendarDefaultsToUTCAndNamesItself(t *testing.T) {
	t.Parallel()
	require.Equal(t, "0 0 * * * UTC", calendar(t, "0 0 * * *", nil).String())
	require.Equal(t, "@daily Europe/Berlin", calendar(t, "@daily", testenv.Zone(t, "Europe/Berlin")).String())
}

func TestParseCalendarRefuses(t *testing.T) {
	t.Parallel()
	for spec, want := range map[string]string{
		"":                           "",
		"* * * *":                    "expected exactly 5 fields",
		"0 0 0 * * *":                "expected exactly 5 fields",
		"60 0 * * *":                 "above maximum",
		"0 0 * * funday":             "funday",
		"@fortnightly":               "@fortnightly",
		"@reboot":                    "@reboot",
		"@every 5m":                  "for equal steps use every",
		" @every 5m":                 "for equal steps use every",
		"TZ=Europe/Berlin @daily":    "time zone must be given separately",
		"CRON_TZ=UTC 0 0 * * *":      "time zone must be given separately",
		"0 0 31 2 *":                 "no such day comes",
		"0 0 30 2 *":                 "no such day comes",
		"0 0 31 4,6,9,11 *":          "no such day comes",
		"*/0 * * * *":                "",
		strings.Repeat("9", 100_000): "",
	} {
		c, err := policy.ParseCalendar(spec, nil)
		require.ErrorIs(t, err, policy.ErrSchedule, "%.20s", spec)
		require.ErrorContains(t, err, want)
		require.Nil(t, c)
	}
}

// walk does the work of Due in a simple way: it goes over every instant.
func walk(s policy.Steps, stored, now, keep int64) (due, next int64) {
	var window []int64
	at := s.Next(time.UnixMicro(stored))
	for ; at.UnixMicro() <= now; at = s.Next(at) {
		window = append(window, at.UnixMicro())
	}
	if len(window) == 0 {
		return 0, at.UnixMicro()
	}
	if missed := int64(len(window)); missed > keep {
		window = window[missed-keep:]
	}
	return window[0], s.Next(time.UnixMicro(window[0])).UnixMicro()
}

func TestDueIsTheOldestStepThatTheBucketCanHold(t *testing.T) {
	t.Parallel()
	all := []policy.Steps{
		policy.Every(time.Minute), policy.Every(7 * time.Second), policy.Every(24 * time.Hour),
		calendar(t, "* * * * *", nil), calendar(t, "*/7 2-5 * * *", testenv.Zone(t, "Europe/Berlin")),
		calendar(t, "@daily", testenv.Zone(t, "America/New_York")),
		calendar(t, "0 0 1 * *", nil), calendar(t, "* * 1 * *", nil),
	}
	rapid.Check(t, func(t *rapid.T) {
		s := all[rapid.IntRange(0, len(all)-1).Draw(t, "steps")]
		stored := now + rapid.Int64Range(0, 90*24*3600*1e6).Draw(t, "stored")
		away := rapid.OneOf(rapid.Int64Range(0, 200e6), rapid.Int64Range(0, 3*3600*1e6),
			rapid.Int64Range(0, 40*3600*1e6)).Draw(t, "away")
		keep := rapid.Int64Range(1, 100).Draw(t, "keep")
		due, next := policy.Due(s, stored, stored+away, keep)
		wantDue, wantNext := walk(s, stored, stored+away, keep)
		require.Equal(t, wantDue, due, "%s", s)
		require.Equal(t, wantNext, next, "%s", s)
	})
}

func TestDueEdges(t *testing.T) {
	t.Parallel()
	minute := int64(60e6)
	for _, s := range []policy.Steps{policy.Every(time.Minute), calendar(t, "* * * * *", nil)} {
		for _, c := range []struct {
			name                         string
			stored, now, keep, due, next int64
		}{
			{"NothingDue", 10 * minute, 11*minute - 1, 5, 0, 11 * minute},
			{"DueThisInstant", 10 * minute, 11 * minute, 5, 11 * minute, 12 * minute},
			{"StoredAheadOfNow", 8 * minute, 5 * minute, 5, 0, 9 * minute},
			{"StoredTooFarAheadOfNow", 10 * minute, 5 * minute, 5, 0, 6 * minute},
			{"OldestFirst", 10 * minute, 13 * minute, 5, 11 * minute, 12 * minute},
			{"BeyondKeepIsPassedOver", 10 * minute, 20 * minute, 3, 18 * minute, 19 * minute},
			{"KeepIsAtLeastOne", 10 * minute, 20 * minute, 0, 20 * minute, 21 * minute},
			{"StoredBetweenSteps", 10*minute + 1, 11 * minute, 1, 11 * minute, 12 * minute},
		} {
			due, next := policy.Due(s, c.stored, c.now, c.keep)
			require.Equal(t, c.due, due, "%s %s", s, c.name)
			require.Equal(t, c.next, next, "%s %s", s, c.name)
		}
	}
	due, next := policy.Due(policy.Every(0), 1, now, 1)
	require.Zero(t, due)
	require.Zero(t, next)
}

// counted counts the calls of Next.
type counted struct {
	policy.Steps
	n int
}

func (c *counted) Next(t time.Time) time.Time {
	c.n++
	return c.Steps.Next(t)
}

func TestDueAfterAYearAwayTakesFewSteps(t *testing.T) {
	t.Parallel()
	const year = int64(366 * 24 * 3600 * 1e6)
	for _, spec := range []string{"* * * * *", "*/5 * * * *", "@hourly", "@daily", "@yearly", "*/3 9-17 * * 1-5"} {
		for _, keep := range []int64{1, 10, 1000, 1 << 40} {
			s := &counted{Steps: calendar(t, spec, nil)}
			due, next := policy.Due(s, now-year, now, keep)
			require.Less(t, now-year, due, spec)
			require.Less(t, due, next, spec)
			require.LessOrEqual(t, s.n, 8000, "%s keeping %d", spec, keep)
		}
	}
	due, _ := policy.Due(policy.Every(time.Minute), now-year, now, 1<<40)
	require.Equal(t, (now-year)/60e6*60e6+60e6, due, "all equal steps are counted")
	due, _ = policy.Due(calendar(t, "* * * * *", nil), now-year, now, 1<<40)
	require.Equal(t, now/60e6*60e6-999*60e6, due, "of a calendar's steps the latest thousand are counted")
}

// Repeated calls of Due after missed steps credit each of the latest keep steps once, and end at the present.
func TestDueCatchesUpStepByStep(t *testing.T) {
	t.Parallel()
	for _, s := range []policy.Steps{policy.Every(time.Hour), calendar(t, "@hourly", nil)} {
		stored, steps := now-100*int64(3600e6), []int64{}
		for range 100 {
			due, next := policy.Due(s, stored, now, 5)
			if due == 0 {
				require.Greater(t, next, now)
				break
			}
			require.Equal(t, due+3600e6, next)
			steps, stored = append(steps, due), due
		}
		require.Len(t, steps, 5, "%s", s)
		require.Equal(t, now/3600e6*3600e6, steps[4])
	}
}

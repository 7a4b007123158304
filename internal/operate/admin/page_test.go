package admin

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// rendered returns the page of a status.
func rendered(t *testing.T, s Status) string {
	t.Helper()
	var out strings.Builder
	require.NoError(t, pageTemplate.Execute(&out, newView(s, Query{})))
	return out.String()
}

func TestThePageReportsNoLeaderOnlyIfThatIsKnown(t *testing.T) {
	t.Parallel()
	for want, s := range map[string]Status{
		"one leads</strong>":          {Leader: &Leader{Identity: "one"}, Leading: true},
		"this replica leads</strong>": {Election: "deadline exceeded", Unknown: true, Leading: true},
		"not known</strong>":          {Election: "deadline exceeded", Unknown: true},
		"no replica leads</strong>":   {Election: "election: no leader"},
	} {
		s.Mode = "etcd"
		page := rendered(t, s)
		require.Contains(t, page, want)
		require.Equal(t, want == "no replica leads</strong>", strings.Contains(page, "no replica leads"), want)
	}
}

func TestThePageSaysWhatIsWrongFirst(t *testing.T) {
	t.Parallel()
	s := Status{Config: 6, Away: "dial tcp: connection refused",
		Outdated: Mismatch{Total: 2, Buckets: []string{"checkout"}, Templates: "the templates of version 7 are published"}}
	page := rendered(t, s)
	alerts, _, found := strings.Cut(page, `<div class="cards"`)
	require.True(t, found)
	for _, want := range []string{"Refills pause:</strong> dial tcp",
		"file has version 6, and a later version is in force",
		"<li>checkout</li><li>the templates of version 7 are published</li>"} {
		require.Contains(t, alerts, want)
	}
	require.NotContains(t, rendered(t, Status{}), `role="alert"`)
}

// Screen readers announce an alert again when its text changes. So an alert has no time that passes.
func TestAlertsStayAsTheyAre(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 3, 1, 12, 30, 0, 0, time.UTC)
	s := Status{Away: "dial tcp: connection refused", Reload: Reload{Result: "refused", At: at}}
	alertsAt := func(now time.Time) string {
		s.Now = now
		_, rest, _ := strings.Cut(rendered(t, s), `<div id="alerts"`)
		alerts, _, found := strings.Cut(rest, `<div class="cards"`)
		require.True(t, found)
		return alerts
	}
	require.Contains(t, alertsAt(at), "refused at 12:30:00 UTC")
	require.Equal(t, alertsAt(at), alertsAt(at.Add(time.Hour)))
}

func TestAPageBehindTheLastBucketLeadsBack(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	require.NoError(t, pageTemplate.Execute(&out, newView(Status{Found: 1003}, Query{Offset: 999_999, Limit: 100})))
	require.Contains(t, out.String(), "None from here on: there are 1\u202f003.")
	require.Contains(t, out.String(), "offset=1000")
	require.NotContains(t, out.String(), "999\u202f999")
}

func TestThePageListsTheFlowsOfABucket(t *testing.T) {
	t.Parallel()
	s := Status{Buckets: []Bucket{{Key: "plain", Capacity: 1}, {Key: "a&b", Capacity: 10, Flows: &Flows{
		Seen: 51, Listed: 2, Level: 19.6, Covered: 58.2,
		List: []Flow{
			{Name: "loud", Got: 45.2, Demand: 2500, Denied: 2454.8, Listed: true}, {Name: "", Got: 19.5, Demand: 19.5},
			{Name: "team-a/", Got: 0.5, Demand: 0.5}, {Name: "\x1b[31m<b>", Got: 0.05, Demand: 0.05},
		},
		Others: &Flow{Got: 930, Demand: 940, Denied: 10},
	}}}, Found: 2}
	page := rendered(t, s)
	_, list, found := strings.Cut(page, `<div id="flows" data-live>`)
	require.True(t, found)
	list, _, _ = strings.Cut(list, "</section>")
	for _, want := range []string{
		`<a href="?key=a%26b">a&amp;b</a> by flows`, "51 flows seen, 2 listed; a flow of weight 1 may have 19.6/s.",
		"58.2&nbsp;s",
		`<progress max="45.2" value="45.2" aria-label="share">45.2/s</progress>`,
		`<td data-label="Got">45.2/s</td><td data-label="Demand">2500/s</td><td data-label="Denied">2455/s</td>` +
			`<td data-label="Listed">yes</td>`,
		"<td>(no name)</td>", "<td>team-a/ (others)</td>", `\x1b[31m&lt;b&gt;`, "0.05/s", "all others", "930/s",
	} {
		require.Contains(t, list, want)
	}
	require.NotContains(t, list, "plain")
	require.NotContains(t, rendered(t, Status{Buckets: s.Buckets[:1]}), "by flows")
}

func TestThePageShowsNoControlCharacters(t *testing.T) {
	t.Parallel()
	page := rendered(t, Status{Templates: []Template{{Prefix: "user:", Most: []Active{{Key: "user:\x1b[31m\u202egreb"}}}}})
	require.NotContains(t, page, "\x1b")
	require.NotContains(t, page, "\u202e")
	require.Contains(t, page, `user:\x1b[31m\u202egreb`)
}

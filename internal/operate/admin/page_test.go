package admin

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// rendered is the page of a status.
func rendered(t *testing.T, s Status) string {
	t.Helper()
	var out strings.Builder
	require.NoError(t, pageTemplate.Execute(&out, newView(s, Query{})))
	return out.String()
}

func TestThePageSaysThatNobodyLeadsOnlyIfThatIsKnown(t *testing.T) {
	t.Parallel()
	for want, s := range map[string]Status{
		"one leads</strong>":          {Leader: &Leader{Identity: "one"}, Leading: true},
		"this replica leads</strong>": {Election: "deadline exceeded", Unknown: true, Leading: true},
		"not known</strong>":          {Election: "deadline exceeded", Unknown: true},
		"nobody leads</strong>":       {Election: "election: no leader"},
	} {
		s.Mode = "etcd"
		page := rendered(t, s)
		require.Contains(t, page, want)
		require.Equal(t, want == "nobody leads</strong>", strings.Contains(page, "nobody leads"), want)
	}
}

func TestThePageSaysWhatIsWrongFirst(t *testing.T) {
	t.Parallel()
	s := Status{Config: 6, Away: "dial tcp: connection refused",
		Outdated: Mismatch{Total: 2, Buckets: []string{"checkout"}, Templates: "the templates of version 7 are published"}}
	page := rendered(t, s)
	alerts, _, found := strings.Cut(page, `<div class="cards"`)
	require.True(t, found)
	for _, want := range []string{"Refills pause:</strong> dial tcp", "later version is in force than version 6",
		"<li>checkout</li><li>the templates of version 7 are published</li>"} {
		require.Contains(t, alerts, want)
	}
	require.NotContains(t, rendered(t, Status{}), `role="alert"`)
}

func TestThePageShowsNoControlCharacters(t *testing.T) {
	t.Parallel()
	page := rendered(t, Status{Templates: []Template{{Prefix: "user:", Most: []Active{{Key: "user:\x1b[31m\u202egreb"}}}}})
	require.NotContains(t, page, "\x1b")
	require.NotContains(t, page, "\u202e")
	require.Contains(t, page, `user:\x1b[31m\u202egreb`)
}

package flowname_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/flowname"
	"github.com/tokenrefill/refiller/policy"
)

func TestEveryTextIsOneLevelOfItsOwn(t *testing.T) {
	t.Parallel()
	seen := map[string]string{}
	long := strings.Repeat("x", policy.MaxFlowLen)
	for _, text := range []string{"", "7", "/", "//", "gold/7", "gold%2F7", "%", "%25", long, long + "x", long + "y"} {
		name := flowname.Fit("strangers/" + flowname.Level(text))
		require.NoError(t, policy.CheckFlow(name), "%q", text)
		require.Equal(t, []string{policy.RootTeam, "strangers/"}, policy.TeamsOf(name), "%q", text)
		require.NotContains(t, seen, name, "%q", text)
		seen[name] = text
	}
	require.Equal(t, "user-7", flowname.Fit(flowname.Level("user-7")))
}

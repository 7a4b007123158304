package bucketname_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/bucketname"
	"github.com/tokenrefill/refiller/lua"
)

func TestEveryNameFits(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"user:7", "user:{7", strings.Repeat("x", lua.MaxKeyLen)} {
		require.Equal(t, name, bucketname.Fit(name))
	}
	long := "user:" + strings.Repeat("x", lua.MaxKeyLen)
	seen := make(map[string]bool)
	for _, name := range []string{"user:}", "user:}}", "user:7}", "user:{7}", long, long + "x", long + "}"} {
		fit := bucketname.Fit(name)
		require.NoError(t, lua.CheckKey(fit))
		require.True(t, strings.HasPrefix(fit, "user:"), "the name keeps the prefix of its template")
		require.Equal(t, fit, bucketname.Fit(fit))
		seen[fit] = true
	}
	require.Len(t, seen, 7, "different names stay different")
	require.Empty(t, bucketname.Fit(""))
}

package cli

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
)

func TestEachFlagOfAVariableHasADescription(t *testing.T) {
	t.Parallel()
	described := map[string]bool{}
	for _, v := range slices.Concat(config.Variables(), redisconn.Variables()) {
		if v.Flag() != "" {
			require.NotEmpty(t, descriptions[v.Field], v.Name)
			described[v.Field] = true
		}
	}
	require.Len(t, described, len(descriptions), "each description is of a field")
}

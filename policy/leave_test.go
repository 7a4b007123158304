package policy_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
)

func TestParseLeaveReadsTokensAndPercent(t *testing.T) {
	for s, want := range map[string]policy.Leave{
		"0": {}, "100": {Tokens: 100}, "20%": {Percent: 20}, "100%": {Percent: 100},
	} {
		l, err := policy.ParseLeave(s)
		require.NoError(t, err, s)
		require.Equal(t, want, l, s)
	}
	for _, s := range []string{"", "%", "a", "1.5", "-1", "101%", "-1%", "9999999999999999", "20 %"} {
		_, err := policy.ParseLeave(s)
		require.ErrorContains(t, err, "leave: ", s)
	}
}

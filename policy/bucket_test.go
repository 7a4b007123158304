package policy_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
)

const now = int64(1_700_000_000_000_000)

func TestRefillFollowsEveryRule(t *testing.T) {
	for _, c := range buckettest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			b, call := c.Setup(now)
			got := b.Refill(call, now)
			if c.Want.Version.Era == 0 && got.Status.Wrote() {
				require.Equal(t, now, got.Version.Era, "a new era begins")
				got.Version.Era = 0
			}
			got.Now = 0
			got.Last = 0
			got.Step = 0
			got.Carry = 0
			require.Equal(t, c.Want, got)
			if got.Status.Wrote() {
				require.Equal(t, c.Carry, b.Control.Carry)
				require.Equal(t, got.Version.Index, *b.Index)
				require.Equal(t, got.Version.Index, b.Control.Index, "the state has a copy of the index")
				require.Equal(t, got.Tokens, *b.Tokens)
			}
		})
	}
}

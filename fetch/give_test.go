package fetch

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/policy"
)

// What a degraded mode granted comes from no bucket: undone when Redis is back, it adds nothing to the bucket.
func TestUndoOfADegradedTakeGivesNothingToTheBucket(t *testing.T) {
	f := newFaulty(t, nil)
	for key, mode := range map[string]policy.Degraded{"open": policy.DegradedOpen, "local": policy.DegradedLocal} {
		p := hourly(80)
		p.Degraded = mode
		createBucket(t, f.direct, key, p)
	}
	c := newClient(t, f.rdb, slow())
	f.warm(t, c)
	for _, key := range []string{"open", "local"} {
		_, err := c.Take(t.Context(), key, 50)
		require.NoError(t, err)
	}
	k := c.cache.get("local")
	eventually(t, func() bool {
		k.share.mu.Lock()
		defer k.share.mu.Unlock()
		return k.share.live == 1
	}, "a heartbeat")
	f.proxy.Cut()
	taken := map[string]Result{}
	for _, key := range []string{"open", "local"} {
		r, err := c.Take(t.Context(), key, 10)
		require.NoError(t, err)
		require.Equal(t, SourceFallback, r.Source.Kind)
		require.EqualValues(t, 10, r.Taken)
		taken[key] = r
	}
	require.NoError(t, f.proxy.Heal())
	for key, r := range taken {
		require.NoError(t, c.Undo(t.Context(), key, r), "there is nothing to send")
		require.EqualValues(t, 30, tokens(t, f.direct, key), key)
	}
}

// What a bucket in shadow mode lacked was not taken from it, and doesn't go back.
func TestUndoOfAShadowTakeGivesBackWhatTheBucketHad(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	p := hourly(10)
	p.Shadow = true
	createBucket(t, rdb, "K", p)
	c := newClient(t, rdb, slow())
	_, err := c.Take(t.Context(), "K", 9)
	require.NoError(t, err)
	r, err := c.Take(t.Context(), "K", 5)
	require.NoError(t, err)
	require.True(t, r.OK && r.Shadow)
	require.EqualValues(t, 5, r.Taken)
	require.NoError(t, c.Undo(t.Context(), "K", r))
	require.EqualValues(t, 1, tokens(t, rdb, "K"))
}

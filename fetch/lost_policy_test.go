package fetch

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// losePolicy deletes the key with a bucket's policy, as an eviction does. The next refill brings the policy back.
func losePolicy(t *testing.T, rdb redis.UniversalClient, key string) {
	t.Helper()
	require.NoError(t, rdb.Del(t.Context(), lua.ControlKey(key)).Err())
}

// takeOne takes one token.
func takeOne(t *testing.T, c *Client, key string) Result {
	t.Helper()
	r, err := c.Take(t.Context(), key, 1)
	require.NoError(t, err)
	return r
}

// The replies of a bucket that has lost its policy don't show that it is in shadow mode.
func TestABucketInShadowModeThatLosesItsPolicyDeniesNothing(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	p := hourly(2)
	p.Shadow = true
	createBucket(t, rdb, "trial", p)
	c := newClient(t, rdb, slow())
	_, err := c.Take(t.Context(), "trial", 2)
	require.NoError(t, err)
	losePolicy(t, rdb, "trial")
	for range 3 {
		require.True(t, takeOne(t, c, "trial").Shadow)
		r, err := c.Wait(t.Context(), "trial", 1)
		require.NoError(t, err)
		require.True(t, r.Shadow)
	}
	require.EqualValues(t, 6, c.Stats().Shadowed)
}

// No reply shows when a bucket that has lost its policy gets tokens. So it is asked each time.
func TestDenialsOfABucketThatLostItsPolicyAreNotRemembered(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	flows := withFlows()
	flows.Capacity = 1
	for key, p := range map[string]policy.Policy{"plain": hourly(1), "divided": flows} {
		createBucket(t, rdb, key, p)
		c := newClient(t, rdb, slow())
		require.True(t, takeOne(t, c, key).OK)
		losePolicy(t, rdb, key)
		require.False(t, takeOne(t, c, key).OK)
		terms := p.Terms(policy.Fence{})
		_, err := lua.Refill(t.Context(), rdb, key, policy.Call{Create: policy.CreateInitial, Terms: &terms})
		require.NoError(t, err)
		_, err = lua.Grant(t.Context(), rdb, key, 1)
		require.NoError(t, err)
		require.True(t, takeOne(t, c, key).OK, key)
	}
}

func TestTheDegradedModeOutlivesTheLossOfAPolicy(t *testing.T) {
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, slow())
	p := hourly(1)
	p.Degraded = policy.DegradedOpen
	createBucket(t, f.direct, "b", p)
	require.True(t, takeOne(t, c, "b").OK)
	losePolicy(t, f.direct, "b")
	require.False(t, takeOne(t, c, "b").OK)
	f.proxy.Cut()
	require.Equal(t, SourceFallback, takeOne(t, c, "b").Source.Kind)
}

func TestALostPolicyIsBelievedForTenSeconds(t *testing.T) {
	start := time.Now()
	p := hourly(5)
	terms := p.Terms(policy.Fence{})
	i := unseen.updated(&terms, 7, start)
	require.True(t, i.hasPolicy())
	for _, after := range []time.Duration{9 * time.Second, 15 * time.Second, 18999 * time.Millisecond} {
		i = i.updated(nil, 0, start.Add(after))
		require.EqualValues(t, 5, i.limit())
		require.Zero(t, i.era, "the next refill may begin another era")
		require.False(t, i.hasPolicy())
		require.False(t, i.remembersDenials())
	}
	require.True(t, i.updated(&terms, 8, start.Add(18*time.Second)).hasPolicy())
	i = i.updated(nil, 0, start.Add(19*time.Second))
	require.Nil(t, i.terms)
	require.True(t, i.remembersDenials())
}

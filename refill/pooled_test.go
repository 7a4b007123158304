package refill

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func pooled(key string) Bucket {
	return Bucket{Key: key, Policy: policy.Policy{Interval: interval}, Pooled: true}
}

func poolTerms(seq, rate int64) policy.Terms {
	return policy.Terms{
		Fence: policy.Fence{Epoch: 1, Seq: seq}, Capacity: 1000, Tokens: rate, Per: 1_000_000,
		Interval: interval.Microseconds(), MaxElapsed: 2_000_000,
	}
}

func TestPooledBucketFollowsTheTermsSetAtRunTime(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a := r.start("a", false, 3, pooled("payments"), checkout(1000))
		time.Sleep(2 * time.Second)
		require.Zero(t, r.server.take("payments", 1), "a pool's bucket is not created without terms")
		require.EqualValues(t, 1000, r.server.take("checkout", 1000))

		require.NoError(t, a.SetTerms("payments", poolTerms(2, 100)))
		time.Sleep(2 * time.Second)
		r.server.take("payments", 1000)
		time.Sleep(5 * time.Second)
		require.InDelta(t, 500, r.server.take("payments", 1000), 15)

		require.NoError(t, a.SetTerms("payments", poolTerms(3, 10)))
		require.NoError(t, a.SetTerms("payments", poolTerms(1, 900)), "older terms are ignored")
		time.Sleep(time.Second)
		r.server.take("payments", 1000)
		time.Sleep(10 * time.Second)
		require.InDelta(t, 100, r.server.take("payments", 1000), 3)

		require.NoError(t, a.Update([]Bucket{pooled("payments")}, nil, 4))
		time.Sleep(10 * time.Second)
		require.InDelta(t, 100, r.server.take("payments", 1000), 3, "the terms outlive a change of the configuration")
		a.stop()
	})
}

func TestPooledBucketWithoutTermsIsRefilledUnderThoseInForce(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a := r.start("a", false, 0, pooled("payments"))
		require.NoError(t, a.SetTerms("payments", poolTerms(1, 100)))
		time.Sleep(time.Second)
		a.stop()
		b := r.start("b", false, 0, pooled("payments")) // no terms were set
		time.Sleep(time.Second)
		r.server.take("payments", 1000)
		time.Sleep(5 * time.Second)
		require.InDelta(t, 500, r.server.take("payments", 1000), 15)
		b.stop()
	})
}

// The terms of a pool have the versions of the replica's configuration, from whichever replica they came. So each
// replica finds out that another one has later pools.
func TestAPoolsTermsHaveTheLatestVersionsOfAllReplicas(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		of := func(poolsVersion int64) Bucket {
			b := pooled("payments")
			b.Start = &policy.Terms{Pool: true, PoolsVersion: poolsVersion}
			return b
		}
		a, b := r.start("a", false, 7, of(5)), r.start("b", false, 7, of(5))
		versions := func() (version, poolsVersion int64) {
			r.server.set(func() {
				terms := r.server.bucket("payments").Control.Terms
				version, poolsVersion = terms.Version, terms.PoolsVersion
			})
			return version, poolsVersion
		}
		terms := poolTerms(1, 100)
		terms.Pool = true
		terms.PoolsVersion = 9 // of the replica that wrote them to Redis
		require.NoError(t, a.SetTerms("payments", terms))
		require.NoError(t, b.SetTerms("payments", terms))
		time.Sleep(2 * time.Second)
		version, poolsVersion := versions()
		require.EqualValues(t, 7, version)
		require.EqualValues(t, 5, poolsVersion)

		require.NoError(t, b.Update([]Bucket{of(6)}, nil, 8))
		time.Sleep(2 * time.Second)
		version, poolsVersion = versions()
		require.EqualValues(t, 8, version)
		require.EqualValues(t, 6, poolsVersion)
		a.stop()
		b.stop()
	})
}

func TestSetTermsNeedsAPooledBucket(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a := r.start("a", false, 0, checkout(1000))
		var be *BucketError
		require.ErrorAs(t, a.SetTerms("checkout", poolTerms(1, 1)), &be)
		require.ErrorIs(t, a.SetTerms("payments", poolTerms(1, 1)), ErrConfig)
		a.stop()
	})
	require.ErrorIs(t, checkBuckets([]Bucket{{Key: "p", Pooled: true, Policy: policy.Policy{Interval: 1}}}), ErrConfig)
	require.NoError(t, checkBuckets([]Bucket{pooled("p")}))
}

func TestThePlanOfAPoolGoesByTheRateInForce(t *testing.T) {
	t.Parallel()
	d := &division{flows: &policy.Flows{Headroom: policy.DefaultHeadroom, Most: policy.DefaultFlows}, pooled: true}
	terms := poolTerms(1, 100)
	terms.GrantTokens = 500
	terms.GrantEra = 7
	terms.GrantEnd = 1000
	refilled := func(era, now int64) *lua.RefillResult {
		return &lua.RefillResult{Outcome: policy.Outcome{
			Status: policy.StatusApplied, Pool: true, Version: policy.Version{Era: era, Index: 1}, Now: now,
		}}
	}
	for _, c := range []struct {
		era, now int64
		rate     float64
	}{{7, 999, 500}, {7, 1000, 100}, {8, 999, 100}} {
		require.True(t, d.planned(&terms, refilled(c.era, c.now)))
		require.InDelta(t, c.rate, d.about.Rate, 0)
		require.EqualValues(t, 1000, d.about.Capacity)
	}
	terms.Tokens = 0
	require.False(t, d.planned(&terms, refilled(8, 999)), "a bucket without a rate is not divided")
	terms.Tokens = 100
	plain := refilled(8, 999)
	plain.Pool = false
	require.False(t, d.planned(&terms, plain), "plain terms are in force")
	require.False(t, d.planned(nil, refilled(8, 999)), "no terms are known")
}

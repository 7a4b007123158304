package refill

import (
	"fmt"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// thousand is the policy of the buckets in these tests. The longest stretch that one refill credits is worth 20 tokens.
var thousand = policy.Policy{Capacity: 1000, Rate: policy.PerSecond(10), Interval: interval}

// prefixed returns a set of templates of that policy.
func prefixed(t *testing.T, version int64, plain []string, prefixes ...string) *policy.Templates {
	t.Helper()
	var list []policy.Template
	for _, prefix := range prefixes {
		list = append(list, policy.Template{Prefix: prefix, Policy: thousand})
	}
	set, err := policy.NewTemplates(version, list, plain)
	require.NoError(t, err)
	return set
}

// onRedisAndCluster runs a test on a single Redis and on a Cluster.
func onRedisAndCluster(t *testing.T, test func(t *testing.T, rdb redis.UniversalClient)) {
	t.Run("Redis", func(t *testing.T) {
		t.Parallel()
		test(t, testenv.Redis(t).Client())
	})
	t.Run("Cluster", func(t *testing.T) {
		t.Parallel()
		test(t, testenv.Cluster(t).Client())
	})
}

// A drained bucket is refilled without a pause, even if its template changes and no take follows.
func TestADrainedBucketIsRefilledByTheTemplateThatMatchesItNow(t *testing.T) {
	t.Parallel()
	const key = "user:vip:1"
	for name, prefixes := range map[string]struct{ before, after []string }{
		"a prefix is split":   {[]string{"user:"}, []string{"user:", "user:vip:"}},
		"a prefix is removed": {[]string{"user:", "user:vip:"}, []string{"user:"}},
		"a prefix is renamed": {[]string{"user:vip:"}, []string{"user:*:", "other:"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onRedisAndCluster(t, func(t *testing.T, rdb redis.UniversalClient) {
				before := prefixed(t, 1, nil, prefixes.before...)
				after := prefixed(t, 2, nil, prefixes.after...)
				ok, err := newConsumer(rdb).take(t.Context(), before.Of(key), key, 1000, false)
				require.NoError(t, err)
				require.True(t, ok)
				w := newWatch()
				r, stop := runningWith(t, Config{Redis: rdb, Templates: before, Version: 1, ObserveActive: w.observe,
					Logger: hclog.NewNullLogger()})
				w.until(t, "a refill", appliedTo([]Bucket{{Key: key}}))
				require.NoError(t, r.Update(nil, after, 2))
				belongsTo(t, rdb, w, after, key)

				// A consumer that does not know the later templates yet puts the bucket into the set of the earlier one.
				err = newConsumer(rdb).enter(t, before.Of(key), key)
				require.NoError(t, err)
				require.Eventually(t, func() bool { return !named(t, rdb, before.Of(key), key) }, 10*time.Second,
					time.Millisecond)
				belongsTo(t, rdb, w, after, key)
				stop()
			})
		})
	}
}

// belongsTo waits until a bucket is refilled under the template that matches it, and is in its active set alone.
func belongsTo(t *testing.T, rdb redis.UniversalClient, w *watch, set *policy.Templates, key string) {
	t.Helper()
	w.until(t, "refills under the later version", func(events map[string][]Event) bool {
		for _, e := range events[key] {
			if e.Err == nil && e.Outcome.Status == policy.StatusApplied && e.Outcome.Fence.Epoch == set.Version() {
				return true
			}
		}
		return false
	})
	w.forget()
	w.until(t, "two more refills", func(events map[string][]Event) bool {
		applied := 0
		for _, e := range events[key] {
			if e.Err == nil && e.Outcome.Status == policy.StatusApplied {
				applied++
			}
		}
		return applied >= 2
	})
	require.True(t, named(t, rdb, set.Of(key), key))
	p, err := lua.Peek(t.Context(), rdb, key, 1)
	require.NoError(t, err)
	require.True(t, p.Terms.Template)
	for _, k := range []string{lua.TokensKey(key), lua.IndexKey(key), lua.ControlKey(key)} {
		require.Positive(t, rdb.PTTL(t.Context(), k).Val(), k)
	}
}

// named reports whether a bucket is in the active set of a template.
func named(t *testing.T, rdb redis.UniversalClient, of *policy.CompiledTemplate, key string) bool {
	t.Helper()
	there, err := rdb.SIsMember(t.Context(), lua.ActiveKey(of.Prefix, lua.ActiveShard(key)), key).Result()
	require.NoError(t, err)
	return there
}

// enter puts a bucket into the active set of a template, as a take does.
func (c *consumer) enter(t *testing.T, template *policy.CompiledTemplate, key string) error {
	till := time.Now().Add(time.Minute).Unix()
	return lua.NewTemplate(template, c.crossSlot).Enter(t.Context(), c.rdb, key, till)
}

// A drained bucket that is removed from the file is refilled under the template that matches its name, even before its
// next take. The same holds for a pool's bucket, because the version of the file decides.
func TestADrainedBucketThatLeavesTheFileIsRefilledByTheTemplate(t *testing.T) {
	t.Parallel()
	const key = "user:1"
	own := thousand.Terms(policy.Fence{Epoch: 1})
	pooled := own
	pooled.Pool = true
	pooled.Fence = policy.Fence{}
	pooled.Version = 1
	granted := pooled
	granted.Fence = policy.Fence{Epoch: 5, Seq: 1}
	granted.GrantTokens = 2 * granted.Tokens
	granted.GrantEnd = time.Now().Add(time.Hour).UnixMicro()
	for name, bucket := range map[string]struct {
		Bucket
		terms policy.Terms
	}{
		"configured": {Bucket{Key: key, Policy: thousand}, own},
		"a pool's":   {Bucket{Key: key, Policy: thousand, Pooled: true}, pooled},
		"granted":    {Bucket{Key: key, Policy: thousand, Pooled: true}, granted},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onRedisAndCluster(t, func(t *testing.T, rdb redis.UniversalClient) {
				_, err := lua.Refill(t.Context(), rdb, key, policy.Call{Create: policy.CreateInitial, Terms: &bucket.terms})
				require.NoError(t, err)
				_, err = lua.Take(t.Context(), rdb, key, 1000, false)
				require.NoError(t, err)
				w := newWatch()
				r, stop := runningWith(t, Config{Redis: rdb, Buckets: []Bucket{bucket.Bucket}, Version: 1,
					Templates: prefixed(t, 1, []string{key}, "user:"), Observe: w.observe, ObserveActive: w.observe,
					Logger: hclog.NewNullLogger()})
				w.until(t, "a refill", appliedTo([]Bucket{{Key: key}}))
				after := prefixed(t, 2, nil, "user:")
				require.NoError(t, r.Update(nil, after, 2))
				belongsTo(t, rdb, w, after, key)
				stop()
			})
		})
	}
}

// If names can't be moved to another set, they stay in their set and delay none of its buckets. They are moved when the
// fault of the other set has ended.
func TestASetThatCanNotTakeNamesHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	const moves = "user:vip:1"
	stays := ""
	for i := 0; stays == ""; i++ {
		if key := fmt.Sprintf("user:%d", i); lua.ActiveShard(key) == lua.ActiveShard(moves) {
			stays = key
		}
	}
	before, after := prefixed(t, 1, nil, "user:"), prefixed(t, 2, nil, "user:", "user:vip:")
	for _, key := range []string{stays, moves} {
		ok, err := newConsumer(rdb).take(ctx, before.Of(key), key, 1000, false)
		require.NoError(t, err)
		require.True(t, ok)
	}
	set := lua.ActiveKey("user:vip:", lua.ActiveShard(moves))
	require.NoError(t, rdb.Set(ctx, set, "x", 0).Err())
	w := newWatch()
	r, stop := runningWith(t, Config{Redis: rdb, Templates: before, Version: 1, ObserveActive: w.observe,
		Logger: hclog.NewNullLogger()})
	w.until(t, "refills", appliedTo([]Bucket{{Key: stays}, {Key: moves}}))
	require.NoError(t, r.Update(nil, after, 2))
	belongsTo(t, rdb, w, after, stays)
	require.True(t, named(t, rdb, before.Of(moves), moves))
	require.NoError(t, rdb.Del(ctx, set).Err())
	belongsTo(t, rdb, w, after, moves)
	stop()
}

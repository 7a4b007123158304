package replica_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/replica"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// A leader has an older file than a standby. None of the older policies stays in force: neither of a bucket nor of a
// template, and not after a loss of Redis either. Buckets that only the later file has are refilled, too.
func TestAStandbysLaterFileIsInForceWithinASecond(t *testing.T) {
	t.Parallel()
	etcd, server := testenv.Etcd(t, 1), testenv.Redis(t)
	ctx, rdb := t.Context(), server.Client()
	file := func(version int64, more string) config.Config { return elected(t, server, etcd, version, more) }
	leader := running(t, file(7, `buckets: [{key: a, capacity: 10000, rate: 5000/s}]
templates: [{prefix: "user:", capacity: 10000, rate: 5000/s, interval: 100ms}]
`), replica.Options{Identity: "leader"})
	eventually(t, "the first replica leads", func() bool {
		s := leader.Status(ctx, admin.Query{})
		return s.Leader != nil && s.Leader.Identity == "leader"
	})
	c := consumer(t, rdb, fetch.WithRescue(false))
	eventually(t, "the leader's buckets and templates exist", func() bool {
		_, bucketErr := c.Take(ctx, "a", 1)
		_, userErr := c.Take(ctx, "user:1", 1)
		return bucketErr == nil && userErr == nil
	})
	running(t, file(8, `buckets: [{key: a, capacity: 10, rate: 10/s}, {key: b, capacity: 10, rate: 10/s}]
templates: [{prefix: "user:", capacity: 10, rate: 10/s, interval: 100ms}]
`), replica.Options{Identity: "standby"})
	eventually(t, "the later file is published", func() bool {
		r, err := c.Peek(ctx, "user:new")
		return err == nil && r.Limit == 10
	})

	keys := []string{"a", "b", "user:1"}
	for round := range 3 {
		eventually(t, "all buckets exist", func() bool {
			for _, key := range keys {
				if _, err := c.Take(ctx, key, 1); err != nil {
					require.ErrorIs(t, err, fetch.ErrUnknownBucket)
					return false
				}
			}
			return true
		})
		time.Sleep(time.Second) // the promise allows older policies to be in force for this time
		for _, key := range keys {
			began := time.Now()
			taken := int64(0)
			for time.Since(began) < 500*time.Millisecond {
				r, err := c.TakeUpTo(ctx, key, 100)
				require.NoError(t, err)
				require.EqualValues(t, 10, r.Limit, "round %d: %s", round, key)
				taken += r.Taken
			}
			due := 10 + 10*time.Since(began).Seconds()
			require.LessOrEqual(t, float64(taken), due+2,
				"round %d: %s gave more than its capacity, its rate and one refill", round, key)
			require.GreaterOrEqual(t, taken, int64(3), "round %d: %s is refilled", round, key)
		}
		require.NoError(t, rdb.FlushAll(ctx).Err())
	}
}

// Two elected deployments have one etcd, one election prefix and one Redis, so only one of them has the leader. The
// buckets of the other one are refilled, too.
func TestTwoDeploymentsWithOneElectionRefillTheirBuckets(t *testing.T) {
	t.Parallel()
	etcd, server := testenv.Etcd(t, 1), testenv.Redis(t)
	ctx, rdb := t.Context(), server.Client()
	start := func(identity string, version int64, key string) *replica.Replica {
		cfg := elected(t, server, etcd, version, fmt.Sprintf("buckets: [{key: %s, capacity: 10000, rate: 100/s}]\n", key))
		return running(t, cfg, replica.Options{Identity: identity})
	}
	first := start("first", 7, "a")
	eventually(t, "the first deployment leads", func() bool {
		s := first.Status(ctx, admin.Query{})
		return s.Leader != nil && s.Leader.Identity == "first"
	})
	start("second-1", 3, "b")
	start("second-2", 7, "b")
	for _, key := range []string{"a", "b"} {
		eventually(t, "the bucket exists", func() bool { return rdb.Exists(ctx, key).Val() == 1 })
		before := peek(t, rdb, key).Version.Index
		eventually(t, "the bucket is refilled", func() bool { return peek(t, rdb, key).Version.Index > before+5 })
	}
}

// Only pools_version is raised, and the later file has another pool. The leader still has the older file.
func TestAPoolThatTheLeaderDoesNotHaveIsRefilled(t *testing.T) {
	t.Parallel()
	etcd, server := testenv.Etcd(t, 1), testenv.Redis(t)
	ctx, rdb := t.Context(), server.Client()
	file := func(poolsVersion int64, names ...string) config.Config {
		pools := ""
		for _, n := range names {
			pools += fmt.Sprintf("  - {name: %s, rate: 1000/s, capacity: 3000, regions: {eu: {}}}\n", n)
		}
		return elected(t, server, etcd, 7, fmt.Sprintf("region: eu\npools_version: %d\n"+
			"buckets: [{key: own, capacity: 1000, rate: 100/s}]\npools:\n%s", poolsVersion, pools))
	}
	leader := running(t, file(7, "payments"), replica.Options{Identity: "leader"})
	eventually(t, "the leader leads", func() bool { return leader.Status(ctx, admin.Query{}).Leading })
	standby := running(t, file(7, "payments"), replica.Options{Identity: "standby"})
	eventually(t, "the standby knows the leader", func() bool {
		s := standby.Status(ctx, admin.Query{})
		return s.Leader != nil && s.Leader.Identity == "leader"
	})
	require.NoError(t, standby.Reload(file(8, "payments", "mail"), "test"))
	eventually(t, "the new pool has tokens", func() bool {
		b, err := lua.Peek(ctx, rdb, "mail", 1)
		return err == nil && b.Tokens > 0
	})
}

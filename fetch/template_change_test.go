package fetch

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// publishUsers publishes a template of the users' buckets.
func publishUsers(t *testing.T, rdb redis.UniversalClient, version, capacity int64, enforce policy.Enforce) {
	t.Helper()
	p := hourly(capacity)
	p.Interval = time.Second
	set, err := policy.NewTemplates(version, []policy.Template{{Prefix: "user:", Policy: p, Enforce: enforce}}, nil)
	require.NoError(t, err)
	reply, err := lua.PublishTemplates(t.Context(), rdb, set)
	require.NoError(t, err)
	require.True(t, reply.OK)
}

// follows waits until the Client knows a version of the templates.
func follows(t *testing.T, c *Client, version int64) {
	t.Helper()
	eventually(t, func() bool {
		_, _ = c.Peek(t.Context(), "user:other")
		return c.templates.set.Load().Version() == version
	}, "the client knows the version")
}

// A batch has takes that were made before and after the Client knew a template. Each of them gets the right answer.
func TestTakesBeforeAndAfterATemplateIsKnownGoTogether(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	publishUsers(t, rdb, 1, 60, policy.EnforceRefilled)
	c := newClient(t, rdb, slow())
	follows(t, c, 1)
	s := c.nodes.of("user:1")
	var batch []*engine.Request[ask]
	for _, k := range []kind{configured{}, c.templates.kind("user:1")} {
		r := s.queue.Request()
		r.Body = ask{key: "user:1", kind: k, bucket: unseenBucket, info: unseen, run: policy.Run{N: 1, Count: 1},
			allKeys: true}
		batch = append(batch, r)
	}
	_, err := c.sender(s, rdb)(t.Context(), batch)
	require.NoError(t, err)
	require.NoError(t, batch[1].Body.err)
}

// The bucket is refilled even if the Client does not know its template yet.
func TestATakeBeforeTheTemplateIsKnownActivatesTheBucket(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string][]CallOption{"a take": nil, "a request": {WithRequestID("a")}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, rdb := t.Context(), testenv.Redis(t).Client()
			late := newClient(t, rdb, slow())
			_, err := late.Take(ctx, "user:other", 1)
			require.ErrorIs(t, err, ErrUnknownBucket)
			publishUsers(t, rdb, 1, 60, policy.EnforceRefilled)
			_, err = newClient(t, rdb, slow()).Take(ctx, "user:1", 1)
			require.NoError(t, err)
			set := lua.ActiveKey("user:", lua.ActiveShard("user:1"))
			require.NoError(t, rdb.SRem(ctx, set, "user:1").Err()) // as a refill that fills it does
			require.NoError(t, rdb.Set(ctx, "user:1", 60, redis.KeepTTL).Err())
			r, err := late.Take(ctx, "user:1", 50, opts...)
			require.NoError(t, err)
			require.True(t, r.OK)
			eventually(t, func() bool { return rdb.SIsMember(ctx, set, "user:1").Val() }, "the bucket is in the active set")
		})
	}
}

func TestUndoReturnsNothingToABucketThatIsEnforcedInAnotherWay(t *testing.T) {
	t.Parallel()
	for first, second := range map[policy.Enforce]policy.Enforce{
		policy.EnforceLazy: policy.EnforceRefilled, policy.EnforceRefilled: policy.EnforceLazy,
	} {
		t.Run(first.String(), func(t *testing.T) {
			t.Parallel()
			ctx, rdb := t.Context(), testenv.Redis(t).Client()
			publishUsers(t, rdb, 1, 60, first)
			c := newClient(t, rdb, slow())
			old, err := c.Take(ctx, "user:1", 30)
			require.NoError(t, err)
			require.True(t, old.OK)
			publishUsers(t, rdb, 2, 60, second)
			follows(t, c, 2)
			later, err := c.Take(ctx, "user:1", 40)
			require.NoError(t, err)
			require.NoError(t, c.Undo(ctx, "user:1", old))
			r, err := c.Peek(ctx, "user:1")
			require.NoError(t, err)
			require.EqualValues(t, 20, r.Remaining)
			require.NoError(t, c.Undo(ctx, "user:1", later))
			r, err = c.Peek(ctx, "user:1")
			require.NoError(t, err)
			require.EqualValues(t, 60, r.Remaining, "Undo returns tokens to the bucket that gave them")
		})
	}
}

// A leave in percent refers to the capacity that the take puts in force.
func TestALeaveInPercentIsOfTheLaterCapacity(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		before, after, percent int64
		ok                     bool
	}{"raised": {60, 600, 50, false}, "lowered": {600, 60, 20, true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, rdb := t.Context(), testenv.Redis(t).Client()
			publishUsers(t, rdb, 1, tc.before, policy.EnforceRefilled)
			c := newClient(t, rdb, slow())
			_, err := c.Take(ctx, "user:1", 10)
			require.NoError(t, err)
			publishUsers(t, rdb, 2, tc.after, policy.EnforceRefilled)
			follows(t, c, 2)
			r, err := c.Take(ctx, "user:1", 1, WithLeavePercent(tc.percent))
			require.NoError(t, err)
			require.Equal(t, tc.ok, r.OK)
		})
	}
}

// A consumer that still remembers the higher capacity takes without adding the bucket to the active set. So a full
// bucket whose capacity was lowered stays in the active set for longer than a consumer may remember the capacity. This
// includes the time of a call that began before. Soon after that, the bucket is removed.
func TestALoweredBucketIsActiveUntilConsumersKnowIt(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	publishUsers(t, rdb, 1, 600, policy.EnforceRefilled)
	_, err := newClient(t, rdb, slow()).Take(ctx, "user:1", 1)
	require.NoError(t, err)
	p := hourly(60)
	terms := p.Terms(policy.Fence{Epoch: 2})
	terms.Template = true
	shard := lua.Shard{Prefix: "user:", Number: lua.ActiveShard("user:1")}
	refill := func() lua.RefillResult {
		peek, err := lua.Peek(ctx, rdb, "user:1", 1)
		require.NoError(t, err)
		r := lua.RefillActive(ctx, rdb, shard, []lua.RefillCall{{Key: "user:1",
			Call: policy.Call{Version: peek.Version, Terms: &terms}}}, 1)[0]
		require.NoError(t, r.Err)
		require.EqualValues(t, 60, r.Tokens)
		return r
	}
	require.False(t, refill().Idle)
	lowered, err := rdb.HGet(ctx, lua.ControlKey("user:1"), "lowered").Int64()
	require.NoError(t, err)
	for age, idle := range map[time.Duration]bool{policyMaxAge + 2*time.Second: false, 2 * policyMaxAge: true} {
		require.NoError(t, rdb.HSet(ctx, lua.ControlKey("user:1"), "lowered", lowered-age.Microseconds()).Err())
		terms.Fence.Seq++ // so that the refill isn't early
		require.Equal(t, idle, refill().Idle, age)
	}
}

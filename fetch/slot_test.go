package fetch

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// moved is a bucket in a slot that moves. It holds its capacity less 3 tokens before the call, if it exists.
type moved struct {
	kind     string // "configured:", "refilled:", "lazy:"; the last two are prefixes of templates
	exists   bool
	override bool // the key has an override, with a capacity of 5 instead of 60
}

func (m moved) limit() int64 {
	if m.override {
		return 5
	}
	return 60
}

// movedCall is a call for a bucket whose slot moves.
type movedCall struct {
	name   string
	before string // what else the bucket remembers: "request" known, of 3 tokens, or "reservation" held, of 1 token
	adds   int64  // tokens that the call adds to the bucket
	call   func(ctx context.Context, c *Client, key string, m moved, era int64) (ok bool, limit int64, err error)
}

// movedCalls are the calls. A limit of -1 is none.
var movedCalls = []movedCall{
	{"take", "", -1, func(ctx context.Context, c *Client, key string, _ moved, _ int64) (bool, int64, error) {
		r, err := c.Take(ctx, key, 1)
		return r.OK, r.Limit, err
	}},
	{"denied", "", 0, func(ctx context.Context, c *Client, key string, m moved, _ int64) (bool, int64, error) {
		r, err := c.Take(ctx, key, m.limit())
		return !r.OK && r.RetryAfter > 0, r.Limit, err
	}},
	{"take up to", "", -1, func(ctx context.Context, c *Client, key string, m moved, _ int64) (bool, int64, error) {
		r, err := c.TakeUpTo(ctx, key, 1)
		return r.OK, r.Limit, err
	}},
	{"take all", "", -1, func(ctx context.Context, c *Client, key string, _ moved, _ int64) (bool, int64, error) {
		r, err := c.TakeAll(ctx, []Request{{Key: key, N: 1}})
		if err != nil {
			return false, 0, err
		}
		return r.OK, r.Results[0].Limit, nil
	}},
	{"wait", "", -1, func(ctx context.Context, c *Client, key string, _ moved, _ int64) (bool, int64, error) {
		return true, -1, errOf(c.Wait(ctx, key, 1))
	}},
	{"peek", "", 0, func(ctx context.Context, c *Client, key string, m moved, _ int64) (bool, int64, error) {
		r, err := c.Peek(ctx, key)
		return r.Remaining == m.limit()-3 || !m.exists && r.Remaining == m.limit(), r.Limit, err
	}},
	{"return", "", 1, func(ctx context.Context, c *Client, key string, _ moved, _ int64) (bool, int64, error) {
		return true, -1, c.Return(ctx, key, 1)
	}},
	{"undo", "", 1, func(ctx context.Context, c *Client, key string, _ moved, era int64) (bool, int64, error) {
		return true, -1, c.Undo(ctx, key, Result{OK: true, Taken: 1, Era: era})
	}},
	{"new request", "", -1, func(ctx context.Context, c *Client, key string, _ moved, _ int64) (bool, int64, error) {
		r, err := c.Take(ctx, key, 1, WithRequestID("new"))
		return r.OK, r.Limit, err
	}},
	{"known request", "request", 0,
		func(ctx context.Context, c *Client, key string, m moved, _ int64) (bool, int64, error) {
			r, err := c.Take(ctx, key, 3, WithRequestID("known"))
			return r.Remaining == m.limit()-3, r.Limit, err
		}},
	{"first reservation", "", -1, reserveOne},
	{"second reservation", "reservation", -1, reserveOne},
	{"settle", "reservation", 1, func(ctx context.Context, c *Client, key string, _ moved, _ int64) (bool, int64, error) {
		s, err := c.Settle(ctx, key, "held", 0)
		return s.Returned == 1, -1, err
	}},
	{"unknown beside held", "reservation", 0, settleUnknown},
	{"unknown", "", 0, settleUnknown},
}

// settleUnknown settles a reservation that the bucket doesn't know.
func settleUnknown(ctx context.Context, c *Client, key string, m moved, _ int64) (ok bool, limit int64, err error) {
	_, err = c.Settle(ctx, key, "unknown", 0)
	want := ErrNotHeld
	switch {
	case m.kind == "lazy:":
		want = ErrLazyBucket
	case !m.exists:
		want = ErrUnknownBucket
	}
	if !errors.Is(err, want) {
		return false, -1, err
	}
	return true, -1, nil
}

func reserveOne(ctx context.Context, c *Client, key string, _ moved, _ int64) (ok bool, limit int64, err error) {
	r, err := c.Reserve(ctx, key, 1, time.Minute)
	if err != nil {
		return false, 0, err
	}
	return r.OK, r.Limit, nil
}

// applies reports whether the call makes sense for the bucket.
func (mc movedCall) applies(m moved) bool {
	if !m.exists && (mc.before != "" || mc.name == "denied") {
		return false
	}
	return m.kind != "lazy:" || mc.before == "" && !strings.Contains(mc.name, "request") &&
		!strings.Contains(mc.name, "reservation")
}

// creates reports whether the call has to create a key while other keys of the bucket exist.
func (mc movedCall) creates(m moved) bool {
	return m.kind == "refilled:" && !m.exists && mc.adds < 0 || mc.name == "new request" || mc.name == "first reservation"
}

// movedBucket is one test case: a bucket and a call for it.
type movedBucket struct {
	moved
	movedCall
	key  string
	era  int64
	move *testenv.SlotMove
}

// movable returns a key that begins with name. Its slot is one of the first server, and is not in slots yet.
func movable(name string, slots map[int]bool) string {
	for i := 0; ; i++ {
		key := fmt.Sprintf("%s:%d", name, i)
		if slot := lua.Slot(key); slot < lua.Slots/4 && !slots[slot] {
			slots[slot] = true
			return key
		}
	}
}

// startMove begins to move the slot of a movable key to the last server. If slots moved to several servers at once,
// Redis' epochs of the slots would conflict.
func startMove(t *testing.T, cluster *testenv.RedisCluster, key string) *testenv.SlotMove {
	t.Helper()
	move, err := cluster.StartMove(lua.Slot(key), cluster.Nodes()[2])
	require.NoError(t, err)
	return move
}

// publishBoth publishes templates of buckets of 60 tokens, with the prefixes refilled: and lazy:.
func publishBoth(t *testing.T, rdb redis.UniversalClient) {
	t.Helper()
	p := hourly(60)
	p.Interval = time.Second
	set, err := policy.NewTemplates(1, []policy.Template{{Prefix: "refilled:", Policy: p},
		{Prefix: "lazy:", Policy: p, Enforce: policy.EnforceLazy}}, nil)
	require.NoError(t, err)
	_, err = lua.PublishTemplates(t.Context(), rdb, set)
	require.NoError(t, err)
}

// prepare makes the bucket.
func (b *movedBucket) prepare(t *testing.T, rdb redis.UniversalClient, c *Client, slots map[int]bool) {
	ctx, own := t.Context(), hourly(5)
	b.key = movable(fmt.Sprintf("%s%t:%t:%s", b.kind, b.exists, b.override, b.name), slots)
	if b.kind == "configured:" {
		createBucket(t, rdb, b.key, hourly(60))
	}
	if b.override {
		r := c.templates.set.Load().Of(b.key)
		_, err := lua.SetOverride(ctx, rdb, b.key, own.Terms(policy.Fence{}), r.Terms, r.Enforce)
		require.NoError(t, err)
	}
	if !b.exists {
		return
	}
	n, opts := int64(3), []CallOption{}
	switch b.before {
	case "request":
		opts = append(opts, WithRequestID("known"))
	case "reservation":
		n = 2
	}
	r, err := c.Take(ctx, b.key, n, opts...)
	require.NoError(t, err)
	require.True(t, r.OK)
	b.era = r.Era
	if n == 2 {
		held, err := c.Reserve(ctx, b.key, 1, time.Minute, WithReservationID("held"))
		require.NoError(t, err)
		require.True(t, held.OK)
	}
}

// tokens returns how many tokens are in the bucket after the call, or, if done is false, without the call.
func (b *movedBucket) tokens(done bool) int64 {
	n := b.limit()
	if b.exists {
		n -= 3
	}
	if done {
		n += b.adds
	}
	return min(n, b.limit())
}

// While a slot moves and all keys of a bucket are on one server, calls are answered as usual. There is one exception: a
// call that has to create another key is repeated until its time is over.
func TestCallsForABucketWhoseSlotMoves(t *testing.T) {
	t.Parallel()
	for name, arrived := range map[string]bool{"keys on the old server": false, "keys on the new server": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cluster := t.Context(), testenv.Cluster(t)
			rdb := cluster.Client()
			require.NoError(t, lua.Load(ctx, rdb))
			publishBoth(t, rdb)
			before, patient := newClient(t, rdb, slow()), newClient(t, rdb, slow())
			brief := newClient(t, rdb, WithTimeout(500*time.Millisecond))
			var buckets []*movedBucket
			slots := map[int]bool{}
			for _, m := range []moved{
				{"configured:", true, false},
				{"refilled:", true, false}, {"refilled:", true, true}, {"refilled:", false, false}, {"refilled:", false, true},
				{"lazy:", true, false}, {"lazy:", true, true}, {"lazy:", false, false}, {"lazy:", false, true},
			} {
				for _, call := range movedCalls {
					if !call.applies(m) {
						continue
					}
					b := &movedBucket{moved: m, movedCall: call}
					buckets = append(buckets, b)
					b.prepare(t, rdb, before, slots)
				}
			}
			for _, b := range buckets {
				b.move = startMove(t, cluster, b.key)
				if arrived {
					require.NoError(t, b.move.MoveKeys())
				}
			}
			var wg sync.WaitGroup
			for _, b := range buckets {
				c := patient
				if b.creates(b.moved) {
					c = brief
				}
				wg.Go(func() { b.check(t, c) })
			}
			wg.Wait()
			for _, b := range buckets {
				require.NoError(t, b.move.MoveKeys())
				require.NoError(t, b.move.Finish())
			}
			for _, b := range buckets {
				r, err := before.Peek(ctx, b.key)
				require.NoError(t, err)
				require.Equal(t, b.tokens(!b.creates(b.moved)), r.Remaining, b.key)
				require.Equal(t, b.limit(), r.Limit, b.key)
			}
			require.Zero(t, patient.Stats().Lost+brief.Stats().Lost)
		})
	}
}

// check makes the call.
func (b *movedBucket) check(t *testing.T, c *Client) {
	ok, limit, err := b.call(t.Context(), c, b.key, b.moved, b.era)
	switch {
	case b.creates(b.moved):
		if why := ReasonOf(err); why != ReasonCluster && why != ReasonDeadline { // the last try may be a slow one
			t.Errorf("%s: %v, want unavailable", b.key, err)
		}
	case err != nil || !ok || limit != -1 && limit != b.limit():
		t.Errorf("%s: ok %t, limit %d, %v", b.key, ok, limit, err)
	}
}

// refusals returns how often the servers replied TRYAGAIN.
func refusals(t *testing.T, cluster *testenv.RedisCluster) (n int) {
	t.Helper()
	for _, node := range cluster.Nodes() {
		info, err := node.Client().Info(t.Context(), "errorstats").Result()
		require.NoError(t, err)
		if _, rest, ok := strings.Cut(info, "errorstat_TRYAGAIN:count="); ok {
			count, err := strconv.Atoi(strings.Fields(rest)[0])
			require.NoError(t, err)
			n += count
		}
	}
	return n
}

// A call that no server of a Cluster can serve is made again until the slot has moved.
func TestACallWaitsForItsSlotAsLongAsItHasTime(t *testing.T) {
	t.Parallel()
	ctx, cluster := t.Context(), testenv.Cluster(t)
	rdb, slots := cluster.Client(), map[int]bool{}
	require.NoError(t, lua.Load(ctx, rdb))
	publishBoth(t, rdb)
	c := newClient(t, rdb, slow())
	for _, cell := range []struct {
		name  string
		split bool // the index is on the new server, the other keys are on the old one
		left  int64
		call  func(key string) error
	}{
		{"refilled:new", false, 59, func(key string) error {
			_, err := c.Take(ctx, key, 1)
			return err
		}},
		{"configured:request", false, 49, func(key string) error {
			_, err := c.Take(ctx, key, 1, WithRequestID("a"))
			return err
		}},
		{"configured:reservation", false, 49, func(key string) error {
			_, err := c.Reserve(ctx, key, 1, time.Minute)
			return err
		}},
		{"configured:peek", true, 50, func(key string) error {
			_, err := c.Peek(ctx, key)
			return err
		}},
		{"configured:return", true, 51, func(key string) error { return c.Return(ctx, key, 1) }},
		{"configured:give back", true, 52, func(key string) error {
			c.giveBack(key, lua.ReturnCall{N: 2})
			return nil
		}},
	} {
		key := movable(cell.name, slots)
		if cell.left != 59 {
			createBucket(t, rdb, key, hourly(60))
			require.NoError(t, rdb.Set(ctx, key, 50, 0).Err())
		}
		move := startMove(t, cluster, key)
		if cell.split {
			require.NoError(t, move.MoveKeys(lua.IndexKey(key)))
		}
		done, before := make(chan error, 1), refusals(t, cluster)
		go func() { done <- cell.call(key) }()
		eventually(t, func() bool { return refusals(t, cluster) > before+4 }, "the client repeats the call")
		require.NoError(t, move.MoveKeys())
		require.NoError(t, move.Finish())
		require.NoError(t, <-done, cell.name)
		require.EqualValues(t, cell.left, tokens(t, rdb, key), cell.name)
	}
	require.Zero(t, c.Stats().Lost)
}

// If a call has waited for its slot for all of its time, the degraded mode answers it. The breaker stays closed.
func TestACallWhoseSlotMovesForTooLongIsDegraded(t *testing.T) {
	t.Parallel()
	ctx, cluster := t.Context(), testenv.Cluster(t)
	rdb, key := cluster.Client(), movable("configured", map[int]bool{})
	p := hourly(60)
	p.Degraded = policy.DegradedOpen
	createBucket(t, rdb, key, p)
	c := newClient(t, rdb, slow())
	_, err := c.Take(ctx, key, 1)
	require.NoError(t, err)
	startMove(t, cluster, key)
	for range 20 {
		r, err := c.Take(ctx, key, 1, WithRequestID("a"), WithTimeout(100*time.Millisecond))
		require.NoError(t, err)
		require.True(t, r.OK)
		require.Equal(t, SourceFallback, r.Source.Kind)
	}
	require.Zero(t, c.Stats().BreakerOpened)
	require.NotZero(t, c.Stats().Degraded[ReasonCluster])

	cancelled, cancel := context.WithCancel(ctx)
	done, before := make(chan error, 1), refusals(t, cluster)
	go func() {
		_, err := c.Take(cancelled, key, 1, WithRequestID("a"))
		done <- err
	}()
	eventually(t, func() bool { return refusals(t, cluster) > before }, "the server refuses the call")
	cancel()
	require.ErrorIs(t, <-done, context.Canceled, "the call does not wait for a degraded answer")
	require.EqualValues(t, 59, tokens(t, rdb, key))
}

// Buckets in the same slot share a script call. While the slot moves and the buckets are on different servers, each has
// a call of its own.
func TestBucketsOfASlotThatMovesDoNotRefuseEachOther(t *testing.T) {
	t.Parallel()
	ctx, cluster := t.Context(), testenv.Cluster(t)
	rdb, keys := cluster.Client(), []string{movable("first", map[int]bool{})}
	keys = append(keys, inSlotOf("second", keys[0]))
	for _, key := range keys {
		createBucket(t, rdb, key, hourly(10))
	}
	move := startMove(t, cluster, keys[0])
	require.NoError(t, move.MoveKeys(lua.TokensKey(keys[1]), lua.IndexKey(keys[1]), lua.ControlKey(keys[1])))
	c := newClient(t, rdb, slow())
	s := c.nodes.of(keys[0])
	for _, allKeys := range []bool{false, true} {
		var batch []*engine.Request[ask]
		for _, key := range keys {
			r := s.queue.Request()
			r.Body = ask{key: key, kind: configured{}, bucket: unseenBucket, info: unseen,
				run: policy.Run{N: 1, Count: 1}, allKeys: allKeys}
			batch = append(batch, r)
		}
		_, err := c.sender(s, rdb)(ctx, batch)
		require.NoError(t, err)
		for _, r := range batch {
			require.NoError(t, r.Body.err)
			require.True(t, r.Body.reply.OK)
		}
	}
	require.NoError(t, move.MoveKeys())
	require.NoError(t, move.Finish())
	for _, key := range keys {
		require.EqualValues(t, 8, tokens(t, rdb, key))
	}
}

// While a slot moves, a server refuses only one call for the buckets of the slot. Later calls are made in the form that
// the server accepts. When the slot has moved, buckets are created and overrides apply as usual.
func TestOneCallFindsOutThatASlotMoves(t *testing.T) {
	t.Parallel()
	for name, m := range map[string]moved{
		"refilled": {kind: "refilled:", exists: true}, "lazy": {kind: "lazy:", exists: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cluster := t.Context(), testenv.Cluster(t)
			rdb := cluster.Client()
			require.NoError(t, lua.Load(ctx, rdb))
			publishBoth(t, rdb)
			c := newClient(t, rdb, slow(), WithDenyCache(false), WithRescue(false))
			b := &movedBucket{moved: m}
			b.prepare(t, rdb, c, map[int]bool{})
			move := startMove(t, cluster, b.key)
			require.NoError(t, move.MoveKeys())
			for i := range 5 {
				r, err := c.Take(ctx, b.key, 60)
				require.NoError(t, err)
				require.False(t, r.OK)
				require.Equal(t, 1, refusals(t, cluster), "take %d", i)
			}
			require.NoError(t, move.Finish())
			other := inSlotOf(m.kind+"other", b.key)
			r, err := c.Take(ctx, other, 1)
			require.NoError(t, err)
			require.EqualValues(t, 59, r.Remaining)
			template := c.templates.set.Load().Of(b.key)
			_, err = lua.SetOverride(ctx, rdb, b.key, hourly(5).Terms(policy.Fence{}), template.Terms, template.Enforce)
			require.NoError(t, err)
			for _, ok := range []bool{true, false} { // a denial always has the policy in force
				r, err = c.Take(ctx, b.key, 5)
				require.NoError(t, err)
				require.Equal(t, ok, r.OK)
			}
			require.EqualValues(t, 5, r.Limit)
		})
	}
}

// inSlotOf returns a key that begins with name, in the slot of another key.
func inSlotOf(name, key string) string {
	for i := 0; ; i++ {
		if other := fmt.Sprintf("%s:%d", name, i); lua.Slot(other) == lua.Slot(key) {
			return other
		}
	}
}

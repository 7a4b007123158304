package fetch

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// withFlows is a policy of 100 tokens that is divided among flows.
func withFlows() policy.Policy {
	p := hourly(100)
	p.Flows = &policy.Flows{Headroom: policy.DefaultHeadroom, Most: policy.DefaultFlows}
	return p
}

// createDivided creates a bucket of 100 tokens with a plan that lasts: its floor is 40 tokens. The flow quiet has a
// right to five of them, and the flow loud has no right. An unlisted flow gets up to three tokens.
func createDivided(t testing.TB, rdb redis.UniversalClient, key string) {
	t.Helper()
	createBucket(t, rdb, key, withFlows())
	list(t, rdb, key, policy.PlannedFlow{Name: "loud", Weight: 1, Took: 5}, policy.PlannedFlow{Name: "quiet", Weight: 1})
}

// list writes a plan that lists flows. Each has the right to five tokens, less those that it took.
func list(t testing.TB, rdb redis.UniversalClient, key string, flows ...policy.PlannedFlow) {
	t.Helper()
	now, err := rdb.Time(t.Context()).Result()
	require.NoError(t, err)
	r := lua.PlanBatch(t.Context(), rdb, []lua.PlanCall{{Key: key, Plan: policy.Plan{
		Version: policy.Version{Era: 1, Index: now.UnixMicro()}, Whole: true, Floor: 40, Unlisted: 3, Most: 1000,
		Span: 1_000_000, Lasts: time.Hour.Microseconds(),
		Teams: []policy.PlannedTeam{{Name: policy.RootTeam, Price: 1e9}}, Listed: flows,
	}}})[0]
	require.NoError(t, r.Err)
	require.False(t, r.Stale)
}

// drain takes all tokens above the bucket's floor, for the flow loud.
func drain(t testing.TB, c *Client, key string) {
	t.Helper()
	r, err := c.Take(t.Context(), key, 60, WithFlow("loud"))
	require.NoError(t, err)
	require.True(t, r.OK)
	require.EqualValues(t, 40, r.Remaining)
}

func TestAFlowWithoutARightLeavesTheOthersTheFloor(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	createDivided(t, rdb, "acme")
	c := newClient(t, rdb, slow())
	r, err := c.Take(ctx, "acme", 61, WithFlow("loud"))
	require.NoError(t, err)
	require.False(t, r.OK, "the first take of a process sends its flow, too")
	drain(t, newClient(t, rdb, slow()), "acme")

	r, err = c.Take(ctx, "acme", 1, WithFlow("loud"))
	require.NoError(t, err)
	require.False(t, r.OK)
	require.Equal(t, SourceShared, r.Source.Kind)
	require.EqualValues(t, 40, r.Remaining)
	r, err = c.Take(ctx, "acme", 1, WithFlow("loud"))
	require.NoError(t, err)
	require.False(t, r.OK)
	require.Equal(t, SourceCached, r.Source.Kind, "the denial of a flow is remembered")

	r, err = c.Take(ctx, "acme", 4, WithFlow("quiet"))
	require.NoError(t, err)
	require.True(t, r.OK, "the denial of one flow does not deny another")
	r, err = c.TakeUpTo(ctx, "acme", 10, WithFlow("quiet"))
	require.NoError(t, err)
	require.EqualValues(t, 4, r.Taken, "a flow with one token of right left gets a tenth of the floor")
	for _, flow := range []string{"stranger", ""} {
		var opts []CallOption
		if flow != "" {
			opts = append(opts, WithFlow(flow))
		}
		for n := range 4 {
			r, err = c.Take(ctx, "acme", 1, opts...)
			require.NoError(t, err)
			require.Equal(t, n < 3, r.OK, "take %d of the unlisted flow %q", n, flow)
		}
	}
}

func TestALineOfAFlowHoldsNoOtherFlowBack(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	createDivided(t, rdb, "acme")
	c := newClient(t, rdb, slow())
	drain(t, c, "acme")
	ctx, cancel := context.WithCancel(t.Context())
	waited := make(chan error, 1)
	go func() { waited <- errOf(c.Wait(ctx, "acme", 1, WithFlow("loud"))) }()
	eventually(t, func() bool {
		ls := c.buckets.find("acme").lines.Load()
		if ls == nil {
			return false
		}
		ls.mu.Lock()
		defer ls.mu.Unlock()
		l := ls.find("loud", policy.Leave{})
		return l != nil && !l.denied.IsZero()
	}, "the line of loud is denied")

	r, err := c.Take(t.Context(), "acme", 1, WithFlow("quiet"))
	require.NoError(t, err)
	require.True(t, r.OK)
	r, err = c.Wait(t.Context(), "acme", 1, WithFlow("quiet"))
	require.NoError(t, err)
	require.True(t, r.OK)
	cancel()
	require.ErrorIs(t, <-waited, context.Canceled)
}

func TestABucketWithoutFlowsPaysNothingForNames(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	commands := func(opts ...CallOption) map[string]int {
		key := fmt.Sprintf("bucket-%d", len(opts))
		createBucket(t, rdb, key, hourly(1000))
		c := newClient(t, rdb, slow())
		require.NoError(t, errOf(c.Take(ctx, key, 1))) // from now on the policy is known
		require.NoError(t, rdb.ConfigResetStat(ctx).Err())
		for range 100 {
			require.NoError(t, errOf(c.Take(ctx, key, 1, opts...)))
		}
		counts := commandCalls(t, rdb)
		require.Zero(t, rdb.Exists(ctx, lua.FlowsKey(key), lua.UseKey(key)).Val())
		return counts
	}
	plain := commands()
	require.Equal(t, 100, plain["decrby"])
	require.Equal(t, plain, commands(WithFlow("someone")))
}

func TestALostPlanLeavesTheBucketToAll(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	createDivided(t, rdb, "acme")
	c := newClient(t, rdb, slow(), WithDenyCache(false))
	drain(t, c, "acme")
	take := func() Result {
		r, err := c.Take(ctx, "acme", 1, WithFlow("loud"))
		require.NoError(t, err)
		return r
	}
	require.False(t, take().OK)
	require.NoError(t, rdb.Del(ctx, lua.UseKey("acme")).Err())
	require.False(t, take().OK, "the plan is in force without the counted use")
	require.Zero(t, rdb.Exists(ctx, lua.UseKey("acme")).Val(), "the take creates no key without an expiry")
	require.NoError(t, rdb.Del(ctx, lua.FlowsKey("acme")).Err())
	require.True(t, take().OK)
	require.Zero(t, rdb.Exists(ctx, lua.UseKey("acme"), lua.FlowsKey("acme")).Val())
	require.NoError(t, rdb.Set(ctx, lua.FlowsKey("acme"), "mine", 0).Err())
	_, err := c.Take(ctx, "acme", 1, WithFlow("loud"))
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
	require.ErrorContains(t, err, lua.FlowsKey("acme"))
}

func TestABucketGetsFlowsAndLosesThemByAVersion(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	createDivided(t, rdb, "acme")
	c := newClient(t, rdb, slow(), WithDenyCache(false))
	drain(t, c, "acme")
	take := func() bool {
		r, err := c.Take(ctx, "acme", 1, WithFlow("loud"))
		require.NoError(t, err)
		return r.OK
	}
	require.False(t, take())
	createUnder(t, rdb, "acme", hourly(100), 1)
	require.False(t, take(), "the plan is in force until it ends; the denial has the new policy")
	require.True(t, take())
	createUnder(t, rdb, "acme", withFlows(), 2)
	for take() { // until the Client asks for the policy again, takes read only the bucket's tokens, and flows don't count
	}
	require.False(t, take())
	require.True(t, known(c, "acme").divided())
}

func TestTheNamesOfStrangersAreBounded(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	createDivided(t, rdb, "acme")
	c := newClient(t, rdb, slow(), WithRescue(false)) // a rescue forgets the denials
	drain(t, c, "acme")
	const names = 2 * mostFlowDenials
	for i := range names {
		require.NoError(t, errOf(c.Take(ctx, "acme", 50, WithFlow(fmt.Sprintf("stranger-%d", i)))))
	}
	const most = 1000
	require.LessOrEqual(t, rdb.HLen(ctx, lua.UseKey("acme")).Val(), int64(most+4),
		"the key also has the period and the team")
	require.Less(t, rdb.MemoryUsage(ctx, lua.UseKey("acme")).Val(), int64(200_000))
	require.EqualValues(t, 3, rdb.HLen(ctx, lua.FlowsKey("acme")).Val())
	f := c.buckets.find("acme").flows.Load()
	f.mu.Lock()
	defer f.mu.Unlock()
	require.LessOrEqual(t, len(f.of), mostFlowDenials)
}

func TestEachFlowHasABlockOfItsOwn(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	createDivided(t, rdb, "acme")
	c := newClient(t, rdb, slow(), WithLease(50, time.Minute), WithDenyCache(false))
	leased := func(flow string) bool {
		r, err := c.Take(ctx, "acme", 1, WithFlow(flow))
		require.NoError(t, err)
		return r.Source.Kind == SourceLeased
	}
	for !leased("loud") {
	}
	require.NotNil(t, c.buckets.find("acme").blockOf("loud"))
	require.Nil(t, c.buckets.find("acme").blockOf("quiet"))
	require.Nil(t, c.buckets.find("acme").block.Load())
	for taken(c.Take(ctx, "acme", 1, WithFlow("loud"))) { // until block and bucket have no more tokens for it
	}
	require.EqualValues(t, 40, tokens(t, rdb, "acme"), "a block gets no tokens beyond the right of its flow")
	for range leaseFrom {
		_ = leased("quiet")
	}
	require.Less(t, tokens(t, rdb, "acme"), int64(40), "a block gets tokens within the right of its flow")
	asked, err := rdb.HGet(ctx, lua.UseKey("acme"), "quiet").Int64()
	require.NoError(t, err)
	require.Positive(t, asked)
}

func TestAFlowIsServedWhileItsSlotMoves(t *testing.T) {
	t.Parallel()
	cluster := testenv.Cluster(t)
	ctx, rdb := t.Context(), cluster.Client()
	createDivided(t, rdb, "acme")
	c := newClient(t, rdb, slow())
	require.NoError(t, errOf(c.Take(ctx, "acme", 1, WithFlow("quiet"))))
	slot := cluster.Slot("acme")
	var to *testenv.RedisServer
	for _, m := range cluster.Masters() {
		if m != cluster.Owner(slot) {
			to = m
		}
	}
	move, err := cluster.StartMove(slot, to)
	require.NoError(t, err)
	require.NoError(t, move.MoveKeys(lua.FlowsKey("acme")))
	within, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	r, err := c.Take(within, "acme", 1, WithFlow("quiet"))
	require.NoError(t, err)
	require.True(t, r.OK)
	require.NoError(t, move.MoveKeys("acme", lua.IndexKey("acme"), lua.ControlKey("acme"), lua.UseKey("acme")))
	require.NoError(t, move.Finish())
}

func TestFlowsAreCheckedAndForSomeCallsOnly(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	createDivided(t, rdb, "acme")
	c := newClient(t, rdb, slow())
	for _, bad := range []string{"", "/a", "a/", "a//b", strings.Repeat("a", policy.MaxFlowLen+1)} {
		require.ErrorIs(t, errOf(c.Take(ctx, "acme", 1, WithFlow(bad))), ErrInvalidOption, "%q", bad)
	}
	require.NoError(t, errOf(c.Take(ctx, "acme", 1, WithFlow(strings.Repeat("a", policy.MaxFlowLen)))))
	flow := WithFlow("quiet")
	_, err := c.TakeAll(ctx, []Request{{Key: "acme", N: 1, Flow: "a//b"}})
	require.ErrorIs(t, err, ErrInvalidOption)
	_, err = c.TakeAll(ctx, []Request{{Key: "acme", N: 1, Flow: "loud"}, {Key: "acme", N: 1}}, flow)
	require.ErrorIs(t, err, ErrInvalidOption)
	require.ErrorContains(t, err, `"loud" and "quiet"`)
	require.ErrorIs(t, errOf(c.Peek(ctx, "acme", flow)), ErrInvalidOption)
	require.ErrorIs(t, c.Return(ctx, "acme", 1, flow), ErrInvalidOption)
}

// rightOf returns how many single tokens a flow can take from a bucket that is at its floor. It gives the tokens back,
// but not the right that the flow paid.
func rightOf(t testing.TB, c *Client, flow string) (n int64) {
	t.Helper()
	for {
		r, err := c.Take(t.Context(), "acme", 1, WithFlow(flow))
		require.NoError(t, err)
		if !r.OK {
			if n > 0 {
				require.NoError(t, c.Return(t.Context(), "acme", n))
			}
			return n
		}
		n++
	}
}

func TestWhatAFlowDoesNotUseGivesItsRightBack(t *testing.T) {
	t.Parallel()
	ctx, quiet := context.Background(), WithFlow("quiet")
	take := func(opts ...CallOption) func(testing.TB, *Client) {
		return func(t testing.TB, c *Client) {
			r, err := c.Take(ctx, "acme", 3, append(opts, quiet)...)
			require.NoError(t, err)
			require.EqualValues(t, 3, r.Taken)
			require.NoError(t, c.Undo(ctx, "acme", r))
		}
	}
	takeAll := func(opts ...CallOption) func(testing.TB, *Client) {
		return func(t testing.TB, c *Client) {
			all, err := c.TakeAll(ctx, []Request{{Key: "acme", N: 1, Flow: "quiet"}, {Key: "plain", N: 1},
				{Key: "acme", N: 2, Flow: "quiet"}}, opts...)
			require.NoError(t, err)
			require.True(t, all.OK)
			require.NoError(t, c.UndoAll(ctx, all))
		}
	}
	for name, use := range map[string]func(testing.TB, *Client){
		"take": take(), "request": take(WithRequestID("r")), "all": takeAll(), "request of all": takeAll(WithRequestID("a")),
		"repeated request": func(t testing.TB, c *Client) {
			_, err := c.Take(ctx, "acme", 3, quiet, WithRequestID("r"))
			require.NoError(t, err)
			take(WithRequestID("r"))(t, c)
		},
		"repeated request of all": func(t testing.TB, c *Client) {
			_, err := c.TakeAll(ctx, []Request{{Key: "acme", N: 3, Flow: "quiet"}, {Key: "plain", N: 1}}, WithRequestID("a"))
			require.NoError(t, err)
			takeAll(WithRequestID("a"))(t, c)
		},
		"up to": func(t testing.TB, c *Client) {
			r, err := c.TakeUpTo(ctx, "acme", 3, quiet)
			require.NoError(t, err)
			require.NoError(t, c.Undo(ctx, "acme", r))
		},
		"wait": func(t testing.TB, c *Client) {
			r, err := c.Wait(ctx, "acme", 3, quiet)
			require.NoError(t, err)
			require.NoError(t, c.Undo(ctx, "acme", r))
		},
		"reservation": func(t testing.TB, c *Client) {
			r, err := c.Reserve(ctx, "acme", 3, time.Minute, quiet)
			require.NoError(t, err)
			require.True(t, r.OK)
			require.NoError(t, r.Cancel(ctx))
		},
		"denied elsewhere": func(t testing.TB, c *Client) {
			all, err := c.TakeAll(ctx, []Request{{Key: "acme", N: 3}, {Key: "elsewhere", N: 101}}, quiet)
			require.ErrorIs(t, err, ErrExceedsCapacity)
			require.False(t, all.OK)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var rdb redis.UniversalClient = testenv.Redis(t).Client()
			if name == "denied elsewhere" {
				rdb = testenv.Cluster(t).Client()
			}
			createDivided(t, rdb, "acme")
			createBucket(t, rdb, "plain", hourly(100))
			createBucket(t, rdb, "elsewhere", hourly(100))
			c := newClient(t, rdb, slow())
			drain(t, c, "acme")
			use(t, c)
			require.EqualValues(t, 40, tokens(t, rdb, "acme"))
			require.EqualValues(t, 5, rightOf(t, c, "quiet"))
		})
	}
}

func TestTokensThatCostNoRightGiveNoneBack(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	createDivided(t, rdb, "acme")
	c := newClient(t, rdb, slow(), WithDenyCache(false))
	for range 3 {
		r, err := c.Take(ctx, "acme", 60, WithFlow("loud"))
		require.NoError(t, err)
		require.True(t, r.OK)
		require.NoError(t, c.Undo(ctx, "acme", r))
		held, err := c.Reserve(ctx, "acme", 60, time.Minute, WithFlow("loud"))
		require.NoError(t, err)
		require.True(t, held.OK)
		require.NoError(t, held.Cancel(ctx))
	}
	drain(t, c, "acme")
	require.Zero(t, rightOf(t, c, "loud"))
	r, err := c.TakeAll(ctx, []Request{{Key: "acme", N: 1}}, WithFlow("loud"))
	require.NoError(t, err)
	require.False(t, r.OK)
	held, err := c.Reserve(ctx, "acme", 1, time.Minute, WithFlow("loud"))
	require.NoError(t, err)
	require.False(t, held.OK)
	require.False(t, taken(c.Take(ctx, "acme", 1, WithFlow("loud"), WithRequestID("r"))))
}

// The flow takes while there is no plan, or while the plan doesn't list it. The next plan lists the flow without a
// right.
func TestWhatWasTakenWithoutAPlanOrAListGivesNoRight(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for name, take := range map[string]func(c *Client, flow CallOption) (undo func() error, err error){
		"take": func(c *Client, flow CallOption) (undo func() error, err error) {
			r, err := c.Take(ctx, "acme", 2, flow)
			return func() error { return c.Undo(ctx, "acme", r) }, err
		},
		"wait": func(c *Client, flow CallOption) (undo func() error, err error) {
			r, err := c.Wait(ctx, "acme", 2, flow)
			return func() error { return c.Undo(ctx, "acme", r) }, err
		},
		"request": func(c *Client, flow CallOption) (undo func() error, err error) {
			r, err := c.Take(ctx, "acme", 2, flow, WithRequestID("r"))
			return func() error { return c.Undo(ctx, "acme", r) }, err
		},
		"all": func(c *Client, flow CallOption) (undo func() error, err error) {
			all, err := c.TakeAll(ctx, []Request{{Key: "acme", N: 2}}, flow)
			return func() error { return c.UndoAll(ctx, all) }, err
		},
		"reservation": func(c *Client, flow CallOption) (undo func() error, err error) {
			r, err := c.Reserve(ctx, "acme", 2, time.Minute, flow)
			return func() error { return r.Cancel(ctx) }, err
		},
	} {
		for _, planned := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, planned: %t", name, planned), func(t *testing.T) {
				t.Parallel()
				rdb := testenv.Redis(t).Client()
				createDivided(t, rdb, "acme")
				if !planned {
					require.NoError(t, rdb.Del(ctx, lua.FlowsKey("acme")).Err())
				}
				c := newClient(t, rdb, slow(), WithDenyCache(false))
				undo, err := take(c, WithFlow("stranger"))
				require.NoError(t, err)
				require.EqualValues(t, 98, tokens(t, rdb, "acme"))
				list(t, rdb, "acme", policy.PlannedFlow{Name: "loud", Weight: 1, Took: 5},
					policy.PlannedFlow{Name: "stranger", Weight: 1, Took: 5})
				require.NoError(t, undo())
				drain(t, c, "acme")
				require.Zero(t, rightOf(t, c, "stranger"))
			})
		}
	}
}

// taken reports whether a take was made.
func taken(r Result, err error) bool { return err == nil && r.OK }

func TestASettlementAdjustsTheRightOfItsFlow(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for _, test := range []struct{ reserved, used, right int64 }{{4, 3, 2}, {1, 3, 2}, {3, 3, 2}, {1, 7, 0}} {
		rdb := testenv.Redis(t).Client()
		createDivided(t, rdb, "acme")
		c := newClient(t, rdb, slow(), WithDenyCache(false))
		drain(t, c, "acme")
		r, err := c.Reserve(ctx, "acme", test.reserved, time.Minute, WithFlow("quiet"))
		require.NoError(t, err)
		require.True(t, r.OK)
		other := newClient(t, rdb, slow()) // it knows nothing of the bucket
		s, err := other.Settle(ctx, "acme", r.ID, test.used)
		require.NoError(t, err)
		require.Equal(t, max(0, test.reserved-test.used), s.Returned)
		require.Equal(t, test.right, rightOf(t, c, "quiet"), "reserved %d, used %d", test.reserved, test.used)
		asked, err := rdb.HGet(ctx, lua.UseKey("acme"), "quiet").Int64()
		require.NoError(t, err)
		denied, err := rdb.HGet(ctx, lua.UseKey("acme"), "/!quiet").Int64()
		require.NoError(t, err)
		require.Equal(t, max(test.reserved, test.used)+test.right, asked-denied)
	}
}

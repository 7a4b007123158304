package lua_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// listing returns a plan with a floor of 50. It lists flow a, which has the right to 5 tokens.
func listing(index int64) policy.Plan {
	return policy.Plan{
		Version: policy.Version{Era: buckettest.Era, Index: index}, Whole: true, Floor: 50, Most: 5, Span: second,
		Lasts: 3600 * second, Teams: []policy.PlannedTeam{{Name: policy.RootTeam, Price: 100_000}},
		Listed: []policy.PlannedFlow{{Name: "a", Weight: 1}},
	}
}

// planned writes a plan.
func planned(ctx context.Context, rdb redis.UniversalClient, key string, p policy.Plan) error {
	return lua.PlanBatch(ctx, rdb, []lua.PlanCall{{Key: key, Plan: p}})[0].Err
}

// storeDivided stores a bucket of 100 tokens with the plan listing(1).
func storeDivided(ctx context.Context, t testing.TB, rdb redis.UniversalClient, key string) {
	t.Helper()
	require.NoError(t, rdb.Del(ctx, lua.FlowsKey(key), lua.UseKey(key)).Err())
	storeCase(ctx, t, rdb, key, 100)
	require.NoError(t, planned(ctx, rdb, key, listing(1)))
}

// takeFor makes a take of n tokens for a flow, and asks for the policy.
func takeFor(ctx context.Context, c lua.Client, key, flow string, n int64) (lua.TakesReply, error) {
	runs := []policy.FlowRun{{Flow: flow, Run: policy.Run{N: n, Count: 1}}}
	replies, err := new(lua.FlowTakesCall).Do(ctx, c, []lua.FlowTakes{{Key: key, Runs: runs, Terms: true}})
	if err != nil {
		return lua.TakesReply{}, err
	}
	return replies[0], replies[0].Err
}

// divide returns a Flow with Divided set.
func divide(name string) lua.Flow { return lua.Flow{Name: name, Divided: true} }

// flowOperations has the functions that call a script for flow a, and the function that writes a plan.
var flowOperations = map[string]func(ctx context.Context, c lua.Client, key string) error{
	"Takes": func(ctx context.Context, c lua.Client, key string) error {
		_, err := takeFor(ctx, c, key, "a", 5)
		return err
	},
	"TakesWithoutTerms": func(ctx context.Context, c lua.Client, key string) error {
		runs := []policy.FlowRun{{Flow: "a", Run: policy.Run{N: 5, Count: 1}}}
		replies, err := new(lua.FlowTakesCall).Do(ctx, c, []lua.FlowTakes{{Key: key, Runs: runs}})
		if err != nil {
			return err
		}
		return replies[0].Err
	},
	"TakeOnce": func(ctx context.Context, c lua.Client, key string) error {
		_, err := lua.TakeOnceFor(ctx, c, key, divide("a"), "request", policy.Run{N: 5, Count: 1}, time.Minute)
		return err
	},
	"TakeAll": func(ctx context.Context, c lua.Client, key string) error {
		_, _, err := lua.TakeAll(ctx, c, []lua.Demand{{Key: key, N: 5, Flow: divide("a")}})
		return err
	},
	"Reserve": func(ctx context.Context, c lua.Client, key string) error {
		_, err := lua.Reserve(ctx, c, key, lua.ReserveCall{ID: "x", N: 5, TTL: time.Minute, Flow: divide("a")})
		return err
	},
	"Lease": func(ctx context.Context, c lua.Client, key string) error {
		_, err := lua.Lease(ctx, c, key, lua.LeaseCall{ID: "x", Seq: 1, Want: 5, TTL: time.Minute, Flow: divide("a")})
		return err
	},
	"Plan": func(ctx context.Context, c lua.Client, key string) error {
		return planned(ctx, c.(redis.UniversalClient), key, listing(2))
	},
}

func TestAKeyOfAnotherKindIsMalformedForFlowsAndStays(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		const key = "bucket"
		spoilt := func(name, kind string, set func(name string) error, ignoredBy ...string) {
			for op, call := range flowOperations {
				where := fmt.Sprintf("%s of a bucket with %s in %s", op, kind, name)
				storeDivided(ctx, t, rdb, key)
				require.NoError(t, rdb.Del(ctx, name).Err(), where)
				require.NoError(t, set(name), where)
				before := dump(ctx, t, rdb)
				err := call(ctx, rdb, key)
				if slices.Contains(ignoredBy, op) {
					require.NoError(t, err, where)
					require.Equal(t, before[name], dump(ctx, t, rdb)[name], where)
					continue
				}
				require.ErrorIs(t, err, lua.ErrMalformedBucket, where)
				require.ErrorContains(t, err, fmt.Sprintf("the key %q does not hold", name), where)
				require.Equal(t, before, dump(ctx, t, rdb), where)
			}
		}
		list := func(name string) error { return rdb.LPush(ctx, name, 1).Err() }
		spoilt(key, "a list", list)
		for _, text := range []string{"many", "1.5", "007", "-0", "", "9007199254740992", "-9007199254740992",
			"99999999999999999999"} {
			spoilt(key, text, func(name string) error { return rdb.Set(ctx, name, text, 0).Err() })
		}
		spoilt(lua.ControlKey(key), "a list", list, "Plan", "TakesWithoutTerms")
		spoilt(lua.ControlKey(key), "another hash", func(name string) error {
			return rdb.HSet(ctx, name, "st", "1 2 3", "pol", "x").Err()
		}, "Plan", "TakesWithoutTerms")
		spoilt(lua.FlowsKey(key), "a list", list)
		spoilt(lua.UseKey(key), "a list", list, slices.DeleteFunc(slices.Collect(maps.Keys(flowOperations)),
			func(op string) bool { return op == "Plan" })...)
	})
}

// A plan whose header is too short can't be read. The next plan replaces it.
func TestAPlanThatCanNotBeReadIsReplaced(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		const key = "bucket"
		for op, call := range flowOperations {
			storeDivided(ctx, t, rdb, key)
			header := rdb.HGet(ctx, lua.FlowsKey(key), "/").Val()
			require.NoError(t, rdb.HSet(ctx, lua.FlowsKey(key), "/", header[:136], "a", "x").Err())
			if op != "Plan" {
				require.ErrorContains(t, call(ctx, rdb, key), fmt.Sprintf("the key %q does not hold", lua.FlowsKey(key)), op)
				require.Equal(t, "100", rdb.Get(ctx, key).Val(), op)
				continue
			}
			kept := listing(0)
			kept.Kept = true
			require.NoError(t, planned(ctx, rdb, key, kept))
			fields := rdb.HGetAll(ctx, lua.FlowsKey(key)).Val()
			require.Len(t, fields, 2, "the plan has the header and flow a")
			require.Len(t, fields["/"], len(header))
			require.NoError(t, rdb.HSet(ctx, lua.FlowsKey(key), "/", header).Err())
			require.NoError(t, call(ctx, rdb, key))
		}
	})
}

func TestTakesForFlowsOfABucketWithoutState(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		_, err := takeFor(ctx, rdb, "none", "a", 1)
		require.ErrorIs(t, err, lua.ErrUnknownBucket)
		require.Empty(t, dump(ctx, t, rdb))

		require.NoError(t, rdb.Set(ctx, "b", 3, 0).Err())
		reply, err := takeFor(ctx, rdb, "b", "a", 5)
		require.NoError(t, err)
		require.NotZero(t, reply.Now)
		require.Equal(t, lua.TakesReply{
			Remaining: 3, Refilled: lua.Refilled{Now: reply.Now}, Runs: []lua.RunReply{{Wait: -time.Microsecond}},
		}, reply, "the time of the next refill is unknown")
		all := policy.FlowRun{Flow: "a", Run: policy.Run{N: 3, Count: 1, Leave: policy.Leave{Percent: 20}}}
		replies, err := new(lua.FlowTakesCall).Do(ctx, rdb, []lua.FlowTakes{{Key: "b", Runs: []policy.FlowRun{all}}})
		require.NoError(t, err)
		require.Equal(t, lua.TakesReply{OK: true}, replies[0], "without a capacity no share must be left")

		storeDivided(ctx, t, rdb, "b")
		require.NoError(t, rdb.Del(ctx, "b").Err())
		reply, err = takeFor(ctx, rdb, "b", "a", 1)
		require.NoError(t, err, "a bucket without tokens causes no error")
		require.False(t, reply.OK)
		require.Zero(t, reply.Remaining)
		require.Zero(t, rdb.Exists(ctx, "b").Val())
	})
}

// A bucket of 100 tokens isn't below a bound of 100. For an unknown bucket the bound makes no difference.
func TestTakesForFlowsAreMadeBelowTheirBound(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		run := []policy.FlowRun{{Flow: "a", Run: policy.Run{N: 5, Count: 1}}}
		takes := func(key string, below int64) lua.FlowTakes { return lua.FlowTakes{Key: key, Runs: run, Below: below} }
		for _, key := range []string{"b", "c", "d"} {
			storeDivided(ctx, t, rdb, key)
		}
		replies, err := new(lua.FlowTakesCall).Do(ctx, rdb, []lua.FlowTakes{takes("b", 100), takes("none", 1), takes("c", 99),
			takes("d", 101)})
		require.NoError(t, err)
		require.Equal(t, lua.TakesReply{Missed: true}, replies[0])
		require.ErrorIs(t, replies[1].Err, lua.ErrUnknownBucket)
		require.Equal(t, lua.TakesReply{Missed: true}, replies[2])
		require.Equal(t, lua.TakesReply{OK: true, Remaining: 95, Paid: true}, replies[3])
		require.Equal(t, []string{"100", "100", "95"}, []string{rdb.Get(ctx, "b").Val(), rdb.Get(ctx, "c").Val(),
			rdb.Get(ctx, "d").Val()})
		require.EqualValues(t, 1, rdb.HLen(ctx, lua.UseKey("b")).Val(), "only takes that are tried are counted")
		replies, err = new(lua.FlowTakesCall).Do(ctx, rdb, []lua.FlowTakes{takes("b", 100)})
		require.NoError(t, err)
		require.Equal(t, lua.TakesReply{Missed: true}, replies[0])
		require.NoError(t, rdb.Set(ctx, "b", 0, 0).Err())
		replies, err = new(lua.FlowTakesCall).Do(ctx, rdb, []lua.FlowTakes{takes("b", 1)})
		require.NoError(t, err)
		require.False(t, replies[0].OK)
		require.Len(t, replies[0].Runs, 1)
	})
}

// If a bucket has lost its tokens, the clock of its division does not advance, because the bucket served no tokens.
func TestTheClockOfABucketThatLostItsTokensIsNotAdvanced(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-11-26T12:00:00Z")
	ctx := t.Context()
	storeDivided(ctx, t, w.rdb, "b")
	before := w.now.UnixMicro()
	for i, held := range []string{"", "-7"} {
		require.NoError(t, w.rdb.Del(ctx, "b").Err())
		if held != "" {
			require.NoError(t, w.rdb.Set(ctx, "b", held, 0).Err())
		}
		w.set(w.now.Add(time.Second))
		result := lua.PlanBatch(ctx, w.rdb, []lua.PlanCall{{Key: "b", Plan: listing(int64(i) + 2)}})[0]
		require.NoError(t, result.Err)
		require.Equal(t, before, result.Clock)
	}
}

// If the server's clock repeats a stretch of time, the stretch does not count twice.
func TestTheClockOfADivisionGoesOnAfterThatOfTheServerWasSetBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-11-26T12:00:00Z")
	ctx := t.Context()
	storeDivided(ctx, t, w.rdb, "b")
	began := w.now
	for i, step := range []struct{ server, division time.Duration }{
		{-time.Second, 0}, {time.Second / 2, 3 * time.Second / 2}, {time.Second, 2 * time.Second},
	} {
		w.set(began.Add(step.server))
		result := lua.PlanBatch(ctx, w.rdb, []lua.PlanCall{{Key: "b", Plan: listing(int64(i) + 2)}})[0]
		require.NoError(t, result.Err)
		require.Equal(t, began.Add(step.division).UnixMicro(), result.Clock, step)
	}
}

// A token costs flow a 0.1 s of the clock. So after a minute the flow has the right to five tokens, the least that a
// flow may save, and to no more.
func TestAFlowThatTakesSingleTokensMaySaveFive(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-11-26T12:00:00Z")
	ctx := t.Context()
	storeDivided(ctx, t, w.rdb, "b")
	w.set(w.now.Add(time.Minute))
	plan := listing(2)
	plan.Span = second / 10
	require.NoError(t, planned(ctx, w.rdb, "b", plan))
	runs := []policy.FlowRun{{Flow: "a", Run: policy.Run{N: 1, Count: 20}}}
	replies, err := new(lua.FlowTakesCall).Do(ctx, w.rdb, []lua.FlowTakes{{Key: "b", Runs: runs, Terms: true}})
	require.NoError(t, err)
	require.NoError(t, replies[0].Err)
	require.Equal(t, []lua.RunReply{{Taken: 20, Paid: 5}}, replies[0].Runs)
}

// The script writes the fields of a plan in several commands, 1000 fields in each.
func TestAPlanOfManyFlowsReplacesAnotherOne(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeDivided(ctx, t, rdb, "b")
		for i, prefix := range []string{"x", "y"} {
			p := listing(int64(i) + 2)
			p.Listed = nil
			for n := range 2100 {
				p.Listed = append(p.Listed, policy.PlannedFlow{Name: fmt.Sprint(prefix, n), Weight: 1})
			}
			require.NoError(t, planned(ctx, rdb, "b", p))
			fields := rdb.HGetAll(ctx, lua.FlowsKey("b")).Val()
			require.Len(t, fields, 2101)
			for _, f := range p.Listed {
				require.Contains(t, fields, f.Name)
			}
		}
	})
}

// takesFor makes takes of 5 tokens for flows.
func takesFor(ctx context.Context, t testing.TB, rdb *redis.Client, key string, flows ...string) lua.TakesReply {
	t.Helper()
	var runs []policy.FlowRun
	for _, flow := range flows {
		runs = append(runs, policy.FlowRun{Flow: flow, Run: policy.Run{N: 5, Count: 1}})
	}
	replies, err := new(lua.FlowTakesCall).Do(ctx, rdb, []lua.FlowTakes{{Key: key, Runs: runs}})
	require.NoError(t, err)
	require.NoError(t, replies[0].Err)
	return replies[0]
}

// If the demand can't be counted, each take is treated as the first one of its flow. Such a take may use tokens of the
// floor. An evicted key of counts is not created again, because it would have no expiry.
func TestTakesForFlowsThatCanNotBeCountedAreMade(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		use := lua.UseKey("b")
		for name, spoil := range map[string]func() error{
			"a list":  func() error { return rdb.LPush(ctx, use, 1).Err() },
			"evicted": func() error { return nil },
			"no number": func() error {
				return rdb.HSet(ctx, use, "//", "1", "y", "x", "z", "x").Err()
			},
		} {
			storeDivided(ctx, t, rdb, "b")
			require.NoError(t, rdb.Set(ctx, "b", 40, 0).Err())
			require.NoError(t, rdb.Del(ctx, use).Err())
			require.NoError(t, spoil(), name)
			before := dump(ctx, t, rdb)[use]
			require.Equal(t, lua.TakesReply{OK: true, Remaining: 25}, takesFor(ctx, t, rdb, "b", "y", "z", "x"), name)
			require.Equal(t, before, dump(ctx, t, rdb)[use], name)
			require.NoError(t, rdb.Set(ctx, "b", 4, 0).Err())
			require.False(t, takesFor(ctx, t, rdb, "b", "y", "z").OK, name)
			require.Equal(t, before, dump(ctx, t, rdb)[use], "%s: the denial is not counted", name)
		}
	})
}

func TestTakesForFlowsOfSeveralBucketsHaveNothingInCommon(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		for _, key := range []string{"b", "c", "d"} {
			storeDivided(ctx, t, rdb, key)
		}
		require.NoError(t, rdb.Del(ctx, lua.UseKey("b")).Err())
		require.NoError(t, rdb.LPush(ctx, lua.UseKey("b"), 1).Err())
		takes := func(key, flow string) lua.FlowTakes {
			return lua.FlowTakes{Key: key, Runs: []policy.FlowRun{{Flow: flow, Run: policy.Run{N: 5, Count: 1}}}}
		}
		calls := []lua.FlowTakes{takes("b", "a"), takes("c", "z"), takes("d", "a")}
		replies, err := new(lua.FlowTakesCall).Do(ctx, rdb, calls)
		require.NoError(t, err)
		for i, key := range []string{"b", "c", "d"} {
			require.NoError(t, replies[i].Err, key)
			require.EqualValues(t, 95, replies[i].Remaining, key)
		}
		require.Equal(t, "5", rdb.HGet(ctx, lua.UseKey("c"), "z").Val())
		require.Equal(t, "5", rdb.HGet(ctx, lua.UseKey("d"), "a").Val())
	})
}

// Flow b has the right to 50 tokens and takes them, and 10 tokens are left. Without a right it waits for the next plan,
// because the floor of 500 is much further away.
func TestAFlowWithoutARightWaitsForThePlanOfARefill(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-11-26T12:00:00Z")
	ctx := t.Context()
	storeDivided(ctx, t, w.rdb, "b")
	require.NoError(t, w.rdb.Set(ctx, "b", 60, 0).Err())
	p := listing(2)
	p.Floor = 500
	p.Listed[0].Name = "b"
	require.NoError(t, planned(ctx, w.rdb, "b", p))
	reply, err := takeFor(ctx, w.rdb, "b", "b", 50)
	require.NoError(t, err)
	require.True(t, reply.OK)
	begin := w.now
	for after, wait := range map[time.Duration]time.Duration{
		0: 100 * time.Millisecond, 99_999 * time.Microsecond: time.Microsecond,
		100 * time.Millisecond: 5 * time.Millisecond, // the plan is overdue
	} {
		w.set(begin.Add(after))
		reply, err = takeFor(ctx, w.rdb, "b", "b", 1)
		require.NoError(t, err)
		require.Equal(t, []lua.RunReply{{Wait: wait}}, reply.Runs, "after %s", after)
	}
	reply, err = takeFor(ctx, w.rdb, "b", "b", 1001)
	require.NoError(t, err)
	require.Equal(t, []lua.RunReply{{Wait: -time.Microsecond}}, reply.Runs, "no wait is long enough for 1001 tokens")
}

// The numbers of a plan may have up to 16 digits.
func TestTheNumbersOfAPlanMayHaveSixteenDigits(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-11-26T12:00:00Z")
	ctx := t.Context()
	const large = 4_000_000_000_000_000
	flow := func(name string, n int64) bool {
		reply, err := takeFor(ctx, w.rdb, "b", name, n)
		require.NoError(t, err)
		return reply.OK
	}
	storeDivided(ctx, t, w.rdb, "b")
	p := listing(2)
	p.Floor = large
	require.NoError(t, planned(ctx, w.rdb, "b", p))
	require.True(t, flow("z", 5), "the flow's first take succeeds")
	require.False(t, flow("z", 5), "a take below the floor is denied")

	p = listing(3)
	p.Floor, p.Unlisted = large, large
	require.NoError(t, planned(ctx, w.rdb, "b", p))
	require.True(t, flow("y", 5))
	require.True(t, flow("y", 5), "an unlisted flow that asked for few tokens is served")

	p = listing(4)
	p.Floor, p.Span = 0, large
	p.Listed[0].Name = "b"
	require.NoError(t, planned(ctx, w.rdb, "b", p))
	require.NoError(t, w.rdb.Set(ctx, "b", 40, 0).Err())
	w.set(w.now.Add(4 * time.Second))
	p.Version.Index = 5
	p.Floor, p.Span = 40, large
	require.NoError(t, planned(ctx, w.rdb, "b", p))
	runs := []policy.FlowRun{{Flow: "b", Run: policy.Run{N: 1, Count: 40}}}
	replies, err := new(lua.FlowTakesCall).Do(ctx, w.rdb, []lua.FlowTakes{{Key: "b", Runs: runs}})
	require.NoError(t, err)
	require.True(t, replies[0].OK, "flow b saved its right for four seconds, which are 40 tokens")
}

// callsFor has the calls that take 5 tokens for a flow. They also return for how many of the tokens the flow paid.
var callsFor = map[string]func(ctx context.Context, c lua.Client, key, flow string) (taken, paid int64, err error){
	"Takes": func(ctx context.Context, c lua.Client, key, flow string) (taken, paid int64, err error) {
		runs := []policy.FlowRun{{Flow: flow, Run: policy.Run{N: 5, Count: 1}}}
		replies, err := new(lua.FlowTakesCall).Do(ctx, c, []lua.FlowTakes{{Key: key, Runs: runs}})
		if err != nil || !replies[0].OK || replies[0].Runs != nil {
			return 0, 0, errors.Join(err, fmt.Errorf("replies %+v", replies))
		}
		if replies[0].Paid {
			paid = 5
		}
		return 5, paid, nil
	},
	"TakeOnce": func(ctx context.Context, c lua.Client, key, flow string) (taken, paid int64, err error) {
		r, err := lua.TakeOnceFor(ctx, c, key, divide(flow), "once", policy.Run{N: 5, Count: 1}, time.Minute)
		return r.Taken, r.Paid, err
	},
	"TakeAll": func(ctx context.Context, c lua.Client, key, flow string) (taken, paid int64, err error) {
		demand := lua.Demand{Key: key, N: 5, Flow: divide(flow)}
		_, r, err := lua.TakeAllOnce(ctx, c, "all", time.Minute, []lua.Demand{demand})
		if err != nil {
			return 0, 0, err
		}
		return r[0].Taken, r[0].Paid, nil
	},
}

// The bucket has 100 tokens, 50 of them above the floor. Flow a has the right to 5 tokens. An unlisted flow may take 5
// tokens without a right.
func TestAFlowPaysOnlyWithItsRight(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		for op, call := range callsFor {
			paid := func(key, flow string, want int64) {
				t.Helper()
				taken, paid, err := call(ctx, rdb, key, flow)
				require.NoError(t, err, op)
				require.EqualValues(t, 5, taken, "%s for %s of %s", op, flow, key)
				require.Equal(t, want, paid, "%s for %s of %s", op, flow, key)
			}
			storeCase(ctx, t, rdb, "undivided", 100)
			paid("undivided", "a", 0)
			storeDivided(ctx, t, rdb, "divided")
			paid("divided", "a", 5)
			storeDivided(ctx, t, rdb, "unlisted")
			paid("unlisted", "b", 0)
			storeDivided(ctx, t, rdb, "above")
			_, err := takeFor(ctx, rdb, "above", "a", 5)
			require.NoError(t, err)
			paid("above", "a", 0)
			require.NoError(t, rdb.FlushDB(ctx).Err())
		}
	})
}

// Each further call of a request returns what the first call got and paid for. The request id is valid only for the
// same flow.
func TestARequestBelongsToItsFlow(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		for _, op := range []string{"TakeOnce", "TakeAll"} {
			storeDivided(ctx, t, rdb, "b")
			for range 2 {
				taken, paid, err := callsFor[op](ctx, rdb, "b", "a")
				require.NoError(t, err, op)
				require.Equal(t, []int64{5, 5}, []int64{taken, paid}, op)
			}
			_, _, err := callsFor[op](ctx, rdb, "b", "b")
			require.ErrorIs(t, err, lua.ErrRequestReused, op)
			require.Equal(t, "95", rdb.Get(ctx, "b").Val(), op)
			require.NoError(t, rdb.FlushDB(ctx).Err())
		}
	})
}

// The plan lists flow a and has one team. Twenty other flows and two other teams are counted, too.
func TestNamesThatAreMadeUpDoNotFillRedis(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeDivided(ctx, t, rdb, "b")
		plan := listing(2)
		plan.Teams = append(plan.Teams, policy.PlannedTeam{Name: "planned/", Price: 100_000, Rest: 100_000})
		plan.Most = 20
		require.NoError(t, planned(ctx, rdb, "b", plan))
		flows := []string{}
		for i := range 40 {
			flows = append(flows, fmt.Sprintf("t%d/x", i), fmt.Sprintf("t%d/y/x", i), fmt.Sprintf("u/%d/x", i))
		}
		takesFor(ctx, t, rdb, "b", append(flows, "a", "planned/x")...)
		use := rdb.HGetAll(ctx, lua.UseKey("b")).Val()
		maps.DeleteFunc(use, func(name, _ string) bool { return strings.HasPrefix(name, "/!") }) // the denied tokens
		require.Len(t, use, 1+20+2+3, "the period's beginning, flows, teams, and the names that always count: %v", use)
		require.Equal(t, "5", use["a"])
		require.Equal(t, "5", use["planned/"])
		require.NotEmpty(t, use["/"])
		sum := 0
		for name, text := range use {
			n, err := strconv.Atoi(text)
			require.NoError(t, err)
			if name != "//" {
				sum += n
			}
		}
		require.Equal(t, 5*(len(flows)+2), sum, "each take is counted once")
	})
}

// The record of a block has the number of its tokens for which the flow did not pay. If the flow is not in the plan,
// these are all of them.
func TestABlockOfAFlowWithoutAPlanIsNotPaidFor(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeDivided(ctx, t, rdb, "b")
		call := lua.LeaseCall{ID: "block", Seq: 1, Want: 5, TTL: time.Minute, Flow: divide("x")}
		lease := func() string {
			_, err := lua.Lease(ctx, rdb, "b", call)
			require.NoError(t, err)
			text, err := rdb.HGet(ctx, lua.OutstandingKey("b"), "block").Result()
			require.NoError(t, err)
			return text
		}
		require.Regexp(t, `^1 5 \d+ \d+ 1 5 0 5$`, lease())
		require.NoError(t, planned(ctx, rdb, "b", listing(2)))
		call.Seq, call.Want = 2, 0
		call.Keep = 3
		require.Regexp(t, `^1 3 \d+ \d+ 2 0 0 3$`, lease(), "two tokens were spent and none requested")
		call.Seq, call.Keep = 3, 1
		require.Regexp(t, `^1 1 \d+ \d+ 3 0 0 1$`, lease(), "two more were spent")
	})
}

// If the counts have no room for an unlisted flow, its tokens are counted for its team. So its leases are limited, too.
func TestLeaseCallsOfAFlowThatIsNotCountedLeaveTheFloor(t *testing.T) {
	t.Parallel()
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		storeDivided(ctx, t, rdb, "b")
		plan := listing(2)
		plan.Most = 1
		plan.Unlisted = 10
		require.NoError(t, planned(ctx, rdb, "b", plan))
		takesFor(ctx, t, rdb, "b", "fills")
		for i := range 20 {
			_, err := lua.Lease(ctx, rdb, "b", lua.LeaseCall{ID: fmt.Sprint(i), Seq: 1, Want: 10, TTL: time.Minute,
				Flow: divide("team/x")})
			require.NoError(t, err)
		}
		left, err := rdb.Get(ctx, "b").Int()
		require.NoError(t, err)
		require.GreaterOrEqual(t, left, 40, "an unlisted flow takes at most 10 tokens of the floor of 50")
	})
}

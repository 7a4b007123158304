package lua_test

import (
	"cmp"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/buckettest"
	"github.com/tokenrefill/refiller/internal/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// The mark in a bucket's state stands for the fields that a refill then need not read.
func TestAMarkedBucketIsRefilledFromOneFieldUntilSomethingElseChanges(t *testing.T) {
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	require.NoError(t, lua.Load(ctx, rdb))
	b := busy(serverTime(ctx, t, rdb) &^ 1) // store marks those with an even last refill
	*b.Tokens = 100
	store(ctx, t, rdb, "b", b)
	version, terms := policy.Version{Era: buckettest.Era, Index: buckettest.Index}, b.Control.Terms
	refill := func(reads string) policy.Outcome {
		t.Helper()
		require.NoError(t, rdb.ConfigResetStat(ctx).Err())
		model, call := load(ctx, t, rdb, "b"), policy.Call{Version: version, Create: policy.CreateLost, Terms: &terms}
		require.NoError(t, rdb.ConfigResetStat(ctx).Err())
		out, err := lua.Refill(ctx, rdb, "b", call)
		require.NoError(t, err)
		require.Equal(t, "calls=1", calls(ctx, t, rdb, "hget"))
		require.Equal(t, reads, calls(ctx, t, rdb, "hmget"))
		require.Equal(t, model.Refill(call, out.Now), out)
		require.Equal(t, model, load(ctx, t, rdb, "b"))
		version = out.Version
		return out
	}
	refill("calls=1")
	refill("")

	reserved, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "r", N: 1, TTL: time.Minute})
	require.NoError(t, err)
	require.True(t, reserved.OK)
	require.EqualValues(t, 1, refill("calls=2").Outstanding)
	_, err = lua.Settle(ctx, rdb, "b", "r", 1)
	require.NoError(t, err)
	require.NotZero(t, refill("calls=2").Due, "it is remembered")
	_, err = lua.Reset(ctx, rdb, "b", 0)
	require.NoError(t, err)
	require.NoError(t, rdb.Del(ctx, lua.HeldKey("b"), lua.DueKey("b")).Err())
	require.NoError(t, rdb.HDel(ctx, lua.ControlKey("b"), "out").Err())
	require.Equal(t, policy.StatusStale, refill("calls=1").Status)
	refill("calls=1")
	refill("")

	own := terms
	own.Tokens++
	_, err = lua.SetLimit(ctx, rdb, "b", own, terms, policy.EnforceRefilled)
	require.NoError(t, err)
	refill("calls=2")
	require.True(t, refill("calls=2").Fence.Own())
	own.Fence.Epoch, terms = terms.Fence.Epoch, own
	require.True(t, refill("calls=2").Fence.Own(), "a policy of the template's version doesn't replace it")
}

// A caller's bucket whose state bears the mark is read without a pattern. Whatever else its keys hold, it gets what its
// twin without a mark gets, which goes by the rules for all.
func TestAMarkChangesNothingButTheCost(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	ctx := t.Context()
	require.NoError(t, lua.Load(ctx, rdb))
	terms := busy(0).Control.Terms
	const era = "1763000000000000"
	for name, c := range map[string]struct {
		tokens, index, copied, last, rest string // of the bucket; last in place of an instant a second ago
		text                              bool   // the state is no hash
		known                             policy.Version
		status                            policy.Status
	}{
		"as it was left":             {tokens: "5", known: policy.Version{Index: 20}, status: policy.StatusApplied},
		"a carry":                    {tokens: "5", rest: "123456 " + era, known: policy.Version{Index: 20}, status: policy.StatusApplied},
		"an instant to come":         {tokens: "5", rest: "0 " + era + " 5 6", known: policy.Version{Index: 20}, status: policy.StatusApplied},
		"nothing known":              {tokens: "5", known: policy.Version{Era: -1}, status: policy.StatusStale},
		"an older index":             {tokens: "5", known: policy.Version{Index: 19}, status: policy.StatusStale},
		"a newer index":              {tokens: "5", known: policy.Version{Index: 21}, status: policy.StatusRolledBack},
		"another era":                {tokens: "5", rest: "0 1762000000000000", known: policy.Version{Index: 20}, status: policy.StatusRolledBack},
		"owing tokens":               {tokens: "-7000000000", known: policy.Version{Index: 20}, status: policy.StatusApplied},
		"more than its capacity":     {tokens: "1099511627777", known: policy.Version{Index: 20}, status: policy.StatusApplied},
		"somebody else's index":      {tokens: "5", copied: "19", known: policy.Version{Index: 20}, status: policy.StatusForeign},
		"and one digit more of it":   {tokens: "5", copied: "9", known: policy.Version{Index: 20}, status: policy.StatusForeign},
		"its copy newer":             {tokens: "5", copied: "201", known: policy.Version{Index: 20}, status: policy.StatusForeign},
		"tokens that are none":       {tokens: "1e3", known: policy.Version{Index: 20}, status: policy.StatusMalformed},
		"an index that is none":      {tokens: "5", index: "+20", known: policy.Version{Index: 20}, status: policy.StatusMalformed},
		"an instant of other digits": {tokens: "5", last: "176300000000000", known: policy.Version{Index: 20}, status: policy.StatusApplied},
		"an instant that is none":    {tokens: "5", last: "17630000000000x0", known: policy.Version{Index: 20}, status: policy.StatusMalformed},
		"a carry that is none":       {tokens: "5", rest: "0x1 " + era, known: policy.Version{Index: 20}, status: policy.StatusMalformed},
		"a carry below 0":            {tokens: "5", rest: "-1 " + era, known: policy.Version{Index: 20}, status: policy.StatusMalformed},
		"no carry":                   {tokens: "5", rest: " " + era, known: policy.Version{Index: 20}, status: policy.StatusMalformed},
		"a state that is no hash":    {tokens: "5", text: true, known: policy.Version{Index: 20}, status: policy.StatusMalformed},
		"a number too many":          {tokens: "5", rest: "0 7 " + era, known: policy.Version{Index: 20}, status: policy.StatusMalformed},
	} {
		t.Run(name, func(t *testing.T) {
			ago := fmt.Sprint(serverTime(ctx, t, rdb) - 1_000_000)
			put := func(key, tokens, index, st string) {
				store(ctx, t, rdb, key, policy.Bucket{})
				require.NoError(t, rdb.MSet(ctx, lua.TokensKey(key), tokens, lua.IndexKey(key), index).Err())
				require.NoError(t, rdb.HSet(ctx, lua.ControlKey(key), "st", st, "pol", terms.Encode()).Err())
			}
			mark := "#" + lua.MarkOf(terms.Encode())
			st := cmp.Or(c.copied, "20") + " " + cmp.Or(c.last, ago) + " " + cmp.Or(c.rest, "0 "+era)
			put("neighbour", "9", "20", "20 "+ago+" 7 "+era+mark)
			put("marked", c.tokens, cmp.Or(c.index, "20"), st+mark)
			put("twin", c.tokens, cmp.Or(c.index, "20"), st)
			if c.text {
				require.NoError(t, rdb.Set(ctx, lua.ControlKey("marked"), st+mark, 0).Err())
				require.NoError(t, rdb.Set(ctx, lua.ControlKey("twin"), st, 0).Err())
			}

			known := c.known
			known.Era += 1763000000000000
			if c.known.Era < 0 {
				known = policy.Version{}
			}
			var calls []lua.RefillCall
			for _, key := range []string{"neighbour", "marked", "twin", "neighbour"} {
				calls = append(calls, lua.RefillCall{Key: key, Call: policy.Call{Version: known, Create: policy.CreateLost, Terms: &terms}})
			}
			calls[0].Version = policy.Version{Era: 1763000000000000, Index: 20}
			results := lua.RefillBatch(ctx, rdb, calls, len(calls))
			require.Equal(t, policy.StatusApplied, results[0].Status)
			marked, twin := results[1], results[2]
			require.Equal(t, c.status, marked.Status, "%+v", marked)
			if c.status == policy.StatusMalformed {
				require.ErrorContains(t, marked.Err, "marked")
				require.ErrorContains(t, twin.Err, "twin")
				marked.Err, twin.Err = nil, nil
				if !c.text {
					require.Equal(t, st+mark, rdb.HGet(ctx, lua.ControlKey("marked"), "st").Val(), "it stays")
				}
			} else {
				require.Equal(t, load(ctx, t, rdb, "twin"), load(ctx, t, rdb, "marked"))
			}
			require.Equal(t, twin, marked)
		})
	}
}

func TestNeighboursUnderDifferentPoliciesGetEachItsOwn(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	ctx := t.Context()
	require.NoError(t, lua.Load(ctx, rdb))
	now := serverTime(ctx, t, rdb) &^ 1 // store marks those with an even last refill
	var calls []lua.RefillCall
	var models []policy.Bucket
	for i := range 6 {
		b := busy(now - 1_000_000)
		b.Control.Terms.Tokens *= int64(1 + i/2)
		key := fmt.Sprint("b", i)
		store(ctx, t, rdb, key, b)
		models = append(models, load(ctx, t, rdb, key))
		calls = append(calls, lua.RefillCall{Key: key, Call: policy.Call{
			Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index}, Create: policy.CreateLost, Terms: &b.Control.Terms,
		}})
	}
	for i, r := range lua.RefillBatch(ctx, rdb, calls, len(calls)) {
		require.NoError(t, r.Err)
		require.Equal(t, models[i].Refill(calls[i].Call, r.Now), r.Outcome)
		require.Equal(t, models[i], load(ctx, t, rdb, calls[i].Key))
	}
}

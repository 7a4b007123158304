package lua_test

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// If a caller sends all of a bucket's state, the server need not read its fields.
func TestAnUnchangedBucketIsRefilledFromOneField(t *testing.T) {
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	require.NoError(t, lua.Load(ctx, rdb))
	b := busy(serverTime(ctx, t, rdb))
	b.Control.Terms.Template = true
	*b.Tokens = 100
	store(ctx, t, rdb, "b", b)
	terms := b.Control.Terms
	call := lua.RefillCall{Key: "b", Call: policy.Call{
		Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index}, Create: policy.CreateLost, Terms: &terms,
	}}
	refill := func(reads string) policy.Outcome {
		t.Helper()
		model := loadHeld(ctx, t, rdb, "b")
		require.NoError(t, rdb.ConfigResetStat(ctx).Err())
		r := lua.RefillBatch(ctx, rdb, []lua.RefillCall{call}, 1)[0]
		require.NoError(t, r.Err)
		require.Equal(t, "calls=1", calls(ctx, t, rdb, "hget"))
		require.Equal(t, reads, calls(ctx, t, rdb, "hmget"))
		require.Equal(t, model.Refill(call.Call, r.Now), r.Outcome)
		require.Equal(t, model, loadHeld(ctx, t, rdb, "b"))
		call.Version, call.Seen = r.Version, r.Seen
		return r.Outcome
	}
	refill("calls=1")
	refill("")

	reserved, err := lua.Reserve(ctx, rdb, "b", lua.ReserveCall{ID: "r", N: 1, TTL: time.Minute})
	require.NoError(t, err)
	require.True(t, reserved.OK)
	require.EqualValues(t, 1, refill("calls=1").Outstanding)
	_, err = lua.Settle(ctx, rdb, "b", "r", 1)
	require.NoError(t, err)
	require.NotZero(t, refill("calls=1").Due, "the settled record is kept")
	require.NoError(t, rdb.Del(ctx, lua.OutstandingKey("b"), lua.DueKey("b")).Err())
	_, err = lua.Settle(ctx, rdb, "b", "r", 1)
	require.ErrorIs(t, err, lua.ErrNotHeld)
	forgetHeld(ctx, t, rdb, "b")
	refill("calls=1")
	refill("")
	_, err = lua.Reset(ctx, rdb, "b", 0)
	require.NoError(t, err)
	require.Equal(t, policy.StatusStale, refill("calls=1").Status)
	refill("")

	own := terms
	own.Tokens++
	_, err = lua.SetOverride(ctx, rdb, "b", own, terms, policy.EnforceRefilled)
	require.NoError(t, err)
	refill("calls=1")
	require.True(t, refill("calls=1").Fence.Own())
	own.Fence.Epoch, call.Terms = terms.Fence.Epoch, &own
	require.True(t, refill("calls=1").Fence.Own(), "a policy of the template's version doesn't replace the override")
}

// steadyBucket is a bucket user:1 of 1,000 tokens that gets one a second and has 900. One caller refills it, and sends
// the state that it remembers. So its calls need one field only.
type steadyBucket struct {
	t    *testing.T
	m    *miniredis.Miniredis
	rdb  *redis.Client
	call lua.RefillCall
}

// newSteadyBucket stores the bucket as it was a second before embeddedNow, with a change to its policy.
func newSteadyBucket(t *testing.T, change func(*policy.Terms)) *steadyBucket {
	t.Helper()
	m, rdb := embedded(t)
	b := buckettest.Bucket(900, embeddedNow, second)
	b.Control.Terms = policy.Policy{Capacity: 1000, Rate: policy.PerSecond(1), Interval: time.Second}.Terms(policy.Fence{})
	change(&b.Control.Terms)
	store(t.Context(), t, rdb, "user:1", b)
	return &steadyBucket{t, m, rdb, lua.RefillCall{Key: "user:1", Call: policy.Call{
		Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index}, Terms: &b.Control.Terms,
	}}}
}

// refill refills the bucket by a call of its shard, some seconds after embeddedNow. The next call sends the state that
// this one returns.
func (b *steadyBucket) refill(seconds int) lua.RefillResult {
	b.t.Helper()
	b.m.SetTime(time.UnixMicro(embeddedNow + int64(seconds)*second))
	r := lua.RefillActive(b.t.Context(), b.rdb, shardOf("user:1"), []lua.RefillCall{b.call}, 1)[0]
	require.NoError(b.t, r.Err)
	b.call.Version, b.call.Seen = r.Version, r.Seen
	return r
}

// The numbers wanted are worked out by hand: each call is a second later.
func TestCallsWithTheRememberedStateDoAllThatOthersDo(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	ofTemplate := func(terms *policy.Terms) { terms.Template = true }
	t.Run("a pool's bucket counts one token", func(t *testing.T) {
		b := newSteadyBucket(t, func(terms *policy.Terms) {
			terms.Pool = true
			terms.PoolsVersion = 3
		})
		for i := range 3 {
			require.EqualValues(t, 1, b.refill(i).Added)
			require.Equal(t, strconv.Itoa(i+1), b.rdb.HGet(ctx, "{user:1}:ctl", "added").Val())
		}
	})
	t.Run("a full bucket stays active for 15 s after its capacity was lowered", func(t *testing.T) {
		b := newSteadyBucket(t, ofTemplate)
		require.NoError(t, b.rdb.HSet(ctx, "{user:1}:ctl", "lowered", embeddedNow).Err())
		require.NoError(t, b.rdb.Set(ctx, "user:1", 997, 0).Err())
		for i, tokens := range []int64{998, 999, 1000} {
			r := b.refill(i)
			require.Equal(t, tokens, r.Tokens)
			require.EqualValues(t, 1, r.Added)
			require.False(t, r.Left)
		}
	})
	t.Run("a bucket gets a new expiry", func(t *testing.T) {
		b := newSteadyBucket(t, ofTemplate)
		b.m.ClockTTL(true)
		require.Equal(t, 2000*time.Second, b.call.Terms.Lifetime()) // it is checked every 250 refills
		keys := []string{"user:1", "{user:1}", "{user:1}:ctl"}
		for i := range 260 {
			now := time.UnixMicro(embeddedNow + int64(i)*second)
			b.m.SetTime(now)
			require.NoError(t, b.rdb.Set(ctx, "user:1", 900, 0).Err())
			for _, key := range keys {
				require.NoError(t, b.rdb.PExpireAt(ctx, key, now.Add(999*time.Second)).Err())
			}
			r := b.refill(i)
			for _, key := range keys {
				want := 999 * time.Second
				if r.Version.Index%250 == 0 {
					want = 2000 * time.Second
				}
				require.Equal(t, want, b.rdb.PTTL(ctx, key).Val(), "refill %d", r.Version.Index)
			}
		}
	})
}

// For any content of a bucket's keys, a caller that sends the state it read gets the same reply as a caller that sends
// only era and index of an equal bucket.
func TestRememberedStateChangesOnlyTheCost(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	ctx := t.Context()
	require.NoError(t, lua.Load(ctx, rdb))
	terms := busy(0).Control.Terms
	const (
		era   = 1763000000000000
		index = 20
		ago   = 1_000_000
		carry = 7
	)
	state := func(last string, index, carry int64) string {
		return fmt.Sprintf("%d %s %d %d", era, last, index, carry)
	}
	for name, c := range map[string]struct {
		tokens, index string // of the bucket
		state         string // in place of the state that the caller read; %d is an instant a second ago
		text          bool   // the state is no hash
		status        policy.Status
	}{
		"unchanged":                  {tokens: "5", status: policy.StatusApplied},
		"another carry":              {tokens: "5", state: state("%d", 20, 1999), status: policy.StatusApplied},
		"an older index":             {tokens: "5", index: "19", state: state("%d", 19, 7), status: policy.StatusRolledBack},
		"a newer index":              {tokens: "5", index: "21", state: state("%d", 21, 7), status: policy.StatusStale},
		"another era":                {tokens: "5", state: "1762" + state("%d", 20, 7)[4:], status: policy.StatusRolledBack},
		"owing tokens":               {tokens: "-7000000000", status: policy.StatusApplied},
		"more than its capacity":     {tokens: "1099511627777", status: policy.StatusApplied},
		"a foreign index":            {tokens: "5", index: "21", status: policy.StatusForeign},
		"a longer foreign index":     {tokens: "5", index: "201", status: policy.StatusForeign},
		"a lower foreign index":      {tokens: "5", index: "9", status: policy.StatusForeign},
		"a lost index":               {tokens: "5", index: "0", status: policy.StatusApplied},
		"tokens that are no number":  {tokens: "1e3", status: policy.StatusMalformed},
		"tokens in hexadecimal":      {tokens: "0x10000000000", status: policy.StatusMalformed},
		"tokens beyond 2^53":         {tokens: "9007199254740994", status: policy.StatusMalformed},
		"tokens read as 2^53":        {tokens: "9007199254740993", status: policy.StatusMalformed},
		"an index that is no number": {tokens: "5", index: "+20", status: policy.StatusMalformed},
		"an index of 15 digits":      {tokens: "5", index: "100000000000000", status: policy.StatusMalformed},
		"an instant of 15 digits":    {tokens: "5", state: state("176300000000000", 20, 7), status: policy.StatusMalformed},
		"a carry below 0":            {tokens: "5", state: state("%d", 20, -7), status: policy.StatusMalformed},
		"no carry":                   {tokens: "5", state: state("%d", 20, 7)[:22], status: policy.StatusMalformed},
		"a number too many":          {tokens: "5", state: state("%d", 20, 7) + " 7", status: policy.StatusMalformed},
		"something outstanding":      {tokens: "5", state: state("%d", 20, 7) + "+", status: policy.StatusMalformed},
		"a state that is text":       {tokens: "5", text: true, status: policy.StatusMalformed},
	} {
		t.Run(name, func(t *testing.T) {
			last := serverTime(ctx, t, rdb) - ago
			seen := stateOf(&policy.Control{Era: era, Index: index, Last: last, Carry: carry})
			st := cmp.Or(c.state, seen)
			if strings.Contains(st, "%d") {
				st = fmt.Sprintf(st, last)
			}
			put := func(key, tokens, index, st string) {
				store(ctx, t, rdb, key, policy.Bucket{})
				require.NoError(t, rdb.MSet(ctx, lua.TokensKey(key), tokens, lua.IndexKey(key), index).Err())
				require.NoError(t, rdb.HSet(ctx, lua.ControlKey(key), "st", st, "pol", terms.Encode()).Err())
			}
			put("neighbour", "9", "20", seen)
			put("seen", c.tokens, cmp.Or(c.index, "20"), st)
			put("twin", c.tokens, cmp.Or(c.index, "20"), st)
			if c.text {
				require.NoError(t, rdb.Set(ctx, lua.ControlKey("seen"), st, 0).Err())
				require.NoError(t, rdb.Set(ctx, lua.ControlKey("twin"), st, 0).Err())
			}

			var calls []lua.RefillCall
			for _, key := range []string{"neighbour", "seen", "twin"} {
				call := lua.RefillCall{Key: key, Call: policy.Call{
					Version: policy.Version{Era: era, Index: index}, Create: policy.CreateLost, Terms: &terms,
				}}
				if key != "twin" {
					call.Seen = lua.Seen{Terms: &terms, Last: last, Carry: carry}
				}
				calls = append(calls, call)
			}
			results := lua.RefillBatch(ctx, rdb, calls, len(calls))
			require.Equal(t, policy.StatusApplied, results[0].Status)
			require.EqualValues(t, 9+500, results[0].Tokens-(results[0].Elapsed-ago+carry)/2000)
			other, twin := results[1], results[2]
			require.Equal(t, c.status, other.Status, "%+v", other)
			if c.status == policy.StatusMalformed {
				require.ErrorContains(t, other.Err, "seen")
				require.ErrorContains(t, twin.Err, "twin")
				other.Err, twin.Err = nil, nil
				require.Equal(t, []any{c.tokens, cmp.Or(c.index, "20")}, rdb.MGet(ctx, "seen", "{seen}").Val(), "both numbers stay")
				if !c.text {
					require.Equal(t, st, rdb.HGet(ctx, lua.ControlKey("seen"), "st").Val(), "the state stays")
				}
			} else {
				require.Equal(t, load(ctx, t, rdb, "twin"), load(ctx, t, rdb, "seen"))
			}
			require.Equal(t, twin, other)
		})
	}
}

func TestNeighboursUnderDifferentPoliciesGetEachItsOwn(t *testing.T) {
	t.Parallel()
	withEmbedded(t, neighboursUnderDifferentPoliciesGetEachItsOwn)
}

func neighboursUnderDifferentPoliciesGetEachItsOwn(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	require.NoError(t, lua.Load(ctx, rdb))
	now := serverTime(ctx, t, rdb)
	var calls []lua.RefillCall
	var models []policy.Bucket
	for i := range 6 {
		b := busy(now - 1_000_000)
		b.Control.Terms.Tokens *= int64(1 + i/2)
		key := fmt.Sprint("b", i)
		store(ctx, t, rdb, key, b)
		models = append(models, load(ctx, t, rdb, key))
		calls = append(calls, lua.RefillCall{Key: key, Call: policy.Call{
			Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index}, Create: policy.CreateLost,
			Terms: &b.Control.Terms,
		}})
	}
	for i, r := range lua.RefillBatch(ctx, rdb, calls, len(calls)) {
		require.NoError(t, r.Err)
		require.Equal(t, models[i].Refill(calls[i].Call, r.Now), r.Outcome)
		require.Equal(t, models[i], load(ctx, t, rdb, calls[i].Key))
	}
}

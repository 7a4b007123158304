package lua_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// store writes a state into the bucket's keys.
func store(ctx context.Context, t testing.TB, rdb redis.UniversalClient, key string, b policy.Bucket) {
	t.Helper()
	storeHeld(ctx, t, rdb, key, oracle.Bucket{Bucket: b})
}

// storeHeld writes a state with reservations and leases into the bucket's keys.
func storeHeld(ctx context.Context, t testing.TB, rdb redis.UniversalClient, key string, b oracle.Bucket) {
	t.Helper()
	require.NoError(t, rdb.Del(ctx, lua.TokensKey(key), lua.IndexKey(key), lua.ControlKey(key), lua.OutstandingKey(key),
		lua.DueKey(key), lua.RequestKey(key, "request")).Err())
	if b.Tokens != nil {
		require.NoError(t, rdb.Set(ctx, lua.TokensKey(key), *b.Tokens, 0).Err())
	}
	if b.Index != nil {
		require.NoError(t, rdb.Set(ctx, lua.IndexKey(key), *b.Index, 0).Err())
	}
	if c := b.Control; c != nil {
		require.NoError(t, rdb.HSet(ctx, lua.ControlKey(key), "st", stateOf(c), "pol", c.Terms.Encode()).Err())
		if c.Outstanding != 0 || c.Due != 0 || c.Debt != 0 {
			require.NoError(t, rdb.HSet(ctx, lua.ControlKey(key), "out",
				fmt.Sprintf("%d %d %d", c.Outstanding, c.Due, c.Debt)).Err())
		}
	}
	for id, h := range b.Held {
		require.NoError(t, rdb.HSet(ctx, lua.OutstandingKey(key), id, encodeHolding(h)).Err())
	}
	for id, until := range b.Ends {
		require.NoError(t, rdb.ZAdd(ctx, lua.DueKey(key), redis.Z{Member: id, Score: float64(until)}).Err())
	}
}

// stateOf returns the state as the scripts write it: see shared/bucket.lua.
func stateOf(c *policy.Control) string {
	st := fmt.Sprintf("%16d %16d %d %d", c.Era, c.Last, c.Index, c.Carry)
	mark := ""
	if c.Outstanding != 0 || c.Due != 0 || c.Debt != 0 {
		mark = "+"
	}
	if c.Terms.Kind == policy.Stepped {
		return st + cmp.Or(mark, " ") + fmt.Sprintf("%16d %16d", c.Step, c.Next)
	}
	return st + mark
}

// encodeHolding writes a record as the scripts do.
func encodeHolding(h oracle.Holding) string {
	text := fmt.Sprintf("%d %d %d %d", h.Kind, h.N, h.Until, h.Era)
	switch a := h.Answer; h.Kind {
	case oracle.HoldingLease:
		return fmt.Sprintf("%s %d %d %d", text, h.Seq, h.Granted, h.Clamped)
	case oracle.HoldingSettled:
		return fmt.Sprintf("%s %d %d %d %d %d %d", text, a.Returned, a.Clamped, a.Void, a.Charged, a.Owed, a.Forgiven)
	case oracle.HoldingRunOut:
		return fmt.Sprintf("%s %d %d", text, h.Overrun, h.Void)
	}
	return fmt.Sprintf("%s %d", text, h.Overrun)
}

func decodeHolding(t testing.TB, text string) oracle.Holding {
	t.Helper()
	var h oracle.Holding
	r := strings.NewReader(text)
	_, err := fmt.Fscan(r, &h.Kind, &h.N, &h.Until, &h.Era)
	require.NoError(t, err, text)
	switch a := &h.Answer; h.Kind {
	case oracle.HoldingLease:
		_, err = fmt.Fscan(r, &h.Seq, &h.Granted, &h.Clamped)
	case oracle.HoldingSettled:
		_, err = fmt.Fscan(r, &a.Returned, &a.Clamped, &a.Void, &a.Charged, &a.Owed, &a.Forgiven)
	case oracle.HoldingRunOut:
		_, err = fmt.Fscan(r, &h.Overrun, &h.Void)
	default:
		_, err = fmt.Fscan(r, &h.Overrun)
	}
	require.NoError(t, err, text)
	require.Zero(t, r.Len(), text)
	return h
}

// load reads what store wrote and the scripts changed.
func load(ctx context.Context, t testing.TB, rdb redis.UniversalClient, key string) policy.Bucket {
	t.Helper()
	b := loadHeld(ctx, t, rdb, key)
	require.Empty(t, b.Held)
	return b.Bucket
}

// loadHeld reads what storeHeld wrote and the scripts changed.
func loadHeld(ctx context.Context, t testing.TB, rdb redis.UniversalClient, key string) oracle.Bucket {
	t.Helper()
	var b oracle.Bucket
	number := func(name string) *int64 {
		v, err := rdb.Get(ctx, name).Result()
		if errors.Is(err, redis.Nil) {
			return nil
		}
		require.NoError(t, err)
		n, err := strconv.ParseInt(v, 10, 64)
		require.NoError(t, err)
		return &n
	}
	b.Tokens, b.Index = number(lua.TokensKey(key)), number(lua.IndexKey(key))
	held, err := rdb.HGetAll(ctx, lua.OutstandingKey(key)).Result()
	require.NoError(t, err)
	ends, err := rdb.ZRangeWithScores(ctx, lua.DueKey(key), 0, -1).Result()
	require.NoError(t, err)
	for id, record := range held {
		if b.Held == nil {
			b.Held = map[string]oracle.Holding{}
		}
		b.Held[id] = decodeHolding(t, record)
	}
	for _, end := range ends {
		if b.Ends == nil {
			b.Ends = map[string]int64{}
		}
		id := end.Member.(string)
		b.Ends[id] = int64(end.Score)
		if h, there := b.Held[id]; there {
			require.Equal(t, b.Ends[id], h.Until, "both keys have the same end of %s", id)
		}
	}
	ctl, err := rdb.HGetAll(ctx, lua.ControlKey(key)).Result()
	require.NoError(t, err)
	if len(ctl) == 0 {
		return b
	}
	c := &policy.Control{}
	c.Terms, err = policy.DecodeTerms(ctl["pol"])
	require.NoError(t, err)
	require.Equal(t, c.Terms.Encode(), ctl["pol"], "each policy has only one encoding")
	numbers := []*int64{&c.Era, &c.Last, &c.Index, &c.Carry}
	if c.Terms.Kind == policy.Stepped {
		numbers = append(numbers, &c.Step, &c.Next)
	}
	for i, word := range strings.Fields(strings.ReplaceAll(ctl["st"], "+", " ")) {
		*numbers[i], err = strconv.ParseInt(word, 10, 64)
		require.NoError(t, err, ctl["st"])
	}
	if out, there := ctl["out"]; there {
		_, err = fmt.Sscan(out, &c.Outstanding, &c.Due, &c.Debt)
		require.NoError(t, err)
		require.NotEqual(t, "0 0 0", out, "the field is deleted if all its numbers are 0")
	}
	require.Equal(t, stateOf(c), ctl["st"], "each state has only one encoding")
	b.Control = c
	return b
}

func serverTime(ctx context.Context, t testing.TB, rdb redis.UniversalClient) int64 {
	t.Helper()
	now, err := rdb.Time(ctx).Result()
	require.NoError(t, err)
	return now.UnixMicro()
}

func TestRefillScriptFollowsEveryRule(t *testing.T) {
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	for _, c := range buckettest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			b, call := c.Setup(serverTime(ctx, t, rdb))
			store(ctx, t, rdb, c.Name, b)
			got, err := lua.Refill(ctx, rdb, c.Name, call)
			require.NoError(t, err)
			require.Equal(t, b.Refill(call, got.Now), got, "the script replies as the model at the server's time")
			require.Equal(t, b, load(ctx, t, rdb, c.Name))
		})
	}
}

// seed returns REFILLER_SEED, or a new one; it is printed so that a run can be repeated.
func seed(t testing.TB) uint64 {
	s := uint64(time.Now().UnixNano())
	if v := os.Getenv("REFILLER_SEED"); v != "" {
		n, err := strconv.ParseUint(v, 10, 64)
		require.NoError(t, err)
		s = n
	}
	t.Logf("REFILLER_SEED=%d repeats this run", s)
	return s
}

func TestScriptsAgreeWithTheModelOnRandomHistories(t *testing.T) {
	withEmbedded(t, agree)
}

func agree(t *testing.T, rdb *redis.Client) {
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	reached := map[policy.Status]int{}
	for history := range 40 {
		key := fmt.Sprintf("bucket%d", history)
		h := buckettest.NewHistory(rng)
		for step := range 60 {
			model := load(ctx, t, rdb, key)
			h.Disturb(&model)
			store(ctx, t, rdb, key, model)
			where := fmt.Sprintf("history %d step %d", history, step)

			call := orOrdinary(h.Call(serverTime(ctx, t, rdb)), model, rng)
			asSeen := lua.RefillCall{Key: key, Call: call, Seen: seenOf(call, model)}
			refilled := lua.RefillBatch(ctx, rdb, []lua.RefillCall{asSeen}, 1)[0]
			out := refilled.Outcome
			require.NoError(t, refilled.Err, where)
			require.Equal(t, model.Refill(call, out.Now), out, where)
			require.Equal(t, seenOf(policy.Call{Version: out.Version, Terms: call.Terms}, model), refilled.Seen, where)
			require.Equal(t, model, load(ctx, t, rdb, key), where)
			reached[out.Status]++
			h.Remember(out.Version)

			n := 1 + rng.Int64N(500)
			peek, err := lua.Peek(ctx, rdb, key, n)
			if model.Control == nil && model.Tokens == nil && model.Index == nil {
				require.ErrorIs(t, err, lua.ErrUnknownBucket, where)
				continue
			}
			require.NoError(t, err, where)
			require.Equal(t, model.Wait(n, peek.Now), micros(peek.Wait), where)

			take, err := takeOne(ctx, rdb, key, n, rng.IntN(2) == 0)
			if strings.Contains(fmt.Sprint(err), "unknown bucket") {
				require.Nil(t, model.Control, where)
				require.Nil(t, model.Tokens, where)
				continue
			}
			require.NoError(t, err, where)
			want := model.Take(n, take.Now)
			require.Equal(t, want.OK, take.OK, where)
			require.Equal(t, want.Tokens, take.Remaining, where)
			require.Equal(t, want.Wait, micros(take.Wait), where)
			require.Equal(t, model, load(ctx, t, rdb, key), where)

			n = 1 + rng.Int64N(100)
			returned, err := lua.Return(ctx, rdb, key, n, 0)
			clamped, known := model.Return(n)
			if !known {
				require.ErrorIs(t, err, lua.ErrUnknownBucket, where)
				continue
			}
			require.NoError(t, err, where)
			require.Equal(t, clamped, returned.Clamped, where)
			require.Equal(t, model, load(ctx, t, rdb, key), where)
		}
	}
	for s := policy.StatusApplied; s <= policy.StatusConflict; s++ {
		if s == policy.StatusMalformed {
			continue
		}
		require.NotZero(t, reached[s], "%s was never reached", s)
	}
}

// orOrdinary replaces half of the calls by those of a refiller that knows the bucket and its policy. It leaves the
// others as they are.
func orOrdinary(call policy.Call, b policy.Bucket, rng *rand.Rand) policy.Call {
	if b.Control == nil || rng.IntN(2) == 0 {
		return call
	}
	terms := b.Control.Terms
	call = policy.Call{Version: policy.Version{Era: b.Control.Era, Index: b.Control.Index}, Create: policy.CreateLost,
		Terms: &terms}
	if rng.IntN(4) == 0 {
		call.Version.Index -= rng.Int64N(3)
	}
	return call
}

// seenOf returns the state of a caller that has just read the bucket.
func seenOf(call policy.Call, b policy.Bucket) lua.Seen {
	c, t := b.Control, call.Terms
	if c == nil || t == nil || *t != c.Terms || t.Kind == policy.Stepped || c.Outstanding != 0 || c.Due != 0 ||
		c.Debt != 0 || call.Version != (policy.Version{Era: c.Era, Index: c.Index}) {
		return lua.Seen{}
	}
	return lua.Seen{Terms: t, Last: c.Last, Carry: c.Carry}
}

func TestABatchAgreesWithTheModelOnEachOfItsBuckets(t *testing.T) {
	withEmbedded(t, agreeOnMany)
}

func agreeOnMany(t *testing.T, rdb *redis.Client) {
	ctx, rng := t.Context(), rand.New(rand.NewPCG(seed(t), 0))
	const buckets = 30
	histories := make([]*buckettest.History, buckets)
	for i := range histories {
		histories[i] = buckettest.NewHistory(rng)
	}
	for step := range 30 {
		models, calls := make([]policy.Bucket, buckets), make([]lua.RefillCall, buckets)
		now := serverTime(ctx, t, rdb)
		for i, h := range histories {
			key := fmt.Sprintf("many%d", i)
			models[i] = load(ctx, t, rdb, key)
			h.Disturb(&models[i])
			store(ctx, t, rdb, key, models[i])
			calls[i] = lua.RefillCall{Key: key, Call: orOrdinary(h.Call(now), models[i], rng)}
			if i > 0 && rng.IntN(4) == 0 { // as for buckets with the same policy
				calls[i].Terms = calls[i-1].Terms
			}
			calls[i].Seen = seenOf(calls[i].Call, models[i])
		}
		for i, r := range lua.RefillBatch(ctx, rdb, calls, 1+rng.IntN(buckets)) {
			where := fmt.Sprintf("bucket %d step %d", i, step)
			require.NoError(t, r.Err, where)
			require.Equal(t, models[i].Refill(calls[i].Call, r.Now), r.Outcome, where)
			require.Equal(t, models[i], load(ctx, t, rdb, calls[i].Key), where)
			histories[i].Remember(r.Version)
		}
	}
}

func TestTokensThatAreNoWholeNumberAreMalformedAndStay(t *testing.T) {
	ctx := t.Context()
	rdb := testenv.Redis(t).Client()
	terms := buckettest.Terms()
	for _, capacity := range []int64{5, 1000} { // full, and not
		for _, text := range []string{"007", "+5", " 5", "5 ", "0x5", "5e0", "5.0", "-0", "", "nan", "inf"} {
			where := fmt.Sprintf("%q of %d", text, capacity)
			terms.Capacity = capacity
			b := buckettest.Bucket(5, serverTime(ctx, t, rdb), 100_000)
			b.Control.Terms = terms
			store(ctx, t, rdb, "b", b)
			require.NoError(t, rdb.Set(ctx, "b", text, 0).Err())
			call := policy.Call{Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index}, Create: policy.CreateLost,
				Terms: &terms}
			_, err := lua.Refill(ctx, rdb, "b", call)
			require.ErrorIs(t, err, lua.ErrMalformedBucket, where)
			require.Equal(t, text, rdb.Get(ctx, "b").Val(), where)
			require.Equal(t, strconv.Itoa(buckettest.Index), rdb.Get(ctx, "{b}").Val(), where)
		}
	}
}

func micros(d time.Duration) int64 { return d.Microseconds() }

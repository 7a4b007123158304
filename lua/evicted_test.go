package lua_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// strictTerms returns the terms of a strict bucket of 100 tokens.
func strictTerms() policy.Terms {
	p := policy.Policy{Capacity: 100, Rate: policy.PerSecond(100), Interval: 100 * time.Millisecond, Strict: true}
	return p.Terms(policy.Fence{Epoch: 1})
}

// idle refills a bucket after a time that is long enough to fill it, and returns the tokens then held.
func idle(ctx context.Context, t testing.TB, rdb *redis.Client, key string) int64 {
	t.Helper()
	p, err := lua.Peek(ctx, rdb, key, 1)
	require.NoError(t, err)
	st := rdb.HGet(ctx, lua.ControlKey(key), "st").Val()
	st = fmt.Sprintf("%s%16d%s", st[:17], p.Last-10_000_000, st[33:])
	require.NoError(t, rdb.HSet(ctx, lua.ControlKey(key), "st", st).Err())
	o, err := lua.Refill(ctx, rdb, key, policy.Call{Version: p.Version})
	require.NoError(t, err)
	require.Equal(t, policy.StatusApplied, o.Status)
	return o.Tokens
}

// reserve holds n tokens for an hour.
func reserve(ctx context.Context, t testing.TB, rdb *redis.Client, key, id string, n int64) {
	t.Helper()
	r, err := lua.Reserve(ctx, rdb, key, lua.ReserveCall{ID: id, N: n, TTL: time.Hour})
	require.NoError(t, err)
	require.True(t, r.OK)
}

// beginAndEndALease makes a lease of one token and ends it. Together they change nothing.
func beginAndEndALease(ctx context.Context, t testing.TB, rdb *redis.Client, key string) {
	t.Helper()
	for seq := range int64(2) {
		_, err := lua.Lease(ctx, rdb, key, lua.LeaseCall{ID: "short", Seq: 1 + seq, Back: seq, Want: 1 - seq,
			TTL: time.Minute})
		require.NoError(t, err)
	}
}

// strictBuckets has functions that create a strict bucket of 100 tokens, each in another way.
var strictBuckets = map[string]func(ctx context.Context, t testing.TB, rdb *redis.Client){
	"configured": func(ctx context.Context, t testing.TB, rdb *redis.Client) {
		terms := strictTerms()
		_, err := lua.Refill(ctx, rdb, "user:1", policy.Call{Terms: &terms, Create: policy.CreateInitial})
		require.NoError(t, err)
	},
	"of a template": func(ctx context.Context, t testing.TB, rdb *redis.Client) {
		terms := strictTerms()
		terms.Template = true
		_, err := takeTemplate(ctx, rdb, "user:1", templateCall{Prefix: "user:", Terms: terms.Encode(), Capacity: 100},
			nil, false, false)
		require.NoError(t, err)
	},
}

// A strict bucket of 100 tokens, 30 of them reserved, loses its state, and in one case also its tokens and index. It is
// created anew and refilled. After the sweep that follows the refill, its tokens and the reserved tokens are never more
// than 100 together. If the bucket kept its tokens, they are never more than 100 even before the sweep.
func TestAStrictBucketThatBeginsAnewKeepsRoomForWhatIsHeld(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aStrictBucketThatBeginsAnewKeepsRoomForWhatIsHeld)
}

func aStrictBucketThatBeginsAnewKeepsRoomForWhatIsHeld(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	for name, create := range strictBuckets {
		for _, lost := range [][]string{{"{user:1}:ctl"}, {"user:1", "{user:1}", "{user:1}:ctl"}} {
			require.NoError(t, rdb.FlushAll(ctx).Err())
			create(ctx, t, rdb)
			reserve(ctx, t, rdb, "user:1", "job", 30)
			require.NoError(t, rdb.Del(ctx, lost...).Err())
			create(ctx, t, rdb)
			if len(lost) == 1 {
				require.EqualValues(t, 70, idle(ctx, t, rdb, "user:1"), "%s: refills wait until the 30 tokens are counted", name)
			}

			swept := lua.Sweep(ctx, rdb, []string{"user:1"}, 10)[0]
			require.NoError(t, swept.Err)
			require.Equal(t, []int64{70, 30}, []int64{swept.Tokens, swept.Outstanding}, "%s without %q", name, lost)
			require.EqualValues(t, 70, idle(ctx, t, rdb, "user:1"), "%s without %q", name, lost)

			settled, err := lua.Settle(ctx, rdb, "user:1", "job", 30)
			require.NoError(t, err)
			require.Zero(t, settled.Settlement)
			require.EqualValues(t, 100, idle(ctx, t, rdb, "user:1"), "%s without %q", name, lost)
		}
	}
}

// The ends of reservations are lost, but not their records. The reserved tokens stay reserved.
func TestNothingIsFreeBecauseTheEndsOfReservationsAreLost(t *testing.T) {
	t.Parallel()
	withEmbedded(t, nothingIsFreeBecauseTheEndsOfReservationsAreLost)
}

func nothingIsFreeBecauseTheEndsOfReservationsAreLost(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	for name, create := range strictBuckets {
		require.NoError(t, rdb.FlushAll(ctx).Err())
		create(ctx, t, rdb)
		reserve(ctx, t, rdb, "user:1", "job", 30)
		ends := rdb.ZRangeWithScores(ctx, lua.DueKey("user:1"), 0, -1).Val()
		require.NoError(t, rdb.Del(ctx, lua.DueKey("user:1")).Err())

		beginAndEndALease(ctx, t, rdb, "user:1")
		require.EqualValues(t, 70, idle(ctx, t, rdb, "user:1"), name)
		require.Equal(t, ends, rdb.ZRangeWithScores(ctx, lua.DueKey("user:1"), 0, -1).Val(), name)
		ctl := rdb.PExpireTime(ctx, lua.ControlKey("user:1")).Val()
		require.Equal(t, ctl, rdb.PExpireTime(ctx, lua.DueKey("user:1")).Val(), name)
		settled, err := lua.Settle(ctx, rdb, "user:1", "job", 10)
		require.NoError(t, err)
		require.Equal(t, policy.Settlement{Returned: 20}, settled.Settlement, name)
	}
}

// The records of reservations are lost, but not their ends. The tokens of all of them count as reserved until the last
// of these reservations has ended, and no longer. Other reservations and leases in between change nothing about that.
func TestWhatLostReservationsHeldCountsUntilTheyEnd(t *testing.T) {
	t.Parallel()
	withEmbedded(t, whatLostReservationsHeldCountsUntilTheyEnd)
}

func whatLostReservationsHeldCountsUntilTheyEnd(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	for name, create := range strictBuckets {
		require.NoError(t, rdb.FlushAll(ctx).Err())
		create(ctx, t, rdb)
		reserve(ctx, t, rdb, "user:1", "job", 20)
		reserve(ctx, t, rdb, "user:1", "longer job", 10)
		require.NoError(t, rdb.Del(ctx, lua.OutstandingKey("user:1")).Err())
		_, err := lua.Settle(ctx, rdb, "user:1", "job", 0)
		require.ErrorIs(t, err, lua.ErrNotHeld)

		reserve(ctx, t, rdb, "user:1", "beside", 5)
		beginAndEndALease(ctx, t, rdb, "user:1")
		require.EqualValues(t, 65, idle(ctx, t, rdb, "user:1"), name)
		for _, id := range []string{"job", "longer job"} {
			endNow(ctx, t, rdb, "user:1", id)
			swept := lua.Sweep(ctx, rdb, []string{"user:1"}, 10)[0]
			require.NoError(t, swept.Err)
			require.Zero(t, swept.Swept, name)
			want := map[string]int64{"job": 65, "longer job": 95}[id]
			require.EqualValues(t, want, idle(ctx, t, rdb, "user:1"), "%s: %s has ended", name, id)
		}
	}
}

// endNow sets the ends of reservations and leases to the present. Their records may be lost.
func endNow(ctx context.Context, t testing.TB, rdb *redis.Client, key string, ids ...string) {
	t.Helper()
	now := serverTime(ctx, t, rdb)
	for _, id := range ids {
		require.NoError(t, rdb.ZAdd(ctx, lua.DueKey(key), redis.Z{Member: id, Score: float64(now)}).Err())
		if record, err := rdb.HGet(ctx, lua.OutstandingKey(key), id).Result(); err == nil {
			h := decodeHolding(t, record)
			h.Until = now
			require.NoError(t, rdb.HSet(ctx, lua.OutstandingKey(key), id, encodeHolding(h)).Err())
		}
	}
	p, err := lua.Peek(ctx, rdb, key, 1)
	require.NoError(t, err)
	out := fmt.Sprintf("%d %d %d", p.Outstanding, now, p.Debt)
	require.NoError(t, rdb.HSet(ctx, lua.ControlKey(key), "out", out).Err())
}

// books has the tokens of a bucket that their holders have, as the holders count them.
type books struct {
	t       *testing.T
	rdb     *redis.Client
	rng     *rand.Rand
	terms   policy.Terms
	version policy.Version
	held    map[string]int64 // by the id of a reservation or lease
	seq     map[string]int64 // of a lease's last call
	lost    string           // the key that was lost, until a refill or sweep has repaired that
}

// sum returns how many tokens are held.
func (b *books) sum() (n int64) {
	for _, held := range b.held {
		n += held
	}
	return n
}

// refill refills the bucket and sweeps as a refiller does.
func (b *books) refill() {
	ctx := b.t.Context()
	if st := b.rdb.HGet(ctx, lua.ControlKey("b"), "st").Val(); st != "" && b.rng.IntN(4) > 0 {
		last := serverTime(ctx, b.t, b.rdb) - b.rng.Int64N(5_000_000)
		st = fmt.Sprintf("%s%16d%s", st[:17], last, st[33:])
		require.NoError(b.t, b.rdb.HSet(ctx, lua.ControlKey("b"), "st", st).Err())
	}
	o, err := lua.Refill(ctx, b.rdb, "b", policy.Call{Version: b.version, Terms: &b.terms, Create: policy.CreateLost})
	require.NoError(b.t, err)
	b.version = o.Version
	if o.Status.Wrote() {
		ends, outstanding := lua.DueKey("b"), lua.OutstandingKey("b")
		if o.Due != 0 && o.Due <= o.Now || b.lost == ends {
			require.NoError(b.t, lua.Sweep(ctx, b.rdb, []string{"b"}, 10)[0].Err)
		}
		if b.lost != outstanding {
			b.lost = ""
		}
	}
}

// settle ends a reservation. The number of used tokens is random, and may exceed the reserved tokens.
func (b *books) settle(id string) {
	_, err := lua.Settle(b.t.Context(), b.rdb, "b", id, b.rng.Int64N(b.held[id]+3))
	b.over(id, err)
}

// lease makes the next call of a block.
func (b *books) lease(id string, want int64) {
	call := lua.LeaseCall{ID: id, Seq: b.seq[id] + 1, Want: want, TTL: time.Hour}
	if b.held[id] > 0 {
		call.Keep = b.rng.Int64N(b.held[id] + 1)
		call.Back = b.rng.Int64N(b.held[id] - call.Keep + 1)
	}
	r, err := lua.Lease(b.t.Context(), b.rdb, "b", call)
	if err == nil && call.Keep+r.Granted > 0 {
		b.held[id], b.seq[id] = call.Keep+r.Granted, call.Seq
		return
	}
	b.over(id, err)
}

// over forgets a holding that has ended. If the bucket's state is lost, over keeps it, because the holder tries again.
func (b *books) over(id string, err error) {
	if errors.Is(err, lua.ErrUnknownBucket) {
		return
	}
	if !errors.Is(err, lua.ErrNotHeld) && !errors.Is(err, lua.ErrOtherEra) {
		require.NoError(b.t, err)
	}
	delete(b.held, id)
	delete(b.seq, id)
}

// step makes one random call or change.
func (b *books) step(n int) {
	ctx := b.t.Context()
	ids := slices.Sorted(maps.Keys(b.held))
	amount := 1 + b.rng.Int64N(40)
	var err error
	switch what := b.rng.IntN(12); {
	case what < 2:
		b.refill()
	case what == 2:
		_, err = takeOne(ctx, b.rdb, "b", amount, false)
	case what == 3:
		var r lua.ReserveReply
		id := fmt.Sprint("job ", n)
		r, err = lua.Reserve(ctx, b.rdb, "b", lua.ReserveCall{ID: id, N: amount, TTL: time.Hour})
		if r.OK {
			b.held[id] = amount
		}
	case what == 4:
		b.lease(fmt.Sprint("block ", n), amount)
	case what < 8 && len(ids) > 0:
		if id := ids[b.rng.IntN(len(ids))]; b.seq[id] > 0 {
			b.lease(id, amount*b.rng.Int64N(2))
		} else {
			b.settle(id)
		}
	case what == 8: // tokens from an operator, or that were taken
		_, e1 := lua.Grant(ctx, b.rdb, "b", amount)
		_, e2 := lua.Return(ctx, b.rdb, "b", amount, 0)
		err = errors.Join(e1, e2)
	case what == 9:
		_, err = lua.Reset(ctx, b.rdb, "b", b.rng.Int64N(300)-1)
	case what == 10:
		b.terms.Fence.Epoch++
		b.terms.Capacity = 20 + b.rng.Int64N(180) // what a refill may credit
		b.terms.OnLoss = policy.Loss(b.rng.IntN(2))
		b.terms.Initial = b.terms.Capacity
		b.terms.MaxElapsed = policy.MaxElapsed(b.terms.Capacity, b.terms.Tokens, b.terms.Per, b.terms.Interval)
		b.refill()
	case what == 11 && b.lost == "":
		keys := []string{"b", lua.IndexKey("b"), lua.ControlKey("b"), lua.DueKey("b"), lua.OutstandingKey("b")}
		b.lost = keys[b.rng.IntN(len(keys))]
		require.NoError(b.t, b.rdb.Del(ctx, b.lost).Err())
	}
	if err != nil && !errors.Is(err, lua.ErrUnknownBucket) { // its state is lost
		require.NoError(b.t, err)
	}
}

// A strict bucket and its holders together never have more tokens than the capacity, as the holders count them. This
// holds for random calls, evictions of single keys, and changes of the capacity. In the end all tokens are in the
// bucket.
func TestAStrictBucketAndItsHoldersNeverHaveMoreThanTheCapacity(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	rng := rand.New(rand.NewPCG(seed(t), 0))
	for history := range 60 {
		require.NoError(t, rdb.FlushAll(ctx).Err())
		b := &books{t: t, rdb: rdb, rng: rng, terms: strictTerms(), held: map[string]int64{}, seq: map[string]int64{}}
		o, err := lua.Refill(ctx, rdb, "b", policy.Call{Terms: &b.terms, Create: policy.CreateInitial})
		require.NoError(t, err)
		b.version = o.Version
		capacity := b.terms.Capacity
		for n := range 60 {
			b.step(n)
			tokens, err := rdb.Get(ctx, "b").Int64()
			if !errors.Is(err, redis.Nil) {
				require.NoError(t, err)
			}
			if ctl := rdb.HGet(ctx, lua.ControlKey("b"), "pol").Val(); ctl != "" {
				terms, err := policy.DecodeTerms(ctl)
				require.NoError(t, err)
				capacity = terms.Capacity
			}
			require.GreaterOrEqual(t, tokens, int64(0), "history %d step %d", history, n)
			require.LessOrEqual(t, tokens, max(0, capacity-b.sum()), "history %d step %d: %v of %d are held", history, n,
				b.held, capacity)
		}

		b.refill()
		require.NoError(t, lua.Sweep(ctx, rdb, []string{"b"}, 1000)[0].Err) // their ends may be lost
		if ids := rdb.ZRange(ctx, lua.DueKey("b"), 0, -1).Val(); len(ids) > 0 {
			endNow(ctx, t, rdb, "b", ids...)
		}
		require.NoError(t, lua.Sweep(ctx, rdb, []string{"b"}, 1000)[0].Err)
		require.Equal(t, capacity, idle(ctx, t, rdb, "b"), "history %d", history)
	}
}

// sweptAfter sweeps a bucket as a refiller does: after a refill that wrote and whose reply shows that records are due.
func sweptAfter(ctx context.Context, t testing.TB, rdb *redis.Client, key string, o policy.Outcome) lua.SweepResult {
	t.Helper()
	require.True(t, o.Status.Wrote())
	require.NotZero(t, o.Due)
	require.LessOrEqual(t, o.Due, o.Now)
	r := lua.Sweep(ctx, rdb, []string{key}, 10)[0]
	require.NoError(t, r.Err)
	return r
}

// A bucket of 100 tokens, 30 of them reserved, loses its state, and in one case also its tokens and index. It is
// created anew, and then its policy becomes strict. No refill adds a token before the next sweep. The sweep leaves 70
// tokens.
func TestABucketThatBecomesStrictCountsWhatWasHeldBeforeItBegan(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	strict := strictTerms()
	strict.Fence.Epoch = 2
	loose := strictTerms()
	loose.Strict = false
	ofTemplate := func(terms policy.Terms) templateCall {
		terms.Template = true
		return templateCall{Prefix: "user:", Terms: terms.Encode(), Capacity: 100}
	}
	refill := func(terms policy.Terms, create policy.Create) policy.Outcome {
		p, err := lua.Peek(ctx, rdb, "user:1", 1)
		if err != nil {
			require.ErrorIs(t, err, lua.ErrUnknownBucket)
		}
		o, err := lua.Refill(ctx, rdb, "user:1", policy.Call{Version: p.Version, Terms: &terms, Create: create})
		require.NoError(t, err)
		return o
	}
	take := func(terms policy.Terms, n int64) {
		_, err := takeTemplate(ctx, rdb, "user:1", ofTemplate(terms), one(n), false, false)
		require.NoError(t, err)
	}
	for name, way := range map[string]struct {
		begin, turn func()
		taken       int64 // that turn takes
	}{
		"refill": {
			func() { refill(loose, policy.CreateInitial) },
			func() { refill(strict, policy.CreateNever) },
			0,
		},
		"take": {func() { take(loose, 1) }, func() { take(strict, 1) }, 1},
		"override": {func() { take(loose, 1) }, func() {
			own, template := strict, loose
			own.Template, template.Template = true, true
			own.Fence.Epoch = policy.OwnEpoch
			_, err := lua.SetOverride(ctx, rdb, "user:1", own, template, policy.EnforceRefilled)
			require.NoError(t, err)
		}, 0},
	} {
		for _, lost := range [][]string{{"{user:1}:ctl"}, {"user:1", "{user:1}", "{user:1}:ctl"}} {
			where := fmt.Sprintf("%s without %q", name, lost)
			require.NoError(t, rdb.FlushAll(ctx).Err())
			way.begin()
			reserve(ctx, t, rdb, "user:1", "job", 30)
			require.NoError(t, rdb.Del(ctx, lost...).Err())
			way.begin()
			idle(ctx, t, rdb, "user:1")
			require.NoError(t, rdb.Set(ctx, "user:1", 90, redis.KeepTTL).Err())
			way.turn() // on a slow machine this still credits a token under the earlier policy
			held, err := rdb.Get(ctx, "user:1").Int64()
			require.NoError(t, err)
			require.LessOrEqual(t, idle(ctx, t, rdb, "user:1"), max(90, held+way.taken), where)
			p, err := lua.Peek(ctx, rdb, "user:1", 1)
			require.NoError(t, err)
			require.NotZero(t, p.Due, where)
			o, err := lua.Refill(ctx, rdb, "user:1", policy.Call{Version: p.Version, Terms: &strict})
			require.NoError(t, err)
			require.Equal(t, p.Due, o.Due, where)
			swept := lua.Sweep(ctx, rdb, []string{"user:1"}, 10)[0]
			require.NoError(t, swept.Err)
			require.Equal(t, []int64{70, 30}, []int64{swept.Tokens, swept.Outstanding}, where)
			require.EqualValues(t, 70, idle(ctx, t, rdb, "user:1"), where)
		}
	}
}

// A strict bucket of 100 that holds 40 tokens loses its state, is adopted, and gets a capacity of 50 before any sweep.
// Before the sweep it loses no tokens because of reservations that may exist. The sweep then makes room for those that
// do exist.
func TestAStrictBucketThatIsLoweredBeforeItIsCountedLosesNothing(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	lower := strictTerms()
	lower.Fence.Epoch = 2
	lower.Capacity, lower.Initial = 50, 50
	for name, create := range strictBuckets {
		for held, want := range map[int64]int64{0: 40, 30: 20} {
			require.NoError(t, rdb.FlushAll(ctx).Err())
			create(ctx, t, rdb)
			if held > 0 {
				reserve(ctx, t, rdb, "user:1", "job", held)
			}
			require.NoError(t, rdb.Set(ctx, "user:1", 40, redis.KeepTTL).Err())
			require.NoError(t, rdb.Del(ctx, "{user:1}:ctl").Err())
			create(ctx, t, rdb)
			p, err := lua.Peek(ctx, rdb, "user:1", 1)
			require.NoError(t, err)
			o, err := lua.Refill(ctx, rdb, "user:1", policy.Call{Version: p.Version, Terms: &lower})
			require.NoError(t, err)
			require.EqualValues(t, 40, o.Tokens, "%s with %d held", name, held)
			swept := sweptAfter(ctx, t, rdb, "user:1", o)
			require.Equal(t, []int64{want, held}, []int64{swept.Tokens, swept.Outstanding}, name)
			require.Equal(t, 50-held, idle(ctx, t, rdb, "user:1"), name)
		}
	}
}

// After a bucket that isn't strict has lost its state, its records are counted again. So they end at their time.
func TestTheRecordsOfABucketThatLostItsStateAreDue(t *testing.T) {
	t.Parallel()
	withEmbedded(t, theRecordsOfABucketThatLostItsStateAreDue)
}

func theRecordsOfABucketThatLostItsStateAreDue(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	terms := strictTerms()
	terms.Strict = false
	for _, lost := range [][]string{{"{b}:ctl"}, {"b", "{b}", "{b}:ctl"}} {
		require.NoError(t, rdb.FlushAll(ctx).Err())
		o, err := lua.Refill(ctx, rdb, "b", policy.Call{Terms: &terms, Create: policy.CreateInitial})
		require.NoError(t, err)
		require.Zero(t, o.Due, "a bucket that no caller remembers is not swept")
		reserve(ctx, t, rdb, "b", "job", 30)
		require.NoError(t, rdb.Del(ctx, lost...).Err())
		o, err = lua.Refill(ctx, rdb, "b", policy.Call{Terms: &terms, Version: o.Version, Create: policy.CreateLost})
		require.NoError(t, err)
		require.Zero(t, o.Outstanding)
		swept := sweptAfter(ctx, t, rdb, "b", o)
		require.EqualValues(t, 30, swept.Outstanding)
		require.Greater(t, swept.Due, swept.Now)
	}
}

// The record of a reservation is lost, but not its end, which is over. So its id may be used again. A new reservation
// under that id stays.
func TestAReservationUnderTheIDOfALostOneThatEndedIsHeld(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aReservationUnderTheIDOfALostOneThatEndedIsHeld)
}

func aReservationUnderTheIDOfALostOneThatEndedIsHeld(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	for name, create := range strictBuckets {
		require.NoError(t, rdb.FlushAll(ctx).Err())
		create(ctx, t, rdb)
		reserve(ctx, t, rdb, "user:1", "job", 30)
		require.NoError(t, rdb.Del(ctx, lua.OutstandingKey("user:1")).Err())
		endNow(ctx, t, rdb, "user:1", "job")
		reserve(ctx, t, rdb, "user:1", "job", 20)
		p, err := lua.Peek(ctx, rdb, "user:1", 1)
		require.NoError(t, err)
		require.EqualValues(t, 20, p.Outstanding, name)
		require.Greater(t, p.Due, p.Now, name)
		settled, err := lua.Settle(ctx, rdb, "user:1", "job", 5)
		require.NoError(t, err, name)
		require.Equal(t, policy.Settlement{Returned: 15}, settled.Settlement, name)
	}
}

// A template's bucket loses its state soon after its capacity was lowered from 600 to 60. So the instant of that change
// is lost, too. Consumers may still use the capacity 600, and take from the bucket without putting it into the active
// set. So after its adoption the bucket stays in the set for a while, although it is full.
func TestABucketThatIsAdoptedStaysInTheActiveSetForAWhile(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aBucketThatIsAdoptedStaysInTheActiveSetForAWhile)
}

func aBucketThatIsAdoptedStaysInTheActiveSetForAWhile(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	lowered := user()
	_, err := takeTemplate(ctx, rdb, "user:1", lowered, one(1), false, false)
	require.NoError(t, err)
	require.NoError(t, rdb.Set(ctx, "user:1", 60, redis.KeepTTL).Err())
	require.NoError(t, rdb.Del(ctx, lua.ControlKey("user:1")).Err())
	_, err = takeTemplate(ctx, rdb, "user:1", lowered, nil, false, false)
	require.NoError(t, err)
	require.NoError(t, lua.Sweep(ctx, rdb, []string{"user:1"}, 10)[0].Err)
	refilled := func() lua.RefillResult {
		p, err := lua.Peek(ctx, rdb, "user:1", 1)
		require.NoError(t, err)
		st := rdb.HGet(ctx, lua.ControlKey("user:1"), "st").Val()
		st = fmt.Sprintf("%s%16d%s", st[:17], p.Last-2_000_000, st[33:])
		require.NoError(t, rdb.HSet(ctx, lua.ControlKey("user:1"), "st", st).Err())
		r := lua.RefillActive(ctx, rdb, shardOf("user:1"), []lua.RefillCall{{Key: "user:1",
			Call: policy.Call{Version: p.Version, Terms: &userTerms}}}, 1)[0]
		require.NoError(t, r.Err)
		require.EqualValues(t, 60, r.Tokens)
		return r
	}
	require.False(t, refilled().Idle)
	require.True(t, isActive(ctx, t, rdb, "user:1"))
	adopted, err := rdb.HGet(ctx, lua.ControlKey("user:1"), "lowered").Int64()
	require.NoError(t, err)
	require.NoError(t, rdb.HSet(ctx, lua.ControlKey("user:1"), "lowered", adopted-16_000_000).Err())
	require.True(t, refilled().Idle)
	require.False(t, isActive(ctx, t, rdb, "user:1"))
}

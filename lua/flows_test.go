package lua_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
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

// Names of flows and teams in random histories.
var (
	someFlows = []string{"", "a", "b", "c", "t/x", "t/y", "t/u/p", "t/u/q", "s/z"}
	someTeams = []string{policy.RootTeam, "t/", "t/u/", "s/"}
)

func TestFlowsAndPlansAgreeWithTheModel(t *testing.T) {
	t.Parallel()
	s := seed(t)
	t.Run("Redis", func(t *testing.T) {
		rng := rand.New(rand.NewPCG(s, 1))
		h := &flowHistory{t: t, rdb: testenv.Redis(t).Client(), rng: rng, pass: func(time.Duration) {}}
		h.runMany(t.Context(), 60)
	})
	t.Run("Embedded", func(t *testing.T) { // its clock also advances between calls
		w := newWorld(t, "2026-11-26T12:00:00Z")
		pass := func(d time.Duration) {
			w.now = w.now.Add(d)
			w.SetTime(w.now)
		}
		h := &flowHistory{t: t, rdb: w.rdb, rng: rand.New(rand.NewPCG(s, 2)), pass: pass}
		h.runMany(t.Context(), 30)
	})
}

// flowHistory is a random history of a divided bucket, and the model of it.
type flowHistory struct {
	t        *testing.T
	rdb      *redis.Client
	key      string
	rng      *rand.Rand
	pass     func(time.Duration) // moves the clock
	bucket   policy.Bucket
	division *oracle.Division
	version  policy.Version
	calls    lua.FlowTakesCall
	held     map[string]heldByFlow
	blocks   map[string]*blockOfFlow
	ids      int
	denied   int64 // tokens, if the bucket counts them
}

// blockOfFlow is a flow's block in a random history.
type blockOfFlow struct {
	id              string
	seq, held, free int64
}

// heldByFlow is a reservation of a random history.
type heldByFlow struct {
	flow    string
	divided bool // the bucket was
	n, paid int64
	overrun policy.Overrun
}

func (h *flowHistory) runMany(ctx context.Context, n int) {
	for i := range n {
		h.key = fmt.Sprintf("flows-%d", i)
		h.division = nil
		h.run(ctx)
	}
}

func (h *flowHistory) run(ctx context.Context) {
	h.bucket = buckettest.Bucket(0, serverTime(ctx, h.t, h.rdb), 1)
	h.bucket.Control.Terms = policy.Policy{
		Capacity: []int64{400, 1000, 1 << 40}[h.rng.IntN(3)], Rate: policy.PerSecond(500),
		Interval: []time.Duration{time.Millisecond, 50 * time.Millisecond, time.Second}[h.rng.IntN(3)],
		Shadow:   h.rng.IntN(3) == 0,
	}.Terms(policy.Fence{Epoch: 3})
	h.denied = 0
	store(ctx, h.t, h.rdb, h.key, h.bucket)
	h.version = policy.Version{Era: buckettest.Era, Index: h.rng.Int64N(2)}
	h.held = map[string]heldByFlow{}
	h.blocks = map[string]*blockOfFlow{}
	for step := range 80 {
		where := fmt.Sprintf("%s, step %d", h.key, step)
		if h.rng.IntN(2) == 0 {
			h.pass(time.Duration(h.rng.Int64N(2_000_000)) * time.Microsecond)
		}
		switch h.rng.IntN(14) {
		case 0:
			tokens := h.rng.Int64N(300)
			h.bucket.Tokens = &tokens
			require.NoError(h.t, h.rdb.Set(ctx, h.key, tokens, 0).Err())
		case 1, 2, 3:
			h.plan(ctx, where)
		case 4:
			h.once(ctx, where)
		case 5:
			h.all(ctx, where)
		case 6, 7:
			h.reserve(ctx, where)
		case 8:
			h.settle(ctx, where)
		case 9:
			h.giveBack(ctx, where)
		case 10, 11:
			h.lease(ctx, where)
		default:
			h.takes(ctx, where)
		}
		h.compare(ctx, where)
	}
}

// plan writes a random plan.
func (h *flowHistory) plan(ctx context.Context, where string) {
	base := h.version
	if h.rng.IntN(8) == 0 {
		base.Index--
	}
	next := policy.Version{Era: h.version.Era, Index: h.version.Index + h.rng.Int64N(3)}
	p := policy.Plan{
		Version: next, Whole: h.rng.IntN(2) == 0, Kept: h.rng.IntN(4) == 0, Read: h.rng.IntN(2) == 0,
		Floor: 10 + h.rng.Int64N(100), Unlisted: h.rng.Int64N(20), Most: 2 + h.rng.Int64N(8), Span: 1_000_000,
		Lasts: (time.Hour + time.Duration(h.rng.IntN(60))*time.Minute).Microseconds(),
	}
	for _, name := range someTeams {
		team := policy.PlannedTeam{Name: name, Price: h.price()}
		if name != policy.RootTeam && h.rng.IntN(2) == 0 {
			team.Rest = h.price()
		}
		p.Teams = append(p.Teams, team)
	}
	for _, name := range someFlows {
		switch h.rng.IntN(4) {
		case 0, 1:
			p.Listed = append(p.Listed, policy.PlannedFlow{Name: name, Weight: 1 + h.rng.Int64N(3), Took: h.rng.Int64N(20)})
		case 2:
			if !p.Whole {
				p.Dropped = append(p.Dropped, name)
			}
		}
	}
	result := lua.PlanBatch(ctx, h.rdb, []lua.PlanCall{{Key: h.key, Plan: p, Base: base}})[0]
	require.NoError(h.t, result.Err, where)
	if result.Stale {
		_, _, ok := h.division.Apply(p, base, *h.bucket.Tokens, 0)
		require.False(h.t, ok, where)
		return
	}
	d, use, ok := h.division.Apply(p, base, *h.bucket.Tokens, result.Now)
	require.True(h.t, ok, where)
	h.division = d
	h.version = next
	require.Equal(h.t, d.Clock, result.Clock, where)
	require.Equal(h.t, use.Covered, result.Use.Covered, where)
	require.Equal(h.t, filled(use.Asked), filled(result.Use.Asked), where)
	require.Equal(h.t, filled(use.Denied), filled(result.Use.Denied), where)
	for _, key := range []string{lua.FlowsKey(h.key), lua.UseKey(h.key)} {
		require.InDelta(h.t, p.Lasts, micros(h.rdb.PTTL(ctx, key).Val()), 10*second, where)
	}
}

// price returns a random price, rounded as in its text.
func (h *flowHistory) price() float64 {
	price := h.rng.Float64() * 200_000
	switch h.rng.IntN(6) {
	case 0:
		price = float64(1 + h.rng.IntN(9)) // one digit
	case 1:
		price = h.rng.Float64()
	}
	price, err := strconv.ParseFloat(policy.FormatPrice(price), 64)
	require.NoError(h.t, err)
	return price
}

// filled returns the counts that are not 0. It never returns nil.
func filled(counts map[string]int64) map[string]int64 {
	all := map[string]int64{}
	maps.Copy(all, counts)
	maps.DeleteFunc(all, func(_ string, n int64) bool { return n == 0 })
	return all
}

// id returns an id that was not used before.
func (h *flowHistory) id() string {
	h.ids++
	return fmt.Sprintf("id-%d", h.ids)
}

// flow returns a random flow, in some cases a flow of teams that no plan has.
func (h *flowHistory) flow() string {
	if h.rng.IntN(12) == 0 {
		return fmt.Sprintf("q%d/", h.rng.IntN(4)) + []string{"w", "r/w", "s/w"}[h.rng.IntN(3)]
	}
	return someFlows[h.rng.IntN(len(someFlows))]
}

// made compares the reply to a single take for a flow with the model.
func (h *flowHistory) made(flow string, run policy.Run, reply lua.TakeReply, where string) {
	want := oracle.Divided(&h.bucket, h.division, []policy.FlowRun{{Flow: flow, Run: run}}, false, reply.Now)[0]
	require.Equal(h.t, want.Taken*run.N, reply.Taken, where)
	require.Equal(h.t, want.Paid, reply.Paid, where)
	require.Equal(h.t, *h.bucket.Tokens, reply.Remaining, where)
	if !reply.OK {
		require.Equal(h.t, want.Wait, reply.Wait.Microseconds(), where)
		h.refused(run.N * run.Count)
	}
}

// refused counts a denied take of n tokens.
func (h *flowHistory) refused(n int64) {
	terms := h.bucket.Control.Terms
	if terms.Shadow && n <= terms.Capacity {
		h.denied += n
	}
}

// once makes a take with a request id, and repeats the call.
func (h *flowHistory) once(ctx context.Context, where string) {
	flow, id := h.flow(), h.id()
	run := policy.Run{N: 1 + h.rng.Int64N(8), Count: 1}
	if h.rng.IntN(3) == 0 {
		run = policy.Run{N: 1, Count: 1 + h.rng.Int64N(30), UpTo: true}
	}
	run.Leave = policy.Leave{Tokens: h.rng.Int64N(20)}
	reply, err := lua.TakeOnceFor(ctx, h.rdb, h.key, divide(flow), id, run, time.Minute)
	require.NoError(h.t, err, where)
	h.made(flow, run, reply, where)
	if !reply.OK {
		return
	}
	again, err := lua.TakeOnceFor(ctx, h.rdb, h.key, divide(flow), id, run, time.Minute)
	require.NoError(h.t, err, where)
	require.True(h.t, again.Repeated, where)
	require.Equal(h.t, reply.Taken, again.Taken, where)
	require.Equal(h.t, reply.Paid, again.Paid, where)
}

// all makes a take, all or nothing, from the bucket and from another bucket that has no flows.
func (h *flowHistory) all(ctx context.Context, where string) {
	other := h.key + "-other"
	store(ctx, h.t, h.rdb, other, busy(serverTime(ctx, h.t, h.rdb)))
	lacks := h.rng.IntN(2) == 0
	held := int64(100)
	if lacks {
		held = 0
	}
	require.NoError(h.t, h.rdb.Set(ctx, other, held, 0).Err())
	flow, n := h.flow(), 1+h.rng.Int64N(20)
	ok, replies, err := lua.TakeAll(ctx, h.rdb, []lua.Demand{{Key: other, N: 1}, {Key: h.key, N: n, Flow: divide(flow)}})
	require.NoError(h.t, err, where)
	require.Equal(h.t, ok, !lacks && (replies[1].OK || h.bucket.Control.Terms.Shadow), where)
	if lacks && replies[1].OK {
		if h.division != nil {
			h.division.Refuse(flow, n)
		}
		return
	}
	replies[1].Now = max(replies[1].Now, 1)
	h.made(flow, policy.Run{N: n, Count: 1}, replies[1], where)
}

// reserve makes a reservation.
func (h *flowHistory) reserve(ctx context.Context, where string) {
	flow, id := h.flow(), h.id()
	n := 1 + h.rng.Int64N(20)
	overrun := policy.Overrun(h.rng.IntN(2))
	divided := h.division != nil
	reply, err := lua.Reserve(ctx, h.rdb, h.key, lua.ReserveCall{ID: id, N: n, TTL: time.Hour, Flow: divide(flow),
		Overrun: overrun})
	require.NoError(h.t, err, where)
	paid := int64(0)
	if record, _ := h.rdb.HGet(ctx, lua.OutstandingKey(h.key), id).Result(); divided && reply.OK {
		numbers, name, _ := strings.Cut(record, " /")
		require.Equal(h.t, flow, name, where)
		paid, err = strconv.ParseInt(numbers[strings.LastIndexByte(numbers, ' ')+1:], 10, 64)
		require.NoError(h.t, err, where)
	}
	reply.Paid = paid
	h.made(flow, policy.Run{N: n, Count: 1}, reply.TakeReply, where)
	if reply.OK {
		h.held[id] = heldByFlow{flow, divided, n, paid, overrun}
	}
}

// settle ends a reservation.
func (h *flowHistory) settle(ctx context.Context, where string) {
	for id, r := range h.held {
		delete(h.held, id)
		settle := lua.Settle
		if h.rng.IntN(2) == 0 {
			settle = lua.SettleDivided
		}
		s, err := settle(ctx, h.rdb, h.key, id, h.rng.Int64N(2*r.n))
		require.NoError(h.t, err, where)
		*h.bucket.Tokens += s.Returned - s.Charged
		h.bucket.Control.Debt += s.Owed
		if h.division == nil || !r.divided {
			return
		}
		if unpaid := r.n - r.paid; s.Returned > unpaid {
			h.division.PayBack(r.flow, s.Returned-unpaid)
		}
		if s.Charged+s.Owed > 0 {
			h.division.Charge(r.flow, s.Charged+s.Owed)
		}
		return
	}
}

// giveBack returns tokens for which a flow paid.
func (h *flowHistory) giveBack(ctx context.Context, where string) {
	call := lua.ReturnCall{N: 1 + h.rng.Int64N(20), Flow: h.flow()}
	call.Paid = 1 + h.rng.Int64N(call.N)
	reply, err := lua.ReturnPaid(ctx, h.rdb, h.key, call)
	require.NoError(h.t, err, where)
	*h.bucket.Tokens += call.N - reply.Clamped
	require.Equal(h.t, *h.bucket.Tokens, reply.Remaining, where)
	if h.division != nil && call.N > reply.Clamped {
		h.division.PayBack(call.Flow, min(call.Paid, call.N-reply.Clamped))
	}
}

// lease reports the use of a flow's block, and requests more tokens.
func (h *flowHistory) lease(ctx context.Context, where string) {
	flow := h.flow()
	block := h.blocks[flow]
	if block == nil || block.held == 0 {
		block = &blockOfFlow{id: h.id()}
		h.blocks[flow] = block
	}
	block.seq++
	keep := h.rng.Int64N(block.held + 1)
	back := h.rng.Int64N(block.held - keep + 1)
	call := lua.LeaseCall{ID: block.id, Seq: block.seq, Keep: keep, Back: back, Want: h.rng.Int64N(40), TTL: time.Hour,
		Flow: divide(flow)}
	reply, err := lua.Lease(ctx, h.rdb, h.key, call)
	require.NoError(h.t, err, where)
	*h.bucket.Tokens += back - reply.Clamped
	block.free = min(block.free, keep+back)
	if h.division != nil {
		if paid := back - block.free - reply.Clamped; paid > 0 {
			h.division.PayBack(flow, paid)
		}
	}
	block.free = max(0, block.free-back)
	granted, paid := oracle.Lend(&h.bucket, h.division, flow, call.Want)
	require.Equal(h.t, granted, reply.Granted, where)
	require.Equal(h.t, *h.bucket.Tokens, reply.Remaining, where)
	block.held = keep + granted
	block.free += granted - paid
}

// takes makes random takes.
func (h *flowHistory) takes(ctx context.Context, where string) {
	runs := make([]policy.FlowRun, 1+h.rng.IntN(6))
	for i := range runs {
		run := policy.Run{N: 1 + h.rng.Int64N(8), Count: 1 + h.rng.Int64N(4)}
		if h.rng.IntN(4) == 0 {
			run = policy.Run{N: 1, Count: []int64{1 + h.rng.Int64N(30), 1 + h.rng.Int64N(500), 400}[h.rng.IntN(3)],
				UpTo: true}
		}
		switch h.rng.IntN(8) {
		case 0, 1:
			run.Leave = policy.Leave{Tokens: h.rng.Int64N(50)}
		case 2:
			run.Leave = policy.Leave{Percent: h.rng.Int64N(20)}
		case 3:
			run.Leave = policy.Leave{Percent: 100}
		}
		runs[i] = policy.FlowRun{Flow: h.flow(), Run: run}
	}
	inLine := h.rng.IntN(2) == 0
	withTerms := h.rng.IntN(4) == 0
	replies, err := h.calls.Do(ctx, h.rdb, []lua.FlowTakes{{Key: h.key, Runs: runs, InLine: inLine, Terms: withTerms}})
	require.NoError(h.t, err, where)
	reply := replies[0]
	require.NoError(h.t, reply.Err, where)
	now := reply.Now
	if now == 0 { // all were made, so that no wait depends on it
		now = h.bucket.Control.Last
	}
	want := oracle.Divided(&h.bucket, h.division, runs, inLine, now)
	require.Equal(h.t, *h.bucket.Tokens, reply.Remaining, where)
	made := true
	taken, paid := int64(0), int64(0)
	for i, w := range want {
		made = made && w.Taken == runs[i].Count
		taken += w.Taken * runs[i].N
		paid += w.Paid
	}
	require.Equal(h.t, made, reply.OK, where)
	require.Equal(h.t, made && !withTerms && (paid == 0 || paid == taken), reply.Runs == nil, where)
	require.Equal(h.t, reply.Runs == nil && paid > 0, reply.Paid, where)
	require.Equal(h.t, !made || withTerms, reply.Terms != nil, where)
	if c := h.bucket.Control; reply.Terms != nil {
		require.Equal(h.t, c.Terms, *reply.Terms, where)
		require.Equal(h.t, lua.Refilled{Version: policy.Version{Era: c.Era, Index: c.Index}, Last: c.Last, Now: now},
			reply.Refilled, where)
	}
	for i, run := range runs {
		h.refusedOf(run.Run, run.Count-want[i].Taken)
	}
	for i := range reply.Runs {
		require.Equal(h.t, want[i].Taken, reply.Runs[i].Taken, "%s, run %d of %v", where, i, runs)
		require.Equal(h.t, want[i].Paid, reply.Runs[i].Paid, "%s, run %d of %v", where, i, runs)
		require.Equal(h.t, want[i].Wait, reply.Runs[i].Wait.Microseconds(), "%s, run %d of %v", where, i, runs)
	}
}

// refusedOf counts the denied takes of a run. A take of up to some tokens is counted only if it got none.
func (h *flowHistory) refusedOf(run policy.Run, denied int64) {
	terms := h.bucket.Control.Terms
	switch {
	case run.UpTo && denied == run.Count:
		h.refused(denied)
	case !run.UpTo && run.N+run.Leave.Of(terms.Capacity) <= terms.Capacity:
		h.refused(denied * run.N)
	}
}

// compare compares what Redis holds with the model.
func (h *flowHistory) compare(ctx context.Context, where string) {
	tokens, err := h.rdb.Get(ctx, h.key).Int64()
	require.NoError(h.t, err, where)
	require.Equal(h.t, *h.bucket.Tokens, tokens, where)
	denied, _ := h.rdb.HGet(ctx, lua.ControlKey(h.key), "denied").Int64()
	require.Equal(h.t, h.denied, denied, where)
	fields, err := h.rdb.HGetAll(ctx, lua.FlowsKey(h.key)).Result()
	require.NoError(h.t, err, where)
	if h.division == nil {
		require.Empty(h.t, fields, where)
		require.Zero(h.t, h.rdb.Exists(ctx, lua.UseKey(h.key)).Val(), "%s: no use is counted without a plan", where)
		return
	}
	require.Equal(h.t, h.fields(), fields, where)
	use, err := h.rdb.HGetAll(ctx, lua.UseKey(h.key)).Result()
	require.NoError(h.t, err, where)
	counted := map[string]string{"//": fmt.Sprint(h.division.Since)}
	for name, n := range h.division.Asked {
		counted[name] = fmt.Sprint(n)
	}
	for name, n := range h.division.Denied {
		counted["/!"+name] = fmt.Sprint(n)
	}
	require.Equal(h.t, counted, use, where)
}

// fields returns the fields of the model's plan.
func (h *flowHistory) fields() map[string]string {
	d := h.division
	root := d.Teams[policy.RootTeam]
	fields := map[string]string{policy.RootTeam: strings.Join([]string{
		wide(d.Clock), wide(d.Span), wide(d.Floor), wide(d.Unlisted), wide(d.Most), wide(d.At), wide(d.Version.Era),
		wide(d.Version.Index), policy.FormatPrice(root.Price),
	}, " ")}
	for name, team := range d.Teams {
		if name != policy.RootTeam {
			fields[name] = fmt.Sprintf("%16d %16s %s", team.Used, policy.FormatPrice(team.Price), policy.FormatPrice(team.Rest))
		}
	}
	for name, part := range d.Parts {
		fields[name] = fmt.Sprintf("%16d %d", part.Used, part.Weight)
	}
	return fields
}

func wide(n int64) string { return fmt.Sprintf("%16d", n) }

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
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	for range 60 {
		seed := rand.Uint64()
		h := &flowHistory{t: t, rdb: rdb, key: fmt.Sprintf("flows-%d", seed), rng: rand.New(rand.NewPCG(seed, 1))}
		h.run(ctx)
	}
}

// flowHistory is a random history of a divided bucket, and the model of it.
type flowHistory struct {
	t        *testing.T
	rdb      *redis.Client
	key      string
	rng      *rand.Rand
	bucket   policy.Bucket
	division *oracle.Division
	version  policy.Version
	calls    lua.FlowTakesCall
}

func (h *flowHistory) run(ctx context.Context) {
	h.bucket = busy(serverTime(ctx, h.t, h.rdb))
	store(ctx, h.t, h.rdb, h.key, h.bucket)
	h.version = policy.Version{Era: buckettest.Era, Index: 5}
	for step := range 60 {
		where := fmt.Sprintf("%s, step %d", h.key, step)
		switch h.rng.IntN(6) {
		case 0:
			tokens := h.rng.Int64N(300)
			h.bucket.Tokens = &tokens
			require.NoError(h.t, h.rdb.Set(ctx, h.key, tokens, 0).Err())
		case 1, 2:
			h.plan(ctx, where)
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
		Lasts: time.Hour.Microseconds(),
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
}

// price returns a random price, as its text has it.
func (h *flowHistory) price() float64 {
	price, err := strconv.ParseFloat(policy.FormatPrice(h.rng.Float64()*200_000), 64)
	require.NoError(h.t, err)
	return price
}

// filled returns counts without those that are 0, never nil.
func filled(counts map[string]int64) map[string]int64 {
	all := map[string]int64{}
	maps.Copy(all, counts)
	maps.DeleteFunc(all, func(_ string, n int64) bool { return n == 0 })
	return all
}

// takes makes random takes.
func (h *flowHistory) takes(ctx context.Context, where string) {
	runs := make([]policy.FlowRun, 1+h.rng.IntN(6))
	for i := range runs {
		run := policy.Run{N: 1 + h.rng.Int64N(8), Count: 1 + h.rng.Int64N(4)}
		if h.rng.IntN(4) == 0 {
			run = policy.Run{N: 1, Count: 1 + h.rng.Int64N(30), UpTo: true}
		}
		switch h.rng.IntN(4) {
		case 0:
			run.Leave = policy.Leave{Tokens: h.rng.Int64N(50)}
		case 1:
			run.Leave = policy.Leave{Percent: h.rng.Int64N(20)}
		}
		runs[i] = policy.FlowRun{Flow: someFlows[h.rng.IntN(len(someFlows))], Run: run}
	}
	inLine := h.rng.IntN(2) == 0
	replies, err := h.calls.Do(ctx, h.rdb, []lua.FlowTakes{{
		Key: h.key, Runs: runs, InLine: inLine, Terms: h.rng.IntN(4) == 0,
	}})
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
	for i, w := range want {
		made = made && w.Taken == runs[i].Count
	}
	require.Equal(h.t, made, reply.OK, where)
	for i := range reply.Runs {
		require.Equal(h.t, want[i].Taken, reply.Runs[i].Taken, "%s, run %d of %v", where, i, runs)
		require.Equal(h.t, want[i].Wait, reply.Runs[i].Wait.Microseconds(), "%s, run %d of %v", where, i, runs)
	}
}

// compare compares what Redis holds with the model.
func (h *flowHistory) compare(ctx context.Context, where string) {
	tokens, err := h.rdb.Get(ctx, h.key).Int64()
	require.NoError(h.t, err, where)
	require.Equal(h.t, *h.bucket.Tokens, tokens, where)
	fields, err := h.rdb.HGetAll(ctx, lua.FlowsKey(h.key)).Result()
	require.NoError(h.t, err, where)
	if h.division == nil {
		require.Empty(h.t, fields, where)
		require.Zero(h.t, h.rdb.Exists(ctx, lua.UseKey(h.key)).Val(), "%s: without a plan nothing is counted", where)
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

// fields are those of the model's plan.
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

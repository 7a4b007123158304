package main

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestLoadCountsWhatTheBucketGave(t *testing.T) {
	server, rdb := newBucket(t, hourly(100))
	o := consumer(t.Context(), server.URL(), "load", "checkout", "-c", "8", "-n", "3", "--duration", "300ms", "-o", "json")
	require.Equal(t, cli.ExitOK, o.code, o.stderr)
	require.Empty(t, o.stderr, "no progress where there is no terminal")
	r := o.json(t)
	require.Equal(t, 99.0, r["admitted"])
	require.Equal(t, 33.0, r["admitted_takes"])
	require.Equal(t, 0.0, r["errors"])
	require.Equal(t, r["takes"], 33+r["denied"].(float64))
	require.Equal(t, 101.0, r["bound"], "the capacity and one partly refilled token")
	require.Equal(t, true, r["within_bound"])
	require.Equal(t, false, r["interrupted"])
	redis, memory := r["asked_redis"].(map[string]any), r["from_memory"].(map[string]any)
	require.Equal(t, 99.0, redis["admitted"])
	require.GreaterOrEqual(t, redis["denied"], 1.0, "Redis answers the first denial")
	require.Zero(t, memory["admitted"])
	require.Positive(t, memory["denied"], "the SDK answers later denials from memory")
	require.Equal(t, r["takes"], redis["takes"].(float64)+memory["takes"].(float64))
	for _, by := range []map[string]any{redis, memory} {
		latency := by["latency_ms"].(map[string]any)
		require.LessOrEqual(t, latency["p50"], latency["p99.9"])
		require.LessOrEqual(t, latency["p99.9"], latency["max"])
	}
	left, err := rdb.Get(t.Context(), "checkout").Int64()
	require.NoError(t, err)
	require.EqualValues(t, 1, left)
}

func TestLoadReportsABucketThatGivesMoreThanItsPolicy(t *testing.T) {
	server, rdb := newBucket(t, hourly(100))
	require.NoError(t, rdb.Set(t.Context(), "checkout", 500, 0).Err())
	o := consumer(t.Context(), server.URL(), "load", "checkout", "--duration", "500ms")
	require.Equal(t, cli.ExitOK, o.code, o.stderr)
	require.Contains(t, o.stdout, "EXCEEDED by 399")
	require.Regexp(t, `(?m)^redis      answered \d+ \(\d+/s\): 500 admitted, \d+ denied\n           latency p50 `,
		o.stdout)
	require.Regexp(t, `(?m)^memory     answered \d+ \(\d+/s\): 0 admitted, \d+ denied\n           latency p50 `, o.stdout)
}

func TestLoadKeepsTheBoundIfARefillCreditsTimeBeforeTheRun(t *testing.T) {
	const capacity, perSecond = 100, 50 // few enough takes for a starved process
	server, rdb := newBucket(t, policy.Policy{Capacity: capacity, Rate: policy.PerSecond(perSecond),
		Interval: 100 * time.Millisecond})
	require.Eventually(t, func() bool { // no replica refills: the first refill of the run finds more than a second due
		p, err := lua.Peek(t.Context(), rdb, "checkout", 1)
		require.NoError(t, err)
		return p.Now-p.Last > 1_200_000
	}, 20*time.Second, 10*time.Millisecond)
	o := consumer(t.Context(), server.URL(), "load", "checkout", "--duration", "1s", "-o", "json")
	require.Equal(t, cli.ExitOK, o.code, o.stderr)
	r := o.json(t)
	require.Greater(t, r["admitted"], capacity+perSecond*r["elapsed_s"].(float64),
		"tokens that fell due before the run are admitted, too")
	require.Equal(t, true, r["within_bound"], o.stdout)
}

func TestLoadHoldsWhatShadowModeLetsByAgainstNoBound(t *testing.T) {
	p := hourly(100)
	p.Shadow = true
	server, _ := newBucket(t, p)
	o := consumer(t.Context(), server.URL(), "load", "checkout", "--duration", "300ms", "-o", "json")
	require.Equal(t, cli.ExitOK, o.code, o.stderr)
	r := o.json(t)
	require.Greater(t, r["admitted"], 101.0)
	require.Equal(t, r["admitted"], 100+r["beyond_bucket"].(float64))
	require.Equal(t, true, r["within_bound"], o.stdout)
}

func TestLoadKeepsToItsRate(t *testing.T) {
	server, _ := newBucket(t, hourly(100))
	o := consumer(t.Context(), server.URL(), "load", "checkout", "-c", "4", "--rate", "40/s", "--duration", "500ms", "-o",
		"json")
	require.Equal(t, cli.ExitOK, o.code, o.stderr)
	takes := o.json(t)["takes"].(float64)
	require.LessOrEqual(t, takes, 21.0, "20 takes fall due in half a second, and one at the start")
	require.Positive(t, takes)

	o = consumer(t.Context(), server.URL(), "load", "checkout", "-c", "500", "--rate", "1/366d", "--duration", "500ms",
		"-o", "json")
	require.Equal(t, cli.ExitOK, o.code, o.stderr)
	require.InDelta(t, 1, o.json(t)["takes"], 0, "the five hundredth take falls due in 500 years")
}

func TestAnInterruptedLoadReports(t *testing.T) {
	server, rdb := newBucket(t, hourly(100))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var progress lockedBuffer
	var stdout bytes.Buffer
	code := make(chan int, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		args := []string{"load", "checkout", "--duration", "1h", "--progress", "--redis", server.URL()}
		code <- run(ctx, args, env{Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &progress})
	})
	require.Eventually(t, func() bool { return strings.Contains(progress.String(), "takes/s") }, 20*time.Second,
		time.Millisecond)
	cancel()
	require.Equal(t, cli.ExitOK, <-code)
	wg.Wait()
	require.Contains(t, stdout.String(), "interrupted")
	require.Contains(t, stdout.String(), "100 admitted")
	require.Contains(t, stdout.String(), "bound      101, not exceeded")
	left, err := rdb.Get(t.Context(), "checkout").Int64()
	require.NoError(t, err)
	require.Zero(t, left)
}

func TestLoadWithoutAPolicyHasNoBound(t *testing.T) {
	server, rdb := newBucket(t, hourly(100))
	_, err := lua.Add(t.Context(), rdb, "foreign", 3, 10, 0)
	require.NoError(t, err)
	o := consumer(t.Context(), server.URL(), "load", "foreign", "--duration", "100ms")
	require.Equal(t, cli.ExitOK, o.code, o.stderr)
	require.Contains(t, o.stdout, "3 admitted")
	require.Contains(t, o.stdout, "unknown: the bucket has no policy")

	set, err := policy.NewTemplates(1, []policy.Template{{Prefix: "user:", Enforce: policy.EnforceLazy,
		Policy: hourly(5)}}, nil)
	require.NoError(t, err)
	_, err = lua.PublishTemplates(t.Context(), rdb, set)
	require.NoError(t, err)
	o = consumer(t.Context(), server.URL(), "load", "user:1", "--duration", "100ms")
	require.Equal(t, cli.ExitOK, o.code, o.stderr)
	require.Contains(t, o.stdout, "5 admitted")
	require.Contains(t, o.stdout, "unknown: the bucket has no policy")
}

func TestTheBoundOfASchedule(t *testing.T) {
	terms := policy.Policy{Capacity: 100, Steps: policy.Every(time.Hour), StepTokens: 40}.Terms(policy.Fence{})
	p := lua.PeekReply{Terms: &terms, Step: 0, Next: 3_600_000_000}
	p.Now = 3_000_000_000 // ten minutes before the next step
	for elapsed, want := range map[time.Duration]int64{
		0: 100, 9 * time.Minute: 100, 10 * time.Minute: 140, 69 * time.Minute: 140, 70 * time.Minute: 180,
	} {
		tokens, _, unknown := bound(p, elapsed, 0)
		require.Empty(t, unknown)
		require.Equal(t, want, tokens, elapsed)
	}
	p.Next = 0
	_, _, unknown := bound(p, time.Hour, 0)
	require.NotEmpty(t, unknown)
}

func TestTheBoundOfARateCountsAGrant(t *testing.T) {
	terms := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(100),
		Interval: 100 * time.Millisecond}.Terms(policy.Fence{})
	tokens, _, _ := bound(lua.PeekReply{Terms: &terms}, 10*time.Second, 0)
	require.EqualValues(t, 1000+1001+10, tokens)
	terms.GrantTokens = 3 * terms.Tokens
	tokens, _, _ = bound(lua.PeekReply{Terms: &terms}, 10*time.Second, 0)
	require.EqualValues(t, 1000+3001+30, tokens)
}

func TestTheBoundCountsTheLongestTimeWithoutARefill(t *testing.T) {
	terms := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(100),
		Interval: 100 * time.Millisecond}.Terms(policy.Fence{})
	tokens, text, _ := bound(lua.PeekReply{Terms: &terms}, 10*time.Second, 1200*time.Millisecond)
	require.EqualValues(t, 1000+1001+120, tokens)
	require.Contains(t, text, "120 for 1.2s without a refill")
	tokens, _, _ = bound(lua.PeekReply{Terms: &terms}, 10*time.Second, time.Minute)
	require.EqualValues(t, 1000+1001+200, tokens, "a refill credits 2 s at most")

	gaps := longestGap{last: 1_000_000}
	for _, at := range []int64{1_100_000, 1_100_000, 2_300_000, 2_400_000} {
		gaps.refilled(at)
	}
	require.Equal(t, 1200*time.Millisecond, gaps.longest)
}

// lockedBuffer can be read while the program writes to it.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func TestALoadsReportFitsTheTerminal(t *testing.T) {
	t.Parallel()
	bound := int64(123_456_789)
	kept := true
	r := report{
		ElapsedSeconds: 3, Takes: 3_171_144, TakesPerSecond: 1_056_422, AdmittedTakes: 115, Denied: 3_171_029, Bound: &bound,
		WithinBound: &kept, BoundText: "capacity 100000000 + 16 due in 3.012s at 5/s + 0 of 101ms between two refills",
	}
	wide := r.text(0)
	narrow := r.text(80)
	for line := range strings.SplitSeq(narrow, "\n") {
		require.LessOrEqual(t, utf8.RuneCountInString(line), 80, line)
	}
	require.Contains(t, wide, r.BoundText)
	require.Equal(t, strings.Fields(wide), strings.Fields(narrow), "lines end between words")
	require.NotEqual(t, wide, narrow)
}

func TestLoadTakesForFlowsInTurn(t *testing.T) {
	p := hourly(100)
	p.Flows = &policy.Flows{Headroom: policy.DefaultHeadroom, Most: policy.DefaultFlows}
	server, rdb := newBucket(t, p)
	plan := policy.Plan{
		Version: policy.Version{Era: 1, Index: 1}, Whole: true, Floor: 40, Unlisted: 100, Most: 1000, Span: 1_000_000,
		Lasts: time.Hour.Microseconds(), Teams: []policy.PlannedTeam{{Name: policy.RootTeam, Price: 1e9}},
	}
	written := lua.PlanBatch(t.Context(), rdb, []lua.PlanCall{{Key: "checkout", Plan: plan}})[0]
	require.NoError(t, written.Err)
	require.False(t, written.Stale)
	load := func(flags ...string) outcome {
		args := append([]string{"load", "checkout", "--rate", "30/s", "--duration", "1s"}, flags...)
		return consumer(t.Context(), server.URL(), args...)
	}
	o := load("--flows", "3", "-o", "json")
	require.Equal(t, cli.ExitOK, o.code, o.stderr)
	r := o.json(t)
	flows := r["flows"].(map[string]any)
	require.Equal(t, 3.0, flows["flows"])
	require.InDelta(t, r["admitted"].(float64)/3, flows["mean_per_s"].(float64)*r["elapsed_s"].(float64), 1e-6)
	require.LessOrEqual(t, flows["least_per_s"], flows["mean_per_s"])
	require.LessOrEqual(t, flows["mean_per_s"], flows["most_per_s"])
	require.Contains(t, load("--flows", "3").stdout, "\nflows      3: tokens per flow: ")
	o = load("--flow", "loud", "-o", "json")
	require.Equal(t, cli.ExitOK, o.code, o.stderr)
	require.NotContains(t, o.stdout, "flows")
	use, err := rdb.HGetAll(t.Context(), lua.UseKey("checkout")).Result()
	require.NoError(t, err)
	for _, name := range []string{"load-1", "load-2", "load-3", "loud"} {
		require.Contains(t, use, name)
	}

	for flag, says := range map[string]string{"--flows=0": "from 1 to 100000", "--flow=a//b": "1 to 3 levels"} {
		o = load(flag)
		require.Equal(t, cli.ExitUsage, o.code)
		require.Contains(t, o.stderr, says)
	}
	o = load("--flow=a", "--flows=2")
	require.Equal(t, cli.ExitUsage, o.code)
}

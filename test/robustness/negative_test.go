package robustness_test

import (
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/test/robustness/mutate"
	"github.com/tokenrefill/refiller/test/robustness/record"
	"github.com/tokenrefill/refiller/test/robustness/schedule"
	"github.com/tokenrefill/refiller/test/robustness/system"
	"github.com/tokenrefill/refiller/test/robustness/traffic"
	"github.com/tokenrefill/refiller/test/robustness/verify"
)

func root(t testing.TB) string {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join("..", ".."))
	require.NoError(t, err)
	return dir
}

// refillWith returns a change of the refill script. It also disables the script's shorter path for the usual case: the
// complete rules then handle every bucket, and they have each mechanism once.
func refillWith(before, after string) mutate.Script {
	return mutate.Script{Name: "refill", Edits: []mutate.Edit{
		{Old: "local at = st == ARGV[i] and p", New: "local at = false and p"}, {Old: before, New: after},
	}}
}

// TestTheVerifierCatchesEachMissingMechanism runs systems whose scripts lack one mechanism. TestFixedSchedules and
// TestIntactScriptsPass show that similar runs without the change keep every promise.
func TestTheVerifierCatchesEachMissingMechanism(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		change mutate.Script
		faults []string
		spec   system.Spec
		beside func(ctx context.Context, t *testing.T, s *system.System)
		caught []string // at least one of these checks must fail
	}{
		{"index check", refillWith("local stale = seen_era < s.era or seen_index < s.index", "local stale = false"),
			[]string{"replica-pause"}, system.Spec{}, nil, []string{verify.Index}},
		{"credit cap", refillWith("if elapsed > p.max_elapsed then elapsed = p.max_elapsed else", ""),
			[]string{"redis-clock-forward"}, system.Spec{}, stepMinute, []string{verify.Credit, verify.Window}},
		{"carry", refillWith("add = (units - carry) / p.per", "add = (units - carry) / p.per\n    carry = 0"),
			nil, system.Spec{}, nil, []string{verify.Credit}},
		{"high-water clock check", refillWith("    if now < s.last - TOLERANCE_US then\n", "    if false then\n"),
			[]string{"redis-clock-back"}, system.Spec{}, stepBack, []string{verify.Resume, verify.Healthy}},
		{"quarantine", refillWith("s.tokens = min(s.tokens, s.after.on_rollback == 1 and p.capacity or 0)", ""),
			nil, system.Spec{}, rollBack, []string{verify.Quarantine}},
		{"notice of a rollback", refillWith(
			"if seen_era > s.era or (seen_era == s.era and seen_index > s.index) then", "if false then"),
			nil, system.Spec{}, rollBack, []string{verify.Quarantine}},
		{"fence order", refillWith("how = q[name] > p[name] and 'newer' or 'older'", "how = 'newer'"),
			[]string{"replica-kill"}, system.Spec{Versions: []int{1, 2, 1}}, nil, []string{verify.Order}},
		{"switch to a newer policy", refillWith("how = q[name] > p[name] and 'newer' or 'older'", "how = 'older'"),
			nil, system.Spec{Versions: []int{1, 2, 1}, InOrder: true}, nil, []string{verify.Versions}},
		{"undo of a failed take", mutate.Script{Name: "take",
			Edits: []mutate.Edit{{Old: "      call('INCRBY', key, total)\n", New: ""}}},
			nil, system.Spec{}, nil, []string{verify.Stock, verify.Linear}},
		{"tokens behind a right", mutate.Script{Name: "flows", Edits: []mutate.Edit{
			{Old: "    if tokens - leave < first * each then first = floor(max(0, tokens - leave) / each) end\n    if first > 0",
				New: "    if first > 0"},
			{Old: "min(count - first, floor(max(0, tokens - first * each - max(leave, reserve)) / each))",
				New: "(at and count - first or 0)"},
		}}, nil, divided, nil, []string{verify.Stock, verify.Window}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			spec := tc.spec
			spec.Front = func(addr string) string { return tc.change.Front(t, root(t), addr) }
			expect(t, tc.caught, spec, tc.beside, tc.faults...)
		})
	}
}

// divided has a bucket whose flows ask for several times its tokens, even on a busy machine.
var divided = system.Spec{Callers: 3, Buckets: append(schedule.Pick("plain"),
	system.Bucket{Key: "divided", Lines: []string{"capacity: 100, rate: 200/s, flows: {}"}})}

// TestIntactScriptsPass makes two runs of TestTheVerifierCatchesEachMissingMechanism without a change of the scripts,
// and requires that they have no violations. No fixed schedule resembles these two.
func TestIntactScriptsPass(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		spec   system.Spec
		beside func(context.Context, *testing.T, *system.System)
	}{"rollback": {system.Spec{}, rollBack}, "flows": {divided, nil}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := recordDir(t, "control")
			control(t, dir, tc.spec, tc.beside)
			result, err := verify.Dir(dir)
			require.NoError(t, err)
			require.Empty(t, result.Violations)
		})
	}
}

// control runs at least three replicas with traffic for some seconds. It runs the named faults or, if beside is set,
// calls that instead.
func control(t *testing.T, dir string, spec system.Spec, beside func(context.Context, *testing.T, *system.System),
	names ...string) {
	t.Helper()
	spec.Replicas = max(3, len(spec.Versions))
	if spec.Buckets == nil {
		spec.Buckets = schedule.Pick("plain", "deep", "rare") // few, so that a busy machine serves them
	}
	if beside != nil {
		spec.Callers = 5
	}
	plan, err := schedule.Fixed("control", 7, spec, names...)
	require.NoError(t, err)
	if beside == nil {
		schedule.Run(t, dir, plan)
		return
	}
	s := system.Start(t, dir, record.Meta{Name: plan.Name, Seed: plan.Seed}, plan.Spec)
	calls, err := traffic.Start(t.Context(), traffic.Config{
		Dir: dir, Dial: s.Dial, Direct: s.Direct, Buckets: s.Record(), Callers: s.Callers, Seed: 7, Pace: plan.Pace,
	})
	require.NoError(t, err)
	beside(t.Context(), t, s)
	calls.AwaitEnough(t.Context())
	s.Check("at the end")
	require.NoError(t, calls.Stop())
	s.Finish()
}

// TestTheVerifierCatchesWhatTheLoopLacks runs replicas whose refill loop lacks one mechanism.
func TestTheVerifierCatchesWhatTheLoopLacks(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, file, before, after string
		spec                      system.Spec
		faults                    []string
		caught                    []string
	}{
		{"what is refused is asked one by one", "lua/script.go",
			"if perCall > 1 && Refuses(failed(&results[i])) {", "if false {",
			system.Spec{Buckets: schedule.Pick("plain", "deep", "rare", "kept", "whole", "user:1")},
			[]string{"redis-forbids-a-bucket"}, []string{verify.Neighbours}},
		{"an unreadable pulse is none", "refill/standby.go", "!errors.Is(err, lua.ErrUnknownBucket) && !ownFault(err)",
			"!errors.Is(err, lua.ErrUnknownBucket)",
			system.Spec{Etcd: 1, Buckets: schedule.Pick("plain", "rare")}, []string{"pulse-unreadable"},
			[]string{verify.Resume}},
		{"another replica has the claim", "refill/claim.go", "b.held = b.held || o.Status.Wrote()", "b.held = false",
			system.Spec{Buckets: schedule.Pick("plain", "user:1")}, nil, []string{verify.Substance}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			spec := tc.spec
			spec.Program = mutate.Program(t, root(t), "./cmd/refiller", tc.file, tc.before, tc.after)
			expect(t, tc.caught, spec, nil, tc.faults...)
		})
	}
}

// expect requires that at least one of the checks in caught fails. It tries several runs, because a system that lacks a
// mechanism may keep all promises by chance, and a run on a busy machine may be too short to judge.
func expect(t *testing.T, caught []string, spec system.Spec,
	beside func(context.Context, *testing.T, *system.System), faults ...string) {
	t.Helper()
	var result *verify.Result
	for range 4 {
		dir := t.TempDir()
		control(t, dir, spec, beside, faults...)
		var err error
		result, err = verify.Dir(dir)
		require.NoError(t, err)
		if slices.ContainsFunc(caught, func(check string) bool { return slices.Contains(result.Broken(), check) }) {
			t.Logf("caught by %v; first: %v", result.Broken(), result.Violations[0])
			return
		}
	}
	require.Fail(t, "not caught", "want one of %v to fail, got %v", caught, result.Violations)
}

func stepMinute(ctx context.Context, t *testing.T, s *system.System) { step(ctx, t, s, time.Minute) }
func stepBack(ctx context.Context, t *testing.T, s *system.System)   { step(ctx, t, s, -time.Minute) }

func step(ctx context.Context, t *testing.T, s *system.System, d time.Duration) {
	t.Helper()
	letRun(ctx, 3*time.Second)
	f := record.Fault{Name: "clock", Start: time.Now().UnixNano(), Effect: record.Clock, Jump: d}
	s.Redis.StepClock(d)
	letRun(ctx, time.Second)
	f.End = time.Now().UnixNano()
	s.AddFault(f)
	letRun(ctx, 3*time.Second)
}

// rollBack makes Redis forget the last second of all buckets at the same moment. A fail-over to a lagging replica does
// the same, but here all replicas meet the older state at the same time.
func rollBack(ctx context.Context, t *testing.T, s *system.System) {
	t.Helper()
	rdb := s.Direct
	f := record.Fault{Name: "rollback", Start: time.Now().UnixNano(), Effect: record.Rollback}
	old, left := map[string]string{}, map[string]time.Duration{} // values and remaining lifetimes
	for _, b := range s.Record() {
		for _, key := range []string{lua.TokensKey(b.Key), lua.IndexKey(b.Key), lua.ControlKey(b.Key)} {
			dump, err := rdb.Dump(ctx, key).Result()
			if errors.Is(err, redis.Nil) {
				continue // a template's bucket that doesn't exist yet
			}
			require.NoError(t, err)
			ttl, err := rdb.PTTL(ctx, key).Result()
			require.NoError(t, err)
			old[key], left[key] = dump, max(0, ttl) // a negative ttl means that the key has no expiry
		}
	}
	letRun(ctx, time.Second)
	pipe := rdb.TxPipeline()
	for key, dump := range old {
		pipe.RestoreReplace(ctx, key, left[key], dump)
	}
	_, err := pipe.Exec(ctx)
	f.Gone = time.Now().UnixNano()
	require.NoError(t, err)
	f.End = time.Now().UnixNano()
	s.AddFault(f)
	letRun(ctx, 2*time.Second)
}

func letRun(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// TestTheElectionsRefereeCatchesEachMissingMechanism runs tests of package election on an election that lacks one
// mechanism. The tests must fail.
func TestTheElectionsRefereeCatchesEachMissingMechanism(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, file, before, after, test string }{
		{"trust margin", "election/term.go", "return sent.Add(ttl - margin)", "return sent.Add(ttl + margin)",
			"TestAtMostOneLeaderIsTrusted"},
		{"wait before resigning", "election/elector.go", "\terr := lead(s.ctx, term)\n", `	done := make(chan error, 1)
	go func() { done <- lead(s.ctx, term) }()
	var err error
	select {
	case err = <-done:
	case <-s.ctx.Done():
	}
`, "TestRunWaitsForLeadBeforeItResigns"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			overlay := mutate.Overlay(t, root(t), tc.file, tc.before, tc.after)
			cmd := exec.CommandContext(t.Context(), "go", "test", "-count=1", "-vet=off", "-ldflags=-w",
				"-overlay", overlay, "-run", "^"+tc.test+"$", "./election")
			cmd.Dir = root(t)
			out, err := cmd.CombinedOutput()
			var failed *exec.ExitError
			require.ErrorAs(t, err, &failed, string(out))
			require.Contains(t, string(out), "--- FAIL: "+tc.test,
				"the test fails because of a broken promise, and not because it can't be built")
		})
	}
}

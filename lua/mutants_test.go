package lua_test

import (
	"bufio"
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/luamutant"
	"github.com/tokenrefill/refiller/lua"
)

var mutate = flag.String("mutants", "",
	"TestEveryMutantIsNoticed runs the mutants whose name matches this expression, such as ^shared/credit; "+
		"none by default")

const acceptedMutants = "testdata/mutants.txt"

// TestEveryMutantIsNoticed runs the tests of a script with each of its mutants. Those that no test notices are listed
// in acceptedMutants with the reason.
func TestEveryMutantIsNoticed(t *testing.T) {
	if *mutate == "" {
		return // make mutants selects some
	}
	selected, err := regexp.Compile(*mutate)
	require.NoError(t, err, "-mutants")
	scripts := scriptTexts(t)
	suites := suitesOf(t, scripts)
	accepted := readAccepted(t)
	maps.DeleteFunc(accepted, func(name, _ string) bool { return !selected.MatchString(name) })
	var mutants []job
	for _, script := range slices.Sorted(maps.Keys(scripts)) {
		all, err := luamutant.Of(script, scripts[script])
		require.NoError(t, err)
		all = slices.DeleteFunc(all, func(m luamutant.Mutant) bool { return !selected.MatchString(m.Name) })
		if len(all) == 0 {
			delete(suites, script)
		}
		for _, m := range all {
			mutants = append(mutants, job{Mutant: m, script: script})
		}
	}
	separateSlow(t, scripts, suites)
	for i := range mutants {
		mutants[i].suite = suites[mutants[i].script]
	}
	began := time.Now()
	runAll(t, mutants, accepted, func(j *job) {
		if testing.Verbose() {
			fmt.Printf("%s: %s %s: lua/%s.lua:%d %s\n", time.Now().Format(time.TimeOnly), j.stage, j.noticed, j.script, j.Line,
				j.Name)
		}
		if j.noticed == "" && accepted[j.Name] == "" {
			fmt.Printf("SURVIVED lua/%s.lua:%d %s\n", j.script, j.Line, j.Name)
		}
	})
	report(t, mutants, accepted, time.Since(began))
}

// TestMutantsOfTheMechanismsAreNoticed is the short form of TestEveryMutantIsNoticed: one mutant for each mechanism
// that keeps a token from being minted or lost, and a test that notices it.
func TestMutantsOfTheMechanismsAreNoticed(t *testing.T) {
	t.Parallel()
	scripts := scriptTexts(t)
	for _, c := range []struct{ mechanism, mutant, test string }{
		{"an index is won once",
			"add: delete return redis.call('DECR', KEYS[2])",
			"TestCasesOfTheTwoScriptBucket"},
		{"a denied take is undone",
			"take: delete call('INCRBY', key, total)",
			"TestADeniedTakeLeavesTheTokensAsTheyWere/Embedded"},
		{"a take creates no bucket by itself",
			"takes takes: delete return say(2)",
			"TestAnUnknownKeyLeavesNothing"},
		{"a request is charged once",
			"takeonce: delete call('SET', KEYS[3], asked .. got, 'PX', ARGV[4])",
			"TestTakesWithARequestIDAreAnsweredAsTheModelSays/Embedded"},
		{"several buckets give all or nothing",
			"takeall: delete fit = fit and (at.fits or p.enforcement % 8 >= 4)",
			"TestTakesOfSeveralBucketsAreAnsweredAsTheModelSays/Embedded"},
		{"tokens of another era do not come back",
			"return: delete return unwritten(KEYS[3], {4, tokens})",
			"TestTokensOfAnotherEraDoNotComeBack/Embedded"},
		{"a reservation that ran out goes back",
			"reserve: delete put_tokens(tokens, before)",
			"TestADeniedReservationReturnsWhatHasRunOut/Embedded"},
		{"what was used is charged",
			"settle: delete tokens = tokens - charged",
			"TestDebtIsPaidBeforeTokensAndIsAtMostTheCapacity"},
		{"a lease is outstanding",
			"lease: delete s.out = s.out + granted",
			"TestReservationsAndLeasesAgreeWithTheModelOnRandomHistories/Embedded"},
		{"a grant counts as a write",
			"grant: delete call('INCRBY', KEYS[2], (index or 0) == 0 and format('%d', s.index) or 1...",
			"TestWhatOperatorsSetRestoresALostIndex/Embedded"},
		{"a reset forgives debt",
			"reset: delete s.debt = 0",
			"TestAResetForgivesDebtAndDropsCarryAndDueSteps/Embedded"},
		{"a switch settles first",
			"refill assess: delete step = s.next",
			"TestASwitchCreditsTheDueStepOfTheOldSchedule/Embedded"},
		{"a foreign refill pays for the step",
			"refill assess: delete s.step, s.next = step, 0",
			"TestAStepThatAForeignClientPaidIsNotCreditedAgain/Embedded"},
		{"a rollback begins an era",
			"refill begin_era: delete s.era = next_era(max(s.era, seen_era), now)",
			"TestTheEmbeddedStoreFollowsEveryRule"},
		{"every added token is counted",
			"refill: delete pcall('HINCRBY', key_ctl, 'added', format('%d', added))",
			"TestEveryRefillOfAPoolsBucketCountsWhatItAdded/Embedded"},
		{"a wait regards the room",
			"shared/denial wait_us: delete due = max(due, s.due)",
			"TestAWaitForRoomLastsUntilTheFirstRecordEnds/Embedded"},
		{"no fraction of a token is lost",
			"shared/credit credit: delete carry = units % p.per",
			"TestTheEmbeddedStoreFollowsEveryRule"},
		{"a strict bucket keeps room",
			"shared/bucket room: delete return max(0, p.capacity - s.out)",
			"TestAWaitForRoomLastsUntilTheFirstRecordEnds/Embedded"},
		{"an old master answers nothing",
			"shared/unwritten unwritten: delete return deleted",
			"TestAServerThatMayNotWriteAnswersNothing"},
		{"a later set of templates stays",
			"publish: delete return {0, before}",
			"TestALaterVersionOfTheTemplatesStaysPublished/Embedded"},
	} {
		t.Run(c.mechanism, func(t *testing.T) {
			t.Parallel()
			script, _, _ := strings.Cut(strings.Replace(c.mutant, ":", " ", 1), " ")
			all, err := luamutant.Of(script, scripts[script])
			require.NoError(t, err)
			i := slices.IndexFunc(all, func(m luamutant.Mutant) bool { return m.Name == c.mutant })
			require.GreaterOrEqual(t, i, 0, "the script has no such statement any more: choose another mutant")
			out, passed, _ := runMutant(t, script, all[i].Text, "-test.failfast", "-test.run=^"+
				strings.Replace(c.test, "/", "$/^", 1)+"$")
			require.False(t, passed, "%s passes without the statement in lua/%s.lua:%d", c.test, script, all[i].Line)
			require.Contains(t, out, "--- FAIL: "+c.test)
		})
	}
}

// job is a mutant to run.
type job struct {
	luamutant.Mutant
	script  string
	suite   suite
	stage   string // whose tests noticed it
	noticed string // the test that did
	spent   time.Duration
}

// suite holds the tests of a script, each as a pattern.
type suite struct {
	quick, slow []string // on the embedded store, by how long they take
	all         []string
}

// stage is a part of the tests that are run with a mutant in one process.
type stage struct {
	name    string
	run     []string
	skip    []string
	atOnce  int
	timeout time.Duration
}

// stages returns the tests of the script in the order in which they are tried. The first stage has the few tests that
// noticed most of the script's mutants so far. The next stages have the other quick tests, and first those that noticed
// most mutants of any script. Each slow test is a stage: if it notices a mutant, it does so soon.
func (j *job) stages(noticed successes) []stage {
	embedded := slices.Concat(j.suite.quick, j.suite.slow)
	quick := noticed.sorted(j.script, j.suite.quick)
	often := min(len(quick), mostOften)
	stages := []stage{
		{"quick", noticed.best(j.script, embedded), nil, 1, 2 * time.Minute},
		{"quick", quick[:often], nil, 1, 2 * time.Minute},
		{"quick", quick[often:], nil, 1, 2 * time.Minute},
	}
	for _, test := range noticed.sorted(j.script, j.suite.slow) {
		stages = append(stages, stage{"slow", []string{test}, nil, 1, 2 * time.Minute})
	}
	return append(stages, stage{"server", j.suite.all, embedded, 8, 10 * time.Minute})
}

// run runs the tests of the script with a mutant until one fails. A mutant that is accepted has to pass the quick ones
// only: an entry that a slow test would make superfluous does no harm.
func (j *job) run(t *testing.T, accepted bool, stages []stage) {
	for _, stage := range stages {
		if len(stage.run) == 0 || stage.name != "quick" && accepted {
			continue
		}
		out, ok, spent := runMutant(t, j.script, j.Text, "-test.failfast", "-test.run="+strings.Join(stage.run, "|"),
			"-test.skip="+strings.Join(stage.skip, "|"), fmt.Sprintf("-test.parallel=%d", stage.atOnce),
			fmt.Sprintf("-test.timeout=%s", stage.timeout))
		j.spent += spent
		if !ok {
			j.stage = stage.name
			j.noticed = cmp.Or(failedTest.FindString(out), "no test")
			return
		}
	}
}

const (
	mostFirst = 5  // how many tests are tried first
	mostOften = 25 // how many are tried next
)

// successes are how many mutants each test noticed, by script and by the test's pattern. The script "" stands for all.
type successes map[string]map[string]int

// count counts the test that noticed a mutant, if it runs on the embedded store.
func (s successes) count(j *job) {
	test, _, _ := strings.Cut(strings.TrimPrefix(j.noticed, "--- FAIL: "), "/")
	for _, pattern := range slices.Concat(j.suite.quick, j.suite.slow) {
		if !strings.HasPrefix(pattern, "^"+test+"$") {
			continue
		}
		for _, script := range []string{"", j.script} {
			if s[script] == nil {
				s[script] = map[string]int{}
			}
			s[script][pattern]++
		}
	}
}

// sorted returns the tests, those first that noticed most mutants of the script, and then of all scripts.
func (s successes) sorted(script string, tests []string) []string {
	return slices.SortedStableFunc(slices.Values(tests), func(a, b string) int {
		return cmp.Or(s[script][b]-s[script][a], s[""][b]-s[""][a])
	})
}

// best returns the few of the tests that noticed most mutants, if they noticed any.
func (s successes) best(script string, tests []string) []string {
	tests = slices.DeleteFunc(s.sorted(script, tests), func(test string) bool { return s[""][test] == 0 })
	return tests[:min(len(tests), mostFirst)]
}

var failedTest = regexp.MustCompile(`(?m)--- FAIL: \S+|^panic: .*`)

// runMutant runs this test program with a text in place of a script or a shared piece. It reports whether it passed and
// how much processor time it spent, which other work on the machine changes less than it changes the duration.
func runMutant(t *testing.T, name, text string, args ...string) (output string, passed bool, spent time.Duration) {
	program, err := os.Executable()
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "mutant.lua")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append(os.Environ(), lua.MutantName+"="+name, lua.MutantText+"="+file, "REFILLER_SEED=1")
	out, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil {
		require.ErrorAs(t, err, &exit)
	}
	return string(out), err == nil, cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
}

// runAll runs the mutants, one for each processor at once, and calls done after each.
func runAll(t *testing.T, jobs []job, accepted map[string]string, done func(*job)) {
	var mu sync.Mutex
	var workers sync.WaitGroup
	next := make(chan *job)
	noticed := successes{}
	work := func(j *job) {
		mu.Lock()
		stages := j.stages(noticed)
		mu.Unlock()
		j.run(t, accepted[j.Name] != "", stages)
		mu.Lock()
		defer mu.Unlock()
		noticed.count(j)
		done(j)
	}
	for range max(1, runtime.NumCPU()) {
		workers.Go(func() {
			for j := range next {
				work(j)
			}
		})
	}
	for i := range jobs {
		next <- &jobs[i]
	}
	close(next)
	workers.Wait()
}

// report prints a line per script and fails for a mutant that nothing noticed and no entry accepts, and for an entry
// without such a mutant.
func report(t *testing.T, jobs []job, accepted map[string]string, took time.Duration) {
	var unexplained []string
	survived := map[string]bool{}
	fmt.Printf("%-20s %8s %8s %8s %8s %8s %8s\n", "script", "mutants", "quick", "slow", "server", "accepted", "survived")
	row := func(of string, selected []job) {
		n := map[string]int{}
		for _, j := range selected {
			stage := j.stage
			if stage == "" && accepted[j.Name] != "" {
				stage = "accepted"
			}
			n[stage]++
		}
		fmt.Printf("%-20s %8d %8d %8d %8d %8d %8d\n", of, len(selected), n["quick"], n["slow"], n["server"],
			n["accepted"], n[""])
	}
	for from, to := 0, 0; from < len(jobs); from = to {
		for to < len(jobs) && jobs[to].script == jobs[from].script {
			to++
		}
		row(jobs[from].script, jobs[from:to])
	}
	row("all", jobs)
	spent := time.Duration(0)
	for _, j := range jobs {
		spent += j.spent
	}
	fmt.Printf("in %s, with %s of processor time\n", took.Round(time.Second), spent.Round(time.Second))
	for _, j := range jobs {
		if j.noticed != "" {
			continue
		}
		survived[j.Name] = true
		if accepted[j.Name] == "" {
			unexplained = append(unexplained, fmt.Sprintf("lua/%s.lua:%d %s", j.script, j.Line, j.Name))
		}
	}
	require.Empty(t, unexplained, "kill these with a test, remove the statement, or add them to lua/"+acceptedMutants)
	for name := range accepted {
		require.True(t, survived[name], "lua/%s accepts %q, which a test notices, or which is no mutant", acceptedMutants,
			name)
	}
}

// readAccepted reads the accepted mutants and the reasons. An entry is a name; the lines below it that are indented are
// the reason. Lines that begin with # and empty ones are for the reader.
func readAccepted(t *testing.T) map[string]string {
	file, err := os.ReadFile(acceptedMutants)
	require.NoError(t, err)
	accepted := map[string]string{}
	var names []string // of the entries that the next reason is for
	inReason := false
	for lines := bufio.NewScanner(bytes.NewReader(file)); lines.Scan(); {
		line := lines.Text()
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
		case strings.HasPrefix(line, "    "):
			inReason = true
			for _, name := range names {
				accepted[name] += line
			}
		default:
			if inReason {
				names = nil
			}
			inReason = false
			require.NotContains(t, accepted, line, "twice in %s", acceptedMutants)
			accepted[line] = ""
			names = append(names, line)
		}
	}
	for name, reason := range accepted {
		require.NotEmpty(t, reason, "%s gives no reason for %q", acceptedMutants, name)
	}
	return accepted
}

// scriptTexts returns the scripts and the shared pieces as they are in their files.
func scriptTexts(t *testing.T) map[string]string {
	texts := map[string]string{}
	for _, pattern := range []string{"*.lua", "shared/*.lua"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			texts[strings.TrimSuffix(file, ".lua")] = string(text)
		}
	}
	return texts
}

// suitesOf returns the tests of each script and shared piece: those from which a path of Go names leads to the script.
func suitesOf(t *testing.T, scripts map[string]string) map[string]suite {
	refs := references(t)
	suites := map[string]suite{}
	tests := slices.Sorted(maps.Keys(refs))
	for _, test := range tests {
		name, isTest := strings.CutPrefix(test, "lua_test.")
		if !isTest || !regexp.MustCompile(`^(Test|Fuzz|Example)`).MatchString(name) || refs[test]["lua_test.runMutant"] {
			continue // tests that run mutants themselves notice none
		}
		reached := reach(refs, test)
		embedded := ""
		switch {
		case refs[test]["lua_test.withEmbedded"] || refs[test][`"Embedded"`]:
			embedded = "^" + name + "$/^Embedded$"
		case reached["lua_test.embedded"] && !reached["testenv"]:
			embedded = "^" + name + "$"
		}
		used := map[string]bool{}
		for script, text := range scripts {
			if reached["script "+script] {
				used[script] = true
				for _, piece := range includeLine.FindAllStringSubmatch(text, -1) {
					used[piece[1]] = true
				}
			}
		}
		for script := range used {
			s := suites[script]
			s.all = append(s.all, "^"+name+"$")
			if embedded != "" {
				s.quick = append(s.quick, embedded)
			}
			suites[script] = s
		}
	}
	for name := range scripts {
		require.Contains(t, suites, name, "no test reaches it")
	}
	return suites
}

// separateSlow measures the tests on the embedded store, with a script that is printed as mutants are, but unchanged.
func separateSlow(t *testing.T, scripts map[string]string, suites map[string]suite) {
	unchanged, err := luamutant.Printed("shared/redis", scripts["shared/redis"])
	require.NoError(t, err)
	const slow = 500 * time.Millisecond
	took := map[string]time.Duration{}
	for _, s := range suites {
		for _, pattern := range s.quick {
			if _, measured := took[pattern]; measured {
				continue
			}
			out, ok, spent := runMutant(t, "shared/redis", unchanged, "-test.run="+pattern)
			require.True(t, ok, out)
			took[pattern] = spent
		}
	}
	for name, s := range suites {
		all := s.quick
		s.quick = nil
		for _, pattern := range all {
			if took[pattern] < slow {
				s.quick = append(s.quick, pattern)
			} else {
				s.slow = append(s.slow, pattern)
			}
		}
		suites[name] = s
	}
}

var includeLine = regexp.MustCompile(`(?m)^--#include (\S+)$`)

func reach(refs map[string]map[string]bool, from string) map[string]bool {
	reached := map[string]bool{from: true}
	for next := []string{from}; len(next) > 0; next = next[1:] {
		for name := range refs[next[0]] {
			if !reached[name] {
				reached[name] = true
				next = append(next, name)
			}
		}
	}
	return reached
}

// references returns for each declaration of the package and its tests the names that it uses. Methods of
// different types count as one, so a test may count for more scripts than it runs.
func references(t *testing.T) map[string]map[string]bool {
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	refs := map[string]map[string]bool{}
	for _, file := range files {
		tree, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		if tree.Name.Name == "lua" && strings.HasSuffix(file, "_test.go") {
			continue // tests of what needs no server
		}
		for _, decl := range tree.Decls {
			for name, body := range declared(decl) {
				name = tree.Name.Name + "." + name
				if refs[name] == nil {
					refs[name] = map[string]bool{}
				}
				addUses(refs[name], tree.Name.Name, body)
			}
		}
	}
	delete(refs, "lua.allScripts") // a test that loads a script doesn't test it thereby
	return refs
}

// declared returns the functions, methods and variables of a declaration; a method's name begins with a dot.
func declared(decl ast.Decl) map[string]ast.Node {
	names := map[string]ast.Node{}
	switch d := decl.(type) {
	case *ast.FuncDecl:
		name := d.Name.Name
		if d.Recv != nil {
			name = "." + name
		}
		names[name] = d
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			if v, ok := spec.(*ast.ValueSpec); ok {
				for _, name := range v.Names {
					names[name.Name] = v
				}
			}
		}
	}
	return names
}

func addUses(uses map[string]bool, pkg string, body ast.Node) {
	ast.Inspect(body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if f, ok := n.Fun.(*ast.Ident); ok && f.Name == "newScript" {
				if name, ok := n.Args[0].(*ast.BasicLit); ok {
					uses["script "+strings.Trim(name.Value, `"`)] = true
				}
			}
		case *ast.SelectorExpr:
			switch of, _ := n.X.(*ast.Ident); {
			case of != nil && of.Name == "lua":
				uses["lua."+n.Sel.Name] = true
			case of != nil && of.Name == "testenv":
				uses["testenv"] = true
			default:
				uses["lua.."+n.Sel.Name] = true
				uses["lua_test.."+n.Sel.Name] = true
				addUses(uses, pkg, n.X)
			}
			return false
		case *ast.Ident:
			uses[pkg+"."+n.Name] = true
		case *ast.BasicLit:
			if n.Value == `"Embedded"` {
				uses[n.Value] = true
			}
		}
		return true
	})
}

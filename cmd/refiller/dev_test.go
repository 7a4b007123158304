package main

import (
	"context"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// patience is the longest time that a test waits for an event. It is long because the machine may be busy.
const patience = 2 * time.Minute

// playground is a running "refiller dev" with a separate directory for temporary files.
type playground struct {
	*testenv.Process
	t   *testing.T
	tmp string
}

func startDev(t *testing.T, args ...string) playground {
	t.Helper()
	tmp := t.TempDir()
	return playground{testenv.StartCommand(t, testenv.Command{
		Name: "dev", Path: testenv.Build(t, "./cmd/refiller"), Args: append([]string{"dev"}, args...),
		Env: []string{"TMPDIR=" + tmp, "REFILLER_REDIS_URL=redis://127.0.0.1:1"},
	}), t, tmp}
}

// find waits until the output has a match and returns its groups.
func (p playground) find(pattern string) []string {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	match, err := p.WaitLog(ctx, regexp.MustCompile(pattern))
	require.NoError(p.t, err)
	return match
}

// end waits for the end of the playground. It requires that no process and no file of the playground is left.
func (p playground) end(code int) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	got, err := p.Wait(ctx)
	require.NoError(p.t, err)
	require.Equal(p.t, code, got, p.Log())
	for _, pid := range p.replicas() {
		require.ErrorIs(p.t, syscall.Kill(pid, 0), syscall.ESRCH, "replica %d still runs", pid)
	}
	left, err := os.ReadDir(p.tmp)
	require.NoError(p.t, err)
	require.Empty(p.t, left)
}

// replicas returns the process ids of replicas that the output names. Some of these replicas may have ended.
func (p playground) replicas() (pids []int) {
	for _, m := range regexp.MustCompile(`pid (\d+)`).FindAllStringSubmatch(p.Log(), -1) {
		pid, err := strconv.Atoi(m[1])
		require.NoError(p.t, err)
		pids = append(pids, pid)
	}
	return pids
}

// requirePrinted runs the commands that the playground prints for a second terminal.
func (p playground) requirePrinted() {
	p.t.Helper()
	commands := regexp.MustCompile(`(?m)^\s+(refiller|consumer) (.+)$`).FindAllStringSubmatch(p.Log(), -1)
	require.NotEmpty(p.t, commands)
	for _, c := range commands {
		cmd := exec.CommandContext(p.t.Context(), testenv.Build(p.t, "./cmd/"+c[1]), strings.Fields(c[2])...)
		out, _ := cmd.CombinedOutput() // the exit code has the result
		code := cmd.ProcessState.ExitCode()
		require.True(p.t, code == 0 || code == 3 && c[1] == "consumer", "%s: exit code %d\n%s", c[0], code, out)
	}
}

// requireRefills waits until every sample bucket with a rate has been refilled several times.
func requireRefills(t *testing.T, url string) {
	t.Helper()
	options, err := redis.ParseURL(url)
	require.NoError(t, err)
	rdb := redis.NewClient(options)
	defer rdb.Close()
	for _, key := range []string{"checkout", "mail", "llm-tokens"} {
		first, err := rdb.Get(t.Context(), lua.IndexKey(key)).Int64()
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			now, err := rdb.Get(t.Context(), lua.IndexKey(key)).Int64()
			return err == nil && now >= first+3
		}, patience, 10*time.Millisecond)
	}
}

func TestAProgramOfGoRunIsKnown(t *testing.T) {
	t.Parallel()
	require.True(t, goRun("/tmp/go-build123/b001/exe/refiller", ""))
	require.True(t, goRun("/root/.cache/go-build/1c/1cb1-d/refiller", ""))
	require.True(t, goRun("/cache/1c/1cb1-d/refiller", "/cache/"))
	require.False(t, goRun("/root/go/bin/refiller", ""))
	require.False(t, goRun("/cached/refiller", "/cache"))
}

const ready = `Ctrl-C stops everything`

func TestDevRefillsItsOwnStoreAndLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	p := startDev(t)
	url := p.find(`redis://127\.0\.0\.1:\d+`)[0]
	p.find(ready)
	p.requirePrinted()
	require.Len(t, p.replicas(), 3)
	requireRefills(t, url)
	p.find(`of at most [\d,]+ tokens admitted`)
	require.NotContains(t, p.Log(), "\x1b", "no colours outside a terminal")

	status := exec.Command(p.path(), "status", "--addr", p.find(`replica-2 +(http://\S+)`)[1])
	answer, err := status.CombinedOutput()
	require.NoError(t, err, string(answer))
	require.Contains(t, string(answer), "replica-2")

	p.Signal(syscall.SIGINT)
	p.end(cli.ExitOK)
	require.Contains(t, p.Log(), "Stopping after")
	require.NotContains(t, p.Log(), "too many")
}

func (p playground) path() string { return testenv.Build(p.t, "./cmd/refiller") }

func TestDevShowsWhatFlowsAreFor(t *testing.T) {
	t.Parallel()
	p := startDev(t, "--flows")
	p.find(`divided: loud \d+/s, quiet [78]\.\d/s each, (9\d|10\d) % of their demand`)
	p.find(`in-order: loud \d+/s, quiet [0-6]\.\d/s each, [1-8]?\d % of their demand`)
	p.requirePrinted()
	p.Signal(syscall.SIGINT)
	p.end(cli.ExitOK)
	require.Regexp(t, `users recently got \d+ % of their demand without flows and \d+ % of their demand with flows`,
		p.Log())
}

func TestDevStopsWhileItStarts(t *testing.T) {
	t.Parallel()
	p := startDev(t)
	p.find(`Starting`)
	p.Signal(syscall.SIGTERM)
	p.end(cli.ExitOK)
}

func TestDevKillsTheReplicaThatRefillsAndMeasuresTheGap(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"etcd", "race"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			p := startDev(t, "--mode", mode, "--kill-leader-every", "3s")
			killed := p.find(`killed (replica-\d) \(pid (\d+)\), which refilled: gap (\d+) ms \(p50 \d+ ms, max \d+ ms over \d+ kills?\)`)
			pid, err := strconv.Atoi(killed[2])
			require.NoError(t, err)
			require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH)
			gap, err := strconv.Atoi(killed[3])
			require.NoError(t, err)
			require.GreaterOrEqual(t, gap, 50, "refills are at least half an interval from each other")
			p.find(killed[1] + ` is back: http://\S+, pid \d+`)
			p.Signal(syscall.SIGINT)
			p.end(cli.ExitOK)
		})
	}
}

func TestDevDetectsAReplicaThatAnotherProgramKills(t *testing.T) {
	t.Parallel()
	p := startDev(t, "--mode", "race")
	victim := p.find(`kill -9 (\d+)`)[1]
	p.find(`of at most [\d,]+ tokens admitted`)
	pid, err := strconv.Atoi(victim)
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	p.find(`replica-\d \(pid ` + victim + `\) ended: signal: killed, which [^:]+: (gap \d+ ms|the gap could not)`)
	p.find(`is back`)
	p.Signal(syscall.SIGINT)
	p.end(cli.ExitOK)
}

func TestDevUsesGivenServers(t *testing.T) {
	t.Parallel()
	server, etcd := testenv.Redis(t), testenv.Etcd(t, 1)
	p := startDev(t, "--redis", server.URL(), "--etcd", etcd.Endpoints()[0])
	p.find(`store +redis://` + regexp.QuoteMeta(server.Addr()) + ` +yours`)
	p.find(`etcd +` + regexp.QuoteMeta(etcd.Endpoints()[0]) + ` +yours`)
	p.find(ready)
	requireRefills(t, server.URL())
	client := etcd.Client()
	candidates := func() int {
		r, err := client.Get(t.Context(), "/refiller-dev/lead/", clientv3.WithPrefix())
		require.NoError(t, err)
		return len(r.Kvs)
	}
	require.Eventually(t, func() bool { return candidates() == 3 }, patience, 10*time.Millisecond,
		"every replica is a candidate")
	p.Signal(syscall.SIGTERM)
	p.end(cli.ExitOK)
	require.Zero(t, candidates(), "the replicas resigned")
}

func TestDevEndsByItselfAfterItsDuration(t *testing.T) {
	t.Parallel()
	p := startDev(t, "--mode", "race", "--duration", "1500ms")
	p.end(cli.ExitOK)
	require.Contains(t, p.Log(), "Stopping after")
}

func TestDevKeepsItsHandsOffForeignKeys(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	require.NoError(t, server.Client().Set(t.Context(), "mail", "7", 0).Err())
	p := startDev(t, "--mode", "race", "--redis", server.URL())
	p.end(cli.ExitFailed)
	require.Contains(t, p.Log(), `"mail"`)
	keys, err := server.Client().Keys(t.Context(), "*").Result()
	require.NoError(t, err)
	require.Equal(t, []string{"mail"}, keys)
}

func TestDevRefusesBadUsage(t *testing.T) {
	t.Parallel()
	for flag, args := range map[string][]string{
		"--mode":               {"--mode", "nonsense"},
		"--redis":              {"--redis", "http://x"},
		"--etcd":               {"--etcd", "ftp://x"},
		"--kill-leader-every":  {"--kill-leader-every", "1ms"},
		"--duration":           {"--duration", "-1s"},
		`arguments "nonsense"`: {"nonsense"},
	} {
		code, stdout, stderr := runWith(t, nil, append([]string{"dev"}, args...)...)
		require.Equal(t, cli.ExitUsage, code, flag)
		require.Empty(t, stdout)
		require.Contains(t, stderr, flag)
	}
}

func TestProductionBuildsHaveNoEmbeddedServers(t *testing.T) {
	t.Parallel()
	const etcd, store = "go.etcd.io/etcd/server/", "github.com/alicebob/miniredis"
	deps := func(flags ...string) string {
		list := exec.Command("go", append(append([]string{"list", "-deps"}, flags...), ".")...)
		out, err := list.Output()
		require.NoError(t, err)
		return string(out)
	}
	embedded := deps()
	require.Contains(t, embedded, etcd)
	require.Contains(t, embedded, store)
	production := deps("-tags=production")
	require.NotContains(t, production, etcd)
	require.NotContains(t, production, store)
	require.True(t, strings.Contains(production, "go.etcd.io/etcd/client/"), "the program still has the client of etcd")

	program := testenv.Build(t, "./cmd/refiller", "-tags=production")
	for flag, args := range map[string][]string{"--redis": {"dev"}, "--etcd": {"dev", "--redis", "redis://127.0.0.1:1"}} {
		out, err := exec.Command(program, args...).CombinedOutput()
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
		require.Equal(t, cli.ExitFailed, exit.ExitCode())
		require.Contains(t, string(out), "no embedded servers")
		require.Contains(t, string(out), flag)
	}
}

func TestDevRunsRegionsAndCutsOneOff(t *testing.T) {
	t.Parallel()
	p := startDev(t, "--regions", "eu,us", "--cut", "us", "--cut-after", "1s", "--cut-for", "2s")
	p.find(ready)
	require.Len(t, p.replicas(), 4)
	p.requirePrinted()
	p.find(`eu has \d+/s of \d+/s wanted, \d+/s admitted \| us has`)
	p.find(`us is cut off from etcd and the other regions: its grant ends within 12s, and then it has only its floor`)
	p.find(`us is connected again`)
	p.find(`demand shifts to us`)
	p.Signal(syscall.SIGINT)
	p.end(cli.ExitOK)
	require.Regexp(t, `of at most [\d,]+ tokens admitted in all regions`, p.Log())
}

func TestDevRefusesFlagsOfTheOtherPlayground(t *testing.T) {
	t.Parallel()
	for says, args := range map[string][]string{
		"--mode can't be used with --regions": {"--regions", "eu,us", "--mode", "race"},
		"--cut requires --regions":            {"--cut", "us"},
		"want 2 to 6 names":                   {"--regions", "eu"},
	} {
		code, _, stderr := runWith(t, nil, append([]string{"dev"}, args...)...)
		require.Equal(t, cli.ExitUsage, code)
		require.Contains(t, stderr, says)
	}
}

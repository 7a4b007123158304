package testenv

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestProcessReportsItsExitCodeAndLog(t *testing.T) {
	t.Parallel()
	p := Start(t, "/bin/sh", "-c", "echo to stdout; echo to stderr >&2; exit 7")
	code, err := p.Wait(t.Context())
	require.NoError(t, err)
	require.Equal(t, 7, code)
	require.Equal(t, "to stdout\nto stderr\n", p.Log())
	require.False(t, p.Running())
}

func TestProcessWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	p := Start(t, "/bin/sh", "-c", "sleep 1000")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := p.Wait(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.True(t, p.Running())
}

func TestProcessGetsEnvironmentAndSignals(t *testing.T) {
	t.Parallel()
	p := StartCommand(t, Command{
		Path: "/bin/sh",
		Args: []string{"-c", `trap 'echo caught; exit 0' USR1; echo "value=$VALUE"; while :; do sleep 0.01; done`},
		Env:  []string{"VALUE=42"},
	})
	match, err := p.WaitLog(t.Context(), regexp.MustCompile(`value=(\d+)`))
	require.NoError(t, err)
	require.Equal(t, "42", match[1])
	p.Signal(syscall.SIGUSR1)
	code, err := p.Wait(t.Context())
	require.NoError(t, err)
	require.Zero(t, code)
	require.Contains(t, p.Log(), "caught")
}

func TestProcessWaitLogFailsWhenTheProcessEnds(t *testing.T) {
	t.Parallel()
	p := Start(t, "/bin/sh", "-c", "echo something else")
	_, err := p.WaitLog(t.Context(), regexp.MustCompile("serving at"))
	require.ErrorContains(t, err, "exited early")
	require.ErrorContains(t, err, "something else")
}

func TestKillReachesChildrenOfTheProcess(t *testing.T) {
	t.Parallel()
	// The child has the write end of the pipe open. So a read from the pipe ends when the child has ended.
	dir := t.TempDir()
	fifo := filepath.Join(dir, "alive")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	p := Start(t, "/bin/sh", "-c", "sleep 1000 >"+fifo+" & echo started; wait")
	alive, err := os.Open(fifo) // returns once the child has opened it
	require.NoError(t, err)
	defer func() { _ = alive.Close() }()
	_, err = p.WaitLog(t.Context(), regexp.MustCompile("started"))
	require.NoError(t, err)
	p.Kill()
	require.NoError(t, alive.SetReadDeadline(time.Now().Add(20*time.Second)))
	_, err = alive.Read(make([]byte, 1))
	require.EqualError(t, err, "EOF")
}

func TestPausedProcessIsStoppedWhenPauseReturns(t *testing.T) {
	t.Parallel()
	p := Start(t, "/bin/sh", "-c", "while :; do echo tick; done")
	_, err := p.WaitLog(t.Context(), regexp.MustCompile("tick"))
	require.NoError(t, err)
	p.Pause()
	p.Pause() // a second Pause is harmless
	before := len(p.Log())
	time.Sleep(20 * time.Millisecond) // the process must not write anything in this time
	require.Equal(t, before, len(p.Log()))
	p.Resume()
	require.Eventually(t, func() bool { return len(p.Log()) > before }, 20*time.Second, time.Millisecond)
	p.Kill()
}

func TestRestartRunsTheSameCommandAgain(t *testing.T) {
	t.Parallel()
	p := Start(t, "/bin/sh", "-c", "echo run; exec sleep 1000")
	_, err := p.WaitLog(t.Context(), regexp.MustCompile("run"))
	require.NoError(t, err)
	first := p.Pid()
	p.Restart()
	_, err = p.WaitLog(t.Context(), regexp.MustCompile("run\nrun"))
	require.NoError(t, err)
	require.NotEqual(t, first, p.Pid())
	require.True(t, p.Running())
}

func TestFailedTestKeepsFilesAndPrintsTheLog(t *testing.T) {
	t.Parallel()
	r := newRecorder(t, "Failing/test")
	var dir string
	output := r.run(func() {
		p := Start(r, "/bin/sh", "-c", "echo last words")
		dir = p.Dir()
		_, _ = p.Wait(t.Context())
		r.Errorf("the test fails")
	})
	require.Contains(t, output, "last words")
	require.Contains(t, output, dir)
	require.FileExists(t, filepath.Join(dir, "sh.log"))
}

func TestPassedTestLeavesNoFiles(t *testing.T) {
	t.Parallel()
	r := newRecorder(t, "passing")
	var p *Process
	output := r.run(func() { p = Start(r, "/bin/sh", "-c", "exec sleep 1000") })
	require.Empty(t, output)
	require.NoDirExists(t, p.Dir())
	require.False(t, p.Running())
}

func TestDataRaceInAProgramFailsTheTest(t *testing.T) {
	t.Parallel()
	r := newRecorder(t, "racy")
	var p *Process
	output := r.run(func() {
		p = Start(r, "/bin/sh", "-c", "echo 'WARNING: DATA RACE'")
		_, _ = p.Wait(t.Context())
	})
	require.True(t, r.Failed())
	require.Contains(t, output, "data race")
}

func TestServerEndsWhenTheTestBinaryIsKilled(t *testing.T) {
	t.Parallel()
	p := StartCommand(t, Command{Path: os.Args[0], Env: []string{orphanEnv + "=1"}})
	match, err := p.WaitLog(t.Context(), regexp.MustCompile(`serving at (\S+) in (\S+)`))
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(match[2]) })
	conn, err := net.Dial("tcp", match[1])
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()

	p.Kill() // kills the test binary, but not the server: that is in another process group
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(20*time.Second)))
	_, err = conn.Read(make([]byte, 1))
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
}

func TestPortsAreReservedWhileTheTestRuns(t *testing.T) {
	t.Parallel()
	r := newRecorder(t, "ports")
	seen := make(map[int]bool)
	r.run(func() {
		for _, port := range Ports(r, 50) {
			require.False(t, seen[port])
			seen[port] = true
			_, err := lockFile(filepath.Join(portsDir(), strconv.Itoa(port)), syscall.LOCK_EX|syscall.LOCK_NB)
			require.ErrorIs(t, err, syscall.EWOULDBLOCK)
		}
	})
	require.Len(t, seen, 50)
}

func TestServerMovesToAnotherPortWhenItsOwnIsTaken(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = ln.Close() }()
	taken := ln.Addr().(*net.TCPAddr).Port
	attempts := 0
	var s *RedisServer
	onFreePorts(t, 1, func(ports []int) (err error) {
		attempts++
		if attempts == 1 {
			ports[0] = taken
		}
		s, err = startRedis(t, "redis", ports[0], options{})
		return err
	})
	require.Equal(t, 2, attempts)
	require.NotEqual(t, taken, s.Port())
	require.NoError(t, s.Client().Ping(t.Context()).Err())
}

func TestBuildRunsAProgramOfTheModule(t *testing.T) {
	t.Parallel()
	path := Build(t, "./internal/testing/testenv/testdata/hello")
	require.Equal(t, path, Build(t, "./internal/testing/testenv/testdata/hello"))
	p := Start(t, path, "world")
	code, err := p.Wait(t.Context())
	require.NoError(t, err)
	require.Zero(t, code)
	require.Equal(t, "hello world\n", p.Log())
}

func TestBuildFailureNamesThePackage(t *testing.T) {
	t.Parallel()
	r := newRecorder(t, "build")
	output := r.run(func() { Build(r, "./no/such/program") })
	require.True(t, r.Failed())
	require.Contains(t, output, "./no/such/program")
}

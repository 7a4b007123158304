package testenv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	// stopTimeout is how long a process may take to end after SIGTERM. stopTimeout and readyTimeout are long because the
	// machine may be busy with other test packages.
	stopTimeout = 30 * time.Second
	// readyTimeout is how long a server may take to answer. If a server exits, the wait ends at once.
	readyTimeout = 60 * time.Second
	// pollInterval is the pause between two checks of a condition.
	pollInterval = 10 * time.Millisecond
	// logTailLines is the number of lines of a log that a failed test prints.
	logTailLines = 30
)

// errPortTaken is returned when a server exited because another program has its port.
var errPortTaken = errors.New("testenv: port is taken by another program")

// Command says how to run a program.
type Command struct {
	Name string   // names the log file; default is the base name of Path
	Path string   // program to run
	Args []string // arguments, without the program's name
	Env  []string // "NAME=value" pairs added to the environment of the test
	Dir  string   // working directory; default is the directory of the process, see [Process.Dir]
}

// Process is a program that a test runs, with its process group and its log. [Process.Restart] runs the program again.
// Methods are safe for concurrent use.
type Process struct {
	t       testing.TB
	command Command
	dir     string
	logPath string

	mu  sync.Mutex // held while starting
	run *run
}

// run is one life of the program.
type run struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed once the process is reaped
}

// Start runs the program at path until the test ends. See [Build] for the project's own programs.
func Start(t testing.TB, path string, args ...string) *Process {
	t.Helper()
	return StartCommand(t, Command{Path: path, Args: args})
}

// StartCommand runs a program until the test ends.
func StartCommand(t testing.TB, c Command) *Process {
	t.Helper()
	p, err := startProcess(t, c)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return p
}

func startProcess(t testing.TB, c Command) (*Process, error) {
	t.Helper()
	if c.Name == "" {
		c.Name = filepath.Base(c.Path)
	}
	dir := newDir(t, c.Name)
	p := &Process{t: t, command: c, dir: dir, logPath: filepath.Join(dir, c.Name+".log")}
	if p.command.Dir == "" {
		p.command.Dir = dir
	}
	if err := p.start(); err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	t.Cleanup(p.cleanUp)
	return p, nil
}

// newDir makes a directory for the files of one process. It doesn't use t.TempDir, because that is removed even when
// the test fails.
func newDir(t testing.TB, name string) string {
	t.Helper()
	safe := func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' {
			return r
		}
		return '_'
	}
	test := strings.Map(safe, t.Name())
	test = test[:min(len(test), 40)]
	dir, err := os.MkdirTemp("", "refiller-"+test+"-"+strings.Map(safe, name)+"-")
	if err != nil {
		t.Fatalf("testenv: make a directory for %s: %v", name, err)
	}
	return dir
}

func (p *Process) start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	log, err := os.OpenFile(p.logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("testenv: open log of %s: %w", p.command.Name, err)
	}
	defer func() { _ = log.Close() }() // the child has its own copy
	cmd := exec.Command(p.command.Path, p.command.Args...)
	cmd.Dir = p.command.Dir
	cmd.Env = append(os.Environ(), p.command.Env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = ownedProcess()
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("testenv: start %s: %w", p.command.Name, err)
	}
	r := &run{cmd: cmd, exited: make(chan struct{})}
	p.run = r
	go func() { // ends with the process, which cleanUp kills and waits for
		_ = cmd.Wait() // the result is read from cmd.ProcessState
		close(r.exited)
	}()
	return nil
}

func (p *Process) current() *run {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.run
}

// Pid returns the process id of the latest run.
func (p *Process) Pid() int { return p.current().cmd.Process.Pid }

// Dir returns the directory of the process. It has the log and, for a server, the data.
func (p *Process) Dir() string { return p.dir }

// Exited returns a channel that is closed when the latest run has ended.
func (p *Process) Exited() <-chan struct{} { return p.current().exited }

// Running reports whether the latest run has not ended. A paused process is running.
func (p *Process) Running() bool {
	select {
	case <-p.Exited():
		return false
	default:
		return true
	}
}

// Wait waits until the latest run has ended. It returns the exit code, or -1 if a signal ended the run. It fails only
// if ctx ends first.
func (p *Process) Wait(ctx context.Context) (int, error) {
	r := p.current()
	select {
	case <-r.exited:
		return r.cmd.ProcessState.ExitCode(), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("testenv: wait for the end of %s: %w", p.command.Name, ctx.Err())
	}
}

// Signal sends sig to the process and its children. It does nothing if the process has ended.
func (p *Process) Signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.signal(p.current(), sig); err != nil {
		p.t.Errorf("testenv: send %v to %s: %v", sig, p.command.Name, err)
	}
}

// signal sends sig to the process group of r. It does nothing if r is reaped, because another process group may have
// the number by then.
func (p *Process) signal(r *run, sig syscall.Signal) error {
	select {
	case <-r.exited:
		return nil
	default:
	}
	err := syscall.Kill(-r.cmd.Process.Pid, sig)
	if errors.Is(err, syscall.ESRCH) || errors.Is(err, syscall.EPERM) { // EPERM: macOS, for a group of zombies
		return nil
	}
	return err
}

// Kill ends the process with SIGKILL, whether it is paused or not, and waits until it has ended.
func (p *Process) Kill() {
	p.t.Helper()
	r := p.current()
	if err := p.signal(r, syscall.SIGKILL); err != nil {
		p.t.Errorf("testenv: kill %s: %v", p.command.Name, err)
		return
	}
	<-r.exited
}

// Stop sends SIGTERM to the process, resumes it if it is paused, and waits until it has ended. If the process has not
// ended after 30 seconds, Stop kills it and fails the test.
func (p *Process) Stop() {
	p.t.Helper()
	p.Signal(syscall.SIGTERM)
	p.Signal(syscall.SIGCONT)
	select {
	case <-p.Exited():
	case <-time.After(stopTimeout):
		p.t.Errorf("testenv: %s ignored SIGTERM for %v", p.command.Name, stopTimeout)
		p.Kill()
	}
}

// Pause freezes the process with SIGSTOP until [Process.Resume]. When Pause returns, the process has stopped. Its
// connections stay open, and the kernel accepts new ones, but the process doesn't answer.
func (p *Process) Pause() {
	p.t.Helper()
	p.Signal(syscall.SIGSTOP)
	if err := awaitStopped(p.Pid()); err != nil {
		p.t.Errorf("testenv: pause %s: %v", p.command.Name, err)
	}
}

// Resume lets a paused process go on.
func (p *Process) Resume() {
	p.t.Helper()
	p.Signal(syscall.SIGCONT)
}

// Restart stops the program if it is running, and starts it again with the same arguments and files. The log goes on in
// the same file.
func (p *Process) Restart() {
	p.t.Helper()
	p.Stop()
	if err := p.start(); err != nil {
		p.t.Errorf("%v", err)
	}
}

// Log returns what the process has written to its standard output and standard error so far.
func (p *Process) Log() string {
	b, err := os.ReadFile(p.logPath)
	if err != nil {
		return fmt.Sprintf("(log is unreadable: %v)", err)
	}
	return string(b)
}

// WaitLog waits until the log has a match of re, and returns the match with its submatches. It fails when ctx ends, or
// when the process ends without a match.
func (p *Process) WaitLog(ctx context.Context, re *regexp.Regexp) ([]string, error) {
	var match []string
	err := p.await(ctx, func(context.Context) error {
		match = re.FindStringSubmatch(p.Log())
		if match == nil {
			return fmt.Errorf("no match of %q in the log", re)
		}
		return nil
	})
	return match, err
}

// await polls ready until it returns nil. It fails when ctx ends, with the last error of ready. It also fails when the
// process ends: with errPortTaken if the process ended because another program has its port.
func (p *Process) await(ctx context.Context, ready func(context.Context) error) error {
	exited := p.Exited()
	for {
		gone := false
		select {
		case <-exited:
			gone = true
		default:
		}
		err := ready(ctx)
		switch {
		case gone && bytes.Contains(bytes.ToLower([]byte(p.Log())), []byte("address already in use")):
			return fmt.Errorf("%w: %s", errPortTaken, p.command.Name)
		case err == nil:
			return nil
		case gone:
			return fmt.Errorf("testenv: %s exited early (%v): %w\n%s", p.command.Name, p.current().cmd.ProcessState, err,
				p.logTail())
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("testenv: %s not ready: %w: %w\n%s", p.command.Name, ctx.Err(), err, p.logTail())
		case <-time.After(pollInterval):
		}
	}
}

// awaitListening waits until the process accepts connections at addr.
func (p *Process) awaitListening(ctx context.Context, addr string) error {
	return p.await(ctx, func(ctx context.Context) error {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
		if err == nil {
			err = conn.Close()
		}
		return err
	})
}

func (p *Process) logTail() string {
	lines := strings.Split(strings.TrimRight(p.Log(), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-logTailLines):], "\n")
}

func (p *Process) cleanUp() {
	p.t.Helper()
	p.Kill()
	if strings.Contains(p.Log(), "WARNING: DATA RACE") { // a program built with -race
		p.t.Errorf("testenv: %s reported a data race", p.command.Name)
	}
	if !p.t.Failed() {
		_ = os.RemoveAll(p.dir)
		return
	}
	p.t.Logf("testenv: files of %s are kept in %s; its log ends:\n%s", p.command.Name, p.dir, p.logTail())
}

// pollUntil calls done until it returns nil, but at most for readyTimeout. It returns the last error of done.
func pollUntil(done func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
	defer cancel()
	for {
		err := done(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pollInterval):
		}
	}
}

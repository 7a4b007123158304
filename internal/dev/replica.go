package dev

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/tokenrefill/refiller/internal/devserver"
)

const (
	restartAfter = time.Second
	stopTimeout  = 3 * time.Second // from SIGTERM to SIGKILL
	readyTimeout = 30 * time.Second
	pollEvery    = 20 * time.Millisecond
	maxStarts    = 3 // starts in a row that end before the replica is ready
)

// replica is one replica: a process that is started again when it ends.
type replica struct {
	name    string
	port    int // of its admin server, if free
	program string
	environ []string
	dir     string
	config  func(listen string) string   // the content of its configuration file
	warn    func(name, message string)   // is told of warnings and errors in the log
	ended   func(end)                    // is told of an end that nobody asked for
	ready   func(r *replica, again bool) // is told when it answers, after each start

	mu      sync.Mutex
	process *process // the latest
}

// end is the end of a process of a replica.
type end struct {
	replica *replica
	pid     int
	how     string
}

// process is one life of a replica.
type process struct {
	cmd    *exec.Cmd
	addr   string // of its admin server
	exited chan struct{}
	isUp   bool // guarded by replica.mu
}

// run keeps the replica running until ctx ends, and returns when its process has ended. It gives up when the replica
// doesn't get ready.
func (r *replica) run(ctx context.Context) error {
	again := false
	for failed := 0; ctx.Err() == nil; {
		p, err := r.start()
		if err != nil {
			return err
		}
		if r.awaitReady(ctx, p) {
			failed = 0
			r.mu.Lock()
			p.isUp = true
			r.mu.Unlock()
			r.ready(r, again)
			again = true
			select {
			case <-p.exited:
				r.ended(end{r, p.cmd.Process.Pid, p.cmd.ProcessState.String()})
			case <-ctx.Done():
			}
		} else if failed++; ctx.Err() == nil && failed == maxStarts {
			p.stop()
			return fmt.Errorf("dev: %s doesn't get ready; its log ends:\n%s", r.name, tail(r.logPath()))
		}
		p.stop()
		select {
		case <-time.After(restartAfter):
		case <-ctx.Done():
		}
	}
	return nil
}

func (r *replica) logPath() string { return filepath.Join(r.dir, r.name+".log") }

func (r *replica) start() (*process, error) {
	addr, err := devserver.FreeAddr(r.port)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(r.dir, r.name+".yaml")
	if err := os.WriteFile(path, []byte(r.config(addr)), 0o600); err != nil {
		return nil, fmt.Errorf("dev: write the configuration of %s: %w", r.name, err)
	}
	log, err := os.OpenFile(r.logPath(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("dev: open the log of %s: %w", r.name, err)
	}
	cmd := exec.Command(r.program, "run", "--config", path, "--identity", r.name)
	cmd.Env = r.environ
	output := &logWriter{file: log, warn: func(message string) { r.warn(r.name, message) }}
	cmd.Stdout, cmd.Stderr = output, output
	cmd.WaitDelay = stopTimeout
	cmd.SysProcAttr = ownedProcess()
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("dev: start %s: %w", r.name, err), log.Close())
	}
	p := &process{cmd: cmd, addr: addr, exited: make(chan struct{})}
	go func() { // ends with the process, which run waits for
		_ = cmd.Wait() // its result is in ProcessState
		_ = log.Close()
		close(p.exited)
	}()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.process = p
	return p, nil
}

// awaitReady waits until the replica is ready; false if it ends or doesn't get ready in time.
func (r *replica) awaitReady(ctx context.Context, p *process) bool {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for {
		if res, err := get(ctx, "http://"+p.addr+"/readyz"); err == nil {
			_ = res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return true
			}
		}
		select {
		case <-p.exited:
			return false
		case <-ctx.Done():
			return false
		case <-time.After(pollEvery):
		}
	}
}

// stop ends the process, if it hasn't ended, and returns when it has.
func (p *process) stop() {
	select {
	case <-p.exited:
		return
	default:
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
	select {
	case <-p.exited:
	case <-time.After(stopTimeout):
		_ = p.cmd.Process.Kill()
		<-p.exited
	}
}

// kill ends the process with SIGKILL, if it is up.
func (r *replica) kill() bool {
	p, up := r.current()
	return up && p.cmd.Process.Kill() == nil
}

// current is the latest process, and whether it is up; nil before the first start.
func (r *replica) current() (p *process, up bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p = r.process; p == nil {
		return nil, false
	}
	select {
	case <-p.exited:
		return p, false
	default:
		return p, p.isUp
	}
}

func (r *replica) url() string {
	p, _ := r.current()
	return "http://" + p.addr
}

func (r *replica) pid() int {
	p, _ := r.current()
	return p.cmd.Process.Pid
}

// logWriter copies a log to its file and tells of warnings and errors in it.
type logWriter struct {
	file *os.File
	warn func(message string)
	line []byte
}

// Write implements io.Writer.
func (w *logWriter) Write(b []byte) (int, error) {
	for rest := b; ; {
		i := bytes.IndexByte(rest, '\n')
		if i < 0 {
			w.line = append(w.line, rest...)
			break
		}
		if message, ok := warning(string(w.line) + string(rest[:i])); ok {
			w.warn(message)
		}
		w.line, rest = w.line[:0], rest[i+1:]
	}
	return w.file.Write(b)
}

// warning is a log line without its time, if it is a warning or an error.
func warning(line string) (string, bool) {
	for _, level := range []string{"[WARN]", "[ERROR]"} {
		if _, message, ok := strings.Cut(line, level); ok {
			return strings.ToLower(strings.Trim(level, "[]")) + ": " + strings.TrimPrefix(strings.TrimSpace(message),
				"refiller."), true
		}
	}
	return "", false
}

// tail is the end of a log.
func tail(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return "  " + strings.Join(lines[max(0, len(lines)-8):], "\n  ")
}

// admins talks to the replicas' admin servers, which come and go.
var admins = &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

func get(ctx context.Context, url string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	return admins.Do(req)
}

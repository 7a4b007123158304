package dev

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tokenrefill/refiller/internal/dev/devserver"
	"github.com/tokenrefill/refiller/internal/timing"
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
	*playground
	name    string
	port    int                        // of its admin server, if free
	redis   string                     // URL of its store
	config  func(listen string) string // the content of its configuration file
	process atomic.Pointer[process]    // the latest that was ready; nil before
}

// process is one life of a replica.
type process struct {
	addr   string // of its admin server
	pid    int
	kill   func()
	exited chan struct{}
	how    string // it exited
}

// run keeps the replica running until ctx ends, and returns when its process has ended. It gives up when the replica
// doesn't get ready.
func (r *replica) run(ctx context.Context) error {
	for failed := 0; ctx.Err() == nil; timing.Sleep(ctx.Done(), restartAfter) {
		life, stop := context.WithCancel(ctx)
		p, err := r.start(life)
		if err != nil {
			stop()
			return err
		}
		if r.awaitReady(ctx, p) {
			failed = 0
			if r.process.Swap(p) == nil {
				r.ready <- struct{}{}
			} else {
				r.say(fmt.Sprintf("%s is back: %s, pid %d", r.name, r.url(), p.pid))
			}
			select {
			case <-p.exited:
				if !r.stopping.Load() {
					r.scene.ended(r, p.pid, p.how)
				}
			case <-ctx.Done():
			}
		} else {
			failed++
			if ctx.Err() == nil && failed == maxStarts {
				err = fmt.Errorf("dev: %s doesn't get ready; its log ends:\n%s", r.name, tail(r.logPath()))
			}
		}
		stop()
		<-p.exited
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *replica) logPath() string { return filepath.Join(r.dir, r.name+".log") }

// start starts a process, which is asked to stop when ctx ends.
func (r *replica) start(ctx context.Context) (*process, error) {
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
	cmd := exec.CommandContext(ctx, r.opts.Program, "run", "--config", path, "--identity", r.name)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopTimeout
	cmd.Env = append(slices.Clone(r.environ), redisVariable+"="+r.redis)
	cmd.SysProcAttr = ownedProcess()
	output, err := cmd.StdoutPipe()
	cmd.Stderr = cmd.Stdout
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("dev: start %s: %w", r.name, err), log.Close())
	}
	p := &process{addr: addr, pid: cmd.Process.Pid, exited: make(chan struct{})}
	p.kill = func() { _ = cmd.Process.Kill() } // it may have ended by itself
	go func() {                                // ends with the process, which run waits for
		copyLog(log, output, func(message string) { r.say(r.screen.style.yellow(r.name + ": " + message)) })
		_ = cmd.Wait() // its result is in ProcessState
		_ = log.Close()
		p.how = cmd.ProcessState.String()
		close(p.exited)
	}()
	return p, nil
}

// awaitReady waits until a process is ready; false if it ends or doesn't get ready in time.
func (r *replica) awaitReady(ctx context.Context, p *process) bool {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for {
		if p.get(ctx, "/readyz", nil) == nil {
			return true
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

// up is the latest process if it runs, otherwise nil.
func (r *replica) up() *process {
	p := r.process.Load()
	if p != nil {
		select {
		case <-p.exited:
			return nil
		default:
		}
	}
	return p
}

// url and pid are of the latest process. The replica was ready once.
func (r *replica) url() string { return "http://" + r.process.Load().addr }
func (r *replica) pid() int    { return r.process.Load().pid }

// admins talks to the replicas' admin servers, which come and go.
var admins = &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// get asks the admin server, and reads the answer's JSON into into unless that is nil.
func (p *process) get(ctx context.Context, path string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.addr+path, nil)
	if err != nil {
		return err
	}
	res, err := admins.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }() // read to its end or given up
	if res.StatusCode != http.StatusOK {
		return errors.New(res.Status)
	}
	if into == nil {
		return nil
	}
	return json.NewDecoder(res.Body).Decode(into)
}

// copyLog copies a log until it ends, and calls warn for the warnings and errors in it.
func copyLog(to io.Writer, from io.Reader, warn func(message string)) {
	for lines := bufio.NewReader(from); ; {
		line, err := lines.ReadString('\n')
		_, _ = io.WriteString(to, line) // it is of help, no more
		for _, level := range []string{"[WARN]", "[ERROR]"} {
			if _, message, ok := strings.Cut(line, level); ok {
				warn(strings.ToLower(strings.Trim(level, "[]")) + ": " +
					strings.TrimPrefix(strings.TrimSpace(message), "refiller."))
				break
			}
		}
		if err != nil {
			return
		}
	}
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

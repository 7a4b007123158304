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
	port    int                        // preferred port of its admin server
	redis   string                     // URL of its store
	config  func(listen string) string // the content of its configuration file
	process atomic.Pointer[process]    // the latest process that was ready; nil before the first
}

// process is a process of a replica, from its start to its end.
type process struct {
	addr   string // of its admin server
	pid    int
	kill   func()
	exited chan struct{}
	how    string // how it exited
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
				err = fmt.Errorf("dev: %s does not become ready; the last lines of its log:\n%s", r.name, tail(r.logPath()))
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

// start starts a process. When ctx ends, the process gets SIGTERM.
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
	p.kill = func() { _ = cmd.Process.Kill() } // it may have ended already
	go func() {                                // ends with the process, for which run waits
		copyLog(log, output, func(message string) { r.say(r.screen.style.yellow(r.name + ": " + message)) })
		_ = cmd.Wait() // its result is in ProcessState
		_ = log.Close()
		p.how = cmd.ProcessState.String()
		close(p.exited)
	}()
	return p, nil
}

// awaitReady waits until a process is ready. It returns false if the process ends or isn't ready in time.
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

// up returns the latest process if it runs, otherwise nil.
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

// url and pid return values of the latest process. The replica must have been ready once.
func (r *replica) url() string { return "http://" + r.process.Load().addr }
func (r *replica) pid() int    { return r.process.Load().pid }

// admins is the client for the replicas' admin servers, which start and end at any time.
var admins = &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// get sends a request to the admin server. It decodes the JSON of the answer into into, unless that is nil.
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

// copyLog copies a log until its end, and calls warn for each warning and error.
func copyLog(to io.Writer, from io.Reader, warn func(message string)) {
	for lines := bufio.NewReader(from); ; {
		line, err := lines.ReadString('\n')
		_, _ = io.WriteString(to, line) // the copy only helps people, so an error is ignored
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

// tail returns the end of a log.
func tail(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return "  " + strings.Join(lines[max(0, len(lines)-8):], "\n  ")
}

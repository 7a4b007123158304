package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"
)

// childEnv is an environment variable with a child in JSON. If it is set, the process runs as that child.
const childEnv = "REFILLER_BENCH_CHILD"

// child describes a process whose goroutines take from a server, a hundred times a second each. The process is stopped
// part of the time, as the kernel stops a process that has used up its processor quota.
type child struct {
	Addr, Contender string
	Goroutines      int
	Time            time.Duration
}

// ready is the line that a child prints when its takes begin. At the end it prints its sample.
const ready = "ready"

// run makes the takes of the child, and prints the results.
func (c child) run(ctx context.Context, out io.Writer) error {
	all := contenders()
	i := slices.IndexFunc(all, func(one contender) bool { return one.name == c.Contender })
	if i < 0 {
		return fmt.Errorf("no contender %q", c.Contender)
	}
	s := &server{addr: c.Addr}
	s.connect()
	defer func() { _ = s.rdb.Close() }()
	session, err := all[i].open(ctx, s, stalled, all[i].keys(stalled))
	if err != nil {
		return err
	}
	touch(ctx, stalled, session)
	fmt.Fprintln(out, ready)
	var takes, failed atomic.Int64
	var wg sync.WaitGroup
	begin := time.Now()
	for g := range c.Goroutines {
		wg.Go(func() {
			ticker := time.NewTicker(10 * time.Millisecond)
			defer ticker.Stop()
			for walk := stalled.walk(g); time.Since(begin) < c.Time; <-ticker.C {
				takes.Add(1)
				if _, err := session.take(ctx, walk.next()); err != nil {
					failed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	found := sample{
		PerSecond:  float64(takes.Load()-failed.Load()) / time.Since(begin).Seconds(),
		ErrorShare: float64(failed.Load()) / float64(takes.Load()),
	}
	if err := json.NewEncoder(out).Encode(found); err != nil {
		return err
	}
	return session.close()
}

// stop runs the child in a process, and stops the process for of in each period of every. It returns the child's
// results.
func (c child) stop(ctx context.Context, of, every time.Duration) (found sample, err error) {
	text, err := json.Marshal(c)
	if err != nil {
		return found, err
	}
	self, err := os.Executable()
	if err != nil {
		return found, err
	}
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), childEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return found, err
	}
	if err := cmd.Start(); err != nil {
		return found, err
	}
	lines, over := bufio.NewScanner(out), make(chan error, 1)
	if !lines.Scan() || lines.Text() != ready {
		return found, fmt.Errorf("the child says %q: %w", lines.Text(), cmd.Wait())
	}
	go func() {
		lines.Scan()
		over <- json.Unmarshal(lines.Bytes(), &found)
	}()
	for {
		_ = cmd.Process.Signal(syscall.SIGSTOP) // fails if the process has ended already
		time.Sleep(of)
		_ = cmd.Process.Signal(syscall.SIGCONT)
		select {
		case err := <-over:
			if waitErr := cmd.Wait(); err == nil {
				err = waitErr
			}
			return found, err
		case <-time.After(every - of):
		}
	}
}

// stalls has the times for which children are stopped, and the periods.
var stalls = []struct{ of, every time.Duration }{
	{50 * time.Millisecond, 70 * time.Millisecond}, {80 * time.Millisecond, 100 * time.Millisecond},
	{150 * time.Millisecond, 170 * time.Millisecond}, {300 * time.Millisecond, 320 * time.Millisecond},
}

// measureStalled runs each contender in one child for each of stalls, and reports the results.
func measureStalled(ctx context.Context, s *server, o options, report func(cell)) error {
	for _, stall := range stalls {
		title := fmt.Sprintf("stopped for %s of %s", stall.of, stall.every)
		one := cell{Workload: stalled.name, Title: title, Goroutines: stalled.goroutines[0]}
		for _, e := range chosen(stalled, o) {
			if err := s.rdb.FlushAll(ctx).Err(); err != nil {
				return err
			}
			c := child{Addr: s.addr, Contender: e.name, Goroutines: one.Goroutines, Time: max(10*o.time, stall.every)}
			found, err := c.stop(ctx, stall.of, stall.every)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", e.name, title, err)
			}
			one.Contenders = append(one.Contenders, figures{Name: e.name, Samples: []sample{found}})
		}
		one.summarise()
		report(one)
	}
	return nil
}

// printShort prints a cell that has only takes and errors.
func (c *cell) printShort(w io.Writer) {
	fmt.Fprintf(w, "\n%s, goroutines: %d\n", c.Title, c.Goroutines)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "contender\ttakes/s\t× "+baseline+"\terrors\t")
	for _, f := range c.Contenders {
		fmt.Fprintf(t, "%s\t%.0f\t%.2f\t%.1f %%\t\n", f.Name, f.Median.PerSecond, f.Ratio, 100*f.Median.ErrorShare)
	}
	_ = t.Flush()
}

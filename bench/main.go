package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := start(ctx)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// start runs the comparison. If the environment describes a child (childEnv), it runs the child instead. A child is a
// process that takes tokens and is stopped part of the time.
func start(ctx context.Context) error {
	text := os.Getenv(childEnv)
	if text == "" {
		return run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	}
	var c child
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return err
	}
	return c.run(ctx, os.Stdout)
}

// options are the options of the command line.
type options struct {
	rounds     int
	time       time.Duration
	workloads  []workload
	goroutines []int // empty: the numbers of the workload
	only       *regexp.Regexp
	json       string
	chart      string
}

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.IntVar(&o.rounds, "rounds", 3, "`rounds` after the first, which warms up and is not counted; 1 or more")
	f.DurationVar(&o.time, "time", 200*time.Millisecond, "`duration` of each run, 1ms or more")
	names := f.String("workload", "hot,many,denied,far,stalled", "workloads, comma-separated")
	goroutines := f.String("goroutines", "", "numbers of goroutines, comma-separated (default: each workload's own)")
	only := f.String("only", "", "run the contenders whose name matches the `regexp`, and redis_rate")
	f.StringVar(&o.json, "json", "", "write all figures to the `file`")
	f.StringVar(&o.chart, "chart", "", "write an SVG chart to the `file`")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	if o.rounds < 1 {
		return o, fmt.Errorf("-rounds %d; want 1 or more", o.rounds)
	}
	if o.time < time.Millisecond {
		return o, fmt.Errorf("-time %s; want 1ms or more", o.time)
	}
	for name := range strings.SplitSeq(*names, ",") {
		i := slices.IndexFunc(workloads, func(w workload) bool { return w.name == name })
		if i < 0 {
			return o, fmt.Errorf("-workload %q; want hot, many, denied, far or stalled", name)
		}
		o.workloads = append(o.workloads, workloads[i])
	}
	if *goroutines != "" {
		for s := range strings.SplitSeq(*goroutines, ",") {
			n, err := strconv.Atoi(s)
			if err != nil || n < 1 {
				return o, fmt.Errorf("-goroutines %q; want numbers of 1 or more", s)
			}
			o.goroutines = append(o.goroutines, n)
		}
	}
	var err error
	o.only, err = regexp.Compile(*only)
	if err != nil {
		return o, fmt.Errorf("-only: %w", err)
	}
	return o, nil
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	server, err := startServer(ctx)
	if err != nil {
		return err
	}
	defer server.stop()
	rep := newReport(ctx, server, o)
	fmt.Fprintln(stdout, rep.Machine)
	for _, w := range o.workloads {
		goroutines := w.goroutines
		if len(o.goroutines) > 0 {
			goroutines = o.goroutines
		}
		report := func(c cell) {
			rep.add(c)
			c.print(stdout)
		}
		if w.name == stalled.name {
			err = measureStalled(ctx, server, o, report)
		} else {
			err = measure(ctx, server, w, goroutines, o, report)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
	}
	rep.printGoals(stdout)
	if o.json != "" {
		if err := rep.writeJSON(o.json); err != nil {
			return err
		}
	}
	if o.chart != "" {
		return rep.writeChart(o.chart)
	}
	return nil
}

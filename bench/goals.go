package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// goal is a value that fetch should reach. It is a figure of a contender, or the ratio of two contenders in one cell.
type goal struct {
	workload   string
	goroutines int
	of, to     string // names of contenders; if to is empty, the goal isn't a ratio
	value      func(sample) float64
	what       string
	most       bool // want is the largest allowed value, otherwise the smallest
	want       float64
}

const (
	merged = "fetch, coalesced"
	piped  = "EVALSHA, auto-pipelined"
	rueidi = "rueidislimiter"
)

var goals = []goal{
	{workload: "many", goroutines: 64, of: merged, to: piped, want: 1.1},
	{workload: "many", goroutines: 64, of: merged, to: rueidi, want: 1.6},
	{workload: "many", goroutines: 64, of: merged, to: baseline, want: 4.5},
	{workload: "many", goroutines: 64, of: merged, to: piped, what: "p99", value: p99, most: true, want: 1},
	{workload: "many", goroutines: 64, of: template, to: merged, want: 0.8},
	{workload: "many", goroutines: 64, of: asGiven, to: merged, want: 0.95},
	{workload: "many", goroutines: 256, of: merged, to: piped, want: 1.25},
	{workload: "many", goroutines: 256, of: merged, to: piped, what: "p99", value: p99, most: true, want: 1},
	{workload: "hot", goroutines: 1, of: merged, to: "EVALSHA", want: 0.8},
	{workload: "hot", goroutines: 64, of: merged, to: baseline, want: 10},
	{workload: "hot", goroutines: 256, of: merged, to: baseline, want: 18},
	{workload: "hot", goroutines: 1024, of: merged, to: baseline, want: 20},
	{workload: "hot", goroutines: 64, of: "fetch, leased", to: "x/time/rate", want: 1},
	{workload: "denied", goroutines: 64, of: "fetch", to: baseline, want: 50},
	{workload: "far", goroutines: 64, of: merged, what: "median latency in round trips", value: inTrips, most: true,
		want: 1.2},
	{workload: "far", goroutines: 64, of: asGiven, what: "median latency in round trips", value: inTrips, most: true,
		want: 1.2},
}

// printGoals prints the goals whose contenders ran.
func (r *report) printGoals(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\ngoal\twant\tgot\t")
	for _, g := range goals {
		c := r.cell(g.workload, g.goroutines)
		if c == nil {
			continue
		}
		value, what := g.value, g.what
		if value == nil {
			value, what = perSecond, "takes/s"
		}
		got, ok := c.of(g.of, value)
		if g.to != "" {
			got, ok = c.ratio(g.of, g.to, value)
			what += ", " + g.of + " to " + g.to
		} else {
			what += " of " + g.of
		}
		if !ok {
			continue
		}
		bound, reached := "≥", got >= g.want
		if g.most {
			bound, reached = "≤", got <= g.want
		}
		verdict := "reached"
		if !reached {
			verdict = "missed"
		}
		fmt.Fprintf(t, "%s, %d: %s\t%s %.3g\t%.3g\t%s\n", c.Title, g.goroutines, what, bound, g.want, got, verdict)
	}
	_ = t.Flush()
	for _, c := range r.Cells {
		for _, f := range c.Contenders {
			if strings.HasPrefix(f.Name, "fetch") && f.Median.ErrorShare > 0 {
				fmt.Fprintf(w, "missed: %s, %d: %s has errors: %.2f %%\n", c.Title, c.Goroutines, f.Name, 100*f.Median.ErrorShare)
			}
		}
	}
}

package main

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// goal is a figure that fetch is built to reach: a ratio of two contenders in one
// cell.
type goal struct {
	workload   string
	goroutines int
	of, to     string
	value      func(sample) float64
	what       string
	most       bool // at most want, otherwise at least
	want       float64
}

var goals = []goal{
	{workload: "hot", goroutines: 1, of: "fetch, coalesced", to: "EVALSHA", want: 0.97},
	{workload: "hot", goroutines: 64, of: "fetch, coalesced", to: baseline, want: 7},
	{workload: "hot", goroutines: 256, of: "fetch, coalesced", to: baseline, want: 30},
	{workload: "hot", goroutines: 1024, of: "fetch, coalesced", to: baseline, want: 55},
	{workload: "hot", goroutines: 64, of: "fetch, coalesced", to: baseline, what: "p99", value: p99, most: true, want: 1},
	{workload: "hot", goroutines: 256, of: "fetch, coalesced", to: baseline, what: "p99", value: p99, most: true, want: 1},
	{workload: "hot", goroutines: 1024, of: "fetch, coalesced", to: baseline, what: "p99", value: p99, most: true, want: 1},
	{workload: "hot", goroutines: 64, of: "fetch, coalesced", to: baseline, what: "Redis CPU", value: redisCPU, most: true, want: 1. / 14},
	{workload: "hot", goroutines: 256, of: "fetch, coalesced", to: baseline, what: "Redis CPU", value: redisCPU, most: true, want: 1. / 50},
	{workload: "many", goroutines: 64, of: "fetch, coalesced", to: baseline, want: 3.4},
	{workload: "many", goroutines: 64, of: "fetch, coalesced", to: "rueidislimiter", want: 1.4},
	{workload: "many", goroutines: 64, of: "fetch, coalesced", to: "EVALSHA, auto-pipelined", want: 0.95},
	{workload: "hot", goroutines: 64, of: "fetch, leased", to: "x/time/rate", want: 0.5},
	{workload: "denied", goroutines: 64, of: "fetch, coalesced", to: baseline, want: 6},
	{workload: "denied", goroutines: 64, of: "fetch", to: baseline, want: 50},
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
		got, ok := c.ratio(g.of, g.to, value)
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
		fmt.Fprintf(t, "%s, %d: %s, %s to %s\t%s %.3g\t%.3g\t%s\n", c.Title, g.goroutines, what, g.of, g.to, bound, g.want, got, verdict)
	}
	_ = t.Flush()
}

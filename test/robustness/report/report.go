// Package report summarises the results of a number of runs. It doesn't judge the runs: see package verify.
package report

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/tokenrefill/refiller/test/robustness/deck"
	"github.com/tokenrefill/refiller/test/robustness/record"
	"github.com/tokenrefill/refiller/test/robustness/verify"
)

// Report collects results. It is safe for concurrent use.
type Report struct {
	mu      sync.Mutex
	runs    int
	failed  []string // the runs with violations
	broken  []string // the violations
	ops     int
	refills int
	writes  int
	hidden  int
	decided int
	remarks int
	cards   []deck.Card
	checks  int
	slack   float64
	gaps    map[string][]verify.Gap
	faults  map[string]int
}

// Add adds the result of a run.
func (r *Report) Add(meta record.Meta, result *verify.Result) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.gaps == nil {
		r.gaps, r.faults = map[string][]verify.Gap{}, map[string]int{}
	}
	r.runs++
	if len(result.Violations) > 0 {
		r.failed = append(r.failed, meta.Name)
	}
	for _, v := range result.Violations {
		r.broken = append(r.broken, meta.Name+": "+v.String())
	}
	r.ops += result.Ops
	r.refills += result.Refills
	r.writes += result.Writes
	r.hidden += result.Hidden
	r.decided += result.Decided
	r.remarks += len(result.Remarks)
	r.checks += result.Versions
	if meta.Deployment != nil {
		r.cards = append(r.cards, meta.Deployment)
	}
	r.slack = max(r.slack, result.Slack)
	for _, f := range meta.Faults {
		r.faults[f]++
	}
	for _, g := range result.Gaps {
		r.gaps[g.Fault] = append(r.gaps[g.Fault], g)
	}
}

// String returns the report. It has a table of the gaps in the refills that each fault caused, and the totals.
func (r *Report) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "fault\truns\tlongest gap p50\tp99\tmax\tresumed after p50\tmax")
	names := make([]string, 0, len(r.gaps))
	for name := range r.gaps {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		var worst, resumed []time.Duration
		for _, g := range r.gaps[name] {
			worst = append(worst, g.Worst)
			if g.Resume >= 0 {
				resumed = append(resumed, g.Resume)
			}
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%s\t%s\n", name, r.faults[name],
			Quantile(worst, 0.5), Quantile(worst, 0.99), Quantile(worst, 1), Quantile(resumed, 0.5), Quantile(resumed,
				1))
	}
	_ = w.Flush() // it writes to memory
	fmt.Fprintf(&b,
		"%d runs, %d with violations %v: %d calls, %d refill calls, %d of which wrote (%d unseen by their caller), "+
			"%d bucket histories linearizable, %d checks of the version in force, %d remarks, at most %.0f %% of the window "+
			"bound used\n",
		r.runs, len(r.failed), r.failed, r.ops, r.refills, r.writes, r.hidden, r.decided, r.checks, r.remarks, 100*r.slack)
	for _, v := range r.broken { // repeated here because only the end of a long log may be kept
		fmt.Fprintln(&b, v)
	}
	return b.String()
}

// Deployments returns a table with the number of runs that had each pair of values of a deployment. It also returns the
// pairs that no run had.
func (r *Report) Deployments() (table string, empty []deck.Cell) {
	r.mu.Lock()
	defer r.mu.Unlock()
	met := map[deck.Cell]int{}
	for _, c := range r.cards {
		for _, cell := range c.Cells() {
			met[cell]++
		}
	}
	for _, cell := range deck.Cells {
		if met[cell] == 0 {
			empty = append(empty, cell)
		}
	}
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 1, ' ', 0)
	last := len(deck.Dimensions) - 1
	for _, d := range deck.Dimensions[1:] {
		fmt.Fprintf(w, "\t%s", strings.Join(d.Values, "\t"))
	}
	fmt.Fprintln(w)
	for i, d := range deck.Dimensions[:last] {
		for _, v := range d.Values {
			fmt.Fprint(w, v)
			for j, other := range deck.Dimensions[1:] {
				for _, o := range other.Values {
					cell := deck.Cell{A: deck.Value{Dimension: i, Value: v}, B: deck.Value{Dimension: j + 1, Value: o}}
					fmt.Fprintf(w, "\t%s", count(cell, met))
				}
			}
			fmt.Fprintln(w)
		}
	}
	_ = w.Flush() // it writes to memory
	return b.String(), empty
}

// count returns the text of a cell of the table. It is empty if the pair has another cell, and a dash if the pair can't
// occur.
func count(cell deck.Cell, met map[deck.Cell]int) string {
	switch {
	case cell.A.Dimension >= cell.B.Dimension:
		return ""
	case !slices.Contains(deck.Cells, cell):
		return "-"
	}
	return strconv.Itoa(met[cell])
}

// Quantile returns the q-quantile of the durations, rounded to milliseconds; q is from 0 to 1. It is the smallest of
// them for which at least a part q of them is not longer. Without durations it is 0.
func Quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	d = slices.Sorted(slices.Values(d))
	i := int(q*float64(len(d))+0.999999) - 1
	return d[min(max(i, 0), len(d)-1)].Round(time.Millisecond)
}

package main

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const maxLatency = time.Hour // the histogram's last value

// counts is what happened so far. Callers are spread over stripes, so that they don't queue for a lock.
type counts struct {
	stripes [8]stripe
}

type stripe struct {
	sync.Mutex
	tally
	lastErr error
}

type tally struct {
	takes, admittedTakes, admitted, denied, errors int64
	latency                                        *hdrhistogram.Histogram // µs, of takes that were answered
}

func newHistogram() *hdrhistogram.Histogram { return hdrhistogram.New(1, maxLatency.Microseconds(), 3) }

func (c *counts) add(caller int, r fetch.Result, err error, latency time.Duration) {
	s := &c.stripes[caller%len(c.stripes)]
	s.Lock()
	defer s.Unlock()
	s.takes++
	if err != nil {
		s.errors++
		s.lastErr = err
		return
	}
	if s.latency == nil {
		s.latency = newHistogram()
	}
	_ = s.latency.RecordValue(min(max(1, latency.Microseconds()), maxLatency.Microseconds())) // within its range
	if r.OK {
		s.admittedTakes++
		s.admitted += r.Taken
	} else {
		s.denied++
	}
}

func (c *counts) snapshot() tally {
	sum := tally{latency: newHistogram()}
	for i := range c.stripes {
		s := &c.stripes[i]
		s.Lock()
		sum.takes += s.takes
		sum.admittedTakes += s.admittedTakes
		sum.admitted += s.admitted
		sum.denied += s.denied
		sum.errors += s.errors
		if s.latency != nil {
			sum.latency.Merge(s.latency)
		}
		s.Unlock()
	}
	return sum
}

// lastError is one of the latest errors, nil if there was none.
func (c *counts) lastError() error {
	for i := range c.stripes {
		s := &c.stripes[i]
		s.Lock()
		err := s.lastErr
		s.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// report is the result of a run.
type report struct {
	Key            string   `json:"key"`
	TokensPerTake  int64    `json:"tokens_per_take"`
	Concurrency    int      `json:"concurrency"`
	ElapsedSeconds float64  `json:"elapsed_s"`
	Interrupted    bool     `json:"interrupted"`
	Takes          int64    `json:"takes"`
	TakesPerSecond float64  `json:"takes_per_s"`
	Admitted       int64    `json:"admitted"` // tokens
	AdmittedTakes  int64    `json:"admitted_takes"`
	Denied         int64    `json:"denied"` // takes
	Errors         int64    `json:"errors"` // takes, whose tokens may have been taken
	LastError      string   `json:"last_error,omitempty"`
	Latency        *latency `json:"latency_ms"` // null if nothing was answered

	Bound        *int64 `json:"bound"` // the most tokens that the policy allows; null if not known
	BoundText    string `json:"bound_is,omitempty"`
	BoundUnknown string `json:"bound_unknown,omitempty"` // why
	WithinBound  *bool  `json:"within_bound"`
}

// latency is in milliseconds.
type latency struct {
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p99.9"`
	Max  float64 `json:"max"`
}

func (l *load) report(elapsed time.Duration) report {
	s := l.counts.snapshot()
	r := report{
		Key: l.key, TokensPerTake: l.tokens, Concurrency: l.concurrency, ElapsedSeconds: elapsed.Seconds(),
		Takes: s.takes, TakesPerSecond: float64(s.takes) / elapsed.Seconds(),
		Admitted: s.admitted, AdmittedTakes: s.admittedTakes, Denied: s.denied, Errors: s.errors,
	}
	if err := l.counts.lastError(); err != nil {
		r.LastError = err.Error()
	}
	if s.latency.TotalCount() > 0 {
		ms := func(quantile float64) float64 { return float64(s.latency.ValueAtQuantile(quantile)) / 1000 }
		r.Latency = &latency{P50: ms(50), P90: ms(90), P99: ms(99), P999: ms(99.9), Max: float64(s.latency.Max()) / 1000}
	}
	return r
}

// setBound holds what was admitted against the most that the policy allows in the time since p.
func (r *report) setBound(p lua.PeekReply, elapsed, gap time.Duration) {
	bound, text, unknown := bound(p, elapsed, gap)
	if unknown != "" {
		r.BoundUnknown = unknown
		return
	}
	within := r.Admitted <= bound
	r.Bound, r.BoundText, r.WithinBound = &bound, text, &within
}

// bound is the most tokens that a bucket which stood at p can admit within elapsed, and how it is made up, if no two refills
// were further apart than gap. A refill credits no longer stretch than the policy says. Of a grant and the floor the higher
// counts.
func bound(p lua.PeekReply, elapsed, gap time.Duration) (tokens int64, text, unknown string) {
	t := *p.Terms
	if t.Kind == policy.Stepped {
		step, first := micro(p.Next-p.Step), micro(p.Next-p.Now)
		if step <= 0 {
			return 0, "", "the instants of the bucket's schedule are not known yet"
		}
		steps := int64(0)
		if elapsed >= first {
			steps = 1 + int64((elapsed-first)/step)
		}
		return t.Capacity + steps*t.Tokens, fmt.Sprintf("capacity %d + %d steps of %d", t.Capacity, steps, t.Tokens), ""
	}
	t.Tokens = max(t.Tokens, t.GrantTokens)
	rate := t.Rate()
	gap = min(max(gap, micro(t.Interval)), micro(t.MaxElapsed))
	due, slack := rate.Over(elapsed)+1, rate.Over(gap) // a started token counts
	text = fmt.Sprintf("capacity %d + %d due in %s at %s + %d of %s between two refills",
		t.Capacity, due, elapsed.Round(time.Millisecond), rate, slack, gap.Round(time.Millisecond))
	return t.Capacity + due + slack, text, ""
}

func micro(us int64) time.Duration { return time.Duration(us) * time.Microsecond }

// micros is a latency to read.
func micros(us int64) time.Duration {
	d := micro(us)
	if d > 10*time.Millisecond {
		return d.Round(100 * time.Microsecond)
	}
	return d
}

// String is the report to read.
func (r report) String() string {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-10s "+format+"\n", append([]any{name}, args...)...)
	}
	how := ""
	if r.Interrupted {
		how = ", interrupted"
	}
	line("run", "%.1f s%s, %d callers, %s a take", r.ElapsedSeconds, how, r.Concurrency, plural(r.TokensPerTake))
	line("takes", "%d (%.0f/s): %d admitted, %d denied, %d errors", r.Takes, r.TakesPerSecond, r.AdmittedTakes, r.Denied, r.Errors)
	if r.LastError != "" {
		line("error", "%s", r.LastError)
	}
	if l := r.Latency; l != nil {
		line("latency", "p50 %.3g ms, p90 %.3g ms, p99 %.3g ms, p99.9 %.3g ms, max %.3g ms", l.P50, l.P90, l.P99, l.P999, l.Max)
	}
	line("admitted", "%s (%.1f/s)", plural(r.Admitted), float64(r.Admitted)/r.ElapsedSeconds)
	switch {
	case r.Bound == nil:
		line("bound", "not known: %s", r.BoundUnknown)
	case *r.WithinBound:
		line("bound", "%d, kept: %s", *r.Bound, r.BoundText)
	default:
		line("bound", "%d, EXCEEDED by %d: %s", *r.Bound, r.Admitted-*r.Bound, r.BoundText)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

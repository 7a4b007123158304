package main

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const maxLatency = time.Hour // the largest value of the histogram

// counts counts the takes so far by their results. Callers are spread over stripes, so that they queue less for a lock.
type counts struct {
	stripes [8]stripe
}

type stripe struct {
	sync.Mutex
	stats
	lastErr error
}

// stats has counts of takes.
type stats struct {
	takes, errors int64
	redis, memory answers // takes by calls of Redis, and from memory
	beyond        int64   // tokens that the bucket didn't give, because of its degraded mode or shadow mode
}

// answers counts the takes that got a result.
type answers struct {
	admittedTakes, admitted, denied int64
	latency                         *hdrhistogram.Histogram // µs; nil before the first
}

func newHistogram() *hdrhistogram.Histogram { return hdrhistogram.New(1, maxLatency.Microseconds(), 3) }

func (a *answers) add(r fetch.Result, latency time.Duration) {
	if a.latency == nil {
		a.latency = newHistogram()
	}
	_ = a.latency.RecordValue(min(max(1, latency.Microseconds()), maxLatency.Microseconds())) // can't fail
	if r.OK {
		a.admittedTakes++
		a.admitted += r.Taken
	} else {
		a.denied++
	}
}

func (a *answers) merge(b answers) {
	a.admittedTakes += b.admittedTakes
	a.admitted += b.admitted
	a.denied += b.denied
	if a.latency == nil {
		a.latency = newHistogram()
	}
	if b.latency != nil {
		a.latency.Merge(b.latency)
	}
}

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
	if r.Shadow || r.Source.Kind == fetch.SourceFallback {
		s.beyond += r.Taken
	}
	switch r.Source.Kind {
	case fetch.SourceShared, fetch.SourceRescued:
		s.redis.add(r, latency)
	default:
		s.memory.add(r, latency)
	}
}

func (c *counts) snapshot() stats {
	var sum stats
	for i := range c.stripes {
		s := &c.stripes[i]
		s.Lock()
		sum.takes += s.takes
		sum.errors += s.errors
		sum.beyond += s.beyond
		sum.redis.merge(s.redis)
		sum.memory.merge(s.memory)
		s.Unlock()
	}
	return sum
}

// lastError returns one of the latest errors. It returns nil if there was none.
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
	Errors         int64    `json:"errors"` // takes that failed; their tokens may have been taken
	LastError      string   `json:"last_error,omitempty"`
	Flows          *parts   `json:"flows,omitempty"`
	Redis          answered `json:"asked_redis"`   // takes by calls of Redis; several takes may share a call
	Memory         answered `json:"from_memory"`   // from remembered denials, leased tokens or the degraded mode
	Beyond         int64    `json:"beyond_bucket"` // tokens in Admitted that the degraded mode or shadow mode allowed

	Bound        *int64 `json:"bound"` // the most tokens that the policy allows; null if unknown
	BoundText    string `json:"bound_is,omitempty"`
	BoundUnknown string `json:"bound_unknown,omitempty"` // why Bound is unknown
	WithinBound  *bool  `json:"within_bound"`
}

// answered has the numbers of takes that got their result in the same way.
type answered struct {
	Takes          int64    `json:"takes"`
	TakesPerSecond float64  `json:"takes_per_s"`
	Admitted       int64    `json:"admitted"` // tokens
	AdmittedTakes  int64    `json:"admitted_takes"`
	Denied         int64    `json:"denied"`     // takes
	Latency        *latency `json:"latency_ms"` // null if there are no takes
}

func (a answers) report(elapsed time.Duration) answered {
	n := a.admittedTakes + a.denied
	out := answered{
		Takes: n, TakesPerSecond: float64(n) / elapsed.Seconds(), Admitted: a.admitted, AdmittedTakes: a.admittedTakes,
		Denied: a.denied,
	}
	if n > 0 {
		ms := func(us int64) float64 { return float64(us) / 1000 }
		at := func(quantile float64) float64 { return ms(a.latency.ValueAtQuantile(quantile)) }
		out.Latency = &latency{P50: at(50), P90: at(90), P99: at(99), P999: at(99.9), Max: ms(a.latency.Max())}
	}
	return out
}

// latency has percentiles in milliseconds.
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
		Takes: s.takes, TakesPerSecond: float64(s.takes) / elapsed.Seconds(), Errors: s.errors, Beyond: s.beyond,
		Redis: s.redis.report(elapsed), Memory: s.memory.report(elapsed),
	}
	r.Admitted = r.Redis.Admitted + r.Memory.Admitted
	r.AdmittedTakes = r.Redis.AdmittedTakes + r.Memory.AdmittedTakes
	r.Denied = r.Redis.Denied + r.Memory.Denied
	r.Flows = l.byFlow.report(elapsed)
	if err := l.counts.lastError(); err != nil {
		r.LastError = err.Error()
	}
	return r
}

// setBound compares the tokens that the bucket gave with the bound of its policy. elapsed is the time since p was read.
func (r *report) setBound(p lua.PeekReply, elapsed, gap time.Duration) {
	bound, text, unknown := bound(p, elapsed, gap)
	if unknown != "" {
		r.BoundUnknown = unknown
		return
	}
	within := r.Admitted-r.Beyond <= bound
	r.Bound = &bound
	r.BoundText = text
	r.WithinBound = &within
}

// bound returns the most tokens that a bucket in state p can admit within elapsed, with an explanation. It assumes that
// no gap between two refills was longer than gap. If the bound is unknown, unknown has the reason. The first refill
// also credits time before the run, but no refill credits more time than the policy allows. For the bucket of a pool,
// bound uses the rate of its grant or of its floor, whichever is higher.
func bound(p lua.PeekReply, elapsed, gap time.Duration) (tokens int64, text, unknown string) {
	t := *p.Terms
	if t.Kind == policy.Stepped {
		step, first := micro(p.Next-p.Step), micro(p.Next-p.Now)
		if step <= 0 {
			return 0, "", "the times of the bucket's schedule are not known yet"
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
	due, slack := rate.Over(elapsed)+1, rate.Over(gap) // a token that has begun to fall due counts
	text = fmt.Sprintf("capacity %d + %d due in %s at %s + %d for %s without a refill",
		t.Capacity, due, elapsed.Round(time.Millisecond), rate.InUnits(), slack, gap.Round(time.Millisecond))
	return t.Capacity + due + slack, text, ""
}

func micro(us int64) time.Duration { return time.Duration(us) * time.Microsecond }

// micros returns a latency, rounded for readers.
func micros(us int64) time.Duration {
	d := micro(us)
	if d > 10*time.Millisecond {
		return d.Round(100 * time.Microsecond)
	}
	return d
}

// labels is the number of columns before the text of a report's lines.
const labels = 11

// text returns the report as text, for a terminal of width columns. A width of 0 means no limit.
func (r report) text(width int) string {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		text := terminal.Wrap(fmt.Sprintf(format, args...), max(0, width-labels))
		fmt.Fprintf(&b, "%-*s%s\n", labels, name, strings.Join(text, "\n"+strings.Repeat(" ", labels)))
	}
	how := ""
	if r.Interrupted {
		how = ", interrupted"
	}
	line("run", "%.1f s%s, %d callers, %s per take", r.ElapsedSeconds, how, r.Concurrency, plural(r.TokensPerTake))
	line("takes", "%d (%.0f/s): %d admitted, %d denied, %d errors",
		r.Takes, r.TakesPerSecond, r.AdmittedTakes, r.Denied, r.Errors)
	if r.LastError != "" {
		line("error", "%s", r.LastError)
	}
	for _, by := range []struct {
		name string
		answered
	}{{"redis", r.Redis}, {"memory", r.Memory}} {
		if by.Takes > 0 {
			line(by.name, "answered %d (%.0f/s): %d admitted, %d denied", by.Takes, by.TakesPerSecond, by.AdmittedTakes,
				by.Denied)
			line("", "latency p50 %.3g ms, p90 %.3g ms, p99 %.3g ms, p99.9 %.3g ms, max %.3g ms",
				by.Latency.P50, by.Latency.P90, by.Latency.P99, by.Latency.P999, by.Latency.Max)
		}
	}
	line("admitted", "%s (%.1f/s)", plural(r.Admitted), float64(r.Admitted)/r.ElapsedSeconds)
	if r.Beyond > 0 {
		line("", "%s of them came from degraded mode or shadow mode instead of the bucket", plural(r.Beyond))
	}
	if r.Flows != nil {
		line("flows", "%d: tokens per flow: mean %.3g/s, least %.3g/s, most %.3g/s", r.Flows.Flows, r.Flows.Mean,
			r.Flows.Least, r.Flows.Most)
	}
	switch {
	case r.Bound == nil:
		line("bound", "unknown: %s", r.BoundUnknown)
	case *r.WithinBound:
		line("bound", "%d, not exceeded: %s", *r.Bound, r.BoundText)
	default:
		line("bound", "%d, EXCEEDED by %d: %s", *r.Bound, r.Admitted-r.Beyond-*r.Bound, r.BoundText)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

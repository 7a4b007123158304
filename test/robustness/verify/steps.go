package verify

import (
	"cmp"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// checkSteps checks that the scheduled instants of a stepped bucket were credited in order, once each, and in time.
func (h *bucketHistory) checkSteps(r *Result) {
	credited, late := map[int64]bool{}, int64(0)
	for i, w := range h.writes {
		o := w.outcome
		if o == nil {
			continue
		}
		steps, t := h.steps[o.Fence], h.policies[o.Fence]
		if steps == nil {
			late = 0
			continue
		}
		next := instantAfter(steps, o.Step)
		if period := instantAfter(steps, next) - next; o.Step > o.Now+period {
			r.violate(Steps, h.bucket.Key, "at index %d the last instant credited is %s ahead", w.version.Index,
				micros(o.Step-o.Now))
		}
		if h.follows(i) && h.writes[i-1].outcome != nil && h.writes[i-1].outcome.Fence == o.Fence {
			h.checkStep(r, steps, *h.writes[i-1].outcome, *o)
		}
		if o.Added+o.Clamped > 0 {
			if credited[o.Step] && !h.creditedAgain(t, i) {
				r.violate(Steps, h.bucket.Key, "the instant %d is credited twice, the second time at index %d", o.Step,
					w.version.Index)
			}
			credited[o.Step] = true
		}
		// A replica credits nothing while it doesn't know the server's clock and the last instant. So late counts refills
		// after which an instant is overdue, and allows some.
		late++
		if next > o.Now-time.Second.Microseconds() {
			late = 0
		}
		if keep := (t.Capacity + t.Tokens - 1) / t.Tokens; late == keep+5 {
			r.violate(Steps, h.bucket.Key, "at index %d the instant %d is still not credited, %s after it",
				w.version.Index, next, micros(o.Now-next))
		}
	}
}

// checkStep checks one refill of a stepped bucket, given the outcome of the refill before it.
func (h *bucketHistory) checkStep(r *Result, steps policy.Steps, before, o policy.Outcome) {
	if o.Status != policy.StatusApplied && o.Status != policy.StatusSwitched {
		return // see checkCredit
	}
	want := int64(0)
	if o.Step != before.Step {
		want = h.policies[o.Fence].Tokens
		if o.Step < before.Step || o.Step > o.Now || instantAfter(steps, o.Step-1) != o.Step {
			r.violate(Steps, h.bucket.Key,
				"index %d goes from the instant %d to %d, which is in the future or no instant of %s", o.Version.Index,
				before.Step, o.Step, steps)
		}
	}
	if got := o.Added + o.Clamped; got != want {
		r.violate(Steps, h.bucket.Key, "index %d credited %d tokens from the instant %d to %d: want %d",
			o.Version.Index, got, before.Step, o.Step, want)
	}
}

// creditedAgain reports whether write i may credit an instant a second time. It may if the clock was stepped back. It
// also may if a server forgot the credit, and either the policy keeps the tokens in a rollback, or no replica has
// detected the rollback yet.
func (h *bucketHistory) creditedAgain(t policy.Terms, i int) bool {
	w := &h.writes[i]
	noticed := slices.ContainsFunc(h.writes[:i], func(o write) bool {
		return o.history == w.history && o.outcome != nil && o.outcome.Status == policy.StatusRolledBack
	})
	return slices.ContainsFunc(h.faults, func(f record.Fault) bool {
		return f.Start <= w.to && (f.Effect == record.Clock && f.Jump < 0 || f.Effect == record.Rollback &&
			(t.OnRollback == policy.RollbackKeep || !noticed))
	})
}

// crossings returns the instants of the bucket's schedules that the server's clock reached in [from, to], with the
// machine's times and the numbers of tokens. It leaves out instants that a clock stepped over: see faultSlack.
func (h *bucketHistory) crossings(from, to int64) (list []crossing) {
	for _, span := range h.clocks(from, to) {
		server := func(at int64) int64 { return time.Unix(0, at).Add(span.ahead).UnixMicro() }
		for fence, steps := range h.steps {
			tokens := float64(h.policies[fence].Tokens)
			for x := instantAfter(steps, server(span.from)); x != 0 && x <= server(span.to); x = instantAfter(steps,
				x) {
				list = append(list, crossing{time.UnixMicro(x).Add(-span.ahead).UnixNano(), x, tokens})
			}
		}
	}
	slices.SortFunc(list, func(a, b crossing) int { return cmp.Compare(a.at, b.at) })
	return list
}

// stepTime is the longest time from a request to step a server's clock until the clock has stepped.
const stepTime = 500 * time.Millisecond

// steady is a span in which the server's clock may have been ahead of the machine's clock by ahead.
type steady struct {
	from, to int64
	ahead    time.Duration
}

// clocks returns the spans of the server's clock in [from, to]. Two spans overlap while the clock is being stepped.
func (h *bucketHistory) clocks(from, to int64) []steady {
	list := []steady{{from, to, 0}}
	faults := slices.Clone(h.faults)
	slices.SortFunc(faults, func(a, b record.Fault) int { return cmp.Compare(a.Start, b.Start) })
	for _, f := range faults {
		if f.Effect == record.Clock {
			last := &list[len(list)-1]
			last.to = min(to, f.End+int64(stepTime))
			list = append(list, steady{f.Start, to, last.ahead + f.Jump})
		}
	}
	return list
}

// crossing is an instant of a schedule.
type crossing struct {
	at      int64 // Unix ns on the machine's clock
	instant int64 // Unix µs on the server's clock
	n       float64
}

// uncredited returns the number of tokens of the instants before a time that the last refill before the time had not
// credited. Instants whose credit was forgotten count too.
func (h *bucketHistory) uncredited(list []crossing, at int64) (n float64) {
	credited := int64(0)
	for i, w := range h.writes {
		if w.outcome != nil && w.to <= at {
			credited = w.outcome.Step
		} else if i > 0 && w.history > h.writes[i-1].history && h.rolledBack(at) >= w.history {
			credited = h.stepBefore(i)
		}
	}
	capacity, _, _ := h.limits()
	most := 0.0 // the instants that a refill credits later are at most as many as fill the bucket
	for _, c := range list {
		if c.at <= at && c.instant > credited {
			n, most = n+c.n, max(most, capacity+c.n-1)
		}
	}
	return min(n, most)
}

// rolledBack returns the number of rollbacks that began before a time.
func (h *bucketHistory) rolledBack(at int64) (n int) {
	for _, f := range h.faults {
		if f.Effect == record.Rollback && f.Start <= at {
			n++
		}
	}
	return n
}

// stepBefore returns the last instant that had been credited in the state to which a rollback went back. Write i is the
// first write after the rollback. It returns 0 if the instant is unknown.
func (h *bucketHistory) stepBefore(i int) (step int64) {
	first := h.writes[i].outcome
	if first == nil {
		return 0
	}
	if first.Added+first.Clamped == 0 {
		return first.Step
	}
	for _, w := range h.writes[:i] {
		if w.outcome != nil && w.outcome.Step < first.Step {
			step = max(step, w.outcome.Step)
		}
	}
	return step
}

func instantAfter(s policy.Steps, at int64) int64 {
	next := s.Next(time.UnixMicro(at))
	if next.IsZero() {
		return 0
	}
	return next.UnixMicro()
}

func micros(n int64) time.Duration { return time.Duration(n) * time.Microsecond }

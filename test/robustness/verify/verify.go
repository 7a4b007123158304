// Package verify judges a run by its files alone: it starts nothing and asks nobody. Each check states one promise of the
// protocol; what breaks it is a Violation.
package verify

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// Names of the checks.
const (
	Window     = "window"     // what was taken in any window fits in capacity, rate and stated slack
	Index      = "index"      // each (era, index) is written once in one history of Redis
	Credit     = "credit"     // each refill credits the elapsed time, capped, to within a token, and nothing twice
	Quarantine = "quarantine" // a server that forgot what a caller saw begins a new era, without tokens
	Order      = "order"      // era, index and fence never fall; a fence may with a new era
	Stock      = "stock"      // tokens are from 0 to the capacity
	Linear     = "linear"     // the calls have an order in which the model gives the same answers
	Epochs     = "epochs"     // a later term has a higher epoch
	Resume     = "resume"     // refills go on within the stated time after a fault
	Healthy    = "healthy"    // the system works before and after each fault
	Substance  = "substance"  // the history holds enough to mean anything
)

// Violation is a broken promise.
type Violation struct {
	Check  string
	Key    string // the bucket; empty for the whole system
	Detail string
}

func (v Violation) String() string { return fmt.Sprintf("%s: %s: %s", v.Check, v.Key, v.Detail) }

// Gap is what one fault did to one bucket's refills.
type Gap struct {
	Fault  string
	Key    string
	Resume time.Duration // from the fault's end to the next refill that wrote
	Worst  time.Duration // longest stretch without such a refill that overlaps the fault, on the machine's clock
}

// Result is what the verifier found.
type Result struct {
	Violations []Violation
	Notes      []string // what could not be decided, and why
	Ops        int
	Refills    int
	Writes     int // refills that wrote
	Decided    int // buckets whose linearizability was decided
	Gaps       []Gap
	Slack      float64 // most of the window check's allowance that was used, 0 to 1, over all buckets
	Hidden     int     // writes whose caller never saw the answer
}

// Broken lists the checks that failed, each once.
func (r *Result) Broken() []string {
	var names []string
	for _, v := range r.Violations {
		if !slices.Contains(names, v.Check) {
			names = append(names, v.Check)
		}
	}
	slices.Sort(names)
	return names
}

func (r *Result) violate(check, key, format string, args ...any) {
	n := 0
	for _, v := range r.Violations {
		if v.Check == check && v.Key == key {
			n++
		}
	}
	if n < 3 { // the first few tell the story
		r.Violations = append(r.Violations, Violation{check, key, fmt.Sprintf(format, args...)})
	}
}

func (r *Result) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

// Dir judges the run in a directory. An error means that its files can't be read.
func Dir(dir string) (*Result, error) {
	run, err := record.Load(dir)
	if err != nil {
		return nil, err
	}
	r := &Result{Ops: len(run.Ops), Refills: len(run.Refills)}
	for _, b := range run.Meta.Buckets {
		h, err := newBucketHistory(run, b)
		if err != nil {
			return nil, err
		}
		r.Writes += len(h.writes)
		r.Hidden += h.hidden
		h.checkSubstance(r)
		h.checkIndex(r)
		h.checkCredit(r)
		h.checkQuarantine(r)
		h.checkOrder(r)
		h.checkWindow(r)
		h.checkResume(r)
		if b.Linear {
			h.checkLinear(r)
		}
	}
	checkEpochs(run, r)
	checkHealth(run, r)
	return r, nil
}

// bucketHistory is what happened to one bucket.
type bucketHistory struct {
	run      *record.Run
	bucket   record.Bucket
	policies map[policy.Fence]policy.Terms
	ops      []record.Op     // by call
	refills  []record.Refill // by sent
	writes   []write         // by version; those without an answer too, as far as they can be told
	hidden   int
	samples  []record.Sample
	faults   []record.Fault // that concern the bucket
	cut      int64          // from here on linearizability isn't decided
	excused  bool           // a write may have come and gone unseen
}

// write is a refill that wrote.
type write struct {
	version policy.Version
	now     int64 // of the server, µs
	from    int64 // it happened between from
	to      int64 // and to, Unix ns
	call    *policy.Call
	outcome *policy.Outcome // nil: nobody saw the answer
	replica string
	history int // of Redis: a fail-over begins another one, in which forgotten numbers come again
}

func newBucketHistory(run *record.Run, b record.Bucket) (*bucketHistory, error) {
	h := &bucketHistory{run: run, bucket: b, cut: math.MaxInt64}
	var err error
	if h.policies, err = b.Policies(); err != nil {
		return nil, err
	}
	for _, op := range run.Ops {
		if op.Key == b.Key && op.Result != record.Failed {
			h.ops = append(h.ops, op)
		}
	}
	for _, f := range run.Refills {
		if f.Key == b.Key {
			h.refills = append(h.refills, f)
		}
	}
	for _, s := range run.Samples {
		if s.Key == b.Key {
			h.samples = append(h.samples, s)
		}
	}
	for _, f := range run.Faults {
		if f.Key == "" || f.Key == b.Key {
			h.faults = append(h.faults, f)
			if f.Effect == record.Rollback {
				h.cut = min(h.cut, f.Start)
			}
		}
	}
	slices.SortFunc(h.ops, func(a, b record.Op) int { return cmp.Compare(a.Call, b.Call) })
	slices.SortFunc(h.refills, func(a, b record.Refill) int { return cmp.Compare(a.Sent, b.Sent) })
	slices.SortFunc(h.samples, func(a, b record.Sample) int { return cmp.Compare(a.Sent, b.Sent) })
	for _, f := range h.refills {
		if f.Outcome != nil && f.Outcome.Status.Wrote() {
			call, err := f.Call()
			if err != nil {
				return nil, err
			}
			h.writes = append(h.writes, write{
				version: f.Outcome.Version, now: f.Outcome.Now, from: f.Sent, to: f.Replied, call: &call, outcome: f.Outcome, replica: f.Replica,
			})
		}
	}
	h.findHidden()
	for i := range h.writes {
		for _, f := range h.faults {
			if f.Effect == record.Rollback && h.writes[i].from >= f.Gone {
				h.writes[i].history++
			}
		}
	}
	slices.SortStableFunc(h.writes, func(a, b write) int {
		if a.history != b.history {
			return cmp.Compare(a.history, b.history)
		}
		if a.version == b.version {
			return cmp.Compare(a.from, b.from)
		}
		if a.version.Before(b.version) {
			return -1
		}
		return 1
	})
	return h, nil
}

// capacity and rate are the largest of the policies; e is the longest credit in seconds.
func (h *bucketHistory) limits() (capacity, perSecond, e float64) {
	for _, t := range h.policies {
		capacity = max(capacity, float64(t.Capacity))
		perSecond = max(perSecond, float64(t.Tokens)/float64(t.Per)*1e6)
		e = max(e, float64(t.MaxElapsed)/1e6)
	}
	return capacity, perSecond, e
}

// effect reports whether a fault of one of the effects overlaps [from, to].
func (h *bucketHistory) effect(from, to int64, effects ...string) bool {
	return slices.ContainsFunc(h.faults, func(f record.Fault) bool {
		return slices.Contains(effects, f.Effect) && f.Start <= to && f.End >= from
	})
}

func (h *bucketHistory) checkSubstance(r *Result) {
	taken := int64(0)
	for _, op := range h.ops {
		taken += op.Taken
	}
	if taken == 0 || len(h.writes) < 10 || len(h.samples) < 10 {
		r.violate(Substance, h.bucket.Key, "%d tokens taken, %d refills wrote, %d samples: too little to judge by", taken, len(h.writes), len(h.samples))
	}
}

func (h *bucketHistory) checkIndex(r *Result) {
	for i := 1; i < len(h.writes); i++ {
		a, b := h.writes[i-1], h.writes[i]
		if a.version != b.version || a.history != b.history {
			continue
		}
		r.violate(Index, h.bucket.Key, "era %d, index %d was written by %s and by %s", a.version.Era, a.version.Index, a.replica, b.replica)
	}
	for i, w := range h.writes {
		if w.outcome == nil || w.outcome.Status != policy.StatusApplied || i == 0 || h.writes[i-1].version.Era != w.version.Era {
			continue
		}
		if expected := w.call.Version; expected.Index != w.version.Index-1 || expected.Era != w.version.Era {
			r.violate(Index, h.bucket.Key, "%s won index %d with what it knew of era %d, index %d", w.replica, w.version.Index, expected.Era, expected.Index)
		}
	}
}

// checkQuarantine looks for callers that had seen more than the server which answered them.
func (h *bucketHistory) checkQuarantine(r *Result) {
	for _, f := range h.refills {
		o := f.Outcome
		if o == nil {
			continue
		}
		switch o.Status {
		case policy.StatusInitialised, policy.StatusUnknown, policy.StatusClock, policy.StatusMalformed:
		case policy.StatusRolledBack:
			if t := h.policies[o.Fence]; t.OnRollback == policy.RollbackEmpty && o.Tokens != 0 {
				r.violate(Quarantine, h.bucket.Key, "%d tokens at index %d, where era %d begins after a rollback", o.Tokens, o.Version.Index, o.Version.Era)
			}
		default:
			if seen := (policy.Version{Era: f.Era, Index: f.Index}); o.Version.Before(seen) {
				r.violate(Quarantine, h.bucket.Key, "%s had seen era %d, index %d and was answered %s from era %d, index %d",
					f.Replica, f.Era, f.Index, o.Status, o.Version.Era, o.Version.Index)
			}
			if o.Status.Wrote() && o.Status != policy.StatusForeign && o.Status != policy.StatusSwitched && o.Version.Index != f.Index+1 {
				r.violate(Quarantine, h.bucket.Key, "%s had seen index %d and wrote index %d", f.Replica, f.Index, o.Version.Index)
			}
		}
	}
}

// checkCredit follows the carry, of which it knows the bounds, from write to write.
func (h *bucketHistory) checkCredit(r *Result) {
	low, high := int64(0), int64(0)
	for i, w := range h.writes {
		o := w.outcome
		if o == nil || i == 0 {
			low, high = 0, math.MaxInt64
			continue
		}
		prev := h.writes[i-1]
		if o.Status != policy.StatusApplied && o.Status != policy.StatusSwitched {
			low, high = 0, 0 // these drop the carry, or credit nothing
			if o.Added != 0 || o.Clamped != 0 {
				r.violate(Credit, h.bucket.Key, "%s at index %d credited %d", o.Status, o.Version.Index, o.Added+o.Clamped)
			}
			if o.Status == policy.StatusClock {
				high = math.MaxInt64 // the carry before it stays
			}
			continue
		}
		fence := o.Fence
		if prev.outcome != nil {
			fence = prev.outcome.Fence // the policy in force before a switch
		}
		t, ok := h.policies[fence]
		if !ok {
			r.violate(Order, h.bucket.Key, "index %d is under the fence %v that no config has", o.Version.Index, fence)
			continue
		}
		switched := prev.outcome == nil || fence != o.Fence
		follows := prev.history == w.history && prev.version.Era == w.version.Era && prev.version.Index+1 == w.version.Index
		if follows && prev.outcome != nil && o.Elapsed != max(0, o.Now-prev.outcome.Last) {
			r.violate(Credit, h.bucket.Key, "index %d credited %dµs, though the refill before was %dµs ago", o.Version.Index, o.Elapsed, o.Now-prev.outcome.Last)
		}
		el := min(o.Elapsed, t.MaxElapsed)
		got := o.Added + o.Clamped
		most := min(high, t.Per-1)
		if !follows || switched {
			low, most = 0, t.Per-1
		}
		due := el * t.Tokens
		if !switched && (got < (due+low)/t.Per || got > (due+most)/t.Per) {
			r.violate(Credit, h.bucket.Key, "index %d credited %d tokens for %dµs at %d per %dµs: want %d to %d",
				o.Version.Index, got, o.Elapsed, t.Tokens, t.Per, (due+low)/t.Per, (due+most)/t.Per)
		}
		if o.Tokens >= t.Capacity || switched {
			low, high = 0, math.MaxInt64 // a full bucket drops its carry, and a switch rescales it
			continue
		}
		low, high = max(0, due+low-got*t.Per), min(t.Per-1, due+most-got*t.Per)
	}
}

func (h *bucketHistory) checkOrder(r *Result) {
	key := h.bucket.Key
	for i := 1; i < len(h.writes); i++ {
		a, b := h.writes[i-1], h.writes[i]
		if a.outcome == nil || b.outcome == nil || a.version.Era != b.version.Era || a.history != b.history {
			continue
		}
		if b.outcome.Fence.Before(a.outcome.Fence) {
			r.violate(Order, key, "the fence fell from %v at index %d to %v at index %d", a.outcome.Fence, a.version.Index, b.outcome.Fence, b.version.Index)
		}
	}
	newest := policy.Fence{} // of all writes; a new era keeps the policy
	for _, w := range h.writes {
		if w.outcome == nil {
			continue
		}
		if h.effect(0, w.to, record.Lose, record.Rollback) {
			break // the policy may be lost with the bucket
		}
		if w.outcome.Fence.Before(newest) {
			r.violate(Order, key, "the policy went back from fence %v to %v at index %d", newest, w.outcome.Fence, w.version.Index)
		}
		newest = w.outcome.Fence
	}
	for i, s := range h.samples {
		if s.Tokens < 0 {
			r.violate(Stock, key, "%d tokens", s.Tokens)
		}
		if s.Era == 0 {
			continue
		}
		t, err := policy.DecodeTerms(s.Policy)
		if err != nil {
			r.violate(Order, key, "index %d: %v", s.Index, err)
			continue
		}
		if s.Tokens > t.Capacity {
			r.violate(Stock, key, "%d tokens above the capacity %d", s.Tokens, t.Capacity)
		}
		if i == 0 || h.samples[i-1].Era == 0 {
			continue
		}
		before := h.samples[i-1]
		if h.effect(before.Sent, s.Got, record.Rollback) {
			continue
		}
		if s.Era < before.Era && !h.effect(before.Sent, s.Got, record.Lose) {
			r.violate(Order, key, "the era fell from %d to %d", before.Era, s.Era)
		}
		if s.Era == before.Era && s.Index < before.Index {
			r.violate(Order, key, "the index fell from %d to %d", before.Index, s.Index)
		}
		if old, err := policy.DecodeTerms(before.Policy); err == nil && s.Era == before.Era && t.Fence.Before(old.Fence) {
			r.violate(Order, key, "the fence fell from %v to %v", old.Fence, t.Fence)
		}
	}
}

// slowness is how many round trips of the samples, which go past all faults, a replica may need more on a machine that is
// too busy: they tell how slow it was.
const slowness = 8

// sampleGap is the longest time between two samples that overlaps [from, to].
func (h *bucketHistory) sampleGap(from, to int64) time.Duration {
	gap := time.Duration(0)
	for i := 1; i < len(h.samples); i++ {
		if a, b := h.samples[i-1].Got, h.samples[i].Got; a <= to && b >= from {
			gap = max(gap, time.Duration(b-a))
		}
	}
	return gap
}

func (h *bucketHistory) checkResume(r *Result) {
	byTime := slices.Clone(h.writes)
	slices.SortFunc(byTime, func(a, b write) int { return cmp.Compare(a.to, b.to) })
	for i, f := range h.faults {
		if f.End == 0 {
			continue
		}
		next := int64(math.MaxInt64)
		for _, g := range h.run.Faults { // another fault may have come before refills went on
			if g.Start > f.End {
				next = min(next, g.Start)
			}
			if g.Start <= f.End && g.End > f.End {
				next = f.End // still under another one
			}
		}
		gap := Gap{Fault: f.Name, Key: h.bucket.Key, Resume: -1}
		for k, w := range byTime {
			if gap.Resume < 0 && w.from >= f.End {
				gap.Resume = time.Duration(w.to - f.End)
			}
			if k > 0 && w.to >= f.Start && byTime[k-1].to <= f.End {
				gap.Worst = max(gap.Worst, time.Duration(w.to-byTime[k-1].to))
			}
		}
		resumed := gap.Resume
		if resumed < 0 {
			resumed = math.MaxInt64
		}
		allowed := h.run.Meta.Resume + slowness*h.sampleGap(f.End, f.End+int64(h.run.Meta.Resume))
		if resumed > allowed && f.End+int64(allowed) < next {
			r.violate(Resume, h.bucket.Key, "fault %d, %s: no refill within %s (after %s)", i, f.Name, allowed, resumed)
		}
		r.Gaps = append(r.Gaps, gap)
	}
}

// checkEpochs looks at the terms in the order in which they began. A replica that was stopped may tell of its term late.
func checkEpochs(run *record.Run, r *Result) {
	leads := slices.Clone(run.Leads)
	slices.SortStableFunc(leads, func(a, b record.Lead) int { return cmp.Compare(a.At, b.At) })
	for i := 1; i < len(leads); i++ {
		a, b := leads[i-1], leads[i]
		stopped := slices.ContainsFunc(run.Faults, func(f record.Fault) bool {
			return f.Victim == b.Replica && f.Start <= b.At && f.End >= a.At
		})
		if b.Epoch == a.Epoch || b.Epoch < a.Epoch && (a.Replica == b.Replica || !stopped) {
			r.violate(Epochs, "", "%s led under epoch %d after %s led under %d", b.Replica, b.Epoch, a.Replica, a.Epoch)
		}
	}
}

func checkHealth(run *record.Run, r *Result) {
	if len(run.Health) < 2 {
		r.violate(Healthy, "", "%d looks at the system: want one at least before and one after the faults", len(run.Health))
	}
	for _, look := range run.Health {
		if !look.OK {
			r.violate(Healthy, "", "%s: %s", look.When, look.Note)
		}
	}
}

// Package verify judges a run only by its files. It starts no process and makes no calls. Each check states one promise
// of the protocol. A Violation is evidence that a promise was broken.
package verify

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/test/robustness/record"
)

// Names of the checks.
const (
	Window = "window" // the takes of any window fit in capacity, rate and stated slack
	Index  = "index"  // each (era, index) is written once in one history of Redis
	Credit = "credit" // each refill credits the elapsed time, capped, to within a token, and nothing twice
	Steps  = "steps"  // each scheduled instant is credited, once, at its time
	Loss   = "loss"   // what was lost comes back as on_loss says
	// a server that forgot what a caller knows, and only such a server, begins a new era, as on_rollback says
	Quarantine = "quarantine"
	Order      = "order"  // era, index and fence never fall; a fence may with a new era
	Stock      = "stock"  // tokens are from 0 to the capacity, of a strict bucket less what is held
	Expiry     = "expiry" // buckets of templates expire, and no others
	Linear     = "linear" // the calls have an order in which the model gives the same answers
	Epochs     = "epochs" // a later term has a higher epoch
	// refills go on within the stated time after a fault, and while it lasts if it spares a replica
	Resume     = "resume"
	Neighbours = "neighbours" // a bucket that can't be refilled delays no other, and is logged once
	Healthy    = "healthy"    // the system works before and after each fault
	Substance  = "substance"  // the history holds enough to mean anything
	Versions   = "versions"   // the highest version of a living replica is in force within a second
	Once       = "once"       // a take that is made again under its request id is answered as the first time
	Leave      = "leave"      // a take leaves what it is to leave
	Degraded   = "degraded"   // while a server doesn't answer, takes are answered as the degraded mode says
	Shadow     = "shadow"     // a bucket in shadow mode denies nothing
	Fair       = "fair"       // a divided bucket gives each flow its part, whatever the others ask for
	Keys       = "keys"       // a template has no more buckets than its max_keys
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
	Remarks    []string // what could not be decided, and why
	Ops        int
	Refills    int
	Writes     int // refills that wrote
	Decided    int // buckets whose linearizability was decided
	Gaps       []Gap
	Slack      float64 // most of the window check's allowance that was used, 0 to 1, over all buckets
	Hidden     int     // writes that were made, and not answered
	Versions   int     // readings of a bucket by which the version in force was judged
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
	if n < 3 { // the first few are enough
		r.Violations = append(r.Violations, Violation{check, key, fmt.Sprintf(format, args...)})
	}
}

func (r *Result) remark(format string, args ...any) {
	r.Remarks = append(r.Remarks, fmt.Sprintf(format, args...))
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
		h.check(r)
	}
	checkEpochs(run, r)
	checkHealth(run, r)
	return r, nil
}

// check makes the checks that go with the bucket's kind.
func (h *bucketHistory) check(r *Result) {
	h.checkSubstance(r)
	h.checkWindow(r)
	h.checkAnswers(r)
	h.checkDegraded(r)
	h.checkFair(r)
	h.checkKeys(r)
	if h.bucket.Kind == record.Lazy {
		return // no replica refills it, and nothing of it is known but the replies to its takes
	}
	h.checkIndex(r)
	if h.bucket.Kind == record.Pooled || h.bucket.Overridden {
		h.checkShare(r)
	} else {
		h.checkCredit(r)
		h.checkSteps(r)
	}
	h.checkLoss(r)
	h.checkQuarantine(r)
	h.checkOrder(r)
	h.checkVersions(r)
	h.checkStock(r)
	h.checkExpiry(r)
	h.checkResume(r)
	h.checkNeighbours(r)
	if h.bucket.Linear {
		h.checkLinear(r)
	}
}

// checkEpochs checks the terms in the order in which they began. A replica that was stopped may report its term late.
func checkEpochs(run *record.Run, r *Result) {
	leads := slices.Clone(run.Leads)
	slices.SortStableFunc(leads, func(a, b record.Lead) int {
		return cmp.Or(cmp.Compare(a.Election, b.Election), cmp.Compare(a.At, b.At))
	})
	for i := 1; i < len(leads); i++ {
		a, b := leads[i-1], leads[i]
		stopped := slices.ContainsFunc(run.Faults, func(f record.Fault) bool {
			return f.Victim == b.Replica && f.Start <= b.At && f.End >= a.At
		})
		if a.Election == b.Election && (b.Epoch == a.Epoch || b.Epoch < a.Epoch && (a.Replica == b.Replica ||
			!stopped)) {
			r.violate(Epochs, "", "%s led under epoch %d after %s led under %d", b.Replica, b.Epoch, a.Replica, a.Epoch)
		}
	}
}

func checkHealth(run *record.Run, r *Result) {
	if len(run.Health) < 2 {
		r.violate(Healthy, "", "%d checks of the system: want one at least before and one after the faults",
			len(run.Health))
	}
	for _, check := range run.Health {
		if !check.OK {
			r.violate(Healthy, "", "%s: %s", check.When, check.Note)
		}
	}
}

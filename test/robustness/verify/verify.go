// Package verify judges a run by its files alone. It starts no process and makes no calls. Each check states one
// promise of the protocol. A Violation is evidence that a promise was broken.
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
	Window = "window" // in any window, no more is taken than capacity, rate and the stated slack allow
	Index  = "index"  // each (era, index) is written only once in one history of Redis
	Credit = "credit" // each refill credits the elapsed time, up to a cap, to within a token; no time is credited twice
	Steps  = "steps"  // each scheduled instant is credited once, at its time
	Loss   = "loss"   // after a loss, a bucket gets the tokens that on_loss says
	// Quarantine: a server begins a new era, as on_rollback says, if it forgot what a caller knows. Other servers don't.
	Quarantine = "quarantine"
	Order      = "order"  // era and index never fall; the fence falls only with a new era
	Stock      = "stock"  // the tokens are from 0 to the capacity; in a strict bucket, outstanding tokens count too
	Expiry     = "expiry" // the buckets of templates have an expiry, and no others
	Linear     = "linear" // the calls have an order in which the model gives the same answers
	Epochs     = "epochs" // a later term has a higher epoch
	// Resume: refills go on within the stated time after a fault. If the fault spares a replica, they go on during it.
	Resume     = "resume"
	Neighbours = "neighbours" // a bucket that can't be refilled doesn't delay other buckets, and is logged once
	Healthy    = "healthy"    // the system works before and after each fault
	Substance  = "substance"  // the history is long enough to judge
	Versions   = "versions"   // the highest version that a living replica has is in force within a second
	Once       = "once"       // a repeated take with the same request id gets the same answer
	Leave      = "leave"      // a take leaves the tokens that it must leave
	Degraded   = "degraded"   // while the server doesn't answer, takes get the answers that the degraded mode says
	Shadow     = "shadow"     // a bucket in shadow mode doesn't deny any take
	Fair       = "fair"       // a divided bucket gives each flow its part, even if other flows ask for more
	Keys       = "keys"       // a template has no more buckets than its max_keys
)

// Violation is a broken promise.
type Violation struct {
	Check  string
	Key    string // the bucket; empty if the promise is about the whole system
	Detail string
}

func (v Violation) String() string { return fmt.Sprintf("%s: %s: %s", v.Check, v.Key, v.Detail) }

// Gap is the pause that one fault caused in the refills of one bucket.
type Gap struct {
	Fault  string
	Key    string
	Resume time.Duration // time from the fault's end to the next refill that wrote; -1 if there was none
	Worst  time.Duration // longest time between two refills that wrote and that overlaps the fault
}

// Result is the result of judging a run.
type Result struct {
	Violations []Violation
	Remarks    []string // questions that could not be decided, with the reasons
	Ops        int      // calls of clients
	Refills    int      // refill calls
	Writes     int      // refills that wrote
	Decided    int      // buckets that were found linearizable
	Gaps       []Gap
	Slack      float64 // largest part of the bound of the window check that any bucket used; 1 is all of it
	Hidden     int     // writes without a known reply
	Versions   int     // samples by which the version in force was judged
}

// Broken returns the names of the checks that failed, each once.
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

// Dir judges the run in a directory. It fails if the files can't be read.
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

// check makes the checks that are made for the bucket's kind.
func (h *bucketHistory) check(r *Result) {
	h.checkSubstance(r)
	h.checkWindow(r)
	h.checkAnswers(r)
	h.checkDegraded(r)
	h.checkFair(r)
	h.checkKeys(r)
	if h.bucket.Kind == record.Lazy {
		return // replicas don't refill it, and only the replies to its takes are recorded
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

// checkEpochs checks that the epochs rise in the order in which the terms began. A replica that was paused may log the
// beginning of its term late, so it is excused.
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

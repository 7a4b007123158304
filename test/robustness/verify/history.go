package verify

import (
	"cmp"
	"math"
	"slices"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// bucketHistory has all records about one bucket.
type bucketHistory struct {
	run      *record.Run
	bucket   record.Bucket
	policies map[policy.Fence]policy.Terms
	steps    map[policy.Fence]policy.Steps // schedules of the stepped ones
	ops      []record.Op                   // ordered by call
	refills  []record.Refill               // ordered by sent
	writes   []write                       // ordered by version; with the hidden writes that could be inferred
	hidden   int                           // number of writes without a known reply
	samples  []record.Sample
	faults   []record.Fault // faults that affect the bucket
	cut      int64          // linearizability is decided only for calls that begin before this time
	excused  bool           // a hidden write may have left no trace, so calls without a possible order are no violation
}

// write is a refill that wrote.
type write struct {
	version policy.Version
	now     int64 // time of the server, µs
	from    int64 // the write was made between from and to, Unix ns
	to      int64
	call    *policy.Call
	outcome *policy.Outcome // nil: the reply is unknown
	replica string
	history int // number of rollbacks before the write; after a rollback, the same versions may be written again
}

func newBucketHistory(run *record.Run, b record.Bucket) (*bucketHistory, error) {
	h := &bucketHistory{run: run, bucket: b, cut: math.MaxInt64}
	var err error
	h.policies, err = b.Policies()
	if err != nil {
		return nil, err
	}
	h.steps, err = b.Schedules()
	if err != nil {
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
	if err := h.findWrites(); err != nil {
		return nil, err
	}
	return h, nil
}

// findWrites finds the refills that wrote, including writes without a known reply, and sorts them.
func (h *bucketHistory) findWrites() error {
	for _, f := range h.refills {
		if f.Outcome != nil && f.Outcome.Status.Wrote() {
			call, err := f.Call()
			if err != nil {
				return err
			}
			h.writes = append(h.writes, write{
				version: f.Outcome.Version, now: f.Outcome.Now, from: f.Sent, to: f.Replied, call: &call,
				outcome: f.Outcome, replica: f.Replica,
			})
		}
	}
	h.findHidden()
	for i := range h.writes {
		for _, f := range h.faults {
			if f.Effect == record.Rollback && h.writes[i].after(f) {
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
	return nil
}

// after reports whether a write was made after a rollback. A write that was sent before the rollback's end counts as
// made before it. But if the same server goes on and the reply came after the start, the server's clock decides.
func (w *write) after(rollback record.Fault) bool {
	if rollback.At > 0 && w.outcome != nil && w.from < rollback.Gone && w.to > rollback.Start {
		return w.now >= rollback.At
	}
	return w.from >= rollback.Gone
}

// follows reports whether write i comes right after the one before it, without a hidden write in between.
func (h *bucketHistory) follows(i int) bool {
	if i == 0 {
		return false
	}
	a, b := h.writes[i-1], h.writes[i]
	return a.history == b.history && a.version.Era == b.version.Era && a.version.Index+1 == b.version.Index
}

// limits returns the largest capacity of the policies, the largest rate, and the longest time that a refill credits, in
// seconds.
func (h *bucketHistory) limits() (capacity, perSecond, e float64) {
	for _, t := range h.policies {
		capacity = max(capacity, float64(t.Capacity))
		if t.Kind == policy.Smooth {
			perSecond = max(perSecond, float64(t.Tokens)/float64(t.Per)*1e6)
			e = max(e, float64(t.MaxElapsed)/1e6)
		}
	}
	return capacity, perSecond, e
}

// effect reports whether a fault of one of the effects overlaps [from, to].
func (h *bucketHistory) effect(from, to int64, effects ...string) bool {
	return slices.ContainsFunc(h.faults, func(f record.Fault) bool {
		return slices.Contains(effects, f.Effect) && f.Start <= to && f.End >= from
	})
}

// throughSDK reports whether consumers may use the bucket through the SDK. The SDK returns tokens and refills buckets
// in calls that the record doesn't have.
func (h *bucketHistory) throughSDK() bool {
	return len(h.run.Meta.Deployment) > 0 || h.run.Meta.Distance > 0 || h.bucket.Overridden || h.bucket.MaxKeys > 0
}

// hadTokens is how many samples with tokens make a bucket one that consumers must have taken from: some two seconds.
const hadTokens = 50

// neverFilled reports whether a stepped bucket had tokens only for a moment, because a fault emptied it before its
// first step.
func (h *bucketHistory) neverFilled() bool {
	filled := 0
	for _, s := range h.samples {
		if s.Tokens > 0 {
			filled++
		}
	}
	return len(h.steps) > 0 && filled < hadTokens
}

func (h *bucketHistory) checkSubstance(r *Result) {
	taken := int64(0)
	for _, op := range h.ops {
		taken += op.Taken
	}
	writes := len(h.writes)
	least := 10
	if h.bucket.Kind == record.Refilled {
		least = 4 // a template's bucket is refilled only while it isn't full
	}
	if h.throughSDK() {
		writes += h.hidden // consumers may have made these
		if h.bucket.Kind == record.Refilled {
			least = 1
		}
	}
	if taken == 0 && !h.neverFilled() || h.bucket.Kind != record.Lazy && (writes < least || len(h.samples) < 10) {
		r.violate(Substance, h.bucket.Key, "%d tokens taken, %d refills wrote, %d samples: too little to judge by",
			taken, writes, len(h.samples))
	}
}

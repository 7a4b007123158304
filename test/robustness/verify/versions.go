package verify

import (
	"time"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// inForce is the time within which the highest version that a living replica has must be in force.
const inForce = time.Second

// starts is how long a replica may need to connect after its start.
const starts = 2 * time.Second

// checkVersions checks that each sample has a version not lower than the version of any replica that has run
// undisturbed for long enough. It skips the buckets of pools and templates. Consumers of a template have to read a new
// version first, and a full bucket gets it only with the next take.
func (h *bucketHistory) checkVersions(r *Result) {
	if h.bucket.Kind != record.Configured && h.bucket.Kind != record.Foreign {
		return
	}
	for _, s := range h.samples {
		t, err := policy.DecodeTerms(s.Policy)
		if s.Era == 0 || err != nil {
			continue
		}
		span := max(inForce, 2*time.Duration(t.Interval)*time.Microsecond) + roundTrips*h.run.Meta.Distance
		since := s.Sent - int64(span+slowness*h.sampleGap(s.Sent-int64(span), s.Sent))
		want, replica := h.highest(since, s.Sent)
		if want == 0 {
			continue
		}
		r.Versions++
		if t.Fence.Epoch < want {
			r.violate(Versions, h.bucket.Key, "version %d is in force, though %s has had version %d for %s", t.Fence.Epoch,
				replica, want, time.Duration(s.Sent-since))
		}
	}
}

// roundTrips is how many round trips may pass until a version is in force.
const roundTrips = 4

// highest returns the highest version that a replica had from since to until, and the name of that replica. Only
// replicas that were not disturbed in this span count. If there is none, the version is 0.
func (h *bucketHistory) highest(since, until int64) (version int64, replica string) {
	latest := map[string]record.Reading{}
	for _, f := range h.run.Files {
		if f.Starts {
			f.At += int64(starts)
		}
		if old, ok := latest[f.Replica]; f.At <= since && (!ok || old.At <= f.At) {
			latest[f.Replica] = f
		}
	}
	for name, f := range latest {
		if f.Version > version && !h.disturbs(name, since, until) {
			version, replica = f.Version, name
		}
	}
	return version, replica
}

// disturbs reports whether a fault may keep a replica from its work in a span.
func (h *bucketHistory) disturbs(replica string, from, to int64) bool {
	for _, f := range h.run.Faults {
		spared := f.Spares && f.Victim != replica && f.Effect == record.None
		if !spared && f.Start <= to && f.End+int64(h.run.Meta.Resume) >= from {
			return true
		}
	}
	return false
}

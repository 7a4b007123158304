package verify

import (
	"maps"
	"math"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// sight is one reading of a bucket that shows its version.
type sight struct {
	version policy.Version
	last    int64
	step    int64 // the last credited instant, from a refill's answer; 0 if it isn't known
	at      int64 // the latest time at which the bucket was in this state, Unix ns
}

// sights returns all readings of the bucket.
func (h *bucketHistory) sights() []sight {
	var sights []sight
	for _, f := range h.refills {
		if o := f.Outcome; o != nil && o.Version.Era > 0 {
			sights = append(sights, sight{o.Version, o.Last, o.Step, f.Replied})
		}
	}
	for _, op := range h.ops {
		if op.Result == record.Denied && op.Era > 0 {
			sights = append(sights, sight{policy.Version{Era: op.Era, Index: op.Index}, op.Last, 0, op.Return})
		}
	}
	for _, s := range h.samples {
		if s.Era > 0 {
			sights = append(sights, sight{policy.Version{Era: s.Era, Index: s.Index}, s.Last, 0, s.Got})
		}
	}
	return sights
}

// findHidden finds the writes without a known reply. Every write adds one to the index, so a hidden write leaves an
// index that no reply has. A later reading may show the time of the write.
func (h *bucketHistory) findHidden() {
	sights := h.sights()
	known := map[policy.Version]bool{}
	settled := map[policy.Version]int64{} // when the write of a version was made, from the reply to the next write
	for _, w := range h.writes {
		known[w.version] = true
		if w.outcome.Status == policy.StatusApplied || w.outcome.Status == policy.StatusSwitched {
			settled[policy.Version{Era: w.version.Era, Index: w.version.Index - 1}] = w.outcome.Now - w.outcome.Elapsed
		}
	}
	// Every index between the lowest and the highest index of an era was written.
	type era struct{ low, high int64 }
	eras := map[int64]era{}
	for _, s := range sights {
		e, ok := eras[s.version.Era]
		if !ok {
			e = era{s.version.Index, s.version.Index}
		}
		eras[s.version.Era] = era{min(e.low, s.version.Index), max(e.high, s.version.Index)}
	}
	for v := range settled {
		if e, ok := eras[v.Era]; ok && v.Index < e.low {
			eras[v.Era] = era{v.Index, e.high}
		}
	}
	used := map[int]bool{}
	before := int64(math.MaxInt64) // the highest index of the era before
	for _, number := range slices.Sorted(maps.Keys(eras)) {
		e := eras[number]
		for index := e.low; index <= e.high; index++ {
			v := policy.Version{Era: number, Index: index}
			if known[v] {
				continue
			}
			h.hidden++
			if index == e.low && index-1 > before { // the last write of the era before is hidden too, and no reading shows it
				h.undecided(v, latestTime(sights, v))
				continue
			}
			h.reveal(v, index == e.low, sights, settled, used)
		}
		before = e.high
	}
	// A write just before the bucket was lost may have left no trace.
	for i, f := range h.refills {
		if f.Outcome == nil && !used[i] && h.effect(f.Sent-int64(time.Second), f.Replied+int64(time.Second),
			record.Lose, record.Rollback) {
			h.excused = true
		}
	}
}

// reveal adds the hidden write of version v, with the call that most likely made the write.
func (h *bucketHistory) reveal(v policy.Version, first bool, sights []sight, settled map[policy.Version]int64,
	used map[int]bool) {
	w := write{version: v, to: latestTime(sights, v)}
	step := int64(math.MaxInt64) // the last credited instant after the write, if it is known
	for _, s := range sights {
		if s.version == v {
			w.now = s.last
			if s.step > 0 {
				step = s.step
			}
		}
	}
	if w.now == 0 {
		w.now = settled[v]
	}
	best := h.likeliest(w, first, step, used)
	if best >= 0 {
		used[best] = true
		f := h.refills[best]
		call, err := f.Call()
		if err == nil && w.now > 0 {
			w.from = f.Sent
			w.call = &call
			w.replica = f.Replica
			h.writes = append(h.writes, w)
			return
		}
	} else if w.now > 0 && !first {
		// The record doesn't have the last call of a replica that was killed. So that replica may have made the write.
		for _, f := range h.run.Faults {
			start := f.Start - int64(time.Second)
			if f.Victim != "" && start <= w.to && w.now*1000 <= f.End+int64(time.Second) {
				terms := h.anyPolicy()
				if len(h.policies) > 1 {
					break // it is unknown which policy the call had
				}
				w.from, w.replica = start, f.Victim
				w.call = &policy.Call{Version: policy.Version{Era: v.Era, Index: v.Index - 1},
					Create: policy.CreateLost, Terms: &terms}
				if step < math.MaxInt64 {
					w.call.Step = step
				}
				h.writes = append(h.writes, w)
				return
			}
		}
	}
	h.undecided(v, w.to)
}

// likeliest returns the index of the refill call that most likely made the hidden write w, or -1 if there is none. It
// must be a call without an answer, and have the version before w. The first write of an era may also be by a call that
// may create a bucket.
//
// If there are several calls, likeliest prefers one that credits the instant step. After that, it prefers one whose
// caller was still waiting when the write was made.
func (h *bucketHistory) likeliest(w write, first bool, step int64, used map[int]bool) int {
	v := w.version
	best, most := -1, -1
	for i, f := range h.refills {
		if f.Outcome != nil || used[i] || f.Sent > w.to || f.Step > step {
			continue
		}
		match := f.Era == v.Era && f.Index == v.Index-1
		if !match && !first {
			continue
		}
		fits := 0
		if f.Step == step {
			fits += 2
		}
		if match && f.Sent <= w.now*1000 && w.now*1000 <= f.Replied {
			fits++
		}
		if !match && (f.Create == int64(policy.CreateInitial) || f.Create == int64(policy.CreateLost) && f.Era > 0) {
			fits++ // the call may create a bucket
		}
		if fits > most {
			best, most = i, fits
		}
	}
	return best
}

// latestTime returns the latest time at which the write of version v may have been made, Unix ns.
func latestTime(sights []sight, v policy.Version) int64 {
	to := int64(math.MaxInt64)
	for _, s := range sights {
		if !s.version.Before(v) {
			to = min(to, s.at)
		}
	}
	return to
}

// undecided excludes, from the linearizability check, all calls that may come after the write of version v. The write
// was made at to at the latest. It is unknown which replica made it, or at which time of the server's clock.
func (h *bucketHistory) undecided(v policy.Version, to int64) {
	from := to
	for _, known := range h.writes {
		if known.version.Before(v) {
			continue
		}
		from = min(from, known.from)
	}
	h.cut = min(h.cut, from-int64(2*time.Second))
}

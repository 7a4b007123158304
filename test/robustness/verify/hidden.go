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
	step    int64 // of a refill's answer; 0 if it isn't known
	at      int64 // it was so at this time at the latest, Unix ns
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

// findHidden finds the writes without a known reply. Every write adds one to the index, so each of them leaves a number
// that no reply has. The bucket's last refill shows when the server made it.
func (h *bucketHistory) findHidden() {
	sights := h.sights()
	known := map[policy.Version]bool{}
	settled := map[policy.Version]int64{} // when the write before this version was made
	for _, w := range h.writes {
		known[w.version] = true
		if w.outcome.Status == policy.StatusApplied || w.outcome.Status == policy.StatusSwitched {
			settled[policy.Version{Era: w.version.Era, Index: w.version.Index - 1}] = w.outcome.Now - w.outcome.Elapsed
		}
	}
	// Every number between the lowest and the highest of an era was written.
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
			if index == e.low && index-1 > before { // the last of the era before left no trace but the number
				h.undecided(v, latestTime(sights, v))
				continue
			}
			h.reveal(v, index == e.low, sights, settled, used)
		}
		before = e.high
	}
	// A write that came just before the bucket was lost may have left no trace at all.
	for i, f := range h.refills {
		if f.Outcome == nil && !used[i] && h.effect(f.Sent-int64(time.Second), f.Replied+int64(time.Second),
			record.Lose, record.Rollback) {
			h.excused = true
		}
	}
}

// reveal adds the write of version v, whose reply is unknown.
func (h *bucketHistory) reveal(v policy.Version, first bool, sights []sight, settled map[policy.Version]int64,
	used map[int]bool) {
	w := write{version: v, to: latestTime(sights, v)}
	step := int64(math.MaxInt64) // the bucket's, after the write
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
		// A replica that was killed takes its last call with it.
		for _, f := range h.run.Faults {
			start := f.Start - int64(time.Second)
			if f.Victim != "" && start <= w.to && w.now*1000 <= f.End+int64(time.Second) {
				terms := h.anyPolicy()
				if len(h.policies) > 1 {
					break // it is unknown which policy it carried
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

// likeliest is the refill, -1 if there is none, that made write w, after which the bucket has the step: a call without
// an answer that carried the version before. Of several, one that credits the instant that the bucket has is preferred,
// then one that was made while its caller waited. The first write of an era may also come from a call that could begin
// one.
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
			fits++ // it may create a bucket
		}
		if fits > most {
			best, most = i, fits
		}
	}
	return best
}

// latestTime returns when the write of version v was made at the latest, Unix ns.
func latestTime(sights []sight, v policy.Version) int64 {
	to := int64(math.MaxInt64)
	for _, s := range sights {
		if !s.version.Before(v) {
			to = min(to, s.at)
		}
	}
	return to
}

// undecided leaves open everything that may come after the write of version v, made at to at the latest. It is unknown
// which replica made the write, or when by the server's clock.
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

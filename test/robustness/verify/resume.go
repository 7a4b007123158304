package verify

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// slowness is how many gaps between two samples are added to the time that refills may need. The samples bypass all
// faults, so their gaps show how slow the machine was.
const slowness = 8

// sampleGap returns the longest time between two samples that overlaps [from, to].
func (h *bucketHistory) sampleGap(from, to int64) time.Duration {
	gap := time.Duration(0)
	for i := 1; i < len(h.samples); i++ {
		if a, b := h.samples[i-1].Got, h.samples[i].Got; a <= to && b >= from {
			gap = max(gap, time.Duration(b-a))
		}
	}
	return gap
}

// allowed returns the time within which refills must go on after an instant.
func (h *bucketHistory) allowed(at int64) time.Duration {
	return h.run.Meta.Resume + slowness*h.sampleGap(at, at+int64(h.run.Meta.Resume))
}

// bucketBackoff is how long a replica may leave out a bucket whose refill failed while others worked.
const bucketBackoff = 5 * time.Second

func (h *bucketHistory) checkResume(r *Result) {
	byTime := slices.Clone(h.writes)
	slices.SortFunc(byTime, func(a, b write) int { return cmp.Compare(a.to, b.to) })
	for i, f := range h.faults {
		if f.End == 0 {
			continue
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
		allowed := h.allowed(f.End)
		if f.Effect == record.Forbid && f.Key == h.bucket.Key {
			allowed += bucketBackoff
		}
		if resumed > allowed && f.End+int64(allowed) < h.disturbed(f.End) && !h.fullOrGone(f.End,
			f.End+int64(allowed)) {
			r.violate(Resume, h.bucket.Key, "fault %d, %s: no refill within %s (after %s)", i, f.Name, allowed, resumed)
		}
		h.checkDuring(r, f, byTime)
		r.Gaps = append(r.Gaps, gap)
	}
}

// disturbed returns the time of the next fault after an instant, or of the last sample if there is none. If a fault
// lasts at the instant, disturbed returns the instant.
func (h *bucketHistory) disturbed(at int64) int64 {
	next := at
	if n := len(h.samples); n > 0 {
		next = h.samples[n-1].Got
	}
	for _, g := range h.run.Faults {
		if g.Start > at {
			next = min(next, g.Start)
		}
		if g.Start <= at && g.End > at {
			return at
		}
	}
	return next
}

// checkDuring requires refills during a fault that spares a replica. No other fault may last at the same time.
func (h *bucketHistory) checkDuring(r *Result, f record.Fault, byTime []write) {
	if !f.Spares || f.Effect == record.Forbid && f.Key == h.bucket.Key || !h.isolated(f) {
		return
	}
	last := f.Start
	stretch := func(to int64) {
		if allowed := h.allowed(last); time.Duration(to-last) > allowed && !h.fullOrGone(last, to) {
			r.violate(Resume, h.bucket.Key, "while %s lasted: no refill for %s, want one within %s", f.Name,
				time.Duration(to-last), allowed)
		}
	}
	for _, w := range byTime {
		if w.to > f.Start && w.to <= f.End {
			stretch(w.to)
			last = w.to
		}
	}
	stretch(f.End)
}

// isolated reports whether f was the only fault while it lasted and shortly before.
func (h *bucketHistory) isolated(f record.Fault) bool {
	return !slices.ContainsFunc(h.run.Faults, func(g record.Fault) bool {
		return (g.Name != f.Name || g.Start != f.Start) && g.Start <= f.End && g.End >= f.Start-int64(h.run.Meta.Resume)
	})
}

// fullOrGone reports whether a template's bucket was full in a span, or may not have existed. Then no replica refills
// it.
func (h *bucketHistory) fullOrGone(from, to int64) bool {
	if h.bucket.Kind != record.Refilled {
		return false
	}
	return slices.ContainsFunc(h.samples, func(s record.Sample) bool {
		if s.Got < from || s.Sent > to {
			return false
		}
		t, err := policy.DecodeTerms(s.Policy)
		return s.Missing || err != nil || s.Tokens >= t.Capacity
	})
}

// refused is what a replica logs about a bucket that it may not refill.
const refused = "bucket can't be refilled"

// checkNeighbours checks the bucket for the times in which it, or another bucket, was forbidden.
func (h *bucketHistory) checkNeighbours(r *Result) {
	for _, f := range h.run.Faults {
		if f.Effect != record.Forbid || !h.isolated(f) {
			continue
		}
		if f.Key == h.bucket.Key {
			h.checkSaidOnce(r, f)
			continue
		}
		for _, line := range h.run.Lines {
			if line.Bucket == h.bucket.Key && line.Message == refused && line.At >= f.Start && line.At <= f.End {
				r.violate(Neighbours, h.bucket.Key, "%s logs %q of this bucket, but another bucket is forbidden",
					line.Replica, refused)
			}
		}
		h.checkPace(r, f)
	}
}

// checkPace checks that refills were not slower while another bucket was forbidden than in an equally long span before.
// On a busy machine both are slow. If Redis is far away and there were too few refills before, there is nothing to
// compare with.
func (h *bucketHistory) checkPace(r *Result, f record.Fault) {
	gap, interval := h.usualGap(f.Start, f.End)
	before, _ := h.usualGap(f.Start-(f.End-f.Start), f.Start)
	if before == 0 && h.run.Meta.Distance > 0 {
		return
	}
	slow := h.sampleGap(f.Start, f.End).Microseconds()
	if most := max(interval, before, slow) * 3 / 2; gap > most {
		r.violate(Neighbours, h.bucket.Key,
			"beside a forbidden bucket half of the refills came after %dµs or more, before it after %dµs; the interval is %dµs",
			gap, before, interval)
	}
}

// fewestGaps is the smallest number of gaps for which a median is computed. With fewer gaps the median would be a
// matter of chance. A template's bucket that is full most of the time has few.
const fewestGaps = 5

// usualGap returns the median time in µs between the refills of a span, and the refill interval. Both are 0 if there
// were too few refills.
func (h *bucketHistory) usualGap(from, to int64) (gap, interval int64) {
	var gaps []int64
	var last write
	for _, w := range h.writes {
		if w.outcome == nil || w.from < from || w.to > to {
			continue
		}
		// The next call is made half an interval after the answer, so at a distance the time between two calls may be longer.
		interval = h.policies[w.outcome.Fence].Interval
		interval = max(interval, interval/2+h.run.Meta.Distance.Microseconds())
		if last.outcome != nil && !h.fullOrGone(last.to, w.from) {
			gaps = append(gaps, w.now-last.now)
		}
		last = w
	}
	if len(gaps) < fewestGaps {
		return 0, 0
	}
	slices.Sort(gaps)
	return gaps[len(gaps)/2], interval
}

// checkSaidOnce checks that no replica logs the same message about a forbidden bucket twice, and that at least one
// replica logs that it can't be refilled.
func (h *bucketHistory) checkSaidOnce(r *Result, f record.Fault) {
	said := map[string]int{}
	for _, line := range h.run.Lines {
		if line.Bucket == h.bucket.Key && line.At >= f.Start && line.At <= f.End {
			said[line.Replica+": "+line.Message]++
		}
	}
	for line, n := range said {
		if n > 1 {
			r.violate(Neighbours, h.bucket.Key, "the log has %q %d times", line, n)
		}
	}
	if !slices.ContainsFunc(h.run.Lines, func(l record.Line) bool {
		return l.Bucket == h.bucket.Key &&
			l.Message == refused
	}) {
		r.violate(Neighbours, h.bucket.Key, "no log reports that the bucket can't be refilled")
	}
}

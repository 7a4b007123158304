package fetch

import (
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// maxRuns is the most runs of equal takes in one call, so that it doesn't
// occupy the server for long.
const maxRuns = 256

// batch is what goes into one call: takes in the order of their arrival, equal
// ones that follow one another as a run.
type batch struct {
	takes []*pending
	runs  []policy.Run
	total int64
}

func (co *coalescer) newBatch() *batch { return co.batches.Get().(*batch) }

func (co *coalescer) freeBatch(b *batch) {
	clear(b.takes)
	b.takes, b.runs, b.total = b.takes[:0], b.runs[:0], 0
	co.batches.Put(b)
}

// fits reports whether a take of n tokens can join.
func (b *batch) fits(n int64) bool {
	last := len(b.runs) - 1
	return n <= policy.MaxTokens-b.total && (len(b.runs) < maxRuns || b.runs[last].N == n)
}

func (b *batch) add(p *pending) {
	b.takes = append(b.takes, p)
	b.count(p.n)
}

// count adds a take of n tokens to the runs.
func (b *batch) count(n int64) {
	b.total += n
	if last := len(b.runs) - 1; last >= 0 && b.runs[last].N == n {
		b.runs[last].Count++
		return
	}
	b.runs = append(b.runs, policy.Run{N: n, Count: 1})
}

// latest is when the last caller stops waiting; zero if never.
func (b *batch) latest() time.Time {
	latest := time.Time{}
	for i, p := range b.takes {
		if p.deadline.IsZero() {
			return time.Time{}
		}
		if i == 0 || p.deadline.After(latest) {
			latest = p.deadline
		}
	}
	return latest
}

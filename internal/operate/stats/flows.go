package stats

import (
	"cmp"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/refill"
)

const (
	// maxDivided is the number of buckets whose flows are remembered. They are the first ones in the configuration.
	// flowsKept is the number of flows that are remembered for each of them. All these flows need some 50 MB if the
	// names are long.
	maxDivided = 256
	flowsKept  = 128
	// flowSlot is the length of a slot of the history of flows. flowSlots is the number of slots: six for a minute, and
	// the slot that is not over yet.
	flowSlot  = 10 * time.Second
	flowSlots = 7
)

// Flows has the counts of a bucket's flows that this replica has read.
type Flows struct {
	Read         time.Time // the last time at which counts were read; zero before the first time
	Seen         int       // flows that are counted separately
	Listed       int       // flows that the last plan lists
	Level        float64   // tokens per second that a flow of weight 1 may have
	DeniedListed int64     // tokens that listed flows were denied
	DeniedOther  int64     // tokens that other flows were denied
}

// Flow has the rates of a flow in a period, in tokens per second.
type Flow struct {
	Name   string
	Asked  float64
	Got    float64
	Denied float64
	Listed bool // whether the plan listed the flow when it was last read
}

// FlowsOfLate has the rates of a bucket's flows in the last minute, as far as this replica has read them.
type FlowsOfLate struct {
	Covered time.Duration // the part of the minute for which this replica has read counts
	Flows   []Flow        // by the tokens that they got, the most first
	Others  Flow          // the sum of the other flows
}

// flowCount has the counts of a flow, in tokens.
type flowCount struct {
	asked, denied int64
	listed        bool
}

func (c *flowCount) add(d flowCount) {
	c.asked += d.asked
	c.denied += d.denied
}

// flowPoint has the counts of flows in a slot of time.
type flowPoint struct {
	covered time.Duration
	flows   map[string]flowCount
	others  flowCount // the flows for which there was no room
}

func (p *flowPoint) add(read *refill.FlowsRead) {
	if p.flows == nil {
		p.flows = map[string]flowCount{}
	}
	p.covered += read.Covered
	for _, f := range read.Flows {
		c := p.flows[f.Name]
		c.add(flowCount{asked: f.Asked, denied: f.Denied})
		c.listed = f.Listed
		p.flows[f.Name] = c
		if len(p.flows) > 2*flowsKept {
			p.trim()
		}
	}
}

// trim makes room. The flows that asked for the most tokens stay.
func (p *flowPoint) trim() {
	asked := make([]int64, 0, len(p.flows))
	for _, c := range p.flows {
		asked = append(asked, c.asked)
	}
	slices.SortFunc(asked, func(a, b int64) int { return cmp.Compare(b, a) })
	least, kept := asked[flowsKept-1], 0
	for _, above := range []bool{true, false} {
		for name, c := range p.flows {
			if (c.asked > least) != above {
				continue
			}
			kept++
			if kept > flowsKept {
				p.others.add(c)
				delete(p.flows, name)
			}
		}
	}
}

// remembersFlows sets whether the flows of the bucket are remembered. The caller holds the mutex.
func (b *bucket) remembersFlows(yes bool) {
	switch {
	case !yes:
		b.flows = nil
	case b.flows == nil:
		b.flows = newRing[flowPoint](flowSlot, flowSlots)
	}
}

// flowsRead applies a reading of the flows. The caller holds the mutex.
func (b *bucket) flowsRead(read *refill.FlowsRead, at time.Time) {
	b.Flows.Read = at
	b.Flows.Seen = read.Seen
	b.Flows.Listed = read.Listed
	b.Flows.Level = read.Level
	for _, f := range read.Flows {
		if f.Listed {
			b.Flows.DeniedListed += f.Denied
		} else {
			b.Flows.DeniedOther += f.Denied
		}
	}
	if b.flows != nil {
		b.flows.at(at).add(read)
	}
}

// Flows returns the rates of at most n flows of a bucket in the last minute. It returns false if this replica has read
// no flows of the bucket, or doesn't remember them.
func (t *Stats) Flows(key string, n int, now time.Time) (FlowsOfLate, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buckets[key]
	if b == nil || b.flows == nil || b.Flows.Read.IsZero() {
		return FlowsOfLate{}, false
	}
	var all flowPoint
	counts := map[string]flowCount{}
	for _, p := range b.flows.until(now) { // the oldest first
		all.covered += p.covered
		all.others.add(p.others)
		for name, c := range p.flows {
			sum := counts[name]
			sum.add(c)
			sum.listed = c.listed
			counts[name] = sum
		}
	}
	return all.rates(counts, n), true
}

// rates returns the n flows that got the most tokens, and the sum of the others.
func (p *flowPoint) rates(counts map[string]flowCount, n int) FlowsOfLate {
	names := make([]string, 0, len(counts))
	for name := range counts {
		names = append(names, name)
	}
	got := func(c flowCount) int64 { return c.asked - c.denied }
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(got(counts[b]), got(counts[a])), cmp.Compare(counts[b].asked, counts[a].asked),
			cmp.Compare(a, b))
	})
	of := func(name string, c flowCount) Flow {
		rate := func(n int64) float64 { return float64(n) / max(time.Millisecond, p.covered).Seconds() }
		return Flow{Name: name, Asked: rate(c.asked), Got: rate(got(c)), Denied: rate(c.denied), Listed: c.listed}
	}
	late := FlowsOfLate{Covered: p.covered}
	others := p.others
	for i, name := range names {
		if i < n {
			late.Flows = append(late.Flows, of(name, counts[name]))
		} else {
			others.add(counts[name])
		}
	}
	late.Others = of("", others)
	return late
}

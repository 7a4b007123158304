package fetch

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// mostFlowDenials is the largest number of flows of one bucket whose denials are remembered.
const mostFlowDenials = 10_000

// flowBlocks are the blocks of a bucket's flows.
type flowBlocks struct {
	of sync.Map // by flow
	n  atomic.Int32
}

// any reports whether any flow has a block.
func (f *flowBlocks) any() bool { return f != nil && f.n.Load() > 0 }

// add adds a flow's block, unless the flow has one already. It reports whether it added the block.
func (f *flowBlocks) add(flow string, blk *block) bool {
	_, there := f.of.LoadOrStore(flow, blk)
	if !there {
		f.n.Add(1)
	}
	return !there
}

func (f *flowBlocks) remove(flow string, blk *block) {
	if f.of.CompareAndDelete(flow, blk) {
		f.n.Add(-1)
	}
}

// blockOf returns the block from which takes for a flow are served, nil for none. A bucket without flows has one block
// for all takes.
func (b *bucket) blockOf(flow string) *block {
	if !b.known.Load().divided() {
		return b.block.Load()
	}
	parts := b.parts.Load()
	if !parts.any() {
		return nil
	}
	blk, there := parts.of.Load(flow)
	if !there {
		return nil
	}
	return blk.(*block)
}

// waitedBy reports whether callers wait for the bucket's tokens for a flow. If flow is nil, it reports whether any
// callers wait for the bucket.
func (b *bucket) waitedBy(flow *string) bool {
	if !b.waited() || flow == nil {
		return b.waited()
	}
	ls := b.lines.Load()
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return slices.ContainsFunc(ls.of, func(l *line) bool { return l.flow == *flow })
}

// flowDenials are the last denials of the flows of a bucket.
type flowDenials struct {
	mu sync.Mutex
	of map[string]*denial
}

// denial returns the remembered denial that applies to the task's flow; nil if there is none.
func (t *task) denial() *denial {
	if !t.info.divided() {
		return t.info.denied
	}
	f := t.bucket.flows.Load()
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.of[t.flow]
}

// remember records the denial of a flow.
func (f *flowDenials) remember(flow string, d *denial, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.of) >= mostFlowDenials && f.of[flow] == nil {
		f.forget(now)
	}
	f.of[flow] = d
}

// forget drops the denials that have expired. If none has expired, it drops all of them. The lock is held.
func (f *flowDenials) forget(now time.Time) {
	for flow, d := range f.of {
		if !now.Before(d.until) {
			delete(f.of, flow)
		}
	}
	if len(f.of) >= mostFlowDenials {
		clear(f.of)
	}
}

// asksByFlow reports whether takes from the task's bucket have to name their flows. They do if the bucket or its
// template has flows. If nothing is known of the bucket, they do if the caller names a flow.
func (t *task) asksByFlow(flow string) bool {
	switch k := t.kind.(type) {
	case *lazy:
		return false
	case *refilled:
		return t.info.divided() || t.info.terms == nil && k.rule.Terms.Divided
	}
	return t.info.divided() || t.info.terms == nil && flow != ""
}

// namedFlow returns the flow for which a script call of the task is made.
func (t *task) namedFlow() lua.Flow { return lua.Flow{Name: t.flow, Divided: t.asksByFlow(t.flow)} }

// payment is the part of its right that a flow paid for the tokens of a take.
type payment struct {
	flow   string
	tokens int64
}

// payment returns the payment of a flow for a take with this answer, nil if the flow paid nothing.
func (a *answer) payment(flow string) *payment {
	if a.reply.Paid == 0 || a.source.Kind == SourceFallback {
		return nil
	}
	return &payment{flow, a.reply.Paid}
}

// backOf returns the call that gives back the tokens of a take for a flow.
func backOf(reply *lua.TakeReply, i *info, flow string) lua.ReturnCall {
	return lua.ReturnCall{N: reply.Taken, Era: i.era, Flow: flow, Paid: reply.Paid}
}

// paidOf returns for how many tokens of the nth take of a run the flow paid. Each take of the run is for n tokens, and
// this take was granted. The flow paid for the first takes, as far as it had a right, and not for the later ones.
func paidOf(n int64, r lua.RunReply, nth int64) int64 {
	if nth < r.Paid/n {
		return n
	}
	return 0
}

// applyReply is like Client.remember, for a take of n tokens by the task. If the bucket has flows, it remembers a
// denial only for the task's flow.
func (t *task) applyReply(n int64, leave policy.Leave, reply *lua.TakeReply, asked time.Time) *info {
	i := t.c.remember(t.key, n, leave, reply, asked)
	if reply.OK || !i.divided() || !i.remembersDenials() {
		return i
	}
	if f := t.c.buckets.flowsOf(t.key, asked); f != nil {
		now := time.Now()
		f.remember(t.flow, newDenial(n, leave.Of(i.limit()), reply, now), now)
	}
	return i
}

// rememberFlows records the reply to takes of a divided bucket: its policy, and for each flow whether its takes were
// denied.
func (c *Client) rememberFlows(g *group, reply *lua.TakesReply, asked time.Time) *info {
	one := lua.TakeReply{OK: true, Terms: reply.Terms, Remaining: reply.Remaining, Refilled: reply.Refilled}
	i := c.remember(g.key, 0, policy.Leave{}, &one, asked)
	if reply.OK {
		return i
	}
	f := c.buckets.flowsOf(g.key, asked)
	if f == nil || !i.divided() || !i.remembersDenials() {
		return i
	}
	now := time.Now()
	smallest := map[string]int{} // by flow, the run with the smallest denied take
	for n, r := range reply.Runs {
		run := &g.runs[n]
		short := run.UpTo && r.Taken == 0 || !run.UpTo && r.Taken < run.Count
		if at, found := smallest[g.flows[n]]; short && (!found || run.N < g.runs[at].N) {
			smallest[g.flows[n]] = n
		}
	}
	for flow, n := range smallest {
		one.Wait = reply.Runs[n].Wait
		f.remember(flow, newDenial(g.runs[n].N, g.runs[n].Leave.Of(i.limit()), &one, now), now)
	}
	return i
}

// flowsOf returns the denials of a bucket's flows, so that the caller can add a denial by a call that began at asked.
// It returns nil if the bucket has got more tokens since then.
func (bs *buckets) flowsOf(key string, asked time.Time) *flowDenials {
	s := bs.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.obtain(key)
	if !asked.After(b.more) {
		return nil
	}
	f := b.flows.Load()
	if f == nil {
		f = &flowDenials{of: map[string]*denial{}}
		b.flows.Store(f)
	}
	return f
}

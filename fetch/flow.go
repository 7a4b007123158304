package fetch

import (
	"sync"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// mostFlowDenials is the most flows of a bucket whose denials are remembered.
const mostFlowDenials = 10_000

// flowDenials are the last denials of the flows of a bucket.
type flowDenials struct {
	mu sync.Mutex
	of map[string]*denial
}

// denial returns what is remembered of the last denial of a take like the task's; nil if there was none.
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
	return f.of[t.cfg.flow]
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

// forget drops the denials that are over, and all of them if there are none. The lock is held.
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

// asksByFlow reports whether takes of the task's bucket are to name their flows: the bucket has some, or nothing is
// known of it and the caller names one.
func (t *task) asksByFlow(flow string) bool {
	return t.kind == (configured{}) && (t.info.divided() || t.info.terms == nil && flow != "")
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
	if f == nil || !i.divided() {
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

// flowsOf returns the denials of a bucket's flows; nil if the bucket got more tokens since a call that began at asked.
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

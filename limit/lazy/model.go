package lazy

import "github.com/tokenrefill/refiller/limit/internal/decide"

// model computes what lazy.lua does.
type model struct {
	decide.Spacing
	capacity int64
}

func newModel(r decide.Rule) decide.Model[decide.Instant] {
	return model{decide.Spacing{Tokens: r.Args[0], Per: r.Args[1]}, r.Args[2]}
}

// Step implements decide.Model. What is stored is the instant at which the
// bucket is full.
func (m model) Step(s decide.Instant, what decide.What, n, _, now int64) (decide.Instant, decide.Outcome) {
	full := m.capacity * m.Per
	lacks := m.Ahead(s, now)
	cost := full + 1 // more than fits; n times Per could overflow
	if n <= m.capacity {
		cost = n * m.Per
	}
	o := decide.Outcome{Fits: what == decide.Return || lacks+cost <= full}
	switch {
	case what == decide.Return:
		lacks = max(0, lacks-cost)
	case what == decide.Take && o.Fits:
		lacks += cost
	case !o.Fits:
		o.Wait = m.Micros(lacks + cost - full)
	}
	o.Left, o.Reset = max(0, full-lacks)/m.Per, m.Micros(lacks)
	if o.Left < m.capacity {
		o.More = m.Micros(lacks - full + (o.Left+1)*m.Per)
	}
	switch {
	case !o.Fits || what == decide.Peek:
	case lacks == 0:
		s = decide.Instant{}
	default:
		s = decide.Instant{Base: now, Units: lacks}
	}
	return s, o
}

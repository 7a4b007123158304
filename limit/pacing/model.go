package pacing

import "github.com/tokenrefill/refiller/limit/internal/decide"

// model computes what pacing.lua does.
type model struct {
	decide.Spacing
	longest int64 // units
}

func newModel(r decide.Rule) decide.Model[decide.Instant] {
	return model{decide.Spacing{Tokens: r.Args[0], Per: r.Args[1]}, r.Args[2] * r.Args[0]}
}

// Step implements decide.Model. What is stored is the instant of the next free
// place.
func (m model) Step(s decide.Instant, what decide.What, n, _, now int64) (decide.Instant, decide.Outcome) {
	wait := m.Ahead(s, now)
	o := decide.Outcome{Fits: what == decide.Return || wait <= m.longest, Delay: m.Micros(wait)}
	switch {
	case what == decide.Take && o.Fits:
		wait += n * m.Per
		s = decide.Instant{Base: now, Units: wait}
	case !o.Fits:
		o.Wait = m.Micros(wait - m.longest)
	}
	if wait <= m.longest {
		o.Left = (m.longest-wait)/m.Per + 1
	}
	if o.Left <= m.longest/m.Per {
		o.More = m.Micros(wait - m.longest + o.Left*m.Per)
	}
	o.Reset = m.Micros(wait)
	return s, o
}

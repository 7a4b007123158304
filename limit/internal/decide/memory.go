package decide

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Model is a rule in Go: it computes what the script does. S is the state that is stored for one key. The zero value
// means that nothing is stored.
type Model[S any] interface {
	// Step answers a call at now, Unix µs. For a return, era is Outcome.Era of the take, the number of its window; 0 if it
	// isn't known. Step returns the state that is stored afterwards, which is s if the script would write nothing.
	Step(s S, what What, n, era, now int64) (after S, o Outcome)
	// Until returns the instant (Unix µs) at which the state s expires. From then on s is equivalent to the zero value.
	Until(s S) int64
}

// WithModel returns r with a model in Go that computes the same as r.Source.
func WithModel[S any](r Rule, model Model[S]) Rule {
	r.table = func() table { return &states[S]{model: model, keys: map[string]S{}, sweep: firstSweep} }
	return r
}

// Memory is the Engine that decides in the memory of this process. It is safe for concurrent use.
type Memory struct {
	rules []Rule
	now   func() time.Time

	mu     sync.Mutex
	tables []table // one for each rule
}

// NewMemory makes the Memory of one or more rules that have models. now is its clock.
func NewMemory(now func() time.Time, rules ...Rule) *Memory {
	m := &Memory{rules: rules, now: now, tables: make([]table, len(rules))}
	for i, r := range rules {
		m.tables[i] = r.table()
	}
	return m
}

// Do implements Engine.
func (m *Memory) Do(ctx context.Context, what What, n int64, ask Ask) (Outcome, error) {
	if err := ctx.Err(); err != nil {
		return Outcome{}, fmt.Errorf("limit: %w", err)
	}
	if err := m.rules[0].Check(ask.Key, n, what); err != nil {
		return Outcome{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now().UnixMicro()
	o := m.tables[0].step(ask, what, n, now)
	o.Era = m.rules[0].era(now, &o)
	return o, nil
}

// Decide implements Engine.
func (m *Memory) Decide(ctx context.Context, what What, n int64, asks ...Ask) ([]Outcome, int64, error) {
	if err := ctx.Err(); err != nil {
		return nil, 0, fmt.Errorf("limit: %w", err)
	}
	for i, r := range m.rules {
		if err := r.Check(asks[i].Key, n, what); err != nil {
			return nil, 0, err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now().UnixMicro()
	outcomes := make([]Outcome, len(m.rules))
	all := func(what What) (granted bool) {
		granted = true
		for i, t := range m.tables {
			outcomes[i] = t.step(asks[i], what, n, now)
			outcomes[i].Era = m.rules[i].era(now, &outcomes[i])
			granted = granted && outcomes[i].Fits
		}
		return granted
	}
	if granted := all(Peek); what == Return || what == Take && granted {
		all(what)
	}
	return outcomes, now, nil
}

// Reset implements Engine.
func (m *Memory) Reset(ctx context.Context, asks ...Ask) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("limit: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, r := range m.rules {
		if err := r.Check(asks[i].Key, 1, Return); err != nil {
			return err
		}
		m.tables[i].drop(asks[i].Key)
	}
	return nil
}

// Len returns the number of states held.
func (m *Memory) Len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for _, t := range m.tables {
		n += t.len()
	}
	return n
}

// table holds the states of one rule.
type table interface {
	// step answers a call at now, Unix µs, and stores what it changes.
	step(of Ask, what What, n, now int64) Outcome
	drop(key string)
	len() int
}

// states is the table of a model. Its size is proportional to the number of keys in use, because expired states are
// deleted each time the number of keys has doubled.
type states[S any] struct {
	model Model[S]
	keys  map[string]S
	sweep int // the number of keys at which expired states are dropped
}

const firstSweep = 1024

func (t *states[S]) step(of Ask, what What, n, now int64) Outcome {
	key := of.Key
	after, o := t.model.Step(t.keys[key], what, n, of.Era, now)
	if t.model.Until(after) <= now {
		delete(t.keys, key)
	} else {
		t.keys[key] = after
	}
	if len(t.keys) >= t.sweep {
		for k, s := range t.keys {
			if t.model.Until(s) <= now {
				delete(t.keys, k)
			}
		}
		t.sweep = max(firstSweep, 2*len(t.keys))
	}
	return o
}

func (t *states[S]) drop(key string) { delete(t.keys, key) }

func (t *states[S]) len() int { return len(t.keys) }

package decide

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Model is a rule in Go: it computes what the script does. S is what is stored
// for one key; its zero value means that nothing is.
type Model[S any] interface {
	// Step answers a call at now, Unix µs, and returns what is stored then and
	// the instant from which on it means nothing.
	Step(s S, what What, n, now int64) (after S, until int64, o Outcome)
}

// Memory answers for one rule from this process's memory. It is safe for
// concurrent use. Memory is bounded by the keys in use: what has expired is
// dropped when the number of keys has doubled.
type Memory[S any] struct {
	rule  Rule
	model Model[S]
	now   func() time.Time

	mu    sync.Mutex
	keys  map[string]stored[S]
	sweep int // the number of keys at which the expired are dropped
}

type stored[S any] struct {
	value S
	until int64 // Unix µs
}

const firstSweep = 1024

// NewMemory makes a Memory on the clock now.
func NewMemory[S any](rule Rule, model Model[S], now func() time.Time) *Memory[S] {
	return &Memory[S]{rule: rule, model: model, now: now, keys: map[string]stored[S]{}, sweep: firstSweep}
}

// Do implements Engine.
func (m *Memory[S]) Do(ctx context.Context, key string, what What, n int64) (Outcome, error) {
	if err := ctx.Err(); err != nil {
		return Outcome{}, fmt.Errorf("limit: %w", err)
	}
	if err := m.rule.Check(key, n, what); err != nil {
		return Outcome{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now().UnixMicro()
	s := m.keys[key]
	after, until, o := m.model.Step(s.value, what, n, now)
	switch {
	case until <= now:
		delete(m.keys, key)
	case what != Peek:
		m.keys[key] = stored[S]{after, until}
	}
	if len(m.keys) >= m.sweep {
		for k, s := range m.keys {
			if s.until <= now {
				delete(m.keys, k)
			}
		}
		m.sweep = max(firstSweep, 2*len(m.keys))
	}
	return o, nil
}

// Len is the number of keys held.
func (m *Memory[S]) Len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.keys)
}

package fetch

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// templatesEvery is how often the published templates are read while there are some and the Client is used: a change
	// is in force everywhere within a second.
	templatesEvery = 600 * time.Millisecond
	// templatesSeldom is templatesEvery while none are published.
	templatesSeldom = 2 * time.Second
	// templatesAgain is the shortest time between two readings, however many keys are unknown.
	templatesAgain = 100 * time.Millisecond
	// templatesBack is how long an earlier version must have been published to be believed: until then a failover may
	// have brought it back, and a refiller is about to publish the later one again.
	templatesBack = 5 * time.Second
)

// templates are those that a Client serves: given to it, or published by refillers and remembered here. They are read
// when a key is first asked for, and again while keys are asked for. If the published set is missing or can't be read,
// the known templates stay in force.
type templates struct {
	c     *Client
	fixed bool // given to the Client, or none: nothing is read
	start time.Time

	set atomic.Pointer[templateSet]
	due atomic.Int64 // when to read them, after start; 0: they were never read

	mu     sync.Mutex
	flight *reading  // under way; nil if none is
	ended  time.Time // when the last one ended, and how
	err    error
	id     string    // of the set
	lower  time.Time // since when an earlier version is published; zero if none is
}

// templateSet is a set with how the buckets of each template are kept.
type templateSet struct {
	*policy.Templates
	kinds map[*policy.CompiledTemplate]kind
}

// reading is one reading of the published templates.
type reading struct {
	done chan struct{} // closed when it has ended
	err  error         // then
}

func newTemplates(c *Client) *templates {
	ts := &templates{c: c, fixed: !c.config.published || c.config.templates != nil, start: time.Now()}
	ts.store(c.config.templates)
	return ts
}

func (ts *templates) store(set *policy.Templates) {
	kinds := make(map[*policy.CompiledTemplate]kind)
	for _, r := range set.All() {
		kinds[r] = kindOf(r, ts.c.nodes.crossSlot())
	}
	ts.set.Store(&templateSet{set, kinds})
}

// kind is how a key's bucket is kept as far as is known.
func (ts *templates) kind(key string) kind {
	set := ts.set.Load()
	if r := set.Of(key); r != nil {
		return set.kinds[r]
	}
	return configured{}
}

// of returns how the bucket of a task is kept. The first tasks wait for the first reading, for half of their time: if
// it takes longer, a task whose bucket is missing calls unknown. A task of a configured bucket also waits if a reading
// has been due for policyMaxAge. Otherwise it takes from a bucket that became a template's meanwhile and gives it no
// new expiry. The bucket may then expire at once and come back full.
func (ts *templates) of(t *task) kind {
	if ts.fixed {
		return ts.kind(t.key)
	}
	due, now := ts.due.Load(), int64(t.began.Sub(ts.start))
	if due == 0 || now-due >= int64(policyMaxAge) && ts.kind(t.key) == (configured{}) {
		if t.node.open(t.key) == nil {
			_ = ts.refresh(t, 2)
		}
	} else if now >= due && ts.due.CompareAndSwap(due, now+int64(templatesEvery)) {
		ts.c.life.spawn(func() { _ = ts.refresh(nil, 1) })
	}
	return ts.kind(t.key)
}

// unknown reports whether the bucket of a task, which turned out to be unknown, is of a template that was published
// since the last reading. It returns an error if the templates can't be read.
func (ts *templates) unknown(t *task) (found bool, err error) {
	if t.kind != (configured{}) || ts.fixed {
		return false, nil
	}
	ts.mu.Lock()
	fresh, err := time.Since(ts.ended) < templatesAgain && causeOf(ts.err).reach <= unfit, ts.err
	ts.mu.Unlock()
	if !fresh {
		err = ts.refresh(t, 1)
	}
	if err != nil {
		return false, fmt.Errorf("templates: %w", err)
	}
	t.kind = ts.kind(t.key)
	return t.kind != (configured{}), nil
}

// observePolicy is called with the policy of a template's bucket. If that is of a later version, so is the published
// set, and the next reading is due soon.
func (ts *templates) observePolicy(t *policy.Terms) {
	if ts.fixed || t == nil || t.Fence.Epoch <= ts.set.Load().Version() || t.Fence.Own() {
		return
	}
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if soon := max(1, ts.ended.Add(templatesAgain).Sub(ts.start)); int64(soon) < ts.due.Load() {
		ts.due.Store(int64(soon))
	}
}

// refresh reads the published templates, or waits for the reading that is under way. If a task is given, it waits for a
// part of the task's time at most.
func (ts *templates) refresh(t *task, part time.Duration) error {
	ts.mu.Lock()
	l, id := ts.flight, ts.id
	if l == nil {
		l = &reading{done: make(chan struct{})}
		ts.flight = l
		if !ts.c.life.spawn(func() { ts.read(l, id) }) {
			ts.flight, l.err = nil, ErrClosed
			close(l.done)
		}
	}
	ts.mu.Unlock()
	if t == nil {
		return nil
	}
	t.began = time.Time{}
	began := time.Now()
	if err := t.wait(l.done, part); err != nil {
		return t.distance.late(time.Since(began), err)
	}
	return l.err
}

// read makes a reading.
func (ts *templates) read(l *reading, id string) {
	t := ts.c.plain(ts.c.internalBudget(context.Background()), lua.TemplatesKey)
	set, id, err := lua.ReadTemplates(t.ctx, t, id)
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.apply(set, id, err)
	ts.flight, l.err = nil, err
	close(l.done)
}

// apply applies the result of a reading. The lock is held.
func (ts *templates) apply(set *policy.Templates, id string, err error) {
	ts.ended, ts.err = time.Now(), err
	pause := templatesEvery
	switch known := ts.set.Load(); {
	case err != nil:
	case id == "":
		pause = templatesSeldom
	case set == nil: // the one that is known
		ts.lower = time.Time{}
	case set.Version() < known.Version() && ts.lower.IsZero():
		ts.lower = ts.ended
	case set.Version() < known.Version() && ts.ended.Sub(ts.lower) < templatesBack:
	default:
		ts.store(set)
		ts.id, ts.lower = id, time.Time{}
	}
	ts.due.Store(int64(ts.ended.Add(pause).Sub(ts.start)))
}

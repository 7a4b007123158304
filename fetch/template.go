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
	// templatesEvery is how often the published templates are looked at while there are some and the Client is used: a
	// change is in force everywhere within a second.
	templatesEvery = 600 * time.Millisecond
	// templatesSeldom is templatesEvery while none are published.
	templatesSeldom = 2 * time.Second
	// templatesAgain is the shortest time between two looks, however many keys are unknown.
	templatesAgain = 100 * time.Millisecond
	// templatesBack is how long an earlier version must have been published to be believed: until then a failover may
	// have brought it back, and a refiller is about to publish the later one again.
	templatesBack = 5 * time.Second
)

// templates are those that a Client serves: given to it, or published by refillers and remembered here. They are read
// when a key is first asked for, and looked at again while keys are asked for. What is missing or can't be read leaves
// those that are known in force.
type templates struct {
	c     *Client
	fixed bool // given to the Client, or none: nothing is read
	start time.Time

	set atomic.Pointer[templateSet]
	due atomic.Int64 // when to look, after start; 0: there was no look yet

	mu     sync.Mutex
	flight *look     // under way; nil if none is
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

// look is a reading of what is published.
type look struct {
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
		kinds[r] = kindOf(r, ts.c.nodes.apart())
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

// of is how the bucket of a task is kept. The first tasks wait for the first look, for half of their time: if there are
// no templates by then, unknown says so should it matter. A task of a configured bucket also waits if a look has
// been due for policyMaxAge. Otherwise it takes from a bucket that became a template's meanwhile and gives it no new
// expiry. The bucket may then expire at once and come back full.
func (ts *templates) of(t *task) kind {
	if ts.fixed {
		return ts.kind(t.key)
	}
	due, now := ts.due.Load(), int64(t.began.Sub(ts.start))
	if due == 0 || now-due >= int64(policyMaxAge) && ts.kind(t.key) == (configured{}) {
		if t.node.open(t.key) == nil {
			_ = ts.look(t, 2)
		}
	} else if now >= due && ts.due.CompareAndSwap(due, now+int64(templatesEvery)) {
		ts.c.life.spawn(func() { _ = ts.look(nil, 1) })
	}
	return ts.kind(t.key)
}

// unknown reports whether the bucket of a task, which turned out to be unknown, is of a template that was published
// since the last look; an error if that can't be said.
func (ts *templates) unknown(t *task) (found bool, err error) {
	if t.kind != (configured{}) || ts.fixed {
		return false, nil
	}
	ts.mu.Lock()
	fresh, err := time.Since(ts.ended) < templatesAgain && !unreached(ts.err), ts.err
	ts.mu.Unlock()
	if !fresh {
		err = ts.look(t, 1)
	}
	if err != nil {
		return false, fmt.Errorf("templates: %w", err)
	}
	t.kind = ts.kind(t.key)
	return t.kind != (configured{}), nil
}

// heard is told the policy that a template's bucket has: if that is of a later version, so is the published set.
func (ts *templates) heard(t *policy.Terms) {
	if ts.fixed || t == nil || t.Fence.Epoch <= ts.set.Load().Version() || t.Fence.Own() {
		return
	}
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if soon := max(1, ts.ended.Add(templatesAgain).Sub(ts.start)); int64(soon) < ts.due.Load() {
		ts.due.Store(int64(soon))
	}
}

// look reads what is published, or waits for the look that is under way: for a part of the time of a task, if one is
// given.
func (ts *templates) look(t *task, part time.Duration) error {
	ts.mu.Lock()
	l, id := ts.flight, ts.id
	if l == nil {
		l = &look{done: make(chan struct{})}
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

// read makes a look.
func (ts *templates) read(l *look, id string) {
	t := ts.c.plain(ts.c.own(context.Background()), lua.TemplatesKey)
	set, id, err := lua.ReadTemplates(t.ctx, t, id)
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.learn(set, id, err)
	ts.flight, l.err = nil, err
	close(l.done)
}

// learn takes in what a look found. The lock is held.
func (ts *templates) learn(set *policy.Templates, id string, err error) {
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

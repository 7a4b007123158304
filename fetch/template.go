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
	// templatesEvery is the time between two readings of the published templates, while there are some and the Client is
	// used. A change is then in force in every Client within a second.
	templatesEvery = 600 * time.Millisecond
	// templatesSeldom is templatesEvery while none are published.
	templatesSeldom = 2 * time.Second
	// templatesAgain is the shortest time between two readings, however many calls are about buckets that the server
	// does not know. It does not apply after a reading that got no answer.
	templatesAgain = 100 * time.Millisecond
	// templatesBack is how long an earlier version must have been published before a Client applies it. A failover
	// of Redis may have brought the earlier version back. Then a refiller soon publishes the later version again.
	templatesBack = 5 * time.Second
)

// templates are the templates that a Client serves. They were given to it, or refillers published them. The published
// templates are read at the first call about a key, and again while there are calls. If the published set is missing or
// can't be read, the known templates stay in force.
type templates struct {
	c     *Client
	fixed bool // no published templates are read: the Client was given templates, or an option turned them off
	start time.Time

	set atomic.Pointer[templateSet]
	due atomic.Int64 // when to read them again, as a time after start; 0: they were never read

	mu     sync.Mutex
	flight *reading  // the reading under way; nil if none is
	ended  time.Time // when the last reading ended; err is its error
	err    error
	id     string    // the id of the published set
	lower  time.Time // since when an earlier version is published; zero if none is
}

// templateSet is a set of templates with the kind of the buckets of each template.
type templateSet struct {
	*policy.Templates
	kinds map[*policy.CompiledTemplate]kind
}

// reading is one reading of the published templates.
type reading struct {
	done chan struct{} // closed when the reading has ended
	err  error         // its error
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

// kind returns the kind of a key's bucket according to the known templates.
func (ts *templates) kind(key string) kind {
	set := ts.set.Load()
	if r := set.Of(key); r != nil {
		return set.kinds[r]
	}
	return configured{}
}

// of returns the kind of a task's bucket. The first tasks wait for the first reading, for half of their time at most.
// If the reading takes longer, a task whose bucket is missing calls unknown. A task of a configured bucket also waits
// if a reading has been due for policyMaxAge. If it did not wait, it might take from a bucket that has become a
// template's meanwhile, and would not extend the bucket's expiry. The bucket might then expire at once and come back
// full.
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

// unknown is called if the server does not know the bucket of a task. If the bucket is of a template that was published
// since the last reading, it returns the kind of the bucket, and nil otherwise. It returns an error if the templates
// can't be read.
func (ts *templates) unknown(t *task) (found kind, err error) {
	if t.kind != (configured{}) || ts.fixed {
		return nil, nil
	}
	ts.mu.Lock()
	fresh, err := time.Since(ts.ended) < templatesAgain && causeOf(ts.err).reach <= unfit, ts.err
	ts.mu.Unlock()
	if !fresh {
		err = ts.refresh(t, 1)
	}
	if err != nil {
		return nil, fmt.Errorf("templates: %w", err)
	}
	found = ts.kind(t.key)
	if found == (configured{}) {
		found = nil
	}
	return found, nil
}

// observePolicy is called with the policy of a template's bucket. If the version of that policy is later than that of
// the known set, a later set has been published. The next reading is then due soon.
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

// refresh reads the published templates, or waits for the reading that is under way. With a task it waits for the end
// of the reading, at most for the task's time divided by part. Without a task it doesn't wait.
func (ts *templates) refresh(t *task, part time.Duration) error {
	ts.mu.Lock()
	r, id := ts.flight, ts.id
	if r == nil {
		r = &reading{done: make(chan struct{})}
		ts.flight = r
		if !ts.c.life.spawn(func() { ts.read(r, id) }) {
			ts.flight, r.err = nil, ErrClosed
			close(r.done)
		}
	}
	ts.mu.Unlock()
	if t == nil {
		return nil
	}
	t.began = time.Time{}
	began := time.Now()
	if err := t.wait(r.done, part); err != nil {
		return t.distance.late(time.Since(began), err)
	}
	return r.err
}

// read reads the published templates, applies them and ends the reading.
func (ts *templates) read(r *reading, id string) {
	t := ts.c.plain(ts.c.internalBudget(context.Background()), lua.TemplatesKey)
	set, id, err := lua.ReadTemplates(t.ctx, t, id)
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.apply(set, id, err)
	ts.flight, r.err = nil, err
	close(r.done)
}

// apply applies the result of a reading. The lock is held.
func (ts *templates) apply(set *policy.Templates, id string, err error) {
	ts.ended, ts.err = time.Now(), err
	pause := templatesEvery
	switch known := ts.set.Load(); {
	case err != nil:
	case id == "":
		pause = templatesSeldom
	case set == nil: // the known set is the published one
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

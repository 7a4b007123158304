package fetch

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// templatesEvery is how often the published templates are looked at while there are some and the Client is used:
	// a change is in force everywhere within a second.
	templatesEvery = 600 * time.Millisecond
	// templatesSeldom is templatesEvery while none are published, or they can't be read.
	templatesSeldom = 2 * time.Second
	// templatesAgain is the shortest time between two looks, however many keys are unknown.
	templatesAgain = 100 * time.Millisecond
	// templatesLook is how long a look takes at most.
	templatesLook = time.Second
	// templatesBack is how long an earlier version must have been published to be believed: until then
	// a failover may have brought it back, and a refiller is about to publish the later one again.
	templatesBack = 5 * time.Second
)

// templates are those that a Client serves: given to it, or published by refillers and remembered here. They are read when a
// key is first asked for, and looked at again while keys are asked for. What is missing or can't be read leaves those that are
// known in force.
type templates struct {
	c     *Client
	fixed bool // given to the Client, or none: nothing is read
	start time.Time

	set atomic.Pointer[policy.Templates]
	due atomic.Int64 // when to look, after start

	mu     sync.Mutex
	flight chan struct{} // closed when the look under way has ended; nil if none is
	ended  time.Time     // the last look
	id     string        // of the set
	lower  time.Time     // since when an earlier version is published; zero if none is
}

func newTemplates(c *Client) *templates {
	ts := &templates{c: c, fixed: !c.config.published || c.config.templates != nil, start: time.Now()}
	ts.set.Store(c.config.templates)
	return ts
}

// of is the template that counts for a key; nil if none does.
func (ts *templates) of(ctx context.Context, key string) *policy.Ruled {
	if ts.fixed {
		return ts.set.Load().Of(key)
	}
	now := time.Since(ts.start)
	if due := ts.due.Load(); due == 0 {
		ts.lookFirst(ctx)
	} else if int64(now) >= due && ts.due.CompareAndSwap(due, int64(now+templatesEvery)) {
		ctx := context.WithoutCancel(ctx)
		_ = ts.c.workers.offer(func() { ts.look(ctx, templatesLook) }) // if nobody is free, the next one that is due finds somebody
	}
	return ts.set.Load().Of(key)
}

// unknown is the template of a key that turned out to be unknown, which may have been published since the last look; nil if
// there is none, or if err is another one.
func (ts *templates) unknown(ctx context.Context, key string, err error) *policy.Ruled {
	if ts.fixed || !errors.Is(err, lua.ErrUnknownBucket) {
		return nil
	}
	ts.mu.Lock()
	fresh := time.Since(ts.ended) < templatesAgain
	ts.mu.Unlock()
	if !fresh {
		ts.lookFirst(ctx)
	}
	return ts.set.Load().Of(key)
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

// lookFirst looks for somebody who has a call to make then: for no longer than half of the time that a call may take.
func (ts *templates) lookFirst(ctx context.Context) {
	patience := templatesLook
	if limit := ts.c.config.deadline; limit > 0 {
		patience = min(patience, limit/2)
	}
	if deadline, ok := ctx.Deadline(); ok {
		patience = min(patience, time.Until(deadline)/2)
	}
	ts.look(ctx, patience)
}

// look reads what is published, or waits for the look that is under way.
func (ts *templates) look(ctx context.Context, patience time.Duration) {
	// A child of ctx itself would still watch it when it is released.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	ts.mu.Lock()
	if flight := ts.flight; flight != nil {
		ts.mu.Unlock()
		select {
		case <-flight:
		case <-ctx.Done():
		}
		return
	}
	flight, id := make(chan struct{}), ts.id
	ts.flight = flight
	ts.mu.Unlock()
	set, now, err := lua.ReadTemplates(ctx, ts.c.store, id)
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.learn(set, now, err)
	ts.flight = nil
	close(flight)
}

// learn takes in what a look found. The lock is held.
func (ts *templates) learn(set *policy.Templates, id string, err error) {
	ts.ended = time.Now()
	pause := templatesEvery
	switch known := ts.set.Load(); {
	case err != nil || id == "":
		pause = templatesSeldom
	case set == nil: // the one that is known
		ts.lower = time.Time{}
	case set.Version() < known.Version() && ts.lower.IsZero():
		ts.lower = ts.ended
	case set.Version() < known.Version() && ts.ended.Sub(ts.lower) < templatesBack:
	default:
		ts.set.Store(set)
		ts.id, ts.lower = id, time.Time{}
	}
	ts.due.Store(int64(ts.ended.Add(pause).Sub(ts.start)))
}

package pool

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// term is the state of a coordinator while it leads. It remembers its offers for the whole term, even if it loses the
// connection to etcd.
type term struct {
	*Coordinator
	leadership leadership
	epoch      int64 // of the fences; once it is recorded in etcd, leadership.epoch equals it
	seq        int64 // of the last fence
	// incompleteUntil is the time until which etcd may lack grants that regions still use, as after a restore.
	// restoredUntil is the same time, but is set only if a region has shown such a grant in this term or the last one.
	// While it is set, shares have a flag for it.
	incompleteUntil, restoredUntil time.Time
	// foreignEpoch is the highest epoch of the grants that regions have shown and that etcd doesn't have.
	foreignEpoch int64
	known        policy.Fence // the latest fence in etcd or in a ticket
	revision     int64        // the highest revision that was read from etcd in this session
	lastEvent    time.Time    // when the last event arrived

	ledgers  map[string]*ledger
	order    []*ledger           // the result of byName; nil if it has to be sorted again
	seen     map[string]int64    // revisions at which the shares and epoch in etcd last changed
	removed  map[string]bool     // shares that this coordinator has removed
	dirty    map[string]bool     // regions whose share has to be written
	declared map[string]declared // of regions, by operators
	// unread has the keys whose records are unreadable or missing, so that the grants in them aren't known. The value is
	// the time at which these grants have ended; zero means that no such time is known.
	unread map[string]time.Time
	lease  time.Duration // the longest lease that any grant in etcd may have
	able   time.Time     // when etcd last accepted a write, or there was nothing to write
	logged string        // the last bad record that was logged
	large  string        // the last region whose share was too large
	closed bool          // a pool was closed because its grants had ended
}

func newTerm(c *Coordinator, l leadership) *term {
	return &term{
		Coordinator: c, leadership: l, ledgers: map[string]*ledger{}, seen: map[string]int64{}, removed: map[string]bool{},
		dirty: map[string]bool{}, declared: map[string]declared{}, able: c.now(), unread: map[string]time.Time{},
	}
}

// session reads all keys, and then applies changes and publishes shares, until a request or the watch fails.
func (t *term) session(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()

	loading, done := context.WithTimeout(ctx, t.timing.load())
	entries, revision, err := t.registry.load(loading)
	done()
	if err != nil {
		return err
	}
	if t.lastEvent.IsZero() {
		t.able = t.now()
	}
	t.lastEvent, t.revision = t.now(), revision
	t.readAll(entries, t.now())

	events := make(chan entry, 1024)
	watched := make(chan error, 1)
	wg.Go(func() { watched <- t.registry.watch(ctx, revision+1, events) })

	timer := time.NewTimer(0)
	defer timer.Stop()
	next := t.now()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-watched:
			return err
		case e := <-events:
			t.lastEvent = t.now()
			t.apply(e, true, t.lastEvent)
			for n := len(events); n > 0; n-- {
				t.apply(<-events, true, t.lastEvent)
			}
			timer.Reset(next.Sub(t.now()))
		case <-timer.C:
			began := t.now()
			t.plan(began)
			next = began.Add(min(max(pace, 10*t.now().Sub(began)), maxPace))
			if err := errors.Join(t.publish(ctx), t.listen(ctx)); err != nil {
				return err
			}
			timer.Reset(t.rest(next))
		}
	}
}

// listen checks whether etcd still has this session's history, if no event has arrived for 2.5 H. After etcd is
// restored, watches of the old history deliver nothing.
func (t *term) listen(ctx context.Context) error {
	if t.now().Sub(t.lastEvent) < t.timing.fresh() {
		return nil
	}
	t.lastEvent = t.now()
	ctx, cancel := context.WithTimeout(ctx, t.timing.request())
	defer cancel()
	_, revision, err := t.registry.load(ctx, epochKey)
	if err == nil && revision < t.revision {
		err = errRewound
	}
	return err
}

// rest returns the time until the next plan if no event arrives. The next plan is made at the instant next or later.
func (t *term) rest(next time.Time) time.Duration {
	at := next.Add(t.timing.Report)
	for _, l := range t.ledgers {
		switch {
		case l.dirty:
			at = next
		case !l.wake.IsZero() && l.wake.Before(at):
			at = l.wake
		}
	}
	if at.Before(next) {
		at = next
	}
	return at.Sub(t.now())
}

// plan makes new plans for the pools whose plans may have changed.
func (t *term) plan(now time.Time) {
	if !t.restoredUntil.IsZero() && !now.Before(t.restoredUntil) {
		t.restoredUntil = time.Time{}
		t.rewrite()
	}
	m := planInput{now, t.timing, now.Before(t.incompleteUntil), t.frozen(now), t.nextFence}
	sums := map[string]PoolSum{}
	for _, l := range t.byName() { // in the order of shares, where fences with a small difference are shorter
		if !l.dirty && (l.wake.IsZero() || l.wake.After(now)) {
			continue
		}
		doubted := l.doubted
		maps.Copy(t.dirty, l.plan(m))
		if doubted {
			t.logClosed(l)
		}
		if m.incomplete && (l.wake.IsZero() || l.wake.After(t.incompleteUntil)) {
			l.wake = t.incompleteUntil
		}
		if l.pool == nil && len(l.accounts) == 0 {
			delete(t.ledgers, l.name)
			t.order = nil
		}
		sums[l.name] = l.sum()
	}
	regions := map[string]bool{} // whether another server reports under the region's name
	for _, l := range t.ledgers {
		for region, a := range l.accounts {
			regions[region] = regions[region] || a.doubled(t.timing, now)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for region, doubled := range regions {
		r := t.regions[region]
		t.observeDoubled(region, &r, doubled)
		r.Fenced = t.declared[region] != inUse
		if r.Since.IsZero() {
			r.Since = now
		}
		t.regions[region] = r
	}
	maps.Copy(t.pools, sums)
	maps.DeleteFunc(t.pools, func(name string, _ PoolSum) bool { return t.ledgers[name] == nil })
	maps.DeleteFunc(t.regions, func(region string, _ RegionSeen) bool {
		_, known := regions[region]
		return !known
	})
}

// observeDoubled records whether another server reports under the region's name. If this has changed, the region's
// share must be written.
func (t *term) observeDoubled(region string, r *RegionSeen, doubled bool) {
	if doubled == r.OtherServer {
		return
	}
	r.OtherServer = doubled
	t.dirty[region] = true
	if doubled {
		t.log.Error("another Redis reports under the name of a region: it gets the floor only", "region", region)
	}
}

// rewrite marks all shares to be written.
func (t *term) rewrite() {
	for _, l := range t.ledgers {
		l.dirty = true
		for region := range l.accounts {
			t.dirty[region] = true
		}
	}
}

// byName returns the ledgers in the order of their names.
func (t *term) byName() []*ledger {
	if t.order == nil {
		t.order = slices.SortedFunc(maps.Values(t.ledgers), func(l, m *ledger) int { return strings.Compare(l.name, m.name) })
	}
	return t.order
}

// frozen reports whether there is a record that can't be read. The grants in such a record aren't known, so the
// coordinator can't give any rate to other regions.
func (t *term) frozen(now time.Time) bool {
	before := len(t.unread)
	maps.DeleteFunc(t.unread, func(_ string, until time.Time) bool { return !until.IsZero() && now.After(until) })
	if before > 0 && len(t.unread) == 0 {
		t.log.Info("every record can be read again", "pool-epoch", t.epoch)
		for _, l := range t.ledgers {
			l.dirty = true
		}
	}
	t.count(func(s *CoordinatorStats) { s.Unread = len(t.unread) })
	return len(t.unread) > 0
}

func (t *term) nextFence() policy.Fence {
	t.seq++
	return policy.Fence{Epoch: t.epoch, Seq: t.seq}
}

// raise makes the term's fences higher than a fence that was read, unless they already are.
func (t *term) raise(seen policy.Fence) {
	if (policy.Fence{Epoch: t.epoch, Seq: t.seq}).Before(seen) {
		t.exceed(seen.Epoch)
	}
}

// exceed makes the term's epoch higher than another one, unless it already is.
func (t *term) exceed(epoch int64) {
	if t.epoch <= epoch {
		t.epoch, t.seq = epoch+1, 0
	}
}

package pool

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"

	"github.com/tokenrefill/refiller/policy"
)

// publish records the epoch, and writes the shares of the regions that have changed. If a write fails, it is repeated
// after the records were read again. An offer counts against the pool as soon as it is planned, even if the write
// fails.
func (t *term) publish(ctx context.Context) error {
	if t.leadership.epoch != t.epoch {
		if err := t.record(ctx); err != nil {
			return err
		}
	}
	if len(t.dirty) == 0 {
		t.able = t.now()
		return nil
	}
	t.lease = max(t.lease, t.timing.Lease)
	var batch []sharing
	size := 0
	for _, region := range slices.Sorted(maps.Keys(t.dirty)) {
		w, ok := t.write(region)
		if len(w.value) > maxShareBytes {
			t.tooLarge(region, len(w.value))
			ok = false
		}
		if !ok {
			delete(t.dirty, region)
			continue
		}
		if len(batch) == maxTxnWrite || len(batch) > 0 && size+len(w.value) > maxTxnBytes {
			if err := t.commitShares(ctx, batch); err != nil {
				return err
			}
			batch, size = nil, 0
		}
		batch, size = append(batch, w), size+len(w.value)
	}
	return t.commitShares(ctx, batch)
}

// record writes the epoch, so that no later coordinator grants under a lower one.
func (t *term) record(ctx context.Context) error {
	l := t.leadership
	l.epoch = 0
	w := write{key: epochKey, value: strconv.FormatInt(t.epoch, 10), seen: t.seen[epochKey]}
	if _, unreadable := t.unread[epochKey]; unreadable {
		return errors.New("pool: the key epoch can't be read: no share is written until it is deleted")
	}
	if err := t.commit(ctx, l, []write{w}); err != nil {
		return err
	}
	t.leadership.epoch = t.epoch
	t.count(func(s *CoordinatorStats) { s.Epoch = t.epoch })
	return nil
}

// tooLarge records and logs a share that etcd would refuse. Its region keeps its grants until they end. Other regions
// are not affected.
func (t *term) tooLarge(region string, bytes int) {
	if t.large != region {
		t.large = region
		t.log.Error("share is too large for etcd and is not written", "region", region, "bytes", bytes, "most", maxShareBytes)
	}
	t.count(func(s *CoordinatorStats) { s.TooLarge++ })
}

// sharing is the write of a region's share.
type sharing struct {
	region  string
	entries []recording
	write
}

// recording is the part of a share about one pool.
type recording struct {
	l     *ledger
	a     *account
	terms []policy.Terms
}

// write returns the write that brings a region's share up to date, and false if there is nothing to write.
func (t *term) write(region string) (sharing, bool) {
	var entries []recording
	text := shareHead(t.lease)
	var rows table
	empty := len(text)
	for _, l := range t.byName() {
		if a := l.accounts[region]; a != nil {
			e := recording{l, a, a.list()}
			entries = append(entries, e)
			g := grants{terms: e.terms, demand: a.demand.units(l.unit.total), since: a.since, joined: a.joined, open: l.open,
				doubled: a.doubled(t.timing, t.now()), restored: !t.restoredUntil.IsZero()}
			text = g.append(text, &rows, l.name)
		}
	}
	key := shareKeys + region
	w := sharing{region, entries, write{key: key, seen: t.seen[key], value: string(text), remove: len(text) == empty}}
	if t.removed[key] {
		w.seen = 0
	}
	if until, ok := t.unread[key]; ok && until.IsZero() {
		return w, false // a share that can't be read must not be replaced
	}
	return w, !w.remove || w.seen > 0
}

// commitShares writes shares in one transaction.
func (t *term) commitShares(ctx context.Context, shares []sharing) error {
	if len(shares) == 0 {
		return nil
	}
	writes := make([]write, len(shares))
	for i, s := range shares {
		writes[i] = s.write
	}
	if err := t.commit(ctx, t.leadership, writes); err != nil {
		return err
	}
	for _, w := range shares {
		delete(t.dirty, w.region)
		for _, e := range w.entries { // the rates that this frees can be given to other regions
			_, before := e.a.claims(e.l.unit)
			e.a.recorded = e.terms
			_, after := e.a.claims(e.l.unit)
			e.l.dirty = e.l.dirty || after.rate < before.rate || after.capacity < before.capacity
		}
		delete(t.removed, w.key)
		if w.remove {
			t.removed[w.key] = true
		}
	}
	t.count(func(s *CoordinatorStats) { s.Writes += int64(len(writes)) })
	return nil
}

// commit makes writes if this term still leads and no other process has written the same keys.
func (t *term) commit(ctx context.Context, l leadership, writes []write) error {
	ctx, cancel := context.WithTimeout(ctx, t.timing.request())
	defer cancel()
	revision, err := t.registry.commit(ctx, l, writes)
	switch {
	case errors.Is(err, errConflict): // a write that we had given up has arrived after all
		t.count(func(s *CoordinatorStats) { s.Refused++ })
		return err
	case err != nil:
		return err
	case revision <= t.revision:
		return errRewound
	}
	for _, w := range writes {
		t.seen[w.key] = revision
	}
	t.able = t.now()
	t.count(func(s *CoordinatorStats) { s.Commits++ })
	return nil
}

package pool

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"strconv"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// unread is a key whose content, or whose absence, nothing can be concluded from.
type unread struct {
	why   error
	until time.Time // when what it may have granted has ended; zero while it is there
}

// readAll takes in everything that is in etcd.
func (t *term) readAll(entries []entry, now time.Time) {
	clear(t.seen)
	clear(t.gone)
	clear(t.declared)
	// Settings come first: they say which regions are expected to report. Shares
	// come before reports, which acknowledge them.
	order := func(e entry) int {
		return slices.IndexFunc([]string{epochKey, configKey, fenceKeys, shareKeys, reportKeys}, func(p string) bool {
			_, ok := e.under(p)
			return ok
		})
	}
	sort.SliceStable(entries, func(i, j int) bool { return order(entries[i]) < order(entries[j]) })
	t.exceed(max(t.epoch, t.office.revision)) // that of the session before, too: its record may be gone
	t.office.epoch = 0
	for key := range t.unread { // it may be gone
		if key != configKey && !slices.ContainsFunc(entries, func(e entry) bool { return e.key == key }) {
			t.learn(entry{key: key, revision: t.revision, deleted: true}, now)
		}
	}
	configured, shared := false, false
	for _, e := range entries {
		_, share := e.under(shareKeys)
		configured, shared = configured || e.key == configKey, shared || share
		if region, ok := e.under(fenceKeys); ok {
			t.failed(e, t.declare(region, e))
		} else if region, ok := e.under(reportKeys); ok {
			t.failed(e, t.hear(region, e.value, false, now))
		} else {
			t.learn(e, now)
		}
	}
	if shared && !configured {
		t.missing()
	}
	if shared && t.incompleteUntil.IsZero() {
		// If etcd was restored, a region may show no trace of what it forgot. Those that do have reported by then.
		t.incompleteUntil = now.Add(t.timing.fresh())
	}
	for _, l := range t.ledgers {
		l.dirty = true
		for region := range l.accounts {
			l.declare(region, t.declared[region])
			t.saw(region, func(r *RegionSeen) { r.Fenced = t.declared[region] != inUse })
		}
	}
}

// missing notes that the pools' settings are gone while regions hold shares. That isn't to say that there are no pools.
func (t *term) missing() {
	t.unread[configKey] = unread{why: errors.New("it is missing, and regions have shares")}
	t.log.Error("pools are missing in etcd: shares are renewed as they are, and nobody gets more", "key", configKey)
}

// learn takes in one key.
func (t *term) learn(e entry, now time.Time) {
	t.revision = max(t.revision, e.revision)
	var err error
	if region, ok := e.under(reportKeys); ok && !e.deleted {
		err = t.hear(region, e.value, true, now)
	} else if region, ok := e.under(shareKeys); ok {
		err = t.recall(region, e, now)
	} else if region, ok := e.under(fenceKeys); ok {
		err = t.redeclare(region, e)
	} else if e.key == epochKey && e.revision > t.seen[e.key] {
		err = t.recorded(e)
	} else if e.key == configKey && e.deleted {
		t.missing()
	} else if e.key == configKey {
		if err = t.configure(e.value); err == nil {
			delete(t.unread, configKey)
		} else {
			t.unread[configKey] = unread{why: err}
		}
	}
	t.failed(e, err)
}

// failed logs, once, that a record can't be read.
func (t *term) failed(e entry, err error) {
	if err != nil && t.logged != e.key+e.value {
		t.logged = e.key + e.value
		what := "record can't be read: shares are renewed as they are, and nobody gets more"
		if e.key == epochKey {
			what = "epoch can't be read: no share is written until the key is deleted"
		}
		t.log.Error(what, "key", e.key, "error", err)
	}
}

// recorded takes in an epoch of an earlier term or session, or of a write that was given up. Ours is to be higher: once
// that is recorded, writes of before that are still under way are refused.
func (t *term) recorded(e entry) error {
	t.seen[e.key], t.office.epoch = e.revision, 0
	if e.deleted {
		delete(t.seen, e.key)
		delete(t.unread, e.key)
		return nil
	}
	epoch, err := strconv.ParseInt(e.value, 10, 64)
	if err == nil && (epoch < 0 || epoch > maxEpoch) {
		err = fmt.Errorf("%w: epoch %d is out of range", ErrRecord, epoch)
	}
	if err != nil {
		t.unread[e.key] = unread{why: err}
		return err
	}
	delete(t.unread, e.key)
	t.exceed(epoch)
	return nil
}

// hear takes in a region's report: a live region's, or a record of unknown age.
func (t *term) hear(region, value string, live bool, now time.Time) error {
	r, err := decodeReport(value)
	if err != nil {
		return err
	}
	for name, ticket := range r.tickets {
		l := t.ledgers[name]
		if l == nil {
			continue
		}
		foreign := l.hear(region, ticket, live, t.timing, now)
		if isRetired(ticket.terms) && !t.known.Before(ticket.terms.Fence) {
			foreign = false // it had left the pool, and is back
		}
		if _, blind := t.unread[shareKeys+region]; foreign && !blind {
			t.foreign(region, name, l.accounts[region], now)
		}
		if ticket.kind == pooled {
			t.knows(ticket.terms.Fence)
		}
	}
	if live {
		t.saw(region, func(r *RegionSeen) { r.Heard = now })
	}
	return nil
}

// foreign notes that a region uses what was never granted here: etcd was restored or emptied, or somebody else grants
// the same pool. So others may be using what they were never granted, too, until that has ended.
func (t *term) foreign(region, pool string, a *account, now time.Time) {
	shows := a.ticket.terms
	if shows.Fence.Epoch <= t.forgotten && !shows.Granted(a.ticket.era, a.ticket.now) {
		return // a region is back after all that was forgotten has ended
	}
	t.forgotten = max(t.forgotten, shows.Fence.Epoch)
	until := now.Add(hold(max(t.lease, t.timing.Lease)))
	if until.Sub(t.incompleteUntil) > t.timing.Lease/2 {
		t.log.Error("region has a grant that etcd doesn't know of: nobody gets more for a lease", "region", region,
			"pool", pool, "fence", shows.Fence, "pool-epoch", t.epoch)
	}
	if a.acked.Epoch == t.epoch && t.epoch > 0 && shows.Fence.Epoch > t.epoch {
		t.log.Error("another coordinator grants the same pool, with another etcd or prefix", "region", region, "pool", pool)
	}
	t.doubt(until)
	t.count(func(s *CoordinatorStats) { s.Foreign++ })
}

// doubt takes etcd's history for incomplete until then, and has that recorded for the next coordinator.
func (t *term) doubt(until time.Time) {
	if t.restoredUntil.IsZero() {
		t.rewrite()
	}
	t.incompleteUntil, t.restoredUntil = until, until
}

// recall takes in a share as it is in etcd: an earlier coordinator's, or one of
// our own that arrived after it was given up.
func (t *term) recall(region string, e entry, now time.Time) error {
	if e.revision <= t.seen[e.key] {
		return nil // as we wrote it
	}
	if e.deleted {
		delete(t.seen, e.key)
		if u, ok := t.unread[e.key]; ok && u.until.IsZero() {
			u.until = now.Add(hold(max(t.lease, t.timing.Lease))) // the region may use what it was granted until then
			t.unread[e.key] = u
		}
		return nil
	}
	t.seen[e.key] = e.revision
	s, err := decodeShare(e.value)
	if err != nil {
		t.unread[e.key] = unread{why: err}
		return err
	}
	delete(t.unread, e.key)
	t.lease = max(t.lease, s.lease)
	for name, g := range s.pools {
		l := t.ledgers[name]
		if l == nil { // the pool has left the configuration
			l = newLedger(name)
			l.configure(nil)
			t.ledgers[name], t.order = l, nil
		}
		l.inherit(region, g, max(s.lease, t.timing.Lease), now)
		l.declare(region, t.declared[region])
		t.knows(g.terms[0].Fence)
		if g.restored && t.restoredUntil.IsZero() {
			t.doubt(now.Add(hold(max(t.lease, t.timing.Lease))))
		}
	}
	return nil
}

// knows takes in a fence that is in etcd or that a ticket shows.
func (t *term) knows(f policy.Fence) {
	if t.raise(f); t.known.Before(f) {
		t.known = f
	}
}

// declare takes in what an operator has declared of a region, and tells nobody yet.
func (t *term) declare(region string, e entry) error {
	to := inUse
	if !e.deleted {
		f, err := decodeFencing(e.value)
		if err != nil {
			t.unread[e.key] = unread{why: err}
			return err
		}
		to = f.declared()
	}
	delete(t.unread, e.key)
	t.declared[region] = to
	return nil
}

// redeclare takes in a change of what an operator has declared.
func (t *term) redeclare(region string, e entry) error {
	before := t.declared[region]
	if err := t.declare(region, e); err != nil || t.declared[region] == before {
		return err
	}
	for _, l := range t.ledgers {
		l.declare(region, t.declared[region])
	}
	t.saw(region, func(r *RegionSeen) { r.Fenced = t.declared[region] != inUse })
	t.log.Warn("operator fence", "region", region, "fenced", t.declared[region] == fenced,
		"drained", t.declared[region] == draining, "pool-epoch", t.epoch)
	return nil
}

func (t *term) configure(value string) error {
	s, err := decodeSettings(value)
	if err != nil {
		return err
	}
	configured := map[string]*Pool{}
	for i, p := range s.Pools {
		configured[p.Name] = &s.Pools[i]
		if t.ledgers[p.Name] == nil {
			t.ledgers[p.Name], t.order = newLedger(p.Name), nil
		}
	}
	for name, l := range t.ledgers {
		l.configure(configured[name])
		for region := range l.accounts {
			l.declare(region, t.declared[region])
			t.saw(region, func(*RegionSeen) {})
		}
	}
	t.log.Info("pools in force", "version", s.Version, "pools", len(s.Pools), "pool-epoch", t.epoch)
	return nil
}

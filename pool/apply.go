package pool

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// readAll applies everything that is in etcd.
func (t *term) readAll(entries []entry, now time.Time) {
	first := len(t.ledgers) == 0
	clear(t.seen)
	clear(t.removed)
	clear(t.declared)
	// Settings come before shares and reports, because they name the regions that are expected to report. Shares come
	// before reports, because reports acknowledge shares.
	order := func(e entry) int {
		return slices.IndexFunc([]string{epochKey, configKey, fenceKeys, shareKeys, reportKeys}, func(p string) bool {
			_, ok := e.under(p)
			return ok
		})
	}
	slices.SortStableFunc(entries, func(x, y entry) int { return order(x) - order(y) })
	t.exceed(max(t.epoch, t.leadership.revision)) // t.epoch is that of the session before, whose record may be lost
	t.leadership.epoch = 0
	for key := range t.unread { // an unreadable record may have been removed
		if key != configKey && !slices.ContainsFunc(entries, func(e entry) bool { return e.key == key }) {
			t.apply(entry{key: key, revision: t.revision, deleted: true}, false, now)
		}
	}
	configured, shared := false, false
	for _, e := range entries {
		_, share := e.under(shareKeys)
		configured, shared = configured || e.key == configKey, shared || share
		t.apply(e, false, now)
	}
	if shared && !configured {
		t.settingsMissing()
	}
	if shared && t.incompleteUntil.IsZero() {
		// If etcd was restored, it may have lost grants. Regions that hold such grants report within this time.
		t.incompleteUntil = now.Add(t.timing.fresh())
	}
	for _, l := range t.ledgers {
		l.dirty = true
		for region := range l.accounts {
			l.declare(region, t.declared[region])
			if first && l.open {
				t.expectShare(region, now)
			}
		}
	}
}

// expectShare handles a region whose share is missing although its pool lends. An earlier coordinator wrote a share,
// unless the region has never reported. So the missing share counts as an unreadable one, until every grant that it may
// have had has ended.
func (t *term) expectShare(region string, now time.Time) {
	key := shareKeys + region
	_, unread := t.unread[key]
	if !unread && t.seen[key] == 0 && t.declared[region] != fenced {
		t.unread[key] = t.ended(now)
		t.log.Warn("share is missing: no region gets more until it would have ended", "region", region)
	}
}

// settingsMissing records that the settings of the pools are missing in etcd. They count as unreadable, because regions
// have shares: missing settings don't mean that there are no pools.
func (t *term) settingsMissing() {
	t.unread[configKey] = time.Time{}
	t.log.Error("pools are missing in etcd: shares are renewed as they are, and no region gets more", "key", configKey)
}

// apply applies an entry. If change is false, the entry was read together with all others.
func (t *term) apply(e entry, change bool, now time.Time) {
	t.revision = max(t.revision, e.revision)
	var err error
	region, isReport := e.under(reportKeys)
	if isReport && !e.deleted {
		err = t.applyReport(region, e.value, change, now)
	} else if region, ok := e.under(shareKeys); ok {
		err = t.applyShare(region, e, now)
	} else if region, ok := e.under(fenceKeys); ok {
		err = t.applyFencing(region, e, change)
	} else if e.key == epochKey && e.revision > t.seen[e.key] {
		err = t.applyEpoch(e)
	} else if e.key == configKey && e.deleted {
		t.settingsMissing()
	} else if e.key == configKey {
		err = t.applySettings(e.value)
	}
	if err != nil && !isReport { // a region whose report can't be read counts as silent
		t.unread[e.key] = time.Time{}
	}
	if err != nil && t.logged != e.key+e.value {
		t.logged = e.key + e.value
		what := "record can't be read: shares are renewed as they are, and no region gets more"
		if e.key == epochKey {
			what = "epoch can't be read: no share is written until the key is deleted"
		}
		t.log.Error(what, "key", e.key, "error", err)
	}
}

// applyEpoch applies the epoch in etcd. An earlier term or session wrote it, or a write of ours that was given up. This
// term's epoch must be higher. Once the higher epoch is recorded, etcd refuses earlier writes that are still under way.
func (t *term) applyEpoch(e entry) error {
	t.seen[e.key], t.leadership.epoch = e.revision, 0
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
		return err
	}
	delete(t.unread, e.key)
	t.exceed(epoch)
	return nil
}

// applyReport applies a region's report. If live is set, the region has just written it. Otherwise its age is unknown.
func (t *term) applyReport(region, value string, live bool, now time.Time) error {
	r, err := decodeReport(value)
	if err != nil {
		return err
	}
	for name, ticket := range r.tickets {
		l := t.ledgers[name]
		if l == nil || !ticket.timed() {
			continue
		}
		foreign := l.applyTicket(region, ticket, live, t.timing, now)
		if isRetired(ticket.terms) && !t.known.Before(ticket.terms.Fence) {
			foreign = false // the region had left the pool and is back
		}
		if _, blind := t.unread[shareKeys+region]; foreign && !blind {
			t.recordForeign(region, name, l.accounts[region], now)
		}
		if ticket.kind == pooled {
			t.recordFence(ticket.terms.Fence)
		}
	}
	if live {
		t.recordReported(region, now)
	}
	return nil
}

// recordForeign records that a region shows a grant that this coordinator doesn't know. Either etcd was restored or
// emptied, or another coordinator grants the same pool. Other regions may hold such grants, too, until they end.
func (t *term) recordForeign(region, pool string, a *account, now time.Time) {
	shows := a.ticket.terms
	if shows.Fence.Epoch <= t.foreignEpoch && !shows.Granted(a.ticket.era, a.ticket.now) {
		return // the region is back after every forgotten grant has ended
	}
	t.foreignEpoch = max(t.foreignEpoch, shows.Fence.Epoch)
	until := t.ended(now)
	if until.Sub(t.incompleteUntil) > t.timing.Lease/2 {
		t.log.Error("region has a grant that etcd doesn't know of: no region gets more for a lease", "region", region,
			"pool", pool, "fence", shows.Fence, "pool-epoch", t.epoch)
	}
	if a.acked.Epoch == t.epoch && t.epoch > 0 && shows.Fence.Epoch > t.epoch {
		t.log.Error("another coordinator grants the same pool, with another etcd or prefix", "region", region, "pool", pool)
	}
	t.assumeRestored(until)
	t.count(func(s *CoordinatorStats) { s.Foreign++ })
}

// assumeRestored makes the coordinator assume, up to the instant until, that etcd lacks grants that are in force.
// Shares have a flag for this in the meantime, so that the next coordinator assumes it, too.
func (t *term) assumeRestored(until time.Time) {
	if t.restoredUntil.IsZero() {
		t.rewrite()
	}
	t.incompleteUntil, t.restoredUntil = until, until
}

// ended returns the time at which every grant that was made before now has ended.
func (t *term) ended(now time.Time) time.Time { return now.Add(hold(max(t.lease, t.timing.Lease))) }

// applyShare applies a share in etcd. An earlier coordinator wrote it, or a write of ours that was given up.
func (t *term) applyShare(region string, e entry, now time.Time) error {
	if e.revision <= t.seen[e.key] {
		return nil // this coordinator wrote it
	}
	if e.deleted {
		delete(t.seen, e.key)
		if until, ok := t.unread[e.key]; ok && until.IsZero() {
			t.unread[e.key] = t.ended(now) // the region may use its grants until then
		}
		return nil
	}
	t.seen[e.key] = e.revision
	s, err := decodeShare(e.value)
	if err != nil {
		return err
	}
	delete(t.unread, e.key)
	t.lease = max(t.lease, s.lease)
	for name, g := range s.pools {
		l := t.ledgers[name]
		if l == nil { // the pool was removed from the configuration
			l = newLedger(name)
			l.configure(nil)
			t.ledgers[name], t.order = l, nil
		}
		l.inherit(region, g, max(s.lease, t.timing.Lease), now)
		l.declare(region, t.declared[region])
		t.recordFence(g.terms[0].Fence)
		if g.restored && t.restoredUntil.IsZero() {
			t.assumeRestored(t.ended(now))
		}
	}
	return nil
}

// recordFence records a fence that is in etcd or that a ticket shows.
func (t *term) recordFence(f policy.Fence) {
	t.raise(f)
	if t.known.Before(f) {
		t.known = f
	}
}

// applyFencing applies an operator's declaration about a region and passes a change to the ledgers.
func (t *term) applyFencing(region string, e entry, change bool) error {
	to := inUse
	if !e.deleted {
		f, err := decodeFencing(e.value)
		if err != nil {
			return err
		}
		to = f.declared()
	}
	delete(t.unread, e.key)
	before := t.declared[region]
	t.declared[region] = to
	if !change || to == before {
		return nil
	}
	for _, l := range t.ledgers {
		l.declare(region, to)
	}
	t.log.Warn("operator fence", "region", region, "fenced", to == fenced, "drained", to == draining, "pool-epoch",
		t.epoch)
	return nil
}

// applySettings applies the settings in etcd.
func (t *term) applySettings(value string) error {
	s, err := decodeSettings(value)
	if err != nil {
		return err
	}
	delete(t.unread, configKey)
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
		}
	}
	t.log.Info("pools in force", "version", s.Version, "pools", len(s.Pools), "pool-epoch", t.epoch)
	return nil
}

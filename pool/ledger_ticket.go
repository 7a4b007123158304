package pool

import (
	"slices"
	"time"
)

// applyTicket applies a region's ticket at our time now. If live is set, the region has just written the ticket.
// Otherwise its age is unknown. applyTicket reports whether the ticket is foreign: it shows a grant that this etcd
// doesn't know.
//
// The order of the steps is the safety argument:
//
//  1. Tickets of a server that isn't the region's are ignored.
//  2. A ticket of a later era voids all offers that were made to earlier eras.
//  3. An acknowledgement is applied even if a later ticket was applied before, because it stays true.
//  4. Everything else in an older ticket is out of date.
//  5. Terms that the bucket has in force without an offer count against the pool.
func (l *ledger) applyTicket(region string, t ticket, live bool, timing Timing, now time.Time) (foreign bool) {
	a := l.accounts[region]
	if a == nil && live && l.readmits(t) {
		a = l.account(region)
	}
	if a == nil || !a.recognise(t, live, timing, now) {
		return false
	}
	l.voidOffers(a, t.era)
	acknowledged := l.acknowledge(a, t, now)
	if a.isAsNewAs(t) {
		return false
	}
	a.shown = nil
	if !acknowledged && t.kind != absent {
		foreign = l.isForeign(region, a, t)
		a.shown = claimOf(t, foreign, timing, now)
	}
	if live {
		l.continues(a, t)
	}
	if live || !a.reported.IsZero() {
		a.recordLive(timing, now)
	}
	a.observe(t, l.unit, timing, l.short(timing, now))
	a.ticket = t
	a.taken = now
	l.dirty = true
	return foreign
}

// readmits reports whether a region without an account gets one again because of its ticket. Such a region was fenced
// and removed from the pool, and still has a grant. The grant counts against the pool until the region has acknowledged
// that it must use nothing.
func (l *ledger) readmits(t ticket) bool {
	return l.pool != nil && t.kind == pooled && t.terms.Fence.Epoch > 0 && !isRetired(t.terms)
}

// voidOffers voids the offers that were made to eras before this one.
func (l *ledger) voidOffers(a *account, era int64) {
	for i := range a.offers {
		o := &a.offers[i]
		if era > o.terms.GrantEra && !o.void {
			o.void = true
			l.dirty = true
		}
	}
}

// isAsNewAs reports whether the account has a ticket of the same era that is at least as late as this one.
func (a *account) isAsNewAs(t ticket) bool {
	return !a.taken.IsZero() && t.era == a.ticket.era && t.now <= a.ticket.now
}

// isForeign reports whether a ticket shows a grant of the pool that is later than every offer. The ticket must not
// acknowledge an offer.
func (l *ledger) isForeign(region string, a *account, t ticket) bool {
	_, member := l.parts[region]
	later := a.newestFence().Before(t.terms.Fence) || t.terms.GrantEnd > a.lastEnd
	return member && t.kind == pooled && a.declared != fenced && later
}

// claimOf returns the claim of a bucket whose ticket shows terms that were not offered. The coordinator that made a
// foreign grant may renew it, so a foreign grant counts for at least a lease.
func claimOf(t ticket, foreign bool, timing Timing, now time.Time) *offer {
	left := time.Duration(t.terms.GrantEnd-t.now) * time.Microsecond
	if foreign {
		left = max(left, timing.Lease)
	}
	return &offer{terms: t.terms, until: now.Add(hold(left)), void: t.kind == plain || left <= 0}
}

// recordLive records that the region is live. The region's report arrived as a change, or an earlier one did. If the
// region was silent, it could not receive its offers, so its time to apply them begins again.
func (a *account) recordLive(timing Timing, now time.Time) {
	if !a.live(timing, now) && !a.waiting.IsZero() {
		a.waiting = now
	}
	a.reported = now
}

// recognise reports whether a ticket is from the server that the region's grants are for. There are two such cases:
//
//   - The ticket has the known era.
//   - The ticket has a higher era, or none, and its agent has read the known era from its own Redis before.
//
// Any other ticket may be from a second server under the region's name. It is accepted after the grants of the known
// era have ended.
func (a *account) recognise(t ticket, live bool, timing Timing, now time.Time) bool {
	follows := t.before == a.era && (t.era == 0 || t.era > a.era)
	if t.era != a.era && !follows && !a.eraAt.IsZero() && now.Sub(a.eraAt) < hold(timing.Lease) {
		if live {
			a.other.extend(now, timing.Lease)
		}
		return false
	}
	if t.era != 0 && t.era != a.era {
		a.era, a.other = t.era, stretch{}
	}
	if a.era != 0 {
		a.eraAt = now
	}
	return true
}

// stretch is a time in which an event was repeated.
type stretch struct{ first, last time.Time }

// extend extends the stretch to now. If no event came for longer than gap, it begins another stretch.
func (s *stretch) extend(now time.Time, gap time.Duration) {
	if now.Sub(s.last) > gap {
		s.first = now
	}
	s.last = now
}

// lasts reports whether the stretch is longer than least and has not ended.
func (s *stretch) lasts(now time.Time, least, gap time.Duration) bool {
	return now.Sub(s.last) <= gap && s.last.Sub(s.first) > least
}

// doubled reports whether tickets arrive from a server other than the one that the region's grants are for.
func (a *account) doubled(timing Timing, now time.Time) bool {
	return a.other.lasts(now, timing.fresh(), timing.Lease)
}

// acknowledge drops the offers that are older than the one that the ticket shows in force. It returns false, and drops
// none, if the terms of the ticket are not those of an offer.
func (l *ledger) acknowledge(a *account, t ticket, now time.Time) bool {
	i := slices.IndexFunc(a.offers, func(o offer) bool { return t.acknowledges(o.terms) })
	if i < 0 {
		return false
	}
	if a.acked.Before(t.terms.Fence) {
		a.acked, a.waiting = t.terms.Fence, now
	}
	if i == 0 {
		a.waiting = time.Time{}
	}
	l.dirty = l.dirty || !a.joined || i < len(a.offers)-1
	a.offers, a.joined = a.offers[:i+1], a.joined || !a.offers[i].old
	return true
}

// observe updates the demand by the time since the last sample, unless that time is too short.
func (a *account) observe(t ticket, u unit, timing Timing, short bool) {
	s := a.sample
	elapsed, goesOn := t.since(s)
	switch {
	case !goesOn:
		a.sample = t
	case elapsed >= timing.Report/2:
		a.sample = t
		perUnit := float64(u.micros) / float64(elapsed.Microseconds())
		a.demand.observe(float64(t.taken(s))*perUnit, float64(t.denied-s.denied)*perUnit, float64(u.total), elapsed, short)
	}
}

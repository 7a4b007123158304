package pool

import (
	"maps"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// planInput is the input of a plan beside the ledger.
type planInput struct {
	now    time.Time
	timing Timing
	// incomplete reports that etcd may have lost records, so that rates which no region claims here may still be in use.
	// Then no region gets more than its own ticket shows in force.
	incomplete bool
	frozen     bool                // a record that a plan needs can't be read
	nextFence  func() policy.Fence // gives each offer its place in the order
}

// member is a live region at one round of planning.
type member struct {
	region string
	*account
	p      part
	claim        // grow adds free units to its rate
	most   int64 // the most that the region may get now
	want   int64 // the rate that allocation gives it
	target int64 // the part of want that it can get now
}

// plan decides what each region is offered now, and returns the regions whose share is to be written.
func (l *ledger) plan(m planInput) (changed map[string]bool) {
	l.dirty, l.wake = false, time.Time{}
	switch {
	case l.doubted:
		return l.judge(m)
	case m.frozen:
		return l.renew(m)
	}
	changed = l.settle(m)
	if l.pool != nil && !l.open && len(l.waits()) == 0 {
		l.open = true
		for region := range l.accounts {
			changed[region] = true
		}
	}
	live, free, room, rest := l.survey(m)
	if len(live) > 0 {
		l.aim(live, rest)
		l.grow(live, free)
	}
	overfull := room < 0
	for _, s := range live {
		capacity := min(s.p.burst, s.capacity+max(0, room))
		if (m.incomplete || overfull) && s.ticket.kind == pooled { // another region may have the rate that it has given up
			capacity = min(capacity, s.ticket.terms.Capacity)
		}
		room -= max(0, capacity-s.capacity)
		if t, ok := l.offer(s, capacity, m.timing); ok {
			s.give(t, m)
			changed[s.region] = true
			l.wakeFor(s.account, m)
		}
	}
	return changed
}

// give offers the region terms in answer to its last report.
func (a *account) give(t policy.Terms, m planInput) {
	t.Fence = m.nextFence()
	a.add(offer{terms: t, until: a.reported.Add(hold(m.timing.Lease))}, m.now)
}

// settle brings the accounts up to date: it removes offers that have ended, regions that have left, and records that
// etcd no longer needs.
func (l *ledger) settle(m planInput) (changed map[string]bool) {
	changed = map[string]bool{}
	for region, a := range l.accounts {
		_, configured := l.parts[region]
		a.lapse(m.now)
		if !configured && a.finished(l.unit) {
			delete(l.accounts, region)
			changed[region] = true
			continue
		}
		retired := (!configured || a.declared != inUse) && l.retire(a, m, configured)
		c, recorded := a.claims(l.unit)
		if retired || c.rate < recorded.rate || c.floor < recorded.floor || c.capacity < recorded.capacity {
			changed[region] = true
		}
		l.wakeFor(a, m)
	}
	return changed
}

// survey returns the live regions, and the rate and the capacity that are free now. rest is the rate that the live
// regions will share in the end.
func (l *ledger) survey(m planInput) (live []member, free, room, rest int64) {
	free, rest = l.unit.total, l.unit.total
	if l.pool != nil {
		room = l.pool.Capacity
	}
	for _, region := range slices.Sorted(maps.Keys(l.accounts)) {
		a := l.accounts[region]
		p, configured := l.parts[region]
		reserves := configured && !a.left() // its floor, whatever happens
		c, recorded := a.claims(l.unit)
		counted := claim{rate: max(c.rate, recorded.rate), capacity: max(c.capacity, recorded.capacity)}
		if reserves && !a.joined {
			counted.rate, counted.capacity = max(counted.rate, l.reserved(p)), max(counted.capacity, p.burst)
			rest -= l.reserved(p) - p.floor
		}
		alive := a.live(m.timing, m.now)
		a.floor = max(a.floor, p.floor)
		if alive {
			a.floor = p.floor
		} else if reserves {
			// It may have acknowledged such a floor to a coordinator whose records a restored etcd has lost.
			counted.rate = max(counted.rate, a.floor)
		}
		free, room = free-counted.rate, room-counted.capacity
		switch {
		case !reserves:
		case alive && a.declared == inUse:
			live = append(live, member{region: region, account: a, p: p, claim: a.keeps(l.unit)})
		default:
			rest -= max(p.floor, c.floor)
		}
	}
	// The reservations for regions that have acknowledged nothing are their own, if all reservations fit together.
	floors := int64(0)
	for i := range live {
		s := &live[i]
		floors += s.p.floor
		if !s.joined && free >= 0 {
			s.rate = max(s.rate, s.p.floor)
		}
		if !s.joined && room >= 0 {
			s.capacity = max(s.capacity, s.p.burst)
		}
		s.most = l.most(*s, m, m.incomplete || free < 0)
	}
	return live, free, room, max(rest, floors)
}

// reserved returns the rate that a region may be using if it has acknowledged nothing here. That is the floor in its
// file or, in a pool that lends already, its part by weight.
func (l *ledger) reserved(p part) int64 {
	if !l.open {
		return p.floor
	}
	return max(p.floor, p.fair)
}

// most returns the most that a live region may get now. unknown reports that the rates in use aren't known, because
// etcd may have lost records, or because the records add up to more than the pool has. Then a region may get no more
// than its own ticket shows in force.
func (l *ledger) most(s member, m planInput, unknown bool) int64 {
	most := l.unit.total
	if s.p.ceiling > 0 {
		most = s.p.ceiling
	}
	if !l.open || !s.joined || s.ticket.era == 0 || s.stuck(m.timing, m.now) || unknown && s.ticket.kind != pooled {
		most = max(1, s.p.floor)
	}
	if unknown && s.ticket.kind == pooled {
		// The floor may be that of an older configuration, which etcd has gone back to.
		most = min(most, s.ticket.rate(l.unit))
	}
	return most
}

// renew is the plan while a record that a plan needs can't be read: a live region keeps its rate as long as no other
// region can have got it, no region gets more, and nothing is taken away.
func (l *ledger) renew(m planInput) (changed map[string]bool) {
	changed = map[string]bool{}
	for _, region := range slices.Sorted(maps.Keys(l.accounts)) {
		a := l.accounts[region]
		a.lapse(m.now)
		if len(a.offers) > 0 && a.declared == inUse && a.live(m.timing, m.now) {
			newest, ticket := a.offers[0], a.ticket
			t := newest.terms
			t.GrantEnd = ticket.now + m.timing.Lease.Microseconds()
			inForce := !newest.void && t.GrantEra != 0 && t.GrantEra == ticket.era
			within := !m.incomplete || t.GrantTokens <= max(t.Tokens, ticket.rate(unit{policy.MaxTokens, t.Per}))
			if inForce && within && t.GrantEnd-newest.terms.GrantEnd >= (m.timing.Report/2).Microseconds() {
				a.give(t, m)
				changed[region] = true
			}
		}
		l.wakeFor(a, m)
	}
	return changed
}

// wakeFor records when the account changes by the passing of time alone.
func (l *ledger) wakeFor(a *account, m planInput) {
	wakeAt := func(at time.Time) {
		if at.After(m.now) && (l.wake.IsZero() || at.Before(l.wake)) {
			l.wake = at
		}
	}
	if !a.reported.IsZero() {
		wakeAt(a.reported.Add(m.timing.fresh()))
	}
	if !a.waiting.IsZero() {
		wakeAt(a.waiting.Add(m.timing.Lease / 2))
	}
	for _, o := range a.offers {
		if !o.void {
			wakeAt(o.until)
		}
	}
	if a.shown != nil && !a.shown.void {
		wakeAt(a.shown.until)
	}
}

// retire offers the region nothing. If the region is fenced, it claims nothing from then on. If it is drained, or was
// removed from the configuration, it claims what it had until it has acknowledged that.
func (l *ledger) retire(a *account, m planInput, configured bool) (changed bool) {
	if t := a.newest(); t == nil || !isRetired(*t) || a.outranked() || configured && !a.asked() {
		a.give(l.terms(0, 0, 1), m)
		changed = true
	}
	if a.declared == fenced && len(a.offers) > 1 {
		a.offers = a.offers[:1]
		changed = true
	}
	return changed
}

// aim sets the rates that the live regions should have. They share rest.
func (l *ledger) aim(live []member, rest int64) {
	claimants := make([]policy.Claimant, len(live))
	for i, s := range live {
		wants := s.granted(l.unit)
		if s.demand.known {
			wants = s.demand.units(l.unit.total)
		}
		claimants[i] = s.p.claimant(s.region, wants, max(1, s.most))
	}
	targets := policy.Allocate(max(0, rest), claimants)
	// If no region needs a change, a write isn't worth it, and each region keeps its grant.
	still, idle := true, max(0, rest)
	for i, s := range live {
		now := s.granted(l.unit)
		more := targets[i] - now
		idle -= now
		still = still && now >= s.p.floor && now <= s.most &&
			max(more, -more) < l.unit.total/100 && (!s.demand.starved || more <= l.unit.total/1000)
	}
	still = still && idle >= 0 && idle <= l.unit.total/1000
	for i := range live {
		s := &live[i]
		s.want = targets[i]
		if still {
			s.want = s.granted(l.unit)
		}
		s.want = min(s.want, s.most)
	}
}

// grow sets the targets to the rates that the regions can get now. A region keeps the rate that it claims. More comes
// from the free rate, which no region claims: first the floors, and then the rest.
func (l *ledger) grow(live []member, free int64) {
	for _, most := range []func(member) int64{
		func(s member) int64 { return min(s.want, s.p.floor) },
		func(s member) int64 { return s.want },
	} {
		if free <= 0 {
			break
		}
		needs := make([]policy.Bounds, len(live))
		for i, s := range live {
			needs[i] = policy.Bounds{Name: s.region, Weight: s.p.weight, Most: max(0, most(s)-s.rate)}
		}
		for i, n := range policy.MaxMin(free, needs) {
			live[i].rate += n
			free -= n
		}
	}
	for i := range live {
		live[i].target = min(live[i].want, live[i].rate)
	}
}

// offer returns the terms to offer to the region. It returns false if they aren't worth a write.
func (l *ledger) offer(s member, capacity int64, timing Timing) (policy.Terms, bool) {
	old := s.newest()
	rate, granted := s.target, s.granted(l.unit)
	if capacity < 1 {
		return policy.Terms{}, false // another region's capacity isn't free yet
	}
	if more := rate - granted; old != nil && more > 0 && more < l.unit.total/100 && more < s.want-rate {
		rate = granted // most of the difference isn't free yet
	}
	t := l.terms(rate, min(s.p.floor, rate), capacity)
	t.GrantEra = s.ticket.era
	if t.GrantEra != 0 {
		t.GrantEnd = s.ticket.now + timing.Lease.Microseconds()
	}
	if !s.asked() || s.outranked() {
		return t, true
	}
	like := *old
	like.Fence, like.GrantEnd = t.Fence, t.GrantEnd
	renewal := t.GrantEnd-old.GrantEnd >= (timing.Report / 2).Microseconds()
	return t, like != t || t.GrantEra != 0 && renewal
}

package pool

import (
	"maps"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// planInput has the arguments of a plan.
type planInput struct {
	now    time.Time
	timing Timing
	// incomplete reports that etcd may have lost records. Then rates that no region claims here may still be in use, and
	// no region gets more than its own ticket shows in force.
	incomplete bool
	frozen     bool                // a record that a plan needs can't be read
	nextFence  func() policy.Fence // returns the fence of the next offer
}

// member is a live region at one round of planning.
type member struct {
	region string
	*account
	p      part
	claim        // the units that the region may be offered again; grow adds free units to its rate
	most   int64 // the highest rate that the region may get now
	want   int64 // the rate that allocation gives it
	target int64 // the part of want that it can get now
}

// plan makes new offers to the regions, and returns the regions whose shares must be written.
func (l *ledger) plan(m planInput) (changed map[string]bool) {
	l.dirty, l.wake = false, time.Time{}
	switch {
	case l.doubted:
		return l.planDoubted(m)
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
		if (m.incomplete || overfull) && s.ticket.kind == pooled { // another region may have what it has given up
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

// give adds an offer with these terms, which answers the region's last report.
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
		reserves := configured && !a.left() // the region's floor is reserved, even if it doesn't report
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
			// The region may have acknowledged this floor to a coordinator, and a restored etcd may have lost the record.
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
	// A region that has acknowledged nothing may be offered its floor and burst, unless the claims of all regions exceed
	// the pool.
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

// reserved returns the rate that a region may be using if it has acknowledged no offer of this pool. That is the floor
// in its file. In a pool that lends already, it is at least the region's part by weight.
func (l *ledger) reserved(p part) int64 {
	if !l.open {
		return p.floor
	}
	return max(p.floor, p.fair)
}

// most returns the highest rate that a live region may get now. unknown reports that the rates in use aren't known:
// etcd may have lost records, or the records add up to more than the pool has. Then a region may get no more than its
// own ticket shows in force.
func (l *ledger) most(s member, m planInput, unknown bool) int64 {
	most := l.unit.total
	if s.p.ceiling > 0 {
		most = s.p.ceiling
	}
	if !l.open || !s.joined || s.ticket.era == 0 || s.stuck(m.timing, m.now) || unknown && s.ticket.kind != pooled {
		most = max(1, s.p.floor)
	}
	if unknown && s.ticket.kind == pooled {
		// The floor in the settings may be an older one, since etcd may have been restored to older settings.
		most = min(most, s.ticket.rate(l.unit))
	}
	return most
}

// renew makes the plan while a record that a plan needs can't be read. A live region keeps its rate as long as no other
// region can have got it. No region gets more, and no region loses a rate that it has.
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

// wakeFor brings l.wake forward to the next instant at which the account changes without an event.
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

// retire offers the region terms under which it may use nothing. A fenced region claims nothing from then on. A region
// that is drained, or was removed from the configuration, claims its earlier offers until it has acknowledged this one.
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

// aim sets the rate that each live region should have in the end. The live regions share the rate rest.
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
	// If all changes would be small, a write isn't worth it, and each region keeps its grant.
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

// grow sets the targets to the rates that the regions can get now. A region keeps the rate that it claims. The free
// rate, which no region claims, is added: first for the floors, and then for the rest.
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

package pool

import (
	"maps"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// ledger is a coordinator's account of one pool: what each region may be using
// and what it could use. It knows of no clock but the instants it is given,
// which are of the coordinator's own monotonic clock.
//
// Its invariant: what the regions may be using adds up to at most the pool's
// rate and capacity, whatever has arrived of what was offered, and so does what
// is recorded of it in etcd. The latter matters to the next coordinator, who
// renews what is recorded: a rate that a region has lost, by expiry or by its
// acknowledgement of less, is given to another only with a record of the loss,
// or after it.
type ledger struct {
	name     string
	pool     *Pool // nil once it has left the configuration
	unit     unit
	parts    map[string]part // of the regions in the configuration
	accounts map[string]*account
	order    []string // their regions, sorted; rebuilt when it is empty

	dirty bool      // something has happened since the last plan
	wake  time.Time // when time alone changes the plan; zero for never
}

// account is one region's part in a pool.
type account struct {
	offers   []offer        // newest first: all that may be in force
	recorded []policy.Terms // what etcd holds of them, or of earlier ones
	acked    policy.Fence   // no older offer is in force
	ticket   lua.Ticket     // the newest
	heard    time.Time      // when it came; zero for never
	sample   lua.Ticket     // where the last sample of demand ended
	demand   demand
	fenced   bool // an operator has declared that it takes nothing
}

// offer is a grant that the region has been or may have been offered.
type offer struct {
	terms policy.Terms
	until time.Time // the granted rate isn't in force after it
	void  bool      // the granted rate has ended, or its era has
}

func newLedger(name string) *ledger {
	return &ledger{name: name, unit: unit{per: 1}, accounts: map[string]*account{}, dirty: true}
}

// configure puts a configuration in force; nil when the pool has left it.
func (l *ledger) configure(p *Pool) {
	l.pool, l.parts, l.dirty = p, map[string]part{}, true
	if p == nil {
		l.unit.total = 0
		return
	}
	l.unit = p.unit()
	for i, part := range p.parts() {
		l.parts[p.Regions[i].Name] = part
		l.account(p.Regions[i].Name)
	}
}

func (l *ledger) account(region string) *account {
	a := l.accounts[region]
	if a == nil {
		a, l.order = &account{}, nil
		l.accounts[region] = a
	}
	return a
}

// inherit takes in what is recorded of a region's offers, by an earlier
// coordinator or by a write of our own of which we don't know how it went. Their
// tickets were read before now, so they end before now + hold.
func (l *ledger) inherit(region string, recorded []policy.Terms, lease time.Duration, now time.Time) {
	a := l.account(region)
	a.recorded = recorded
	for _, t := range recorded {
		if !t.Fence.Before(a.acked) && !slices.ContainsFunc(a.offers, func(o offer) bool { return o.terms.Fence == t.Fence }) {
			a.offers = append(a.offers, offer{terms: t, until: now.Add(hold(lease))})
			l.dirty = true
		}
	}
	slices.SortStableFunc(a.offers, func(x, y offer) int {
		if y.terms.Fence.Before(x.terms.Fence) {
			return -1
		}
		return 1
	})
}

// fence declares that a region takes nothing, or takes that back. A region that has no part in the pool gets none by it.
func (l *ledger) fence(region string, fenced bool) {
	if a := l.accounts[region]; a != nil && a.fenced != fenced {
		a.fenced, l.dirty = fenced, true
	}
}

// hear takes in a region's ticket at our time now.
func (l *ledger) hear(region string, t lua.Ticket, timing Timing, now time.Time) {
	a := l.accounts[region]
	if a == nil {
		return
	}
	// What a ticket acknowledges stays true when a later one has come before it.
	for i := range a.offers {
		if o := &a.offers[i]; t.Version.Era > o.terms.GrantEra && !o.void {
			o.void, l.dirty = true, true
		}
	}
	if a.acked.Before(t.Fence) {
		a.acked = t.Fence
	}
	// The newest offer is kept: what it says is in force or may yet be.
	for n := len(a.offers); n > 1 && a.offers[n-1].terms.Fence.Before(t.Fence); n-- {
		a.offers, l.dirty = a.offers[:n-1], true
	}
	if !a.heard.IsZero() && t.Now <= a.ticket.Now && (t.Version.Era == a.ticket.Version.Era || now.Sub(a.heard) < timing.fresh()) {
		return // came late: the one we have makes a longer lease
	}
	a.observe(t, l.unit, timing)
	a.ticket, a.heard, l.dirty = t, now, true
}

// observe samples the demand since the last sample: what was consumed is what
// refills added less the change of the tokens.
func (a *account) observe(t lua.Ticket, u unit, timing Timing) {
	s := a.sample
	elapsed := time.Duration(t.Now-s.Now) * time.Microsecond
	switch {
	case t.Version.Era != s.Version.Era || elapsed < 0 || t.Added < s.Added || t.Denied < s.Denied:
		a.sample = t
	case elapsed >= timing.Report/2:
		a.sample = t
		perUnit := float64(u.per) / float64(elapsed.Microseconds())
		a.demand.observe(float64(t.Added-s.Added-t.Tokens+s.Tokens)*perUnit, float64(t.Denied-s.Denied)*perUnit, float64(u.total), elapsed)
	}
}

// newest is the last offer; nil if there was none.
func (a *account) newest() *policy.Terms {
	if len(a.offers) == 0 {
		return nil
	}
	return &a.offers[0].terms
}

// claim is the most that a region may be using: the rate, the part of it that
// never ends, and the capacity.
type claim struct{ rate, floor, capacity int64 }

// add extends the claim to terms that may be in force.
func (c *claim) add(u unit, t policy.Terms) {
	c.floor = max(c.floor, u.convert(t.Tokens, t.Per))
	c.capacity = max(c.capacity, t.Capacity)
	if c.rate = max(c.rate, c.floor); t.GrantEra != 0 {
		c.rate = max(c.rate, u.convert(t.GrantTokens, t.Per))
	}
}

// known is the offer less a rate that has ended.
func (o offer) known() policy.Terms {
	t := o.terms
	if o.void {
		t.GrantTokens = 0
	}
	return t
}

// list appends what is to be recorded of the account's offers.
func (a *account) list(to []policy.Terms) []policy.Terms {
	for _, o := range a.offers {
		to = append(to, o.known())
	}
	return to
}

// lapse voids the offers that have ended.
func (a *account) lapse(now time.Time) {
	for i := range a.offers {
		if o := &a.offers[i]; !now.Before(o.until) {
			o.void = true
		}
	}
}

// claims are what the region may be using, and what is recorded of that.
func (a *account) claims(u unit) (inForce, recorded claim) {
	for _, o := range a.offers {
		inForce.add(u, o.known())
	}
	for _, t := range a.recorded {
		recorded.add(u, t)
	}
	return inForce, recorded
}

// convert expresses tokens per per µs in units, rounded up.
func (u unit) convert(tokens, per int64) int64 {
	if per == u.per {
		return tokens
	}
	return mulDivUp(tokens, u.per, per)
}

// granted is the rate of the newest offer in units.
func (a *account) granted(u unit) int64 {
	t := a.newest()
	if t == nil {
		return 0
	}
	return max(u.convert(t.Tokens, t.Per), u.convert(t.GrantTokens, t.Per))
}

// live reports whether a grant may be founded on the region's ticket.
func (a *account) live(timing Timing, now time.Time) bool {
	return !a.heard.IsZero() && now.Sub(a.heard) < timing.fresh()
}

// sum is what all regions claim and could use.
func (l *ledger) sum() PoolSum {
	var claimed, demand int64
	for _, a := range l.accounts {
		inForce, _ := a.claims(l.unit)
		claimed += inForce.rate
		demand += a.demand.units(l.unit.total)
	}
	perSecond := func(units int64) float64 { return float64(units) * 1e6 / float64(l.unit.per) }
	return PoolSum{Rate: perSecond(l.unit.total), Claimed: perSecond(claimed), Demand: perSecond(demand)}
}

// seat is a region at one round of planning.
type seat struct {
	region string
	a      *account
	p      part
	claim        // grow adds to the rate what is free
	want   int64 // as allocated
	target int64 // of that, what can be given now
}

// plan decides what each region is offered now, and returns the regions whose
// offers have changed. fence gives each offer its place in the order. What is
// recorded as used can be given away only if both changes are sure to be
// recorded together.
func (l *ledger) plan(timing Timing, now time.Time, together bool, fence func() policy.Fence) []string {
	l.dirty, l.wake = false, time.Time{}
	var changed []string
	if l.order == nil {
		l.order = slices.Sorted(maps.Keys(l.accounts))
	}
	free, room := l.unit.total, int64(0)
	if l.pool != nil {
		room = l.pool.Capacity
	}
	rest := l.unit.total // for the targets of the live
	var live []seat
	for _, r := range l.order {
		a := l.accounts[r]
		p, member := l.parts[r]
		a.lapse(now)
		changes := false
		if !member && a.finished(l.unit) {
			delete(l.accounts, r)
			l.order = nil
			changed = append(changed, r)
			continue
		} else if !member || a.fenced {
			changes = l.retire(a, fence)
		}
		c, recorded := a.claims(l.unit)
		if together {
			free, room = free-c.rate, room-c.capacity
		} else {
			free, room = free-max(c.rate, recorded.rate), room-max(c.capacity, recorded.capacity)
		}
		if changes || c.rate < recorded.rate || c.floor < recorded.floor || c.capacity < recorded.capacity {
			changed = append(changed, r)
		}
		l.wakeFor(a, timing, now)
		switch {
		case !member || a.fenced:
		case a.live(timing, now):
			live = append(live, seat{region: r, a: a, p: p, claim: c})
		default:
			rest -= max(p.floor, c.floor)
		}
	}
	if len(live) == 0 {
		return changed
	}
	l.aim(live, rest)
	l.grow(live, free)
	for _, s := range live {
		capacity := min(s.p.burst, s.capacity+max(0, room))
		room -= max(0, capacity-s.capacity)
		if t, ok := l.offer(s, capacity, timing); ok {
			t.Fence = fence()
			s.a.add(offer{terms: t, until: s.a.heard.Add(hold(timing.Lease))})
			changed = append(changed, s.region)
			l.wakeFor(s.a, timing, now)
		}
	}
	return changed
}

// renew is plan for a time when a record can't be read on which a plan would rest: a region that is alive keeps its rate as
// long as nobody can have got it, nobody gets more, and nothing is taken away. It returns the regions whose offers have changed.
func (l *ledger) renew(timing Timing, now time.Time, fence func() policy.Fence) []string {
	l.dirty, l.wake = false, time.Time{}
	var changed []string
	for _, region := range slices.Sorted(maps.Keys(l.accounts)) {
		a := l.accounts[region]
		a.lapse(now)
		if len(a.offers) > 0 && !a.fenced && a.live(timing, now) {
			newest, ticket := a.offers[0], a.ticket
			t := newest.terms
			t.GrantEnd = ticket.Now + timing.Lease.Microseconds()
			inForce := !newest.void && t.GrantEra != 0 && t.GrantEra == ticket.Version.Era
			if inForce && t.GrantEnd-newest.terms.GrantEnd >= (timing.Report/2).Microseconds() {
				t.Fence = fence()
				a.add(offer{terms: t, until: a.heard.Add(hold(timing.Lease))})
				changed = append(changed, region)
			}
		}
		l.wakeFor(a, timing, now)
	}
	return changed
}

// wakeFor notes when the account changes by itself.
func (l *ledger) wakeFor(a *account, timing Timing, now time.Time) {
	note := func(at time.Time) {
		if at.After(now) && (l.wake.IsZero() || at.Before(l.wake)) {
			l.wake = at
		}
	}
	if !a.heard.IsZero() {
		note(a.heard.Add(timing.fresh()))
	}
	for _, o := range a.offers {
		if !o.void {
			note(o.until)
		}
	}
}

// finished reports whether a region that left the pool uses nothing any more,
// as far as anybody knows.
func (a *account) finished(u unit) bool {
	t := a.newest()
	if t == nil {
		return len(a.recorded) == 0
	}
	_, recorded := a.claims(u)
	return a.retired() && !a.ticket.Fence.Before(t.Fence) && recorded.rate == 0
}

// retired reports whether the newest offer is that of nothing.
func (a *account) retired() bool {
	t := a.newest()
	return t != nil && t.Tokens == 0 && t.GrantEra == 0 && t.Capacity == 1
}

// retire offers the region nothing. One that is fenced claims nothing from then
// on; one that left the configuration claims what it had until it has
// acknowledged.
func (l *ledger) retire(a *account, fence func() policy.Fence) (changed bool) {
	if !a.retired() {
		t := l.terms(0, 0, 1)
		t.Fence = fence()
		a.add(offer{terms: t})
		changed = true
	}
	if a.fenced && len(a.offers) > 1 {
		a.offers = a.offers[:1]
		changed = true
	}
	return changed
}

// aim sets the targets of the live regions, which share rest.
func (l *ledger) aim(live []seat, rest int64) {
	claimants := make([]Claimant, len(live))
	for i, s := range live {
		c := Claimant{Name: s.region, Weight: s.p.weight, Floor: s.p.floor, Ceiling: s.p.ceiling}
		switch {
		case s.a.ticket.Version.Era == 0: // has no bucket yet, so no grant
			c.Ceiling = max(1, c.Floor)
		case s.a.demand.known:
			c.Demand = s.a.demand.units(l.unit.total)
		default:
			c.Demand = s.a.granted(l.unit)
		}
		claimants[i] = c
	}
	targets := Allocate(max(0, rest), claimants)
	// Changes that matter to nobody aren't worth a write: then everyone keeps
	// what there is, and gets a part of what nobody has.
	quiet, idle := true, max(0, rest)
	for i, s := range live {
		now := s.a.granted(l.unit)
		more := targets[i] - now
		idle -= now
		quiet = quiet && now >= s.p.floor && max(more, -more) < l.unit.total/100 && (!s.a.demand.starved || more <= l.unit.total/1000)
	}
	for i := range live {
		live[i].want = targets[i]
	}
	if !quiet || idle < 0 {
		return
	}
	rooms := make([]bounds, len(live))
	for i, c := range claimants {
		live[i].want = live[i].a.granted(l.unit)
		rooms[i] = bounds{name: c.Name, weight: c.Weight, hi: l.unit.total}
		if c.Ceiling > 0 {
			rooms[i].hi = max(0, c.Ceiling-live[i].want)
		}
	}
	if idle > l.unit.total/1000 {
		for i, n := range fill(idle, rooms) {
			live[i].want += n
		}
	}
}

// grow sets the targets to what can be given now: a region keeps what it
// claims, and more comes out of what nobody claims, floors first.
func (l *ledger) grow(live []seat, free int64) {
	for _, most := range []func(seat) int64{
		func(s seat) int64 { return min(s.want, s.p.floor) },
		func(s seat) int64 { return s.want },
	} {
		if free <= 0 {
			break
		}
		needs := make([]bounds, len(live))
		for i, s := range live {
			needs[i] = bounds{name: s.region, weight: s.p.weight, hi: max(0, most(s)-s.rate)}
		}
		for i, n := range fill(free, needs) {
			live[i].rate += n
			free -= n
		}
	}
	for i := range live {
		live[i].target = min(live[i].want, live[i].rate)
	}
}

// termsOf are terms of rates in tokens per per µs, without a grant's end.
func termsOf(rate, floor, capacity, per int64, interval time.Duration) policy.Terms {
	t := policy.Terms{
		Pool: true, Capacity: capacity, Tokens: floor, Per: per, Interval: interval.Microseconds(), GrantTokens: rate,
	}
	t.MaxElapsed = policy.MaxElapsed(capacity, floor, per, t.Interval)
	return t
}

// terms are a grant of rate above floor, without its end.
func (l *ledger) terms(rate, floor, capacity int64) policy.Terms {
	interval := policy.DefaultInterval
	if l.pool != nil {
		interval = l.pool.interval()
	}
	return termsOf(rate, floor, capacity, l.unit.per, interval)
}

// offer is what the region is to be offered, if that is worth a write.
func (l *ledger) offer(s seat, capacity int64, timing Timing) (policy.Terms, bool) {
	old, ticket := s.a.newest(), s.a.ticket
	rate, granted := s.target, s.a.granted(l.unit)
	if capacity < 1 {
		return policy.Terms{}, false // another region's capacity isn't free yet
	}
	if more := rate - granted; old != nil && more > 0 && more < l.unit.total/100 && more < s.want-rate {
		rate = granted // the better part of it isn't free yet
	}
	t := l.terms(rate, min(s.p.floor, rate), capacity)
	if t.GrantEra = ticket.Version.Era; t.GrantEra != 0 {
		t.GrantEnd = ticket.Now + timing.Lease.Microseconds()
	}
	if old == nil {
		return t, true
	}
	like := *old
	like.Fence, like.GrantEnd = t.Fence, t.GrantEnd
	renewal := t.GrantEnd-old.GrantEnd >= (timing.Report / 2).Microseconds()
	return t, like != t || t.GrantEra != 0 && renewal
}

// maxOffers bounds the list of a region that acknowledges nothing.
const maxOffers = 8

// add puts a new offer in front. Beyond maxOffers the oldest two are counted as
// one, with the fence of the later one, that is no smaller than either. A rate
// that has ended stays ended: others may have got it.
func (a *account) add(o offer) {
	a.offers = slices.Insert(a.offers, 0, o)
	n := len(a.offers)
	if n <= maxOffers {
		return
	}
	older, later := a.offers[n-1], &a.offers[n-2]
	x, y := older.known(), later.known()
	u := unit{per: y.Per} // the pool's rate may have changed between the two, and its unit with it
	later.terms.Tokens = max(u.convert(x.Tokens, x.Per), y.Tokens)
	later.terms.Capacity = max(x.Capacity, y.Capacity)
	later.terms.GrantTokens = max(u.convert(x.GrantTokens, x.Per), y.GrantTokens)
	later.terms.GrantEra = max(x.GrantEra, y.GrantEra)
	later.void = older.void && later.void
	if later.until.Before(older.until) {
		later.until = older.until
	}
	a.offers = a.offers[:n-1]
}

package pool

import (
	"maps"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// ledger is a coordinator's account of one pool: what each region may be using and what it could use. It knows of no
// clock but the instants it is given, which are of the coordinator's own monotonic clock.
//
// Its invariant: what the regions may be using adds up to at most the pool's rate and capacity, whichever offers have
// arrived. The same holds for what etcd records of it, since the next coordinator renews what is recorded: a rate that
// a region has lost, by expiry or by acknowledging less, is given to another only after the loss is recorded.
type ledger struct {
	name     string
	pool     *Pool // nil once it has left the configuration
	open     bool  // every region has acknowledged terms here: more than floors is lent
	unit     unit
	parts    map[string]part // of the regions in the configuration
	accounts map[string]*account

	dirty bool      // something has happened since the last plan
	wake  time.Time // when time alone changes the plan; zero for never
}

// account is one region's part in a pool.
type account struct {
	offers   []offer        // newest first: all that may be in force of what was offered here
	recorded []policy.Terms // what etcd holds of them, or of earlier ones
	shown    *offer         // what a ticket shows to be in force and that was never offered here; nil for nothing
	acked    policy.Fence   // no older offer is in force
	since    int64          // the version of the settings with which the region came into the pool
	joined   bool           // the region has acknowledged an offer that was made since
	lastEnd  int64          // of the grants ever offered
	floor    int64          // the highest configured since the region was live, in units
	waiting  time.Time      // since when the region has made no progress with its offers; zero for not at all
	ticket   ticket         // the newest
	era      int64          // of the server that the region's grants are for
	eraAt    time.Time      // when a ticket last showed that era; zero for never
	other    stretch        // in which tickets of another server came
	taken    time.Time      // when the ticket was applied; zero for never
	heard    time.Time      // when it came from a live region; zero for never
	sample   ticket         // where the last sample of demand ended
	demand   demand
	declared declared // by an operator
}

// offer is terms that a region may have in force.
type offer struct {
	terms policy.Terms
	until time.Time // when its rate has ended for certain, on the coordinator's clock
	void  bool      // its rate has ended, or its era has
	// old: it may date from before the region came into the pool. Acknowledging it tells nothing of the region as it is
	// now: the region may have had a bucket of its own in between, and may still have it.
	old bool
}

func newLedger(name string) *ledger {
	return &ledger{name: name, unit: unit{per: 1}, accounts: map[string]*account{}, dirty: true}
}

// configure puts a configuration in force; nil when the pool has left it.
func (l *ledger) configure(p *Pool) {
	before := l.unit
	l.pool = p
	l.parts = map[string]part{}
	l.dirty = true
	l.unit.total = 0
	if p != nil {
		l.unit = p.unit()
		for i, part := range p.parts() {
			l.parts[p.Regions[i].Name] = part
			l.account(p.Regions[i].Name)
		}
	}
	joined := false
	for region, a := range l.accounts {
		if part, configured := l.parts[region]; !configured {
			a.since, a.joined = 0, false
		} else if a.since != part.since {
			a.since, a.joined = part.since, false
			for i := range a.offers {
				a.offers[i].old = true
			}
		}
		joined = joined || a.joined
		a.demand.level *= float64(l.unit.per) / float64(before.per)
		a.floor = l.unit.convert(a.floor, before.per)
	}
	l.open = l.open && joined // with no region of before it's another pool
}

func (l *ledger) account(region string) *account {
	a := l.accounts[region]
	if a == nil {
		a = &account{}
		l.accounts[region] = a
	}
	return a
}

// inherit adds the recorded offers of a region to its account. An earlier coordinator wrote them, or a write of ours
// whose result is unknown. Their tickets were read before now, so they end before now + hold.
func (l *ledger) inherit(region string, g grants, lease time.Duration, now time.Time) {
	a := l.account(region)
	a.recorded = g.terms
	if _, configured := l.parts[region]; configured && g.since == a.since {
		a.joined, l.open = a.joined || g.joined, l.open || g.open
	}
	if era := g.terms[0].GrantEra; a.eraAt.IsZero() && era != 0 {
		a.era, a.eraAt = era, now
	}
	for _, t := range g.terms {
		a.lastEnd = max(a.lastEnd, t.GrantEnd)
		if !t.Fence.Before(a.acked) && !slices.ContainsFunc(a.offers,
			func(o offer) bool { return o.terms.Fence == t.Fence }) {
			a.offers = append(a.offers, offer{terms: t, until: now.Add(hold(lease)), old: true})
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

// declare takes in what an operator has declared of a region. One that has no part in the pool gets none by it.
func (l *ledger) declare(region string, d declared) {
	if a := l.accounts[region]; a != nil && a.declared != d {
		a.declared = d
		a.waiting = time.Time{}
		l.dirty = true
	}
}

// hear takes in a region's ticket at our time now, from a live region or from a record of unknown age. It reports
// whether the ticket shows what this pool's history here doesn't know of.
func (l *ledger) hear(region string, t ticket, live bool, timing Timing, now time.Time) (foreign bool) {
	a := l.accounts[region]
	if a == nil && live && l.pool != nil && t.kind == pooled && t.terms.Fence.Epoch > 0 && !isRetired(t.terms) {
		a = l.account(region) // it was fenced, left the pool, and is back: it counts until it has been told so
	}
	if a == nil || !a.recognise(t, live, timing, now) {
		return false
	}
	for i := range a.offers {
		if o := &a.offers[i]; t.era > o.terms.GrantEra && !o.void {
			o.void, l.dirty = true, true
		}
	}
	// What a ticket acknowledges stays true when a later one has come before it.
	acknowledged := l.acknowledge(a, t, now)
	if !a.taken.IsZero() && t.era == a.ticket.era && t.now <= a.ticket.now {
		return false
	}
	a.shown = nil
	if !acknowledged && t.kind != absent {
		_, member := l.parts[region]
		foreign = t.kind == pooled && member && a.declared != fenced &&
			(a.newestFence().Before(t.terms.Fence) || t.terms.GrantEnd > a.lastEnd)
		left := time.Duration(t.terms.GrantEnd-t.now) * time.Microsecond
		if foreign { // whoever granted it may do so again
			left = max(left, timing.Lease)
		}
		a.shown = &offer{terms: t.terms, until: now.Add(hold(left)), void: t.kind == plain || left <= 0}
	}
	if live || !a.heard.IsZero() {
		if !a.live(timing, now) && !a.waiting.IsZero() {
			a.waiting = now // it hasn't heard of its offers
		}
		a.heard = now
	}
	a.observe(t, l.unit, timing, l.short(timing, now))
	a.ticket = t
	a.taken = now
	l.dirty = true
	return foreign
}

// recognise reports whether a ticket is of the server that the region's grants are for. That is the server of the era
// known so far, or the one that follows it: a higher era of an agent that has read the era known so far from its own
// Redis. Any other server may be a second one under the region's name. Its tickets count once the grants of the era
// known so far have ended.
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

// stretch is a time in which something happened again and again.
type stretch struct{ first, last time.Time }

// extend extends the stretch to now, or begins another one if nothing happened for longer than the gap.
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

// doubled reports whether tickets come of another server than the one that the region's grants are for.
func (a *account) doubled(timing Timing, now time.Time) bool {
	return a.other.lasts(now, timing.fresh(), timing.Lease)
}

// acknowledge drops the offers before the one that the ticket shows to be in force, if it is one of ours.
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

// observe samples the demand since the last sample.
func (a *account) observe(t ticket, u unit, timing Timing, short bool) {
	s := a.sample
	elapsed, goesOn := t.since(s)
	switch {
	case !goesOn:
		a.sample = t
	case elapsed >= timing.Report/2:
		a.sample = t
		perUnit := float64(u.per) / float64(elapsed.Microseconds())
		a.demand.observe(float64(t.taken(s))*perUnit, float64(t.denied-s.denied)*perUnit, float64(u.total), elapsed, short)
	}
}

// short reports whether some region could use more than it has.
func (l *ledger) short(timing Timing, now time.Time) bool {
	for _, a := range l.accounts {
		if a.demand.starved && a.live(timing, now) {
			return true
		}
	}
	return false
}

// newest is the last offer; nil if there was none.
func (a *account) newest() *policy.Terms {
	if len(a.offers) == 0 {
		return nil
	}
	return &a.offers[0].terms
}

func (a *account) newestFence() policy.Fence {
	if t := a.newest(); t != nil {
		return t.Fence
	}
	return policy.Fence{}
}

// outranked reports whether the region's bucket refuses the newest offer, since it has seen a later fence.
func (a *account) outranked() bool { return a.newestFence().Before(a.ticket.terms.Fence) }

// live reports whether a grant may be founded on the region's ticket.
func (a *account) live(timing Timing, now time.Time) bool {
	return !a.heard.IsZero() && now.Sub(a.heard) < timing.fresh()
}

// stuck reports whether the region hears of its offers but can't put them in force.
func (a *account) stuck(timing Timing, now time.Time) bool {
	return !a.waiting.IsZero() && now.Sub(a.waiting) >= timing.Lease/2
}

// granted is the rate of the newest offer in units.
func (a *account) granted(u unit) int64 {
	t := a.newest()
	if t == nil {
		return 0
	}
	return max(u.convert(t.Tokens, t.Per), u.convert(t.GrantTokens, t.Per))
}

// finished reports whether a region that left the pool uses nothing of it any more, as far as anybody knows.
func (a *account) finished(u unit) bool {
	t := a.newest()
	switch {
	case a.declared == fenced, a.ticket.kind == plain:
		return true // what it has is no pool's
	case t == nil:
		return len(a.recorded) == 0 && a.shown == nil
	}
	_, recorded := a.claims(u)
	return a.retired() && recorded.rate == 0
}

// asked reports whether the region is in the pool, or comes into it by acknowledging the newest offer.
func (a *account) asked() bool { return len(a.offers) > 0 && (a.joined || !a.offers[0].old) }

// retired reports whether the region has acknowledged that it is to use nothing.
func (a *account) retired() bool {
	t := a.newest()
	return t != nil && isRetired(*t) && !a.acked.Before(t.Fence)
}

// list is what is to be recorded of the account's offers.
func (a *account) list() []policy.Terms {
	list := make([]policy.Terms, len(a.offers))
	for i, o := range a.offers {
		list[i] = o.known()
	}
	return list
}

// maxOffers bounds the list of a region that acknowledges nothing.
const maxOffers = 8

// covers reports whether a later offer counts for as much as an earlier one, and as long.
func (o offer) covers(earlier offer) bool {
	x, y := earlier.known(), o.known()
	return x.Per == y.Per && x.Tokens <= y.Tokens && x.Capacity <= y.Capacity && x.GrantTokens <= y.GrantTokens &&
		!earlier.until.After(o.until)
}

// add puts a new offer in front. Beyond maxOffers it drops the oldest offer that the next later one covers. If there is
// none, it merges the oldest two into one that is no smaller than either and has the later fence. A rate that has ended
// stays ended: other regions may have it now.
func (a *account) add(o offer, now time.Time) {
	if a.waiting.IsZero() {
		a.waiting = now
	}
	a.lastEnd = max(a.lastEnd, o.terms.GrantEnd)
	a.offers = slices.Insert(a.offers, 0, o)
	n := len(a.offers)
	if n <= maxOffers {
		return
	}
	for i := n - 1; i > 0; i-- {
		if a.offers[i-1].covers(a.offers[i]) {
			a.offers = slices.Delete(a.offers, i, i+1)
			return
		}
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

// sum is what all regions claim and could use.
func (l *ledger) sum() PoolSum {
	var claimed, demand int64
	for _, a := range l.accounts {
		inForce, _ := a.claims(l.unit)
		claimed += inForce.rate
		demand += a.demand.units(l.unit.total)
	}
	return PoolSum{
		Rate: l.unit.perSecond(l.unit.total), Claimed: l.unit.perSecond(claimed), Demand: l.unit.perSecond(demand),
		Waits: l.waits(),
	}
}

// waits are the regions without which the pool doesn't open: those that have neither acknowledged terms of it here nor
// are fenced may be using whatever they like, under another prefix or as buckets of no pool.
func (l *ledger) waits() (regions []string) {
	if l.pool == nil || l.open {
		return nil
	}
	for _, region := range slices.Sorted(maps.Keys(l.parts)) {
		if a := l.accounts[region]; !a.joined && a.declared != fenced {
			regions = append(regions, region)
		}
	}
	return regions
}

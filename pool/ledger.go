package pool

import (
	"maps"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// ledger is a coordinator's account of one pool. It has the rate that each region may be using, and the rate that each
// region could use. All instants are arguments, which the caller reads from the coordinator's own monotonic clock.
//
// The ledger keeps this invariant: whichever offers have arrived, the regions together may be using at most the pool's
// rate and capacity. The invariant also holds for the records in etcd, because the next coordinator renews the recorded
// grants. A region loses a rate when the rate ends, or when the region acknowledges a smaller one. Another region gets
// the lost rate only after the loss was recorded.
type ledger struct {
	name     string
	pool     *Pool // nil once the pool was removed from the configuration
	open     bool  // every region has acknowledged terms here, so more than floors is lent
	doubted  bool  // the records in etcd show an open pool, but the regions may use another etcd by now
	unit     unit
	parts    map[string]part // of the regions in the configuration
	accounts map[string]*account

	dirty bool      // something has happened since the last plan
	wake  time.Time // when the plan changes if no event arrives; zero for never
}

// account is one region's part in a pool.
type account struct {
	offers   []offer        // the offers made here that may be in force, newest first
	recorded []policy.Terms // the offers that etcd has; some may be older than offers
	shown    *offer         // terms that a ticket shows in force and that were never offered here; nil for none
	acked    policy.Fence   // no offer older than this is in force
	since    int64          // the version of the settings with which the region joined the pool
	joined   bool           // the region has acknowledged an offer that was made after it joined
	lastEnd  int64          // the latest end of all grants that were offered
	floor    int64          // the highest floor that was configured since the region was live, in units
	waiting  time.Time      // since when the region has made no progress with its offers; zero if it has
	ticket   ticket         // the newest ticket
	era      int64          // of the server that the region's grants are for
	eraAt    time.Time      // when the share in etcd or a ticket last confirmed that era; zero for never
	other    stretch        // the time in which tickets of another server came
	taken    time.Time      // when the ticket was applied; zero for never
	reported time.Time      // when a live region last reported; zero for never
	sample   ticket         // the ticket at which the last sample of demand ended
	demand   demand
	declared declared // by an operator
}

// offer has terms that a region may have in force.
type offer struct {
	terms policy.Terms
	until time.Time // when its rate has certainly ended, on the coordinator's clock
	void  bool      // its rate or its era has ended
	// old is true if the offer may have been made before the region joined the pool. An acknowledgement of it proves
	// nothing about the region's present state: since then the region may have had a bucket of its own, and may still have
	// it.
	old bool
}

func newLedger(name string) *ledger {
	return &ledger{name: name, unit: unit{micros: 1}, accounts: map[string]*account{}, dirty: true}
}

// configure puts the configuration of the pool in force. p is nil if the pool was removed.
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
			a.since = part.since
			a.forget()
		}
		joined = joined || a.joined
		a.demand.level *= float64(l.unit.micros) / float64(before.micros)
		a.floor = l.unit.convert(a.floor, before.micros)
	}
	l.open = l.open && joined // a pool without any of its former regions counts as a new pool
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
// whose result is unknown. The tickets that these offers answer were read before now, so the offers end before
// now + hold.
func (l *ledger) inherit(region string, g grants, lease time.Duration, now time.Time) {
	a := l.account(region)
	a.recorded = g.terms
	if l.unit.micros == 1 {
		l.unit.micros = g.terms[0].Per // the pool was removed from the configuration before this ledger was made
	}
	if _, configured := l.parts[region]; configured && g.since == a.since {
		a.joined, l.doubted = a.joined || g.joined, l.doubted || g.open && !l.open
		l.open = l.open || g.open
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

// declare applies an operator's declaration about a region. It has no effect if the region has no part in the pool.
func (l *ledger) declare(region string, d declared) {
	if a := l.accounts[region]; a != nil && a.declared != d {
		a.declared = d
		a.waiting = time.Time{}
		l.dirty = true
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

// newest returns the last offer, nil if there was none.
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

// outranked reports whether the region's bucket refuses the newest offer, because the bucket has a later fence.
func (a *account) outranked() bool { return a.newestFence().Before(a.ticket.terms.Fence) }

// live reports whether the region's ticket is recent enough for a grant.
func (a *account) live(timing Timing, now time.Time) bool {
	return !a.reported.IsZero() && now.Sub(a.reported) < timing.fresh()
}

// stuck reports whether the region receives its offers but can't put them in force.
func (a *account) stuck(timing Timing, now time.Time) bool {
	return !a.waiting.IsZero() && now.Sub(a.waiting) >= timing.Lease/2
}

// granted returns the rate of the newest offer in units.
func (a *account) granted(u unit) int64 {
	t := a.newest()
	if t == nil {
		return 0
	}
	return max(u.convert(t.Tokens, t.Per), u.convert(t.GrantTokens, t.Per))
}

// finished reports whether a region that was removed from the pool certainly uses nothing of the pool any more.
func (a *account) finished(u unit) bool {
	t := a.newest()
	switch {
	case a.declared == fenced, a.ticket.kind == plain:
		return true // its bucket is not the pool's
	case t == nil:
		return len(a.recorded) == 0 && a.shown == nil
	}
	_, recorded := a.claims(u)
	return a.retired() && recorded.rate == 0
}

// asked reports whether the region has joined the pool, or joins it when it acknowledges the newest offer.
func (a *account) asked() bool { return len(a.offers) > 0 && (a.joined || !a.offers[0].old) }

// retired reports whether the region has acknowledged that it must use nothing.
func (a *account) retired() bool {
	t := a.newest()
	return t != nil && isRetired(*t) && !a.acked.Before(t.Fence)
}

// left reports whether the region uses nothing of the pool because an operator has fenced or drained it.
func (a *account) left() bool { return a.declared == fenced || a.declared == draining && a.retired() }

// list returns the offers in the form in which etcd records them.
func (a *account) list() []policy.Terms {
	list := make([]policy.Terms, len(a.offers))
	for i, o := range a.offers {
		list[i] = o.known()
	}
	return list
}

// maxOffers bounds the list of a region that acknowledges nothing.
const maxOffers = 8

// covers reports whether o claims at least as much as an earlier offer, and for at least as long.
func (o offer) covers(earlier offer) bool {
	x, y := earlier.known(), o.known()
	return x.Per == y.Per && x.Tokens <= y.Tokens && x.Capacity <= y.Capacity && x.GrantTokens <= y.GrantTokens &&
		!earlier.until.After(o.until)
}

// add puts a new offer in front. If there are then more than maxOffers, it drops the oldest offer that the next later
// one covers. If there is no such offer, it merges the two oldest. The merged offer claims at least as much as each of
// them and has the later fence. A rate that has ended does not count again, because other regions may have it now.
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
	u := unit{micros: y.Per} // the pool's rate may have changed between the two, and its unit with it
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

// sum returns the sums of the claims and of the demands of all regions.
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

// waits returns the regions for which the pool waits before it opens. They are not fenced, and have not acknowledged
// its terms in this etcd under this prefix. Their buckets may belong to another prefix or to no pool, so their rates
// are unknown.
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

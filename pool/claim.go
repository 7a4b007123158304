package pool

import (
	"math/bits"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// claim is the most that a region may be using: a rate, the part of the rate that never ends, and a capacity.
type claim struct{ rate, floor, capacity int64 }

// add extends the claim to terms that may be in force.
func (c *claim) add(u unit, t policy.Terms) {
	c.floor = max(c.floor, u.convert(t.Tokens, t.Per))
	c.capacity = max(c.capacity, t.Capacity)
	c.rate = max(c.rate, c.floor)
	if t.GrantEra != 0 {
		c.rate = max(c.rate, u.convert(t.GrantTokens, t.Per))
	}
}

// claims returns two claims. inForce is the most that the region may be using. recorded is the most that it may be
// using according to its share in etcd.
func (a *account) claims(u unit) (inForce, recorded claim) {
	inForce = a.offered(u)
	for _, t := range a.recorded {
		recorded.add(u, t)
	}
	if a.shown != nil && a.declared != fenced {
		shown := claim{}
		shown.add(u, a.shown.known())
		// A rate that this coordinator did not offer may have any size. It counts for at most the pool's rate, which already
		// leaves nothing for the other regions.
		inForce.rate, inForce.floor = max(inForce.rate, min(shown.rate, u.total)),
			max(inForce.floor, min(shown.floor, u.total))
		inForce.capacity = max(inForce.capacity, shown.capacity)
	}
	return inForce, recorded
}

// offered returns the claim of the region's offers.
func (a *account) offered(u unit) (c claim) {
	for _, o := range a.offers {
		c.add(u, o.known())
	}
	return c
}

// keeps returns the part of its claim that a live region may be offered again. It has two parts: the region's offers,
// and the terms that its own ticket shows in force.
func (a *account) keeps(u unit) claim {
	c := a.offered(u)
	if a.shown != nil {
		c.rate, c.capacity = max(c.rate, a.ticket.rate(u)), max(c.capacity, a.ticket.terms.Capacity)
	}
	return c
}

// known returns the terms of the offer, without its grant if that has ended.
func (o offer) known() policy.Terms {
	t := o.terms
	if o.void {
		t.GrantTokens = 0
	}
	return t
}

// lapse voids the offers that have ended.
func (a *account) lapse(now time.Time) {
	lapse := func(o *offer) { o.void = o.void || !now.Before(o.until) }
	for i := range a.offers {
		lapse(&a.offers[i])
	}
	if a.shown != nil {
		lapse(a.shown)
	}
}

// convert converts a rate to units, rounded up. The rate is a number of tokens in a time of per µs.
func (u unit) convert(tokens, per int64) int64 {
	if per == u.micros {
		return tokens
	}
	return mulDivUp(tokens, u.micros, per)
}

// termsOf returns the terms of a region with a floor and a grant up to rate. Both are numbers of tokens in a time of
// per µs. The caller sets the end of the grant.
func termsOf(rate, floor, capacity, per int64, interval time.Duration) policy.Terms {
	t := policy.Terms{
		Pool: true, Capacity: capacity, Tokens: floor, Per: per, Interval: interval.Microseconds(), GrantTokens: rate,
	}
	t.MaxElapsed = policy.MaxElapsed(capacity, floor, per, t.Interval)
	return t
}

// terms returns the terms of a region with a floor and a grant up to rate, in the pool's units. The caller sets the end
// of the grant.
func (l *ledger) terms(rate, floor, capacity int64) policy.Terms {
	interval := policy.DefaultInterval
	if l.pool != nil {
		interval = l.pool.interval()
	}
	return termsOf(rate, floor, capacity, l.unit.micros, interval)
}

// isRetired reports whether the terms are those of a region that must use nothing.
func isRetired(t policy.Terms) bool { return t.Capacity == 1 && t.Tokens == 0 && t.GrantTokens == 0 }

// mulDivUp returns ⌈a·b/c⌉.
func mulDivUp(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	lo, carry := bits.Add64(lo, uint64(c-1), 0)
	hi += carry
	if hi >= uint64(c) {
		return 1<<63 - 1
	}
	n, _ := bits.Div64(hi, lo, uint64(c))
	return int64(min(n, 1<<63-1))
}

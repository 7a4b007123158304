package pool

import (
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// usage is the number of tokens that a region's consumers have taken from a pool, less those that they gave back. It
// survives failures of the region's Redis, its replicas and the coordinator: each report has the usage, so that another
// replica continues from the last report.
//
// From one ticket to the next in an era of the bucket, the usage grows by the tokens that refills added, less the
// change of the tokens in the bucket. Tokens that are taken between the last ticket of an era and the first ticket of
// the next era aren't counted. Neither are tokens that are dropped because the capacity became smaller. Tokens that an
// operator grants count as given back. Tokens that an operator's reset removes count as taken.
type usage struct {
	used  int64 // never falls
	ahead int64 // tokens of used that were given back; this number can be taken again before used rises
}

// usageFrom returns the usage at a ticket. before is an earlier ticket with its usage.
func (t ticket) usageFrom(before ticket) usage {
	switch {
	case t.kind != pooled:
		return usage{used: before.used}
	case before.used == 0 && before.kind != pooled: // only the bucket's own counts are known
		return usage{used: max(0, t.added-t.tokens)}
	case before.kind != pooled || before.era != t.era:
		return usage{used: before.used}
	}
	net := before.used - before.ahead + t.taken(before)
	used := max(before.used, net)
	return usage{used, used - net}
}

// since returns the time from an earlier ticket to this one. goesOn is false if the bucket's counts began anew in
// between.
func (t ticket) since(before ticket) (elapsed time.Duration, goesOn bool) {
	elapsed = time.Duration(t.now-before.now) * time.Microsecond
	return elapsed, t.era == before.era && elapsed >= 0 && t.added >= before.added && t.denied >= before.denied
}

// taken returns how many tokens were taken since an earlier ticket of the same era, less those that were given back.
func (t ticket) taken(before ticket) int64 {
	return t.added - before.added + min(before.tokens, t.terms.Capacity) - t.tokens
}

// count applies a ticket and returns it with the usage at its time.
func (b *bucket) count(t ticket) ticket {
	t.usage = t.usageFrom(b.counted)
	b.counted = t
	return t
}

// usageOnly returns a ticket that has only the usage, and no instant. usageFrom continues from it as it would from t.
func (t ticket) usageOnly() ticket {
	t.now, t.denied = 0, 0
	t.terms = policy.Terms{Pool: t.terms.Pool, Capacity: t.terms.Capacity, Per: t.terms.Per}
	return t
}

// recount replaces the ticket with the highest usage by a reported ticket, if the reported usage is higher.
func (b *bucket) recount(t ticket) {
	if b.counted == (ticket{}) || t.used > b.counted.used {
		b.counted = t
	}
}

package pool

import (
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// usage is how many tokens a region's consumers have taken of a pool, less what came back: whatever befalls its Redis,
// its replicas and the coordinator. Each report has it, so that another replica goes on from there.
//
// It is what refills added less the change of the tokens, from one ticket to the next in an era of the bucket. What is
// taken between the last ticket of an era and the first of the next isn't counted, nor is what a smaller capacity takes
// away. Tokens that an operator grants count as given back, and those that an operator's reset takes away as taken.
type usage struct {
	used  int64 // never falls
	ahead int64 // of it, what has come back since, so that as much is taken again without counting
}

// usageFrom returns the usage at a ticket, given an earlier one with the usage then.
func (t ticket) usageFrom(before ticket) usage {
	switch {
	case t.kind != pooled:
		return usage{used: before.used}
	case before.used == 0 && before.kind != pooled: // the counts of the bucket are all that is known
		return usage{used: max(0, t.added-t.tokens)}
	case before.kind != pooled || before.era != t.era:
		return usage{used: before.used}
	}
	net := before.used - before.ahead + t.taken(before)
	used := max(before.used, net)
	return usage{used, used - net}
}

// since returns how long after an earlier ticket this one is; it doesn't go on if the bucket counts anew since then.
func (t ticket) since(before ticket) (elapsed time.Duration, goesOn bool) {
	elapsed = time.Duration(t.now-before.now) * time.Microsecond
	return elapsed, t.era == before.era && elapsed >= 0 && t.added >= before.added && t.denied >= before.denied
}

// taken returns what was taken since an earlier ticket of the same era, less what came back.
func (t ticket) taken(before ticket) int64 {
	return t.added - before.added + min(before.tokens, t.terms.Capacity) - t.tokens
}

// count applies a ticket and returns it with the usage at its time.
func (b *bucket) count(t ticket) ticket {
	t.usage = t.usageFrom(b.counted)
	b.counted = t
	return t
}

// usageOnly returns a ticket without an instant that the usage goes on from as from this one.
func (t ticket) usageOnly() ticket {
	t.now, t.denied = 0, 0
	t.terms = policy.Terms{Pool: t.terms.Pool, Capacity: t.terms.Capacity, Per: t.terms.Per}
	return t
}

// recount goes on from a reported ticket that knows of more.
func (b *bucket) recount(t ticket) {
	if b.counted == (ticket{}) || t.used > b.counted.used {
		b.counted = t
	}
}

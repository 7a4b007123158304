package policy

import "time"

// TakeTemplate is Take of a bucket of a refilled template of terms t, which
// creates the bucket if it is missing. active says whether the bucket is in the
// active set, and the result whether it is now: it is, unless it was full and still is, or was
// not created, because it could never hold n tokens.
func (b *Bucket) TakeTemplate(t Terms, n, now int64, active bool) (Taking, bool) {
	created := b.Control == nil
	if created {
		held := b.held()
		index := int64(0)
		if b.Index != nil {
			index = *b.Index
		}
		if held <= 0 && b.Index == nil {
			if n > t.Capacity {
				return Taking{Known: true, Tokens: t.Initial + held, Wait: -1}, active
			}
			held += t.Initial
		}
		held, index = min(held, t.Capacity), index+1
		b.Tokens, b.Index = &held, &index
		b.Control = &Control{Terms: t, Era: now, Index: index, Last: now}
	}
	before := b.held()
	taking := b.Take(n, now)
	s := b.Control
	if b.held() >= s.Terms.Capacity && !created {
		return taking, active
	}
	if (before >= s.Terms.Capacity || !active) && s.Last < now {
		s.Last, s.Carry = now, 0 // until now it was full, and owed nothing
		if !taking.OK {
			taking.Wait = b.Wait(n, now)
		}
	}
	return taking, true
}

// Lifetime is the least time that a template's bucket lives after its expiry was
// set: twice its drain time, at least a minute.
func (t Terms) Lifetime() time.Duration {
	if t.Kind != Smooth || t.Tokens == 0 {
		return time.Minute
	}
	return max(time.Minute, 2*min(t.Rate().TimeFor(t.Capacity), maxLifetime/2))
}

const maxLifetime = 1_000_000_000 * time.Second

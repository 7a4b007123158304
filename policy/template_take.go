package policy

import "time"

// TakeTemplate is Take of a bucket of a refilled template of terms t, which
// creates the bucket if it is missing. It reports whether the bucket is to be in
// the active set: it is, unless it is full or was not created, because it could
// never hold n tokens.
func (b *Bucket) TakeTemplate(t Terms, n, now int64) (taking Taking, active bool) {
	if b.Control == nil {
		held := int64(0)
		if b.Tokens != nil {
			held = *b.Tokens
		}
		index := int64(0)
		if b.Index != nil {
			index = *b.Index
		}
		if held == 0 && b.Index == nil {
			if n > t.Capacity {
				*b = Bucket{}
				return Taking{Known: true, Tokens: t.Initial, Wait: -1}, false
			}
			held = t.Initial
		}
		held, index = max(0, min(held, t.Capacity)), index+1
		b.Tokens, b.Index = &held, &index
		b.Control = &Control{Terms: t, Era: now / 1_000_000, Index: index, Last: now}
	}
	before := int64(0)
	if b.Tokens != nil {
		before = *b.Tokens
	}
	taking = b.Take(n, now)
	s := b.Control
	if *b.Tokens >= s.Terms.Capacity {
		return taking, false
	}
	if before >= s.Terms.Capacity && s.Last < now {
		s.Last, s.Carry = now, 0 // until now it was owed nothing
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

package policy

import "time"

// Lifetime is the least time that a template's bucket lives after its expiry was
// set: twice its drain time, at least a minute.
func (t Terms) Lifetime() time.Duration {
	if t.Kind != Smooth || t.Tokens == 0 {
		return time.Minute
	}
	return max(time.Minute, 2*min(t.Rate().TimeFor(t.Capacity), maxLifetime/2))
}

const maxLifetime = 1_000_000_000 * time.Second

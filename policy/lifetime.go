package policy

import "time"

// Lifetime returns the time after which an unused bucket of a template expires. This is twice the time in which it
// refills from empty to full, and at least a minute.
func (t Terms) Lifetime() time.Duration {
	if t.Kind != Smooth || t.Tokens == 0 {
		return time.Minute
	}
	return max(time.Minute, 2*min(t.Rate().TimeFor(t.Capacity), maxLifetime/2))
}

const maxLifetime = 1_000_000_000 * time.Second

package pool

import (
	"math"
	"time"
)

const (
	headroom = 0.1 // the part of the demand that is added to it
	// Half-lives of a demand that has fallen. The short one applies while some region has too little, so that it soon gets
	// the rate that others no longer use.
	slowly = 5 * time.Second
	soon   = 500 * time.Millisecond
	// Denials at most double the demand. retryShare of the pool's rate may be added to that, so that a region without a
	// share can start.
	retryShare = 0.05
)

// demand estimates the rate that a region could use, in units of the pool's rate. It rises at once and falls slowly.
// The zero demand has no observation.
type demand struct {
	level   float64
	known   bool
	starved bool // tokens were denied lately
}

// observe updates the demand with the rates that were consumed and denied in the elapsed time. total is the pool's
// rate. short reports whether some region could use more than it has. Denied takes may be retries of the same work. So
// they add at most the consumed rate and retryShare of total. Otherwise a storm of retries would get a share that the
// region can't use.
func (d *demand) observe(consumed, denied, total float64, elapsed time.Duration, short bool) {
	consumed, denied = max(0, consumed), max(0, denied)
	sample := consumed + min(denied, consumed+retryShare*total)
	d.starved = denied > 0
	if !d.known || sample >= d.level {
		d.level, d.known = sample, true
		return
	}
	halfLife := slowly
	if short {
		halfLife = soon
	}
	keep := math.Exp2(-elapsed.Seconds() / halfLife.Seconds())
	d.level = d.level*keep + sample*(1-keep)
}

// units returns the demand with headroom, from 0 to most.
func (d *demand) units(most int64) int64 {
	return int64(math.Round(min((1+headroom)*d.level, float64(most))))
}

// sample is the demand since the sample before, up to a ticket. rate is in tokens per µs.
type sample struct {
	until ticket
	rate  float64
}

// nextSample returns the sample up to the ticket, and false if the time since the last sample is too short for another.
func (b *bucket) nextSample(t ticket, period time.Duration) (sample, bool) {
	from := b.sample.until
	elapsed, goesOn := t.since(from)
	if !goesOn {
		return sample{until: t}, true
	}
	asked := t.taken(from) + t.denied - from.denied
	return sample{t, float64(asked) / float64(max(elapsed.Microseconds(), 1))}, elapsed >= period/2
}

// surges reports whether demand has risen so much since the last report that the agent should report before the period
// ends.
func (b *bucket) surges(now ticket, period time.Duration) bool {
	s, ok := b.nextSample(now, period)
	step := 0.1 * float64(max(b.terms.Tokens, b.terms.GrantTokens)) / float64(max(b.terms.Per, 1))
	return ok && s.rate > 1.2*b.sample.rate+step
}

package decide

import (
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// Spacing is a rate of Tokens in Per microseconds, in lowest terms. Its unit of time is 1/Tokens of a microsecond. So
// one token is earned in exactly Per units.
type Spacing struct{ Tokens, Per int64 }

// Limits that keep every product of the scripts below 2^53.
const (
	maxTokens = 1 << 40
	maxUnits  = 1 << 52
)

// CheckRate reports whether a limit can have a rate.
func CheckRate(rate policy.Rate) error {
	err := rate.Validate()
	switch {
	case err == nil:
		return nil
	case rate.Tokens == 0:
		return fmt.Errorf("rate: %w; to have no limit, use no limiter", err)
	}
	return fmt.Errorf("rate: %w", err)
}

// NewSpacing makes the Spacing of a rate. span is the number of tokens that it must be able to count ahead. They may
// need at most 2^52 units.
func NewSpacing(rate policy.Rate, span int64) (Spacing, error) {
	if err := CheckRate(rate); err != nil {
		return Spacing{}, err
	}
	a, b := rate.Tokens, rate.Per.Microseconds()
	for b != 0 {
		a, b = b, a%b
	}
	s := Spacing{Tokens: rate.Tokens / a, Per: rate.Per.Microseconds() / a}
	if s.Tokens > maxTokens {
		return Spacing{}, fmt.Errorf("rate: %s is %d tokens in %dµs in lowest terms; want at most %d tokens", rate, s.Tokens,
			s.Per, int64(maxTokens))
	}
	if span > maxUnits/s.Per {
		return Spacing{}, fmt.Errorf("rate: at %s, %d tokens take too long to be counted exactly; want at most %d", rate,
			span, maxUnits/s.Per)
	}
	return s, nil
}

// Micros returns a number of units in µs, rounded up.
func (s Spacing) Micros(units int64) int64 { return (units + s.Tokens - 1) / s.Tokens }

// For returns the time in which n tokens are earned.
func (s Spacing) For(n int64) time.Duration { return micros(s.Micros(n * s.Per)) }

// Instant is an exact instant: Units after the microsecond Base.
type Instant struct{ Base, Units int64 }

// Ahead returns how many units i lies ahead of now, 0 to 2^52. If the clock went back, that may be more than the limit
// allows.
func (s Spacing) Ahead(i Instant, now int64) int64 {
	past := now - i.Base
	switch {
	case past > i.Units/s.Tokens:
		return 0
	case -past > maxUnits/s.Tokens:
		return maxUnits
	}
	return min(max(0, i.Units-past*s.Tokens), maxUnits)
}

// Until returns the instant, Unix µs, at which i no longer lies ahead.
func (s Spacing) Until(i Instant) int64 { return i.Base + s.Micros(i.Units) }

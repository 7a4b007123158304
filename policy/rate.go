package policy

import (
	"errors"
	"fmt"
	"math/big"
	"math/bits"
	"strconv"
	"strings"
	"time"
)

// Rate is a number of tokens per span of time. The zero Rate means that no rate
// is set.
type Rate struct {
	Tokens int64         // tokens that fall due in Per, at least 1
	Per    time.Duration // a whole number of microseconds, 1µs to MaxPer
}

// MaxPer is the longest span of a rate and of a schedule's step.
const MaxPer = 366 * 24 * time.Hour

// ErrRate is returned for a rate that can't be read or is out of range.
var ErrRate = errors.New("policy: bad rate")

// PerSecond returns the rate of n tokens each second.
func PerSecond(n int64) Rate { return Rate{Tokens: n, Per: time.Second} }

// ParseRate reads a rate as people write it: tokens, a slash, and a unit (us,
// ms, s, m, h, d, w) or a duration ("500/s", "10/m", "1000/24h", "3/1m30s").
func ParseRate(s string) (Rate, error) {
	count, span, found := strings.Cut(strings.TrimSpace(s), "/")
	if !found {
		return Rate{}, fmt.Errorf("%w %q: want tokens/time, such as 500/s, 10/m or 1000/24h", ErrRate, s)
	}
	tokens, err := strconv.ParseInt(strings.TrimSpace(count), 10, 64)
	if err != nil {
		return Rate{}, fmt.Errorf("%w %q: tokens must be a whole number from 1 to %d%s", ErrRate, s, MaxTokens,
			wholeRate(strings.TrimSpace(count), strings.TrimSpace(span)))
	}
	span = strings.TrimSpace(span)
	if span != "" && strings.IndexByte("0123456789.+-", span[0]) < 0 { // a bare unit
		span = "1" + span
	}
	per, err := ParseDuration(span)
	if err != nil {
		return Rate{}, fmt.Errorf("%w %q: time must be us, ms, s, m, h, d, w or a duration such as 90s or 24h", ErrRate, s)
	}
	r := Rate{Tokens: tokens, Per: per}
	if err := r.Validate(); err != nil {
		return Rate{}, err
	}
	return r, nil
}

// wholeRate returns a suggestion in place of a rate with a fraction of tokens, such as 1/2s for 0.5/s. It returns the
// empty string if no valid rate is equal.
func wholeRate(count, span string) string {
	tokens, ok := new(big.Rat).SetString(count)
	if !ok || tokens.Sign() <= 0 || span == "" || strings.ContainsAny(span, "0123456789.+-") {
		return ""
	}
	r, err := ParseRate(fmt.Sprintf("%s/%s%s", tokens.Num(), tokens.Denom(), span))
	if err != nil {
		return ""
	}
	return fmt.Sprintf("; write it as %d/%s%s", r.Tokens, tokens.Denom(), span)
}

// ParseDuration reads a duration as [time.ParseDuration] does, and also whole
// days ("7d") and weeks ("2w").
func ParseDuration(s string) (time.Duration, error) {
	for _, unit := range []struct {
		suffix, name string
		length       time.Duration
	}{{"d", "days", 24 * time.Hour}, {"w", "weeks", 7 * 24 * time.Hour}} {
		number, found := strings.CutSuffix(s, unit.suffix)
		if !found {
			continue
		}
		n, err := strconv.ParseInt(number, 10, 32)
		if err != nil || n < 0 || n > int64(MaxPer/unit.length) {
			return 0, fmt.Errorf("policy: bad duration %q: %s must be a whole number from 0 to %d",
				s, unit.name, MaxPer/unit.length)
		}
		return time.Duration(n) * unit.length, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, fmt.Errorf(
			"policy: bad duration %q: want a number and a unit (us, ms, s, m, h, d or w), such as 100ms or 7d", s)
	}
	return d, nil
}

// Validate returns an error if the rate is out of range.
func (r Rate) Validate() error {
	switch {
	case r.Tokens < 1 || r.Tokens > MaxTokens:
		return fmt.Errorf("%w %s: tokens must be a whole number from 1 to %d", ErrRate, r, MaxTokens)
	case r.Per < time.Microsecond || r.Per > MaxPer || r.Per%time.Microsecond != 0:
		return fmt.Errorf("%w %s: time must be whole microseconds from 1us to %dd", ErrRate, r, MaxPer/(24*time.Hour))
	}
	return nil
}

// String writes the rate so that ParseRate reads it back.
func (r Rate) String() string {
	for _, unit := range []struct {
		span time.Duration
		name string
	}{{time.Microsecond, "us"}, {time.Millisecond, "ms"}, {time.Second, "s"}, {time.Minute, "m"}, {time.Hour, "h"}} {
		if r.Per == unit.span {
			return fmt.Sprintf("%d/%s", r.Tokens, unit.name)
		}
	}
	if r.Per > 0 && r.Per%time.Hour == 0 {
		return fmt.Sprintf("%d/%dh", r.Tokens, r.Per/time.Hour)
	}
	return fmt.Sprintf("%d/%s", r.Tokens, r.Per)
}

// InUnits returns the same rate per second, minute, hour or day. It chooses the first of these units for which the
// number of tokens is whole. If there is none, it returns the rate itself.
func (r Rate) InUnits() Rate {
	tokens, per := r.reduced()
	for _, unit := range []time.Duration{time.Second, time.Minute, time.Hour, 24 * time.Hour} {
		if us := unit.Microseconds(); per > 0 && us%per == 0 && tokens <= MaxTokens/(us/per) {
			return Rate{Tokens: tokens * (us / per), Per: unit}
		}
	}
	return r
}

// Over returns the number of whole tokens that fall due within d, at least 0 and at most MaxTokens.
func (r Rate) Over(d time.Duration) int64 {
	if d <= 0 || r.Tokens <= 0 || r.Per <= 0 {
		return 0
	}
	hi, lo := bits.Mul64(uint64(r.Tokens), uint64(d))
	if hi >= uint64(r.Per) { // the quotient has more than 64 bits
		return MaxTokens
	}
	n, _ := bits.Div64(hi, lo, uint64(r.Per))
	return int64(min(n, MaxTokens))
}

// TimeFor returns the time in which n tokens fall due, rounded up to a microsecond, and at most the longest Duration.
func (r Rate) TimeFor(n int64) time.Duration {
	if n <= 0 || r.Tokens <= 0 {
		return 0
	}
	hi, lo := bits.Mul64(uint64(n), uint64(max(0, r.Per.Microseconds())))
	if hi >= uint64(r.Tokens) { // as in Over
		return maxDuration
	}
	us, rest := bits.Div64(hi, lo, uint64(r.Tokens))
	if us >= uint64(maxDuration/time.Microsecond) {
		return maxDuration
	}
	if rest > 0 {
		us++
	}
	return time.Duration(us) * time.Microsecond
}

const maxDuration = time.Duration(1<<63 - 1)

// Reduced returns the same rate in lowest terms over microseconds. The zero Rate stays as it is.
func (r Rate) Reduced() Rate {
	tokens, per := r.reduced()
	return Rate{Tokens: tokens, Per: time.Duration(per) * time.Microsecond}
}

// reduced returns the rate in lowest terms over microseconds, which keeps the products of the scripts small. The zero
// Rate stays as it is.
func (r Rate) reduced() (tokens, per int64) {
	tokens, per = r.Tokens, r.Per.Microseconds()
	if tokens == 0 && per == 0 {
		return 0, 0
	}
	a, b := tokens, per
	for b != 0 {
		a, b = b, a%b
	}
	return tokens / a, per / a
}

// PerSecond returns the rate in tokens per second.
func (r Rate) PerSecond() float64 { return float64(r.Tokens) / r.Per.Seconds() }

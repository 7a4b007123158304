package policy

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Limits of the numbers in a policy. Redis scripts compute in doubles, which are exact to 2^53. These limits keep every
// product below that.
const (
	MaxTokens   = 1 << 50          // most tokens of a bucket, a rate or a step
	MinInterval = time.Millisecond // shortest refill interval
	MaxInterval = time.Hour        // longest refill interval
	maxExact    = 1 << 53
)

// DefaultInterval is the refill interval where none is given.
const DefaultInterval = 100 * time.Millisecond

// ErrPolicy matches every error of Validate. The error is a *FieldError, which names the field.
var ErrPolicy = errors.New("policy: bad policy")

// FieldError names a field of a Policy, as it is written in a config file, and
// what is wrong with its value.
type FieldError struct {
	Field string
	Msg   string
}

// Error implements error.
func (e *FieldError) Error() string { return "policy: " + e.Field + ": " + e.Msg }

// Is makes every FieldError match ErrPolicy.
func (e *FieldError) Is(target error) bool { return target == ErrPolicy }

// Loss determines what a bucket holds after its tokens were lost.
type Loss int

// What a bucket holds after a loss.
const (
	LossEmpty Loss = iota // no tokens: nothing can be spent twice
	LossFull              // its capacity, for uses in which a long denial is worse than tokens that are spent twice
)

// Rollback determines what a bucket holds after its server came back with older state.
type Rollback int

// What a bucket holds after a rollback.
const (
	RollbackEmpty Rollback = iota // no tokens: nothing can be spent twice
	RollbackKeep                  // the tokens of the older state, for long-term quotas
)

// CarryOver determines what happens to a bucket's tokens when its capacity, its rate or its schedule changes. Any other
// change keeps them. No carry-over ever adds a token.
type CarryOver int

// What happens to the tokens when an amount changes.
const (
	CarryKeep         CarryOver = iota // they stay, up to the new capacity
	CarryProportional                  // they shrink as the capacity does
	CarryReset                         // they are dropped
)

// Degraded determines how consumers answer takes while the bucket can't be reached.
type Degraded int

// How consumers answer while the bucket can't be reached.
const (
	DegradedClosed Degraded = iota // an error
	DegradedOpen                   // every take is admitted
	DegradedLocal                  // each consumer limits itself, in memory, to a share of the rate
)

// Policy describes how much a bucket holds and when its tokens fall due. Exactly one of Rate (smooth) and Steps (with
// StepTokens) is set.
type Policy struct {
	Capacity   int64         // most tokens the bucket holds, 1 to MaxTokens
	Rate       Rate          // smooth refills: tokens per time
	Steps      Steps         // scheduled refills: when StepTokens fall due
	StepTokens int64         // tokens of one step, 1 to MaxTokens
	Interval   time.Duration // refill interval, MinInterval to MaxInterval; 0 means DefaultInterval
	Initial    *int64        // tokens of a new bucket, 0 to Capacity; nil means Capacity
	OnLoss     Loss
	OnRollback Rollback
	CarryOver  CarryOver
	Degraded   Degraded
	// Strict keeps room in the bucket for the tokens that are outstanding in reservations and leases: refills stop at the
	// capacity less these tokens. So the bound on takes in a window is the same as without reservations and leases.
	Strict bool
	// Shadow makes consumers admit the takes that the bucket denies, and count them. It is for trying a policy before it
	// is enforced.
	Shadow bool
	// Flows divides a smooth bucket among its flows; nil for a bucket that serves takes in the order in which they come.
	Flows *Flows
}

// Validate reports the first field that is out of range, as a *FieldError.
func (p Policy) Validate() error { return p.validate(true) }

// validate does the work of Validate. If refilled is true, refills add the tokens. Otherwise takes do, and the refill
// interval does not bound the capacity.
func (p Policy) validate(refilled bool) error {
	bad := func(field, format string, args ...any) error {
		return &FieldError{Field: field, Msg: fmt.Sprintf(format, args...)}
	}
	if p.Capacity < 1 || p.Capacity > MaxTokens {
		return bad("capacity", "%d is not a whole number from 1 to %d", p.Capacity, int64(MaxTokens))
	}
	interval := p.interval()
	if interval < MinInterval || interval > MaxInterval || interval%time.Microsecond != 0 {
		return bad("interval", "%s is not from %s to %s in whole microseconds", p.Interval, MinInterval, MaxInterval)
	}
	if p.Initial != nil && (*p.Initial < 0 || *p.Initial > p.Capacity) {
		return bad("initial", "%d is not from 0 to the capacity, %d", *p.Initial, p.Capacity)
	}
	for _, choice := range []struct {
		field string
		value int
		most  int
	}{
		{"on_loss", int(p.OnLoss), int(LossFull)},
		{"on_rollback", int(p.OnRollback), int(RollbackKeep)},
		{"carry_over", int(p.CarryOver), int(CarryReset)},
		{"degraded", int(p.Degraded), int(DegradedLocal)},
	} {
		if choice.value < 0 || choice.value > choice.most {
			return bad(choice.field, "%d is not from 0 to %d", choice.value, choice.most)
		}
	}
	smooth, stepped := p.Rate != Rate{}, p.Steps != nil
	switch {
	case smooth && stepped:
		return bad("rate", "a bucket has a rate or a schedule, not both")
	case smooth:
		return p.validateRate(bad, refilled)
	case stepped:
		return p.validateSteps(bad, refilled)
	default:
		return bad("rate", "a bucket needs a rate, or every or cron with tokens")
	}
}

func (p Policy) validateRate(bad func(string, string, ...any) error, refilled bool) error {
	if err := p.Rate.Validate(); err != nil {
		return bad("rate", "%v", err)
	}
	if p.StepTokens != 0 {
		return bad("tokens", "it can be set only with every or cron, not with a rate")
	}
	if p.Flows != nil {
		if err := p.Flows.Validate(); err != nil {
			return err
		}
	}
	tokens, per := p.Rate.reduced()
	least := 2 * float64(tokens) * float64(p.interval().Microseconds()) / float64(per)
	if refilled && float64(p.Capacity) < least {
		return bad("capacity",
			"%d is below %.0f, the tokens of two refill intervals of %s at %s: raise it, or lower the interval",
			p.Capacity, math.Ceil(least), p.interval(), p.Rate)
	}
	if most := MaxElapsed(p.Capacity, tokens, per,
		p.interval().Microseconds()); float64(most)*float64(tokens)+float64(per) >= maxExact {
		return bad("rate", "%s over %dus of credit is not below 2^53 units: use a coarser rate", p.Rate, most)
	}
	return nil
}

func (p Policy) validateSteps(bad func(string, string, ...any) error, refilled bool) error {
	if p.Flows != nil {
		return bad("flows", "it can be set only with a rate: with every or cron, no tokens fall due between two steps")
	}
	if p.StepTokens < 1 || p.StepTokens > MaxTokens {
		return bad("tokens", "%d is not a whole number from 1 to %d", p.StepTokens, int64(MaxTokens))
	}
	if e, ok := p.Steps.(Every); ok && refilled {
		if d := time.Duration(e); d < p.interval() || d > MaxPer || d%time.Microsecond != 0 {
			return bad("every", "%s is not from the refill interval, %s, to %dd in whole microseconds", d, p.interval(),
				MaxPer/(24*time.Hour))
		}
	}
	return nil
}

// Equal reports whether both policies have the same meaning.
func (p Policy) Equal(q Policy) bool {
	return p.Terms(Fence{}) == q.Terms(Fence{}) && p.schedule() == q.schedule() && p.Flows.Equal(q.Flows)
}

func (p Policy) schedule() string {
	if p.Steps == nil {
		return ""
	}
	return p.Steps.String()
}

func (p Policy) interval() time.Duration {
	if p.Interval == 0 {
		return DefaultInterval
	}
	return p.Interval
}

func (p Policy) initial() int64 {
	if p.Initial == nil {
		return p.Capacity
	}
	return *p.Initial
}

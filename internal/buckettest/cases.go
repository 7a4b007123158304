package buckettest

import (
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// Era and Index are what the buckets of the cases stand at.
const (
	Era   = 1_000_000
	Index = 7
)

// Case is one refill of a bucket in a given state.
type Case struct {
	Name string
	// Setup makes the state and the call at the server's time now, Unix µs.
	Setup func(now int64) (policy.Bucket, policy.Call)
	// Want is the outcome at exactly that time. Era 0 means that a new era
	// begins; Now and Last aren't compared.
	Want policy.Outcome
	// Carry wanted after the call.
	Carry int64
}

// Terms are those of the cases: 500/s, 50 tokens a refill interval of 100 ms,
// capacity 1000, under fence (3, 0).
func Terms() policy.Terms {
	return policy.Policy{Capacity: 1000, Rate: policy.PerSecond(500), Interval: 100 * time.Millisecond}.Terms(policy.Fence{Epoch: 3})
}

func with(change func(*policy.Terms)) *policy.Terms {
	t := Terms()
	change(&t)
	return &t
}

// Bucket has the tokens, was refilled ago µs before now, and is otherwise at
// rest.
func Bucket(tokens, now, ago int64) policy.Bucket {
	index := int64(Index)
	return policy.Bucket{Tokens: &tokens, Index: &index, Control: &policy.Control{
		Terms: Terms(), Era: Era, Index: Index, Last: now - ago,
	}}
}

const (
	interval = 100_000 // µs
	second   = 1_000_000
)

func learned() policy.Version { return policy.Version{Era: Era, Index: Index} }

func known(tokens, ago int64, call policy.Call, change func(b *policy.Bucket, now int64)) func(int64) (policy.Bucket, policy.Call) {
	return func(now int64) (policy.Bucket, policy.Call) {
		b := Bucket(tokens, now, ago)
		if change != nil {
			change(&b, now)
		}
		return b, call
	}
}

func missing(call policy.Call) func(int64) (policy.Bucket, policy.Call) {
	return func(int64) (policy.Bucket, policy.Call) { return policy.Bucket{}, call }
}

func foreign(tokens, index *int64, call policy.Call) func(int64) (policy.Bucket, policy.Call) {
	return func(int64) (policy.Bucket, policy.Call) { return policy.Bucket{Tokens: tokens, Index: index}, call }
}

func of(n int64) *int64 { return &n }

func outcome(s policy.Status, tokens, added, clamped, elapsed int64) policy.Outcome {
	o := policy.Outcome{
		Status: s, Version: policy.Version{Era: Era, Index: Index}, Tokens: tokens, Added: added, Clamped: clamped, Elapsed: elapsed,
		Fence: policy.Fence{Epoch: 3},
	}
	if s.Wrote() {
		o.Version.Index++
	}
	switch s {
	case policy.StatusInitialised, policy.StatusRolledBack, policy.StatusClock:
		o.Version.Era = 0
	case policy.StatusUnknown:
		o.Version, o.Fence = policy.Version{}, policy.Fence{}
	}
	return o
}

func at(o policy.Outcome, index int64) policy.Outcome {
	o.Version.Index = index
	return o
}

func fenced(o policy.Outcome, epoch, seq int64) policy.Outcome {
	o.Fence = policy.Fence{Epoch: epoch, Seq: seq}
	return o
}

// Cases cover every rule of a refill.
func Cases() []Case {
	terms := with(func(*policy.Terms) {})
	call := policy.Call{Version: learned(), Terms: terms}
	newer := with(func(t *policy.Terms) { t.Fence.Epoch, t.Capacity, t.Tokens, t.Per = 4, 100, 1, 1000 })
	full := with(func(t *policy.Terms) { t.OnLoss = policy.LossFull })
	stepped := func(b *policy.Bucket, now int64) {
		b.Control.Terms.Kind, b.Control.Terms.Tokens, b.Control.Terms.Per = policy.Stepped, 300, 0
		b.Control.Step, b.Control.Next = now-second, now-second/2
	}
	steppedCall := func(step, next int64) func(int64) (policy.Bucket, policy.Call) {
		return func(now int64) (policy.Bucket, policy.Call) {
			b := Bucket(10, now, interval)
			stepped(&b, now)
			return b, policy.Call{Version: learned(), Step: now + step, Next: now + next}
		}
	}
	granted := func(end int64) func(*policy.Bucket, int64) {
		return func(b *policy.Bucket, now int64) {
			b.Control.Terms.GrantTokens, b.Control.Terms.GrantEra, b.Control.Terms.GrantEnd = 3, Era, now+end
		}
	}
	stale := policy.Version{Era: Era, Index: Index - 1}

	return []Case{
		{Name: "MissingAndNeverSeenIsUnknown", Setup: missing(policy.Call{Create: policy.CreateLost, Terms: terms}), Want: outcome(policy.StatusUnknown, 0, 0, 0, 0)},
		{Name: "MissingAndNeverSeenIsCreatedWithInitial", Setup: missing(policy.Call{Create: policy.CreateInitial, Terms: terms}), Want: at(outcome(policy.StatusInitialised, 1000, 0, 0, 0), 1)},
		{Name: "MissingAndRememberedIsRestoredEmpty", Setup: missing(policy.Call{Version: learned(), Create: policy.CreateLost, Terms: terms}), Want: outcome(policy.StatusInitialised, 0, 0, 0, 0)},
		{Name: "MissingAndRememberedIsRestoredFullOnLossFull", Setup: missing(policy.Call{Version: learned(), Create: policy.CreateInitial, Terms: full}), Want: outcome(policy.StatusInitialised, 1000, 0, 0, 0)},
		{Name: "MissingIsNeverCreatedByARescue", Setup: missing(policy.Call{Version: learned()}), Want: outcome(policy.StatusUnknown, 0, 0, 0, 0)},
		{Name: "ForeignBucketIsAdopted", Setup: foreign(of(30), of(5), policy.Call{Terms: terms}), Want: at(outcome(policy.StatusInitialised, 30, 0, 0, 0), 6)},
		{Name: "ForeignBucketAboveCapacityIsClamped", Setup: foreign(of(3000), nil, policy.Call{Terms: terms}), Want: at(outcome(policy.StatusInitialised, 1000, 0, 0, 0), 1)},
		{Name: "ForeignIndexAloneIsAdoptedEmpty", Setup: foreign(nil, of(5), policy.Call{Terms: terms, Create: policy.CreateInitial}), Want: at(outcome(policy.StatusInitialised, 0, 0, 0, 0), 6)},
		{Name: "ForeignBucketIsNotAdoptedByARescue", Setup: foreign(of(30), of(5), policy.Call{}), Want: outcome(policy.StatusUnknown, 0, 0, 0, 0)},

		{Name: "CreditsElapsedTime", Setup: known(10, interval, call, nil), Want: outcome(policy.StatusApplied, 60, 50, 0, interval)},
		{Name: "CarriesTheRemainder", Setup: known(10, interval+1999, call, nil), Want: outcome(policy.StatusApplied, 60, 50, 0, interval+1999), Carry: 1999},
		{Name: "AddsTheCarry", Setup: known(10, interval+1, call, func(b *policy.Bucket, _ int64) { b.Control.Carry = 1999 }), Want: outcome(policy.StatusApplied, 61, 51, 0, interval+1)},
		{Name: "ClampsAtCapacityAndDropsTheCarry", Setup: known(990, interval+1, call, nil), Want: outcome(policy.StatusApplied, 1000, 10, 40, interval+1)},
		{Name: "FullBucketKeepsNoCarry", Setup: known(1000, 1999, policy.Call{Version: learned(), Terms: newer}, nil), Want: fenced(outcome(policy.StatusApplied, 100, 0, 0, 1999), 4, 0)},
		{Name: "CreditsNoMoreThanTheCap", Setup: known(0, 60*second, call, nil), Want: outcome(policy.StatusApplied, 1000, 1000, 0, 60*second)},
		{Name: "BringsTokensAboveCapacityDown", Setup: known(5000, interval, call, nil), Want: outcome(policy.StatusApplied, 1000, 0, 50, interval)},
		{Name: "CreditsAForeignTakersUnfinishedUndo", Setup: known(-1, interval, call, nil), Want: outcome(policy.StatusApplied, 49, 50, 0, interval)},
		{Name: "StaleIndexWritesNothing", Setup: known(10, interval, policy.Call{Version: stale, Terms: terms}, nil), Want: outcome(policy.StatusStale, 10, 0, 0, 0)},
		{Name: "NeverSeenIsStale", Setup: known(10, interval, policy.Call{Terms: terms, Create: policy.CreateInitial}, nil), Want: outcome(policy.StatusStale, 10, 0, 0, 0)},
		{Name: "OlderEraIsStaleWhateverItsIndex", Setup: known(10, interval, policy.Call{Version: policy.Version{Era: Era - 1, Index: 99}, Terms: terms}, nil), Want: outcome(policy.StatusStale, 10, 0, 0, 0)},
		{Name: "UnderHalfAnIntervalIsEarly", Setup: known(10, interval/2-1, call, nil), Want: outcome(policy.StatusEarly, 10, 0, 0, 0)},
		{Name: "HalfAnIntervalIsNotEarly", Setup: known(10, interval/2, call, nil), Want: outcome(policy.StatusApplied, 35, 25, 0, interval/2)},

		{Name: "NewerFenceSettlesThenSwitches", Setup: known(10, interval, policy.Call{Version: learned(), Terms: newer}, nil), Want: fenced(outcome(policy.StatusApplied, 60, 50, 0, interval), 4, 0)},
		{Name: "NewerFenceSwitchesThoughEarly", Setup: known(10, 1000, policy.Call{Version: learned(), Terms: newer}, func(b *policy.Bucket, _ int64) { b.Control.Carry = 1500 }), Want: fenced(outcome(policy.StatusApplied, 11, 1, 0, 1000), 4, 0), Carry: 249},
		{Name: "NewerFenceSwitchesThoughStale", Setup: known(10, interval, policy.Call{Version: stale, Terms: newer}, nil), Want: fenced(outcome(policy.StatusSwitched, 60, 50, 0, interval), 4, 0)},
		{Name: "LoweredCapacityClamps", Setup: known(600, interval, policy.Call{Version: learned(), Terms: newer}, nil), Want: fenced(outcome(policy.StatusApplied, 100, 50, 0, interval), 4, 0)},
		{Name: "ProportionalCarryOverShrinks", Setup: known(600, 0, policy.Call{Version: learned(), Terms: with(func(t *policy.Terms) {
			t.Fence.Seq, t.Capacity, t.CarryOver = 1, 500, policy.CarryProportional
		})}, nil), Want: fenced(outcome(policy.StatusApplied, 300, 0, 0, 0), 3, 1)},
		{Name: "ProportionalCarryOverNeverGrows", Setup: known(600, 0, policy.Call{Version: learned(), Terms: with(func(t *policy.Terms) {
			t.Fence.Seq, t.Capacity, t.CarryOver = 1, 5000, policy.CarryProportional
		})}, nil), Want: fenced(outcome(policy.StatusApplied, 600, 0, 0, 0), 3, 1)},
		{Name: "ResetCarryOverDropsTokens", Setup: known(600, 0, policy.Call{Version: learned(), Terms: with(func(t *policy.Terms) {
			t.Fence.Seq, t.CarryOver = 1, policy.CarryReset
		})}, nil), Want: fenced(outcome(policy.StatusApplied, 0, 0, 0, 0), 3, 1)},
		{Name: "OlderFenceIsIgnored", Setup: known(10, interval, policy.Call{Version: learned(), Terms: with(func(t *policy.Terms) {
			t.Fence.Epoch, t.Tokens = 2, 999
		})}, nil), Want: outcome(policy.StatusApplied, 60, 50, 0, interval)},
		{Name: "ChangedTermsUnderTheSameFenceAreAConflict", Setup: known(10, interval, policy.Call{Version: learned(), Terms: with(func(t *policy.Terms) { t.Tokens = 999 })}, nil),
			Want: func() policy.Outcome {
				o := outcome(policy.StatusApplied, 60, 50, 0, interval)
				o.Conflict = true
				return o
			}()},

		{Name: "ForeignAddIsNotCreditedAgain", Setup: known(10, interval, policy.Call{Version: policy.Version{Era: Era, Index: Index + 1}, Terms: terms}, func(b *policy.Bucket, _ int64) {
			*b.Index, b.Control.Carry = Index+1, 77
		}), Want: at(outcome(policy.StatusForeign, 10, 0, 0, 0), Index+2)},
		{Name: "ForeignAddAboveCapacityIsClamped", Setup: known(5000, interval, policy.Call{Version: policy.Version{Era: Era, Index: Index + 1}, Terms: terms}, func(b *policy.Bucket, _ int64) {
			*b.Index = Index + 1
		}), Want: at(outcome(policy.StatusForeign, 1000, 0, 0, 0), Index+2)},
		{Name: "LostIndexIsRestoredFromItsCopy", Setup: known(10, interval, call, func(b *policy.Bucket, _ int64) { b.Index = nil }), Want: outcome(policy.StatusApplied, 60, 50, 0, interval)},
		{Name: "LostTokensAreEmptyByDefault", Setup: known(10, interval, call, func(b *policy.Bucket, _ int64) { b.Tokens = nil }), Want: outcome(policy.StatusApplied, 50, 50, 0, interval)},
		{Name: "LostTokensAreFullOnLossFull", Setup: known(10, interval, call, func(b *policy.Bucket, _ int64) {
			b.Tokens, b.Control.Terms = nil, *full
		}), Want: func() policy.Outcome {
			o := outcome(policy.StatusApplied, 1000, 0, 50, interval)
			o.Conflict = true
			return o
		}()},

		{Name: "RollbackEmptiesAndBeginsANewEra", Setup: known(600, interval, policy.Call{Version: policy.Version{Era: Era, Index: Index + 5}, Terms: terms}, nil), Want: at(outcome(policy.StatusRolledBack, 0, 0, 0, 0), Index+6)},
		{Name: "RollbackKeepsWhereThePolicySaysSo", Setup: known(600, interval, policy.Call{Version: policy.Version{Era: Era + 5, Index: 2}}, func(b *policy.Bucket, _ int64) {
			b.Control.Terms.OnRollback = policy.RollbackKeep
		}), Want: outcome(policy.StatusRolledBack, 600, 0, 0, 0)},
		{Name: "RollbackAppliesANewerFence", Setup: known(600, interval, policy.Call{Version: policy.Version{Era: Era, Index: Index + 1}, Terms: newer}, nil), Want: fenced(at(outcome(policy.StatusRolledBack, 0, 0, 0, 0), Index+2), 4, 0)},
		{Name: "ClockBackBeyondToleranceBeginsANewEra", Setup: known(600, interval, call, func(b *policy.Bucket, now int64) {
			b.Control.Last = now + second
		}), Want: outcome(policy.StatusClock, 600, 0, 0, 0)},
		{Name: "ClockBackClampsToo", Setup: known(5000, interval, call, func(b *policy.Bucket, now int64) {
			b.Control.Last = now + second
		}), Want: outcome(policy.StatusClock, 1000, 0, 0, 0)},
		{Name: "ClockBackWithinToleranceCreditsNothing", Setup: known(600, interval, policy.Call{Version: learned(), Terms: newer}, func(b *policy.Bucket, now int64) {
			b.Control.Last = now + policy.ClockTolerance
		}), Want: fenced(outcome(policy.StatusApplied, 100, 0, 0, 0), 4, 0)},

		{Name: "GrantEarnsItsOwnRate", Setup: known(0, interval, call, granted(second)), Want: conflicting(outcome(policy.StatusApplied, 150, 150, 0, interval))},
		{Name: "GrantEndsWithinTheStretch", Setup: known(0, interval, call, granted(-interval/2)), Want: conflicting(outcome(policy.StatusApplied, 100, 100, 0, interval))},
		{Name: "EndedGrantEarnsTheFloor", Setup: known(0, interval, call, granted(-second)), Want: conflicting(outcome(policy.StatusApplied, 50, 50, 0, interval))},
		{Name: "GrantOfAnotherEraIsVoid", Setup: known(0, interval, call, func(b *policy.Bucket, now int64) {
			granted(second)(b, now)
			b.Control.Terms.GrantEra = Era - 1
		}), Want: conflicting(outcome(policy.StatusApplied, 50, 50, 0, interval))},

		{Name: "DueStepIsCredited", Setup: steppedCall(-1000, second), Want: outcome(policy.StatusApplied, 310, 300, 0, interval)},
		{Name: "FutureStepIsNot", Setup: steppedCall(10*second, 20*second), Want: outcome(policy.StatusApplied, 10, 0, 0, interval)},
		{Name: "CreditedStepIsNotCreditedAgain", Setup: steppedCall(-second, second), Want: outcome(policy.StatusApplied, 10, 0, 0, interval)},
	}
}

func conflicting(o policy.Outcome) policy.Outcome {
	o.Conflict = true
	return o
}

package buckettest

import (
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// Era and Index are the era and the index of the buckets of the cases.
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
	// begins. Now and Last aren't compared.
	Want policy.Outcome
	// Carry is the carry that the bucket must have after the call.
	Carry int64
}

// Terms returns the terms of the cases: 500 tokens a second, which is 50 in a
// refill interval of 100 ms, capacity 1000, and fence (3, 0).
func Terms() policy.Terms {
	return policy.Policy{Capacity: 1000, Rate: policy.PerSecond(500),
		Interval: 100 * time.Millisecond}.Terms(policy.Fence{Epoch: 3})
}

func with(change func(*policy.Terms)) *policy.Terms {
	t := Terms()
	change(&t)
	t.Initial = min(t.Initial, t.Capacity)
	t, err := policy.DecodeTerms(t.Encode()) // computes the fields that depend on the changed ones
	if err != nil {
		panic(err)
	}
	return &t
}

// Bucket returns a bucket that has the tokens and was refilled ago µs before
// now. It has no carry, and no tokens are outstanding or owed.
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

func current() policy.Version { return policy.Version{Era: Era, Index: Index} }

func known(tokens, ago int64, call policy.Call, change func(b *policy.Bucket, now int64)) func(int64) (policy.Bucket,
	policy.Call) {
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
		Status: s, Version: policy.Version{Era: Era, Index: Index}, Tokens: tokens, Added: added, Clamped: clamped,
		Elapsed: elapsed,
		Fence:   policy.Fence{Epoch: 3}, FileVersion: 3,
	}
	if s.Wrote() {
		o.Version.Index++
	}
	switch s {
	case policy.StatusInitialised, policy.StatusRolledBack, policy.StatusClock:
		o.Version.Era = 0
	case policy.StatusUnknown:
		o.Version = policy.Version{}
		o.Fence = policy.Fence{}
		o.FileVersion = 0
	}
	return o
}

func at(o policy.Outcome, index int64) policy.Outcome {
	o.Version.Index = index
	return o
}

func uncounted(o policy.Outcome) policy.Outcome {
	o.Due = policy.Uncounted
	return o
}

func fenced(o policy.Outcome, epoch, seq int64) policy.Outcome {
	o.Fence, o.FileVersion = policy.Fence{Epoch: epoch, Seq: seq}, epoch
	return o
}

func pooled(o policy.Outcome, version, poolsVersion, epoch, seq int64) policy.Outcome {
	o = fenced(o, epoch, seq)
	o.Pool = true
	o.FileVersion = version
	o.PoolsVersion = poolsVersion
	return o
}

// Cases returns cases that cover every rule of a refill.
func Cases() []Case {
	terms := with(func(*policy.Terms) {})
	call := policy.Call{Version: current(), Terms: terms}
	newer := with(func(t *policy.Terms) {
		t.Fence.Epoch = 4
		t.Capacity = 100
		t.Tokens = 1
		t.Per = 1000
	})
	newerKeeping := with(func(t *policy.Terms) {
		t.Fence.Epoch = 4
		t.Capacity = 100
		t.OnRollback = policy.RollbackKeep
	})
	full := with(func(t *policy.Terms) { t.OnLoss = policy.LossFull })
	strict := with(func(t *policy.Terms) { t.Strict = true })
	laterStrict := with(func(t *policy.Terms) {
		t.Strict = true
		t.Fence.Epoch = 4
	})
	holding := func(o policy.Outcome, n int64) policy.Outcome {
		o.Outstanding = n
		return o
	}
	stepped := func(b *policy.Bucket, now int64) {
		b.Control.Terms = policy.Policy{Capacity: 1000, Steps: policy.Every(500 * time.Millisecond), StepTokens: 300}.
			Terms(policy.Fence{Epoch: 3})
		b.Control.Step, b.Control.Next = now-second, now-second/2
	}
	steppedCall := func(step, next int64) func(int64) (policy.Bucket, policy.Call) {
		return func(now int64) (policy.Bucket, policy.Call) {
			b := Bucket(10, now, interval)
			stepped(&b, now)
			terms := b.Control.Terms
			return b, policy.Call{Version: current(), Terms: &terms, Step: now + step, Next: now + next}
		}
	}
	ofPool := func(version, poolsVersion, epoch, seq int64) func(*policy.Terms) {
		return func(t *policy.Terms) {
			t.Pool = true
			t.Version = version
			t.PoolsVersion = poolsVersion
			t.Fence = policy.Fence{Epoch: epoch, Seq: seq}
		}
	}
	inPool := func(version, poolsVersion, epoch, seq int64) func(*policy.Bucket, int64) {
		return func(b *policy.Bucket, _ int64) { ofPool(version, poolsVersion, epoch, seq)(&b.Control.Terms) }
	}
	granted := func(end int64) func(*policy.Bucket, int64) {
		return func(b *policy.Bucket, now int64) {
			inPool(3, 3, 5, 1)(b, now)
			b.Control.Terms.GrantTokens = 3
			b.Control.Terms.GrantEra = Era
			b.Control.Terms.GrantEnd = now + end
		}
	}
	resetting := func(f policy.Fence) *policy.Terms {
		return with(func(t *policy.Terms) {
			t.CarryOver = policy.CarryReset
			t.Fence = f
		})
	}
	resettingPool := func(version, poolsVersion, epoch, seq int64) *policy.Terms {
		return with(func(t *policy.Terms) {
			t.CarryOver = policy.CarryReset
			ofPool(version, poolsVersion, epoch, seq)(t)
		})
	}
	asIs := policy.Call{Version: current()}
	stale := policy.Version{Era: Era, Index: Index - 1}

	return []Case{
		{Name: "MissingAndNeverSeenIsUnknown", Setup: missing(policy.Call{Create: policy.CreateLost, Terms: terms}),
			Want: outcome(policy.StatusUnknown, 0, 0, 0, 0)},
		{Name: "MissingAndNeverSeenIsCreatedWithInitial",
			Setup: missing(policy.Call{Create: policy.CreateInitial, Terms: terms}),
			Want:  at(outcome(policy.StatusInitialised, 1000, 0, 0, 0), 1)},
		{Name: "MissingAndRememberedIsRestoredEmpty",
			Setup: missing(policy.Call{Version: current(), Create: policy.CreateLost, Terms: terms}),
			Want:  uncounted(outcome(policy.StatusInitialised, 0, 0, 0, 0))},
		{Name: "MissingAndRememberedIsRestoredFullOnLossFull",
			Setup: missing(policy.Call{Version: current(), Create: policy.CreateInitial, Terms: full}),
			Want:  uncounted(outcome(policy.StatusInitialised, 1000, 0, 0, 0))},
		{Name: "MissingIsNeverCreatedByARescue", Setup: missing(policy.Call{Version: current()}),
			Want: outcome(policy.StatusUnknown, 0, 0, 0, 0)},
		{Name: "ForeignBucketIsAdopted", Setup: foreign(of(30), of(5), policy.Call{Terms: terms, Create: policy.CreateLost}),
			Want: at(uncounted(outcome(policy.StatusInitialised, 30, 0, 0, 0)), 6)},
		{Name: "ForeignBucketAboveCapacityIsClamped",
			Setup: foreign(of(3000), nil, policy.Call{Terms: terms, Create: policy.CreateLost}),
			Want:  at(uncounted(outcome(policy.StatusInitialised, 1000, 0, 0, 0)), 1)},
		{Name: "ForeignIndexAloneIsAdoptedEmpty", Setup: foreign(nil, of(5),
			policy.Call{Terms: terms, Create: policy.CreateInitial}),
			Want: at(uncounted(outcome(policy.StatusInitialised, 0, 0, 0, 0)), 6)},
		{Name: "AnEmptyKeyAloneIsAMissingBucket",
			Setup: foreign(of(0), nil, policy.Call{Terms: full, Create: policy.CreateLost}),
			Want:  outcome(policy.StatusUnknown, 0, 0, 0, 0)},
		{Name: "AnEmptyKeyAloneIsCreatedWithInitial",
			Setup: foreign(of(0), nil, policy.Call{Terms: terms, Create: policy.CreateInitial}),
			Want:  at(outcome(policy.StatusInitialised, 1000, 0, 0, 0), 1)},
		{Name: "AnEmptyKeyAloneIsRestoredAsOnLossSays",
			Setup: foreign(of(0), nil, policy.Call{Version: current(), Terms: full, Create: policy.CreateLost}),
			Want:  uncounted(outcome(policy.StatusInitialised, 1000, 0, 0, 0))},
		{Name: "AKeyBelowZeroAloneIsCreatedLessWhatIsAboutToBeUndone",
			Setup: foreign(of(-2), of(0), policy.Call{Terms: terms, Create: policy.CreateInitial}),
			Want:  at(outcome(policy.StatusInitialised, 998, 0, 0, 0), 1)},
		{Name: "AKeyBelowZeroAloneIsRestoredLessWhatIsAboutToBeUndone",
			Setup: foreign(of(-2), nil, policy.Call{Version: current(), Terms: terms, Create: policy.CreateLost}),
			Want:  uncounted(outcome(policy.StatusInitialised, -2, 0, 0, 0))},
		{Name: "AnIndexOfZeroAloneIsAMissingBucket",
			Setup: foreign(nil, of(0), policy.Call{Terms: terms, Create: policy.CreateLost}),
			Want:  outcome(policy.StatusUnknown, 0, 0, 0, 0)},
		{Name: "AnIndexOfZeroAloneIsCreatedWithInitial",
			Setup: foreign(nil, of(0), policy.Call{Terms: terms, Create: policy.CreateInitial}),
			Want:  at(outcome(policy.StatusInitialised, 1000, 0, 0, 0), 1)},
		{Name: "ForeignBucketIsNotAdoptedByOneWhoMayNot",
			Setup: foreign(of(30), of(5), policy.Call{Terms: terms, Create: policy.CreateNever}),
			Want:  outcome(policy.StatusUnknown, 0, 0, 0, 0)},
		{Name: "ForeignBucketIsNotAdoptedByARescue", Setup: foreign(of(30), of(5), policy.Call{}),
			Want: outcome(policy.StatusUnknown, 0, 0, 0, 0)},

		{Name: "AStrictBucketThatIsAdoptedHasRoomForNoMore",
			Setup: foreign(of(30), of(5), policy.Call{Terms: strict, Create: policy.CreateLost}),
			Want:  holding(at(uncounted(outcome(policy.StatusInitialised, 30, 0, 0, 0)), 6), 970)},
		{Name: "AStrictBucketThatIsRestoredEmptyHasRoomForNoMore",
			Setup: missing(policy.Call{Version: current(), Create: policy.CreateLost, Terms: strict}),
			Want:  holding(uncounted(outcome(policy.StatusInitialised, 0, 0, 0, 0)), 1000)},
		{Name: "ABucketThatBecomesStrictHasRoomForNoMore",
			Setup: known(10, interval, policy.Call{Version: current(), Terms: laterStrict}, nil),
			Want:  fenced(holding(uncounted(outcome(policy.StatusApplied, 60, 50, 0, interval)), 940), 4, 0)},
		{Name: "ABucketThatBecomesStrictKeepsItsCount",
			Setup: known(10, interval, policy.Call{Version: current(), Terms: laterStrict}, func(b *policy.Bucket, now int64) {
				b.Control.Outstanding = 400
				b.Control.Due = 7
			}), Want: func() policy.Outcome {
				o := fenced(holding(outcome(policy.StatusApplied, 60, 50, 0, interval), 400), 4, 0)
				o.Due = 7
				return o
			}()},
		{Name: "AStrictBucketThatIsLoweredUncountedKeepsItsTokens",
			Setup: known(70, 0, policy.Call{Version: current(), Terms: with(func(t *policy.Terms) {
				t.Strict = true
				t.Fence.Epoch = 4
				t.Capacity = 100
			})}, func(b *policy.Bucket, _ int64) {
				b.Control.Terms.Strict = true
				b.Control.Outstanding = 930
				b.Control.Due = policy.Uncounted
			}), Want: fenced(holding(uncounted(outcome(policy.StatusApplied, 70, 0, 0, 0)), 30), 4, 0)},
		{Name: "ABucketThatIsNoLongerStrictHoldsNothingUncounted",
			Setup: known(70, 0, policy.Call{Version: current(), Terms: with(func(t *policy.Terms) { t.Fence.Epoch = 4 })},
				func(b *policy.Bucket, _ int64) {
					b.Control.Terms.Strict = true
					b.Control.Outstanding = 930
					b.Control.Due = policy.Uncounted
				}), Want: fenced(uncounted(outcome(policy.StatusApplied, 70, 0, 0, 0)), 4, 0)},

		{Name: "CreditsElapsedTime", Setup: known(10, interval, call, nil),
			Want: outcome(policy.StatusApplied, 60, 50, 0, interval)},
		{Name: "CarriesTheRemainder", Setup: known(10, interval+1999, call, nil),
			Want: outcome(policy.StatusApplied, 60, 50, 0, interval+1999), Carry: 1999},
		{Name: "AddsTheCarry", Setup: known(10, interval+1, call, func(b *policy.Bucket, _ int64) { b.Control.Carry = 1999 }),
			Want: outcome(policy.StatusApplied, 61, 51, 0, interval+1)},
		{Name: "ClampsAtCapacityAndDropsTheCarry", Setup: known(990, interval+1, call, nil),
			Want: outcome(policy.StatusApplied, 1000, 10, 40, interval+1)},
		{Name: "FullBucketKeepsNoCarry", Setup: known(1000, 1999, policy.Call{Version: current(), Terms: newer}, nil),
			Want: fenced(outcome(policy.StatusApplied, 100, 0, 0, 1999), 4, 0)},
		{Name: "CreditsNoMoreThanTheCap", Setup: known(0, 60*second, call, nil),
			Want: outcome(policy.StatusApplied, 1000, 1000, 0, 60*second)},
		{Name: "BringsTokensAboveCapacityDown", Setup: known(5000, interval, call, nil),
			Want: outcome(policy.StatusApplied, 1000, 0, 50, interval)},
		{Name: "CreditsAForeignTakersUnfinishedUndo", Setup: known(-1, interval, call, nil),
			Want: outcome(policy.StatusApplied, 49, 50, 0, interval)},
		{Name: "StaleIndexWritesNothing", Setup: known(10, interval, policy.Call{Version: stale, Terms: terms}, nil),
			Want: outcome(policy.StatusStale, 10, 0, 0, 0)},
		{Name: "NeverSeenIsStale", Setup: known(10, interval, policy.Call{Terms: terms, Create: policy.CreateInitial}, nil),
			Want: outcome(policy.StatusStale, 10, 0, 0, 0)},
		{Name: "OlderEraIsStaleWhateverItsIndex", Setup: known(10, interval,
			policy.Call{Version: policy.Version{Era: Era - 1, Index: 99}, Terms: terms}, nil),
			Want: outcome(policy.StatusStale, 10, 0, 0, 0)},
		{Name: "UnderHalfAnIntervalIsEarly", Setup: known(10, interval/2-1, call, nil),
			Want: outcome(policy.StatusEarly, 10, 0, 0, 0)},
		{Name: "HalfAnIntervalIsNotEarly", Setup: known(10, interval/2, call, nil),
			Want: outcome(policy.StatusApplied, 35, 25, 0, interval/2)},

		{Name: "NewerFenceSettlesThenSwitches", Setup: known(10, interval, policy.Call{Version: current(), Terms: newer},
			nil), Want: fenced(outcome(policy.StatusApplied, 60, 50, 0, interval), 4, 0)},
		{Name: "NewerFenceSwitchesThoughEarly", Setup: known(10, 1000, policy.Call{Version: current(), Terms: newer},
			func(b *policy.Bucket, _ int64) { b.Control.Carry = 1500 }),
			Want: fenced(outcome(policy.StatusApplied, 11, 1, 0, 1000), 4, 0), Carry: 249},
		{Name: "NewerFenceSwitchesThoughStale", Setup: known(10, interval, policy.Call{Version: stale, Terms: newer}, nil),
			Want: fenced(outcome(policy.StatusSwitched, 60, 50, 0, interval), 4, 0)},
		{Name: "LoweredCapacityClamps", Setup: known(600, interval, policy.Call{Version: current(), Terms: newer}, nil),
			Want: fenced(outcome(policy.StatusApplied, 100, 50, 0, interval), 4, 0)},
		{Name: "ProportionalCarryOverShrinks", Setup: known(600, 0,
			policy.Call{Version: current(), Terms: with(func(t *policy.Terms) {
				t.Fence.Seq = 1
				t.Capacity = 500
				t.CarryOver = policy.CarryProportional
			})}, nil), Want: fenced(outcome(policy.StatusApplied, 300, 0, 0, 0), 3, 1)},
		{Name: "ProportionalCarryOverNeverGrows", Setup: known(600, 0,
			policy.Call{Version: current(), Terms: with(func(t *policy.Terms) {
				t.Fence.Seq = 1
				t.Capacity = 5000
				t.CarryOver = policy.CarryProportional
			})}, nil), Want: fenced(outcome(policy.StatusApplied, 600, 0, 0, 0), 3, 1)},
		{Name: "ResetCarryOverDropsTokens", Setup: known(600, 0,
			policy.Call{Version: current(), Terms: with(func(t *policy.Terms) {
				t.Fence.Seq = 1
				t.Capacity = 5000
				t.CarryOver = policy.CarryReset
			})}, nil), Want: fenced(outcome(policy.StatusApplied, 0, 0, 0, 0), 3, 1)},
		{Name: "ResetCarryOverKeepsTokensIfNoAmountChanges", Setup: known(600, 0,
			policy.Call{Version: current(), Terms: with(func(t *policy.Terms) {
				t.Fence.Seq = 1
				t.CarryOver = policy.CarryReset
				t.Degraded = policy.DegradedOpen
			})}, nil), Want: fenced(outcome(policy.StatusApplied, 600, 0, 0, 0), 3, 1)},
		{Name: "TheSamePolicyOfALaterVersionDropsNothing", Setup: known(600, 0,
			policy.Call{Version: current(), Terms: resetting(policy.Fence{Epoch: 4})},
			func(b *policy.Bucket, _ int64) {
				b.Control.Terms, b.Control.Carry = *resetting(policy.Fence{Epoch: 3}), 1500
			}),
			Want: fenced(outcome(policy.StatusApplied, 600, 0, 0, 0), 4, 0), Carry: 1500},
		{Name: "TheSameOverrideSetAgainDropsNothing", Setup: known(600, 0,
			policy.Call{Version: stale, Terms: resetting(policy.Fence{Epoch: policy.OwnEpoch, Seq: 2})},
			func(b *policy.Bucket, _ int64) {
				b.Control.Terms = *resetting(policy.Fence{Epoch: policy.OwnEpoch, Seq: 1})
			}),
			Want: fenced(outcome(policy.StatusSwitched, 600, 0, 0, 0), policy.OwnEpoch, 2)},
		{Name: "TheSamePoolOfLaterVersionsDropsNothing", Setup: known(600, 0,
			policy.Call{Version: current(), Terms: resettingPool(4, 5, 0, 0)},
			func(b *policy.Bucket, _ int64) { b.Control.Terms = *resettingPool(3, 3, 0, 0) }),
			Want: pooled(outcome(policy.StatusApplied, 600, 0, 0, 0), 4, 5, 0, 0)},
		{Name: "OlderFenceIsIgnored", Setup: known(10, interval,
			policy.Call{Version: current(), Terms: with(func(t *policy.Terms) {
				t.Fence.Epoch, t.Tokens = 2, 999
			})}, nil), Want: outcome(policy.StatusApplied, 60, 50, 0, interval)},
		{Name: "ChangedTermsUnderTheSameFenceAreAConflict",
			Setup: known(10, interval, policy.Call{Version: current(), Terms: with(func(t *policy.Terms) { t.Tokens = 999 })},
				nil),
			Want: func() policy.Outcome {
				o := outcome(policy.StatusApplied, 60, 50, 0, interval)
				o.Differs = true
				return o
			}()},

		{Name: "ForeignAddIsNotCreditedAgain", Setup: known(10, interval, call, func(b *policy.Bucket, _ int64) {
			*b.Index, b.Control.Carry = Index+1, 77
		}), Want: at(outcome(policy.StatusForeign, 10, 0, 0, 0), Index+2)},
		{Name: "ForeignAddAboveCapacityIsClamped", Setup: known(5000, interval, call, func(b *policy.Bucket, _ int64) {
			*b.Index = Index + 1
		}), Want: at(outcome(policy.StatusForeign, 1000, 0, 0, 0), Index+2)},
		{Name: "AnIndexThatWasTakenBackIsARollback",
			Setup: known(10, interval, policy.Call{Version: policy.Version{Era: Era, Index: Index + 1}, Terms: terms}, nil),
			Want:  at(outcome(policy.StatusRolledBack, 0, 0, 0, 0), Index+2)},
		{Name: "AStaleCallerGetsTheCopy", Setup: known(10, interval, policy.Call{Version: stale, Terms: terms},
			func(b *policy.Bucket, _ int64) {
				*b.Index = Index + 1
			}), Want: outcome(policy.StatusStale, 10, 0, 0, 0)},
		{Name: "AnEarlyCallerGetsTheCopy", Setup: known(10, 1000, call, func(b *policy.Bucket, _ int64) {
			*b.Index = Index + 1
		}), Want: outcome(policy.StatusEarly, 10, 0, 0, 0)},
		{Name: "LostIndexIsRestoredFromItsCopy", Setup: known(10, interval, call,
			func(b *policy.Bucket, _ int64) { b.Index = nil }), Want: outcome(policy.StatusApplied, 60, 50, 0, interval)},
		{Name: "LostTokensAreEmptyByDefault", Setup: known(10, interval, call,
			func(b *policy.Bucket, _ int64) { b.Tokens = nil }), Want: outcome(policy.StatusApplied, 50, 50, 0, interval)},
		{Name: "LostTokensAreFullOnLossFull", Setup: known(10, interval, call, func(b *policy.Bucket, _ int64) {
			b.Tokens, b.Control.Terms = nil, *full
		}), Want: func() policy.Outcome {
			o := outcome(policy.StatusApplied, 1000, 0, 50, interval)
			o.Differs = true
			return o
		}()},

		{Name: "RollbackEmptiesAndBeginsANewEra", Setup: known(600, interval,
			policy.Call{Version: policy.Version{Era: Era, Index: Index + 5}, Terms: terms}, nil),
			Want: at(outcome(policy.StatusRolledBack, 0, 0, 0, 0), Index+6)},
		{Name: "RollbackKeepsWhereThePolicySaysSo",
			Setup: known(600, interval, policy.Call{Version: policy.Version{Era: Era + 5, Index: 2}},
				func(b *policy.Bucket, _ int64) {
					b.Control.Terms.OnRollback = policy.RollbackKeep
				}), Want: outcome(policy.StatusRolledBack, 600, 0, 0, 0)},
		{Name: "RollbackAppliesANewerFence", Setup: known(600, interval,
			policy.Call{Version: policy.Version{Era: Era, Index: Index + 1}, Terms: newer}, nil),
			Want: fenced(at(outcome(policy.StatusRolledBack, 0, 0, 0, 0), Index+2), 4, 0)},
		{Name: "RollbackFollowsTheNewerPolicyThatEmpties", Setup: known(600, interval,
			policy.Call{Version: policy.Version{Era: Era, Index: Index + 1}, Terms: newer},
			func(b *policy.Bucket, _ int64) {
				b.Control.Terms.OnRollback = policy.RollbackKeep
			}), Want: fenced(at(outcome(policy.StatusRolledBack, 0, 0, 0, 0), Index+2), 4, 0)},
		{Name: "RollbackFollowsTheNewerPolicyThatKeeps", Setup: known(600, interval,
			policy.Call{Version: policy.Version{Era: Era, Index: Index + 1}, Terms: newerKeeping}, nil),
			Want: fenced(at(outcome(policy.StatusRolledBack, 100, 0, 0, 0), Index+2), 4, 0)}, // its capacity
		{Name: "ClockBackBeyondToleranceBeginsANewEra", Setup: known(600, interval, call, func(b *policy.Bucket, now int64) {
			b.Control.Last = now + second
		}), Want: outcome(policy.StatusClock, 600, 0, 0, 0)},
		{Name: "ClockBackClampsToo", Setup: known(5000, interval, call, func(b *policy.Bucket, now int64) {
			b.Control.Last = now + second
		}), Want: outcome(policy.StatusClock, 1000, 0, 0, 0)},
		{Name: "ClockBackWithinToleranceCreditsNothing",
			Setup: known(600, interval, policy.Call{Version: current(), Terms: newer}, func(b *policy.Bucket, now int64) {
				b.Control.Last = now + policy.ClockTolerance
			}), Want: fenced(outcome(policy.StatusApplied, 100, 0, 0, 0), 4, 0)},

		{Name: "GrantEarnsItsOwnRate", Setup: known(0, interval, asIs, granted(second)),
			Want: pooled(outcome(policy.StatusApplied, 150, 150, 0, interval), 3, 3, 5, 1)},
		{Name: "GrantEndsWithinTheStretch", Setup: known(0, interval, asIs, granted(-interval/2)),
			Want: pooled(outcome(policy.StatusApplied, 100, 100, 0, interval), 3, 3, 5, 1)},
		{Name: "EndedGrantEarnsTheFloor", Setup: known(0, interval, asIs, granted(-second)),
			Want: pooled(outcome(policy.StatusApplied, 50, 50, 0, interval), 3, 3, 5, 1)},
		{Name: "GrantOfAnotherEraIsVoid", Setup: known(0, interval, asIs, func(b *policy.Bucket, now int64) {
			granted(second)(b, now)
			b.Control.Terms.GrantEra = Era - 1
		}), Want: pooled(outcome(policy.StatusApplied, 50, 50, 0, interval), 3, 3, 5, 1)},

		{Name: "APoolOfALaterVersionReplacesAPlainPolicy",
			Setup: known(10, interval, policy.Call{Version: current(), Terms: with(ofPool(4, 2, 0, 0))}, nil),
			Want:  pooled(outcome(policy.StatusApplied, 60, 50, 0, interval), 4, 2, 0, 0)},
		{Name: "APoolOfTheSameVersionConflicts", Setup: known(10, interval,
			policy.Call{Version: current(), Terms: with(ofPool(3, 9, 0, 0))}, nil),
			Want: outcome(policy.StatusConflict, 10, 0, 0, 0)},
		{Name: "AGrantNeverReplacesAPlainPolicy", Setup: known(10, interval,
			policy.Call{Version: current(), Terms: with(ofPool(9, 9, 20261122, 7))}, nil),
			Want: outcome(policy.StatusConflict, 10, 0, 0, 0)},
		{Name: "APlainPolicyOfALaterVersionReplacesAPools",
			Setup: known(10, interval, policy.Call{Version: current(), Terms: newer}, inPool(3, 9, 20261122, 7)),
			Want:  fenced(outcome(policy.StatusApplied, 60, 50, 0, interval), 4, 0)},
		{Name: "APlainPolicyOfTheSameVersionConflicts", Setup: known(10, interval, call, inPool(3, 0, 1, 1)),
			Want: pooled(outcome(policy.StatusConflict, 10, 0, 0, 0), 3, 0, 1, 1)},
		{Name: "AStaleCallerOfTheOtherKindIsStale",
			Setup: known(10, interval, policy.Call{Version: stale, Terms: terms}, inPool(3, 0, 1, 1)),
			Want:  pooled(outcome(policy.StatusStale, 10, 0, 0, 0), 3, 0, 1, 1)},
		{Name: "ALaterGrantReplacesAnEarlierOne", Setup: known(10, interval,
			policy.Call{Version: stale, Terms: with(ofPool(3, 3, 6, 0))}, inPool(3, 3, 5, 9)),
			Want: pooled(outcome(policy.StatusSwitched, 60, 50, 0, interval), 3, 3, 6, 0)},
		{Name: "AnEarlierGrantOfALaterFileRaisesTheVersions",
			Setup: known(10, interval, policy.Call{Version: current(), Terms: with(ofPool(8, 7, 5, 8))}, inPool(3, 3, 5, 9)),
			Want:  pooled(outcome(policy.StatusApplied, 60, 50, 0, interval), 8, 7, 5, 9)},
		{Name: "BeforeAnyGrantThePoolsVersionDecides",
			Setup: known(500, interval, policy.Call{Version: current(), Terms: with(func(t *policy.Terms) {
				ofPool(2, 4, 0, 0)(t)
				t.Capacity = 100
			})}, inPool(3, 3, 0, 0)), Want: pooled(outcome(policy.StatusApplied, 100, 50, 0, interval), 3, 4, 0, 0)},
		{Name: "AGrantIsNotReplacedByAPolicyWithoutOne",
			Setup: known(500, interval, policy.Call{Version: current(), Terms: with(func(t *policy.Terms) {
				ofPool(3, 4, 0, 0)(t)
				t.Capacity = 100
			})}, inPool(3, 3, 1, 1)), Want: pooled(outcome(policy.StatusApplied, 550, 50, 0, interval), 3, 4, 1, 1)},

		{Name: "DueStepIsCredited", Setup: steppedCall(-1000, second),
			Want: outcome(policy.StatusApplied, 310, 300, 0, interval)},
		{Name: "FutureStepIsNot", Setup: steppedCall(10*second, 20*second),
			Want: outcome(policy.StatusApplied, 10, 0, 0, interval)},
		{Name: "CreditedStepIsNotCreditedAgain", Setup: steppedCall(-second, second),
			Want: outcome(policy.StatusApplied, 10, 0, 0, interval)},
	}
}

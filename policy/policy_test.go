package policy_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
)

func of[T any](v T) *T { return &v }

func TestValidateNamesTheFieldAndItsRange(t *testing.T) {
	t.Parallel()
	smooth := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(500)}
	stepped := policy.Policy{Capacity: 1000, Steps: policy.Every(time.Hour), StepTokens: 10}
	type change func(*policy.Policy)
	for _, c := range []struct {
		name        string
		base        policy.Policy
		change      change
		field, want string
	}{
		{"NoCapacity", smooth, func(p *policy.Policy) { p.Capacity = 0 }, "capacity",
			"0 is not a whole number from 1 to 1125899906842624"},
		{"HugeCapacity", smooth, func(p *policy.Policy) { p.Capacity = policy.MaxTokens + 1 }, "capacity",
			"from 1 to 1125899906842624"},
		{"ShortInterval", smooth, func(p *policy.Policy) { p.Interval = time.Microsecond }, "interval",
			"1µs is not from 1ms to 1h0m0s"},
		{"LongInterval", smooth, func(p *policy.Policy) { p.Interval = 2 * time.Hour }, "interval", "from 1ms to 1h0m0s"},
		{"NegativeInterval", smooth, func(p *policy.Policy) { p.Interval = -time.Second }, "interval", "from 1ms to 1h0m0s"},
		{"OddInterval", smooth, func(p *policy.Policy) { p.Interval = time.Millisecond + 1 }, "interval",
			"whole microseconds"},
		{"NegativeInitial", smooth, func(p *policy.Policy) { p.Initial = of(int64(-1)) }, "initial",
			"-1 is not from 0 to the capacity, 1000"},
		{"InitialAboveCapacity", smooth, func(p *policy.Policy) { p.Initial = of(int64(1001)) }, "initial",
			"from 0 to the capacity, 1000"},
		{"UnknownLoss", smooth, func(p *policy.Policy) { p.OnLoss = 2 }, "on_loss", "2 is not from 0 to 1"},
		{"UnknownRollback", smooth, func(p *policy.Policy) { p.OnRollback = -1 }, "on_rollback", "-1 is not from 0 to 1"},
		{"UnknownCarryOver", smooth, func(p *policy.Policy) { p.CarryOver = 3 }, "carry_over", "3 is not from 0 to 2"},
		{"UnknownDegraded", smooth, func(p *policy.Policy) { p.Degraded = 3 }, "degraded", "3 is not from 0 to 2"},
		{"NeitherRateNorSteps", smooth, func(p *policy.Policy) { p.Rate = policy.Rate{} }, "rate",
			"needs a rate, or every or cron"},
		{"RateAndSteps", smooth, func(p *policy.Policy) { p.Steps = policy.Every(time.Hour) }, "rate", "not both"},
		{"BadRate", smooth, func(p *policy.Policy) { p.Rate.Tokens = -1 }, "rate", "from 1 to 1125899906842624"},
		{"RateOverALongTime", smooth, func(p *policy.Policy) { p.Rate.Per = policy.MaxPer + time.Hour }, "rate",
			"from 1us to 366d"},
		{"TokensWithARate", smooth, func(p *policy.Policy) { p.StepTokens = 5 }, "tokens", "every or cron"},
		{"CapacityBelowTwoIntervals", smooth, func(p *policy.Policy) { p.Capacity = 99 }, "capacity",
			"99 is below 100, the tokens of two refill intervals of 100ms at 500/s"},
		{"RateTooFine", smooth, func(p *policy.Policy) {
			p.Capacity, p.Rate = policy.MaxTokens, policy.Rate{Tokens: 1<<40 - 1, Per: policy.MaxPer}
			p.Interval = time.Hour
		}, "rate", "not below 2^53 units: use a coarser rate"},
		{"NoStepTokens", stepped, func(p *policy.Policy) { p.StepTokens = 0 }, "tokens",
			"0 is not a whole number from 1 to 1125899906842624"},
		{"HugeStepTokens", stepped, func(p *policy.Policy) { p.StepTokens = policy.MaxTokens + 1 }, "tokens",
			"from 1 to 1125899906842624"},
		{"EveryBelowTheInterval", stepped, func(p *policy.Policy) { p.Steps = policy.Every(time.Millisecond) }, "every",
			"1ms is not from the refill interval, 100ms, to 366d"},
		{"EveryTooLong", stepped, func(p *policy.Policy) { p.Steps = policy.Every(policy.MaxPer + time.Second) }, "every",
			"to 366d"},
		{"OddEvery", stepped, func(p *policy.Policy) { p.Steps = policy.Every(time.Hour + 1) }, "every",
			"whole microseconds"},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.NoError(t, c.base.Validate())
			p := c.base
			c.change(&p)
			err := p.Validate()
			require.ErrorIs(t, err, policy.ErrPolicy)
			var field *policy.FieldError
			require.True(t, errors.As(err, &field))
			require.Equal(t, c.field, field.Field)
			require.ErrorContains(t, err, c.want)
			require.ErrorContains(t, err, "policy: "+c.field+": ")
		})
	}
}

func TestValidateAcceptsTheEdges(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]policy.Policy{
		"TwoIntervals": {Capacity: 100, Rate: policy.PerSecond(500)},
		"Largest":      {Capacity: policy.MaxTokens, Rate: policy.PerSecond(1 << 38)},
		"Slowest":      {Capacity: 1, Rate: policy.Rate{Tokens: 1, Per: policy.MaxPer}, Interval: policy.MaxInterval},
		"EmptyAtFirst": {Capacity: 1, Rate: policy.PerSecond(1), Initial: of(int64(0))},
		"EveryInterval": {Capacity: 1, Steps: policy.Every(policy.MinInterval), Interval: policy.MinInterval,
			StepTokens: policy.MaxTokens},
		"EveryLongest":    {Capacity: 1, Steps: policy.Every(policy.MaxPer), StepTokens: 1},
		"DefaultInterval": {Capacity: 100, Rate: policy.PerSecond(500), Interval: policy.DefaultInterval},
	} {
		require.NoError(t, p.Validate(), name)
	}
}

func TestEqualComparesWhatPoliciesSay(t *testing.T) {
	t.Parallel()
	p := policy.Policy{Capacity: 1000, Rate: policy.Rate{Tokens: 1000, Per: 2 * time.Second}}
	same := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(500), Interval: policy.DefaultInterval,
		Initial: of(int64(1000))}
	require.True(t, p.Equal(same), "reduced rates, defaults written out")
	same.Degraded = policy.DegradedOpen
	require.False(t, p.Equal(same))
	hourly := policy.Policy{Capacity: 1000, Steps: policy.Every(time.Hour), StepTokens: 10}
	daily := hourly
	daily.Steps = policy.Every(24 * time.Hour)
	require.False(t, hourly.Equal(daily))
	require.True(t, hourly.Equal(hourly))
	require.False(t, hourly.Equal(p))
	require.False(t, p.Equal(policy.Policy{}))
}

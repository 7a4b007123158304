package policy_test

import (
	"math"
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tokenrefill/refiller/policy"
)

func TestARateInUnitsIsTheSameRate(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"10/h": "10/h", "60/m": "1/s", "10/m": "10/m", "1000/24h": "1000/24h", "1/7us": "1/7\u00b5s",
		"500000/ms": "500000000/s", "1/h": "1/h", "24/24h": "1/h",
		"1125899906842624/ms": "1125899906842624/ms",
	} {
		r, err := policy.ParseRate(text)
		require.NoError(t, err)
		require.Equal(t, want, r.InUnits().String())
	}
	require.Zero(t, policy.Rate{}.InUnits())
}

func TestParseRateReadsWhatPeopleWrite(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]policy.Rate{
		"500/s":                {Tokens: 500, Per: time.Second},
		" 10 / m ":             {Tokens: 10, Per: time.Minute},
		"1000/24h":             {Tokens: 1000, Per: 24 * time.Hour},
		"3/1m30s":              {Tokens: 3, Per: 90 * time.Second},
		"3/.5s":                {Tokens: 3, Per: 500 * time.Millisecond},
		"7/d":                  {Tokens: 7, Per: 24 * time.Hour},
		"7/366d":               {Tokens: 7, Per: policy.MaxPer},
		"1/us":                 {Tokens: 1, Per: time.Microsecond},
		"1/µs":                 {Tokens: 1, Per: time.Microsecond},
		"2/ms":                 {Tokens: 2, Per: time.Millisecond},
		"5/h":                  {Tokens: 5, Per: time.Hour},
		"1125899906842624/1us": {Tokens: policy.MaxTokens, Per: time.Microsecond},
	} {
		t.Run(text, func(t *testing.T) {
			r, err := policy.ParseRate(text)
			require.NoError(t, err)
			require.Equal(t, want, r)
			again, err := policy.ParseRate(r.String())
			require.NoError(t, err, "ParseRate accepts the text that String returns")
			require.Equal(t, r, again)
		})
	}
}

func TestParseRateNamesTheRangeOfWhatItRefuses(t *testing.T) {
	t.Parallel()
	const tokens, per = "tokens must be a whole number from 1 to 1125899906842624",
		"time must be us, ms, s, m, h, d, w or a duration"
	const whole = "time must be whole microseconds from 1us to 366d"
	for text, want := range map[string]string{
		"":                       "want tokens/time, such as 500/s",
		"500":                    "want tokens/time",
		"/s":                     tokens,
		"0/s":                    tokens,
		"-5/s":                   tokens,
		"1.5/s":                  tokens,
		"1125899906842625/s":     tokens,
		"99999999999999999999":   "want tokens/time",
		"99999999999999999999/s": tokens,
		"5/":                     per,
		"5/x":                    per,
		"5/s/s":                  per,
		"5/1.5d":                 per,
		"5/--1s":                 per,
		"5/s1":                   per,
		"5/0s":                   whole,
		"5/-1s":                  whole,
		"5/500ns":                whole,
		"5/1500ns":               whole,
		"5/8785h":                whole,
	} {
		t.Run(text, func(t *testing.T) {
			_, err := policy.ParseRate(text)
			require.ErrorIs(t, err, policy.ErrRate)
			require.ErrorContains(t, err, want)
		})
	}
}

func FuzzParseRate(f *testing.F) {
	for _, text := range []string{"500/s", "10/m", "1000/24h", "3/1m30s", "3/.5s", "7/366d", "1/µs", "0/s", "5/-1s",
		"9/1.5us", " 1 / h ", "1/1e3s", "/", "5/8784h", "+5/+5s"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := policy.ParseRate(text)
		if err != nil {
			require.ErrorIs(t, err, policy.ErrRate)
			require.Zero(t, r)
			return
		}
		require.NoError(t, r.Validate())
		again, err := policy.ParseRate(r.String())
		require.NoError(t, err, r.String())
		require.Equal(t, r, again)
	})
}

func TestParseDurationAlsoReadsDaysAndWeeks(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{"7d": 7 * 24 * time.Hour, "0d": 0, "366d": policy.MaxPer,
		"2w":    14 * 24 * time.Hour,
		"100ms": 100 * time.Millisecond, "1h30m": 90 * time.Minute} {
		got, err := policy.ParseDuration(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for text, want := range map[string]string{"367d": "from 0 to 366", "-1d": "from 0 to 366", "1.5d": "from 0 to 366",
		"53w": "weeks must be a whole number from 0 to 52", "w": "from 0 to 52",
		"d": "from 0 to 366", "": "want a number and a unit", "5": "want a number and a unit",
		"5y": "want a number and a unit"} {
		_, err := policy.ParseDuration(text)
		require.ErrorContains(t, err, "policy: bad duration", text)
		require.ErrorContains(t, err, want, text)
	}
}

func TestOverAndTimeForSaturate(t *testing.T) {
	t.Parallel()
	most := policy.Rate{Tokens: policy.MaxTokens, Per: time.Microsecond}
	least := policy.Rate{Tokens: 1, Per: policy.MaxPer}
	require.EqualValues(t, policy.MaxTokens, most.Over(math.MaxInt64))
	require.EqualValues(t, policy.MaxTokens, most.Over(time.Hour), "the product exceeds 64 bits")
	require.EqualValues(t, policy.MaxTokens, most.Over(2*time.Microsecond), "the product fits into 64 bits")
	require.EqualValues(t, math.MaxInt64/int64(policy.MaxPer), least.Over(math.MaxInt64))
	require.Zero(t, most.Over(0))
	require.Zero(t, most.Over(-time.Hour))
	require.Zero(t, policy.Rate{}.Over(time.Hour))
	require.Zero(t, policy.Rate{Tokens: -1, Per: 1}.Over(time.Hour))

	require.Equal(t, time.Duration(math.MaxInt64), least.TimeFor(policy.MaxTokens))
	require.Equal(t, time.Duration(math.MaxInt64), least.TimeFor(math.MaxInt64), "the product exceeds 64 bits")
	require.Equal(t, time.Microsecond, most.TimeFor(1), "the time is rounded up")
	require.Equal(t, 2*time.Millisecond, policy.PerSecond(500).TimeFor(1))
	require.Zero(t, most.TimeFor(0))
	require.Zero(t, most.TimeFor(-1))
	require.Zero(t, policy.Rate{}.TimeFor(1))
}

func rates() *rapid.Generator[policy.Rate] {
	return rapid.Custom(func(t *rapid.T) policy.Rate {
		return policy.Rate{
			Tokens: rapid.Int64Range(1, policy.MaxTokens).Draw(t, "tokens"),
			Per:    time.Duration(rapid.Int64Range(1, policy.MaxPer.Microseconds()).Draw(t, "per")) * time.Microsecond,
		}
	})
}

func TestOverAndTimeForAreExact(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		r := rates().Draw(t, "rate")
		d := time.Duration(rapid.Int64Range(1, math.MaxInt64).Draw(t, "d"))
		due := new(big.Int).Mul(big.NewInt(r.Tokens), big.NewInt(int64(d)))
		due.Quo(due, big.NewInt(int64(r.Per)))
		if due.Cmp(big.NewInt(policy.MaxTokens)) > 0 {
			due.SetInt64(policy.MaxTokens)
		}
		require.Equal(t, due.Int64(), r.Over(d))

		n := rapid.Int64Range(1, policy.MaxTokens).Draw(t, "n")
		if wait := r.TimeFor(n); wait < math.MaxInt64 {
			require.GreaterOrEqual(t, r.Over(wait), n, "the tokens are due by then")
			require.Less(t, r.Over(wait-time.Microsecond), n, "the tokens are not due a microsecond earlier")
		}
	})
}

func TestRateStringIsReadBack(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		r := rates().Draw(t, "rate")
		got, err := policy.ParseRate(r.String())
		require.NoError(t, err)
		require.Equal(t, r, got)
	})
}

func TestTheErrorOfAFractionalRateSuggestsAWholeOne(t *testing.T) {
	for text, want := range map[string]string{"0.5/s": "1/2s", "1.5/m": "3/2m", "0.1/h": "1/10h", ".25 / s": "1/4s"} {
		_, err := policy.ParseRate(text)
		require.ErrorContains(t, err, "write it as "+want, text)
		_, err = policy.ParseRate(want)
		require.NoError(t, err)
	}
	for _, text := range []string{"-0.5/s", "x/s", "0.5/", "0.5/2s", "1e-30/s"} {
		_, err := policy.ParseRate(text)
		require.ErrorIs(t, err, policy.ErrRate, text)
		require.NotContains(t, err.Error(), "write it as", text)
	}
}

package policy_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tokenrefill/refiller/policy"
)

func TestTermsHoldTheRateInLowestTerms(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		rate        policy.Rate
		tokens, per int64
	}{
		{policy.PerSecond(500), 1, 2000},
		{policy.Rate{Tokens: 1000, Per: 24 * time.Hour}, 1, 86_400_000},
		{policy.Rate{Tokens: 7, Per: time.Microsecond}, 7, 1},
		{policy.PerSecond(999_983), 999_983, 1_000_000},
		{policy.PerSecond(1 << 40), 1 << 34, 15_625},
	} {
		got := policy.Policy{Capacity: policy.MaxTokens, Rate: c.rate}.Terms(policy.Fence{Epoch: 2, Seq: 9})
		require.Equal(t, c.tokens, got.Tokens, c.rate)
		require.Equal(t, c.per, got.Per, c.rate)
		require.Equal(t, policy.Fence{Epoch: 2, Seq: 9}, got.Fence)
		require.InEpsilon(t, float64(c.rate.Tokens)/float64(c.rate.Per), float64(got.Rate().Tokens)/float64(got.Rate().Per),
			1e-12)
	}
}

func TestTermsCreditNoMoreThanAFullBucketOrFiveIntervals(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		p    policy.Policy
		want time.Duration
	}{
		{"TimeToFill", policy.Policy{Capacity: 1000, Rate: policy.PerSecond(1000)}, time.Second},
		{"TwoSeconds", policy.Policy{Capacity: 5000, Rate: policy.PerSecond(1000)}, 2 * time.Second},
		{"FiveIntervals", policy.Policy{Capacity: 50_000, Rate: policy.PerSecond(1000), Interval: time.Second},
			5 * time.Second},
	} {
		require.NoError(t, c.p.Validate(), c.name)
		require.Equal(t, c.want.Microseconds(), c.p.Terms(policy.Fence{}).MaxElapsed, c.name)
	}
}

func TestSteppedTermsHaveNoRate(t *testing.T) {
	t.Parallel()
	got := policy.Policy{Capacity: 100, Steps: policy.Every(time.Hour), StepTokens: 30}.Terms(policy.Fence{})
	name := got.Per
	require.Positive(t, name)
	require.Equal(t, policy.Terms{Kind: policy.Stepped, Capacity: 100, Tokens: 30, Per: name, Interval: 100_000,
		Initial: 100}, got)
	other := policy.Policy{Capacity: 100, Steps: policy.Every(2 * time.Hour), StepTokens: 30}.Terms(policy.Fence{})
	require.NotEqual(t, name, other.Per, "a different schedule has a different name")
	require.Zero(t, got.Rate())
}

func TestFenceOrdersByEpochThenSeq(t *testing.T) {
	t.Parallel()
	fences := []policy.Fence{{Epoch: 0, Seq: 0}, {Epoch: 0, Seq: 9}, {Epoch: 1, Seq: 0}, {Epoch: 1, Seq: 1},
		{Epoch: 2, Seq: 0}}
	for i, f := range fences {
		for k, g := range fences {
			require.Equal(t, i < k, f.Before(g), "%v %v", f, g)
			v, w := policy.Version{Era: f.Epoch, Index: f.Seq}, policy.Version{Era: g.Epoch, Index: g.Seq}
			require.Equal(t, i < k, v.Before(w), "%v %v", v, w)
		}
	}
}

func TestDecodedTermsAreThoseEncoded(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		number := func(name string, least int64) int64 { return rapid.Int64Range(least, 1<<53).Draw(t, name) }
		choice := func(name string, most int) int { return rapid.IntRange(0, most).Draw(t, name) }
		want := policy.Policy{Capacity: 1, Rate: policy.PerSecond(1)}.Terms(policy.Fence{Seq: number("seq", 0)})
		want.Capacity, want.Interval = number("capacity", 1), number("interval", 1)
		want.Initial = rapid.Int64Range(0, want.Capacity).Draw(t, "initial")
		want.OnLoss, want.OnRollback = policy.Loss(choice("on loss", 1)), policy.Rollback(choice("on rollback", 1))
		want.CarryOver, want.Degraded = policy.CarryOver(choice("carry over", 2)), policy.Degraded(choice("degraded", 2))
		want.Shadow, want.Strict = rapid.Bool().Draw(t, "shadow"), rapid.Bool().Draw(t, "strict")
		want.Fence.Epoch = number("version or epoch", 0)
		switch choice("kind", 3) {
		case 1:
			want.Kind, want.MaxElapsed = policy.Stepped, 0
		case 2:
			want.Template = true
		case 3:
			want.Pool = true
			want.Version = number("version", 0)
			want.PoolsVersion = number("pools version", 0)
			want.GrantTokens = number("grant", 0)
			want.GrantEnd = number("end", 0)
			want.GrantEra = number("era", 0)
		}
		if want.Kind == policy.Smooth {
			want.MaxElapsed = int64(min(float64(want.Capacity)*1e6, float64(max(2_000_000, 5*want.Interval))))
		}
		got, err := policy.DecodeTerms(want.Encode())
		require.NoError(t, err)
		require.Equal(t, want, got)
	})
}

func TestDecodeTermsRefusesWhatNoTermsHave(t *testing.T) {
	t.Parallel()
	good := "3 0 1000 1 2000 100000 0 0 0 0 0 0 0 0 0 0 0 0"
	terms, err := policy.DecodeTerms(good)
	require.NoError(t, err)
	short, err := policy.DecodeTerms("3 0 1000 1 2000 100000")
	require.NoError(t, err)
	require.Equal(t, terms, short, "zeros at the end may be left out")
	for place, bad := range map[int][]string{
		0: {"x", "-1", "1.5"}, 1: {"5"}, 2: {"0"}, 4: {"0"}, 5: {"0"}, 6: {"1001"}, 7: {"2"}, 8: {"2"}, 9: {"3"},
		10: {"3", "16"},
		11: {"2"}, 12: {"1"}, 13: {"1"}, 17: {"99999999999999999999"},
	} {
		for _, word := range bad {
			words := strings.Fields(good)
			words[place] = word
			_, err := policy.DecodeTerms(strings.Join(words, " "))
			require.ErrorIs(t, err, policy.ErrTerms, "number %d is %q", place+1, word)
		}
	}
	for _, text := range []string{"", "1 2 3", "3 0 1000 1 2000", good + " 1", "3 1 1000 0 7 100000"} {
		_, err := policy.DecodeTerms(text)
		require.ErrorIs(t, err, policy.ErrTerms, text)
	}
}

func FuzzDecodeTerms(f *testing.F) {
	f.Add("3 0 1000 1 2000 100000 0 0 0 0 0 0 0 0 0 0 0 0")
	f.Add("3 1 1000 30 99 100000 0 1 1 2 2")
	f.Add("3 3 1000 1 2000 100000 1000 0 0 0 0 0 3 8 9 5 7 9")
	f.Add("")
	f.Add("a b c d e f g h i j k l m n o p")
	f.Fuzz(func(t *testing.T, text string) {
		terms, err := policy.DecodeTerms(text)
		if err != nil {
			require.ErrorIs(t, err, policy.ErrTerms)
			require.Zero(t, terms)
			return
		}
		again, err := policy.DecodeTerms(terms.Encode())
		require.NoError(t, err)
		require.Equal(t, terms, again)

		// All terms that can be read can be used in computations.
		tokens, index := int64(0), int64(1)
		b := policy.Bucket{Tokens: &tokens, Index: &index,
			Control: &policy.Control{Terms: terms, Era: 1, Index: 1, Last: now - 1}}
		_ = b.Wait(1, now)
		out := b.Refill(policy.Call{Version: policy.Version{Era: 1, Index: 1}}, now)
		require.LessOrEqual(t, out.Status, policy.StatusConflict)
	})
}

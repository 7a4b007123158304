package refill

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// answers returns the replies to a batch of script calls of n buckets each, which began at the given times in µs.
func answers(n int, begun ...int64) []lua.RefillResult {
	var list []lua.RefillResult
	for _, now := range begun {
		for range n {
			list = append(list, lua.RefillResult{Outcome: policy.Outcome{Status: policy.StatusApplied, Now: now}})
		}
	}
	return list
}

func TestScriptCallsShrinkOnASlowServerAndGrowOnAFastOne(t *testing.T) {
	t.Parallel()
	p := newSizes(500, time.Second)
	require.Equal(t, 20, p.perCall(), "the first calls have 20 buckets")
	require.Equal(t, 500, p.batch())

	for range 50 { // 5 µs a bucket
		n := int64(p.perCall())
		p.answered(answers(int(n), 1000, 1000+5*n, 1000+10*n))
	}
	require.Equal(t, 50, p.perCall(), "fast calls have 50 buckets")
	require.Equal(t, 500, p.batch())

	p.answered(answers(50, 1000, 90_000))
	require.GreaterOrEqual(t, p.perCall(), 35, "one slow reply shrinks calls only a little")

	for range 50 { // 400 µs a bucket
		n := int64(p.perCall())
		p.answered(answers(int(n), 1000, 1000+400*n))
	}
	require.Equal(t, 1, p.perCall(), "calls have one bucket, even if that exceeds the budget")
	require.InDelta(t, 250, p.batch(), 10, "a batch fits into a tenth of the timeout")

	for range 50 {
		n := int64(p.perCall())
		p.answered(answers(int(n), 1000, 1000+10*n))
	}
	require.InDelta(t, 25, p.perCall(), 2)
	require.Equal(t, 500, p.batch())
}

func TestBatchesShrinkWhenTheyFailAndGrowBack(t *testing.T) {
	t.Parallel()
	p := newSizes(500, time.Second)
	for _, want := range []int{250, 125, 62, 31, 15, 7, 3, 1, 1} {
		p.failed(p.batch())
		require.Equal(t, want, p.batch())
	}
	for _, want := range []int{2, 4, 8, 16, 32, 64, 128, 256, 500, 500} {
		p.answered(nil)
		require.Equal(t, want, p.batch())
	}
}

func TestTheCostOfACallIsReadFromTheServersClock(t *testing.T) {
	t.Parallel()
	us := func(n int64) time.Duration { return time.Duration(n) * time.Microsecond }
	require.Zero(t, costOf(nil))
	require.Zero(t, costOf(answers(20, 1000)), "the cost of a single call is unknown")
	require.Equal(t, us(5), costOf(answers(20, 1000, 1100)))
	require.Equal(t, us(5), costOf(answers(20, 1000, 1100, 9100, 9200)), "the cost is the median")
	require.Zero(t, costOf(answers(20, 1000, 900)), "the clock stepped back")
	failed := answers(1, 1000, 1010, 1020, 1030)
	failed[1].Err = errors.New("lost")
	require.Equal(t, us(10), costOf(failed), "the cost is that of the last two calls")
}

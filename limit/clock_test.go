package limit_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/limit/internal/decide"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/pacing"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/policy"
)

// All ten tokens are taken. The clock goes back by 20 hours for one call that gets nothing, and then returns. left is
// the number of tokens that are left then, both in the process and in Redis.
func TestACallThatGetsNothingMintsNothingWhenTheClockReturns(t *testing.T) {
	t.Parallel()
	server, hourly := testenv.Redis(t, testenv.WithClock()), policy.Rate{Tokens: 1, Per: time.Hour}
	bucket, queue := lazy.Config{Capacity: 10, Rate: hourly}, pacing.Config{Rate: hourly, MaxWait: 9 * time.Hour}
	fixed := window.Config{Limit: 10, Window: time.Hour}
	sliding := window.Config{Kind: window.Sliding, Limit: 10, Window: time.Hour}
	for _, c := range []struct {
		limit limit.Config
		what  decide.What
		left  int64
	}{
		{bucket, decide.Peek, 0}, {bucket, decide.Take, 0},
		{sliding, decide.Peek, 0}, {sliding, decide.Take, 0},
		{queue, decide.Peek, 0}, {queue, decide.Take, 0}, {queue, decide.Return, 0}, // places can't be returned
		// If a call finds that a fixed window ends too late, it shortens the window for good.
		{fixed, decide.Peek, 10}, {fixed, decide.Take, 10},
	} {
		rule, err := decide.RuleOf(c.limit)
		require.NoError(t, err)
		var now time.Time
		for where, engine := range map[string]decide.Engine{
			"process": decide.NewMemory(func() time.Time { return now }, rule),
			"redis":   decide.NewScript(server.Client(), rule),
		} {
			call := func(after time.Duration, what decide.What, n int64) decide.Outcome {
				now = time.Unix(1_800_000_000, 0).Add(after)
				server.StepClock(after)
				o, err := engine.Do(t.Context(), what, n, decide.Ask{Key: "K"})
				require.NoError(t, err)
				return o
			}
			require.True(t, call(0, decide.Take, 10).Fits)
			require.Equal(t, c.what == decide.Return, call(-20*time.Hour, c.what, 1).Fits)
			require.Equal(t, c.left, call(0, decide.Peek, 1).Left, "%s: %s, %d", where, rule.Kind, c.what)
			require.NoError(t, engine.Reset(t.Context(), decide.Ask{Key: "K"}))
		}
	}
}

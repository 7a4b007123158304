package lua_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// These tests check the steps that a budget is credited when it has an override, when its schedule changes, and when a
// call is repeated. The numbers wanted are worked out by hand.

// hourlyBudget returns a template whose buckets hold 100 tokens and get 30 at each hour, and its policy.
func hourlyBudget(t *testing.T) (*lua.Template, policy.Terms) {
	t.Helper()
	p := policy.Policy{Capacity: 100, Steps: policy.Every(time.Hour), StepTokens: 30}
	set, err := policy.NewTemplates(1, []policy.Template{{Prefix: "t:", Policy: p}}, nil)
	require.NoError(t, err)
	return lua.NewTemplate(set.Of("t:"), false), set.Of("t:").Terms
}

// override gives a key a policy that differs from the template's by its capacity.
func (w *world) override(key string, capacity int64, template policy.Terms) lua.OverrideReply {
	w.Helper()
	own := template
	own.Capacity = capacity
	own.Initial = capacity
	reply, err := lua.SetOverride(context.Background(), w.rdb, key, own, template, policy.EnforceRefilled)
	require.NoError(w, err)
	return reply
}

// The first call sends only the instants of the steps that fill a bucket under the template's policy. More steps are
// needed to fill it under the override, so the script asks for a second call with more instants.
func TestABudgetWithALargerOverrideIsCreditedAllOfItsSteps(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template, terms := hourlyBudget(t)
	require.True(t, w.take(template, "t:a", 100).OK)
	w.override("t:a", 1000, terms)
	w.at("2026-01-01T20:00:00Z")
	require.True(t, w.take(template, "t:b", 1).OK, "the template now has the instants around the present")
	require.EqualValues(t, 20*30-1, w.take(template, "t:a", 1).Remaining)
}

// The script of an override doesn't know the schedule. It credits the step in the bucket's state, once.
func TestAnOverrideCreditsTheStepOfABudgetOnce(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		at   string
		want int64
	}{
		{"2026-01-01T00:59:59.999999Z", 0},
		{"2026-01-01T01:00:00Z", 30},
		{"2026-01-01T01:00:10Z", 30},
	} {
		w := newWorld(t, "2026-01-01T00:00:30Z")
		template, terms := hourlyBudget(t)
		require.True(t, w.take(template, "t:a", 100).OK)
		w.at(c.at)
		require.Equal(t, c.want, w.override("t:a", 200, terms).Tokens, c.at)
		w.at("2026-01-01T01:00:20Z")
		require.EqualValues(t, 30-1, w.take(template, "t:a", 1).Remaining, c.at)
	}
}

// The next step in the state is not later than the last one, so the state names no step to come.
func TestAnOverrideCreditsNoStepThatTheStateDoesNotName(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template, terms := hourlyBudget(t)
	require.True(t, w.take(template, "t:a", 100).OK)
	step := w.now.UnixMicro()
	st := fmt.Sprintf("%16d %16d 1 0 %16d %16d", step, step, step, step)
	require.NoError(t, w.rdb.HSet(t.Context(), "{t:a}:ctl", "st", st).Err())
	w.at("2026-01-01T00:00:40Z")
	require.Zero(t, w.override("t:a", terms.Capacity, terms).Tokens)
}

// A take under another schedule doesn't know how many steps of the old schedule have come. It credits only the next
// step that the state names.
func TestATakeUnderAnotherScheduleCreditsTheStepOfTheOldOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template, _ := hourlyBudget(t)
	require.True(t, w.take(template, "t:a", 100).OK)
	w.at("2026-01-01T01:00:10Z")
	later := budgets(t, 2, policy.Policy{Capacity: 100, Steps: policy.Every(20 * time.Minute), StepTokens: 7}, 0)
	require.EqualValues(t, 30-1, w.take(later, "t:a", 1).Remaining)
	w.at("2026-01-01T01:20:00Z")
	require.EqualValues(t, 30-1+7-1, w.take(later, "t:a", 1).Remaining)
}

// An override has the schedule of its template, also after the template got another one.
func TestABudgetWithAnOverrideFollowsTheNewSchedule(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template, terms := hourlyBudget(t)
	require.True(t, w.take(template, "t:a", 100).OK)
	w.override("t:a", 1000, terms)
	w.at("2026-01-01T01:00:10Z")
	later := budgets(t, 2, policy.Policy{Capacity: 100, Steps: policy.Every(20 * time.Minute), StepTokens: 7}, 0)
	require.EqualValues(t, 2*30-1, w.take(later, "t:a", 1).Remaining, "the steps at 00:40 and 01:00")
}

// The clocks of the caller and the server differ by months, so the first call has the wrong instants. The second call
// has the instants around the present, and not all of them since 1970.
func TestACallWithTheWrongInstantsIsRepeatedWithAFew(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template, _ := hourlyBudget(t)
	require.NoError(t, lua.Load(t.Context(), w.rdb))
	calls, longest := 0, 0
	w.rdb.AddHook(onCommand(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		calls++
		for _, arg := range cmd.Args()[1:] {
			longest = max(longest, len(fmt.Sprint(arg)))
		}
		return next(ctx, cmd)
	}))
	require.True(t, w.take(template, "t:a", 100).OK)
	w.at("2026-01-01T01:00:10Z")
	later := budgets(t, 2, policy.Policy{Capacity: 100, Steps: policy.Every(20 * time.Minute), StepTokens: 7}, 0)
	require.EqualValues(t, 30-1, w.take(later, "t:a", 1).Remaining)
	require.Less(t, longest, 1000)
	calls = 0
	require.False(t, w.take(later, "t:a", 50).OK)
	require.Equal(t, 1, calls, "nothing is to be swept")
}

// A call makes a take of 5 tokens and one of 20. The second one needs the reservation's 89 tokens, so the call is
// repeated after a sweep. The take of 5 is made only once.
func TestATakeThatNeedsASweepIsMadeOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template, _ := hourlyBudget(t)
	require.EqualValues(t, 99, w.take(template, "t:a", 1).Remaining)
	call := lua.ReserveCall{ID: "r", N: 89, TTL: time.Second}
	_, err := lua.Reserve(t.Context(), w.rdb, "t:a", call)
	require.NoError(t, err)
	w.at("2026-01-01T00:00:40Z")
	runs := []policy.Run{{N: 5, Count: 1}, {N: 20, Count: 1}}
	reply, err := lua.TakeWhole(t.Context(), w.rdb, lua.Takes{Key: "t:a", Runs: runs, Template: template})
	require.NoError(t, err)
	require.EqualValues(t, 99-5-20, reply.Remaining)
}

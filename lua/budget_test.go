package lua_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// calendar returns a schedule in a time zone.
func calendar(t testing.TB, spec, zone string) policy.Steps {
	t.Helper()
	in, err := time.LoadLocation(zone)
	require.NoError(t, err)
	c, err := policy.ParseCalendar(spec, in)
	require.NoError(t, err)
	return c
}

// budgets returns a template of budgets.
func budgets(t testing.TB, version int64, p policy.Policy, maxKeys int64) *lua.Template {
	t.Helper()
	list := []policy.Template{{Prefix: "t:", Policy: p, MaxKeys: maxKeys}}
	set, err := policy.NewTemplates(version, list, nil)
	require.NoError(t, err)
	return lua.NewTemplate(set.Of("t:"), false)
}

// world is an embedded store. A test sets its clock, and its keys expire by that clock.
type world struct {
	testing.TB
	*miniredis.Miniredis
	rdb *redis.Client
	now time.Time
}

func newWorld(t testing.TB, now string) *world {
	m, rdb := embedded(t)
	w := &world{TB: t, Miniredis: m, rdb: rdb}
	w.at(now)
	return w
}

// at sets the clock.
func (w *world) at(now string) {
	w.Helper()
	at, err := time.Parse(time.RFC3339Nano, now)
	require.NoError(w, err)
	w.set(at)
}

func (w *world) set(now time.Time) {
	w.Helper()
	if later := now.Sub(w.now); !w.now.IsZero() && later > 0 {
		w.FastForward(later)
	}
	w.now = now
	w.SetTime(now)
}

// take takes n tokens.
func (w *world) take(template *lua.Template, key string, n int64) lua.TakesReply {
	w.Helper()
	takes := lua.Takes{Key: key, Runs: one(n), Template: template, Terms: true}
	r, err := lua.TakeWhole(context.Background(), w.rdb, takes)
	require.NoError(w, err)
	return r
}

// The numbers are worked out by hand. A budget of 100 is drained. Then a take is tried a moment before each step, and
// at the step.
func TestABudgetIsCreditedOnceAtEachStepOfItsCalendar(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, spec, zone, begin string
		steps                   []string
	}{
		{"months, over both changes of the clock", "0 0 1 * *", "Europe/Berlin", "2026-03-15T12:00:00Z", []string{
			"2026-03-31T22:00:00Z", "2026-04-30T22:00:00Z", "2026-05-31T22:00:00Z", "2026-06-30T22:00:00Z",
			"2026-07-31T22:00:00Z", "2026-08-31T22:00:00Z", "2026-09-30T22:00:00Z", "2026-10-31T23:00:00Z",
			"2026-11-30T23:00:00Z"}},
		{"a day whose hour is skipped", "30 2 * * *", "Europe/Berlin", "2026-03-28T12:00:00Z", []string{
			"2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"}},
		{"a day whose hour is repeated", "30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", []string{
			"2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"}},
		{"every hour, with one hour repeated", "0 * * * *", "Europe/Berlin", "2026-10-24T23:30:00Z", []string{
			"2026-10-25T00:00:00Z", "2026-10-25T01:00:00Z", "2026-10-25T02:00:00Z"}},
		{"leap days", "0 0 29 2 *", "America/New_York", "2026-01-01T00:00:00Z", []string{
			"2028-02-29T05:00:00Z", "2032-02-29T05:00:00Z"}},
		{"a zone that leaves out a day", "0 0 * * *", "Pacific/Apia", "2011-12-29T12:00:00Z", []string{
			"2011-12-30T10:00:00Z", "2011-12-31T10:00:00Z"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, c.begin)
			template := budgets(t, 1, policy.Policy{Capacity: 100, Steps: calendar(t, c.spec, c.zone), StepTokens: 100}, 0)
			require.True(t, w.take(template, "t:a", 100).OK, "the budget begins full")
			for _, step := range c.steps {
				at, err := time.Parse(time.RFC3339, step)
				require.NoError(t, err)
				w.set(at.Add(-time.Millisecond))
				denied := w.take(template, "t:a", 1)
				require.False(t, denied.OK, "the step is not credited before %s", step)
				require.Equal(t, time.Millisecond, denied.Runs[0].Wait, "the wait ends at %s", step)
				w.set(at)
				require.True(t, w.take(template, "t:a", 100).OK, "the step is credited at %s", step)
				require.False(t, w.take(template, "t:a", 1).OK, "the step is not credited twice at %s", step)
			}
		})
	}
}

func TestABudgetThatMissedStepsIsCreditedAllOfThem(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template := budgets(t, 1, policy.Policy{Capacity: 100, Steps: policy.Every(time.Hour), StepTokens: 30}, 0)
	require.True(t, w.take(template, "t:a", 100).OK)
	w.at("2026-01-01T01:00:00Z")
	require.EqualValues(t, 25, w.take(template, "t:a", 5).Remaining)
	w.at("2026-01-01T03:59:59Z")
	require.EqualValues(t, 85-1, w.take(template, "t:a", 1).Remaining, "two steps are credited")
	w.at("2026-01-01T04:00:00Z")
	require.EqualValues(t, 100-1, w.take(template, "t:a", 1).Remaining, "the budget is full")
}

// For a budget of 100, a call sends the three latest steps of 60 each. These suffice if the budget has no debt. Four
// steps are needed to pay a debt of 100 and fill the budget.
func TestABudgetInDebtThatMissedStepsIsCreditedAllOfThem(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template := budgets(t, 1, policy.Policy{Capacity: 100, Steps: policy.Every(time.Hour), StepTokens: 60}, 0)
	require.True(t, w.take(template, "t:a", 1).OK)
	_, err := lua.Reserve(t.Context(), w.rdb, "t:a",
		lua.ReserveCall{ID: "x", N: 99, TTL: time.Minute, Overrun: policy.OverrunDebt})
	require.NoError(t, err)
	settled, err := lua.Settle(t.Context(), w.rdb, "t:a", "x", 300)
	require.NoError(t, err)
	require.EqualValues(t, 100, settled.Owed)
	w.at("2026-01-01T04:00:00Z")
	require.EqualValues(t, 100-1, w.take(template, "t:a", 1).Remaining)
}

// A bucket lives until steps have filled it twice: 3 steps of 40 fill 100.
func TestABudgetExpiresWhenStepsHaveFilledItTwice(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-01T00:00:30Z")
	template := budgets(t, 1, policy.Policy{Capacity: 100, Steps: policy.Every(time.Hour), StepTokens: 40}, 5)
	require.True(t, w.take(template, "t:a", 100).OK)
	for _, key := range []string{"t:a", "{t:a}", "{t:a}:ctl"} {
		at := time.UnixMilli(w.rdb.PExpireTime(t.Context(), key).Val().Milliseconds()).UTC()
		require.Equal(t, "2026-01-01T06:01:01Z", at.Format(time.RFC3339), key)
	}
	require.Zero(t, w.rdb.Exists(t.Context(), lua.ActiveKey("t:", lua.ActiveShard("t:a"))).Val(), "no active set exists")
	w.at("2026-01-01T05:59:00Z")
	require.False(t, w.take(template, "t:a", 101).OK)
	require.EqualValues(t, 100, w.take(template, "t:a", 100).Remaining+100)
	at := time.UnixMilli(w.rdb.PExpireTime(t.Context(), "t:a").Val().Milliseconds()).UTC()
	require.Equal(t, "2026-01-01T11:01:01Z", at.Format(time.RFC3339), "a take that credits a step renews the expiry")
}

func TestABudgetsClockGoesBackAndForward(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-15T00:00:00Z")
	template := budgets(t, 1, policy.Policy{Capacity: 100, Steps: calendar(t, "0 0 1 * *", "UTC"), StepTokens: 100}, 0)
	require.True(t, w.take(template, "t:a", 100).OK)
	w.at("2026-02-01T00:00:00Z")
	require.True(t, w.take(template, "t:a", 100).OK)
	w.at("2026-01-31T23:59:00Z")
	require.False(t, w.take(template, "t:a", 1).OK)
	w.at("2026-02-01T00:00:01Z")
	require.False(t, w.take(template, "t:a", 1).OK, "February's step was credited before")
	w.SetTime(time.Date(2027, 6, 15, 0, 0, 0, 0, time.UTC)) // SetTime, so that the keys do not expire
	require.True(t, w.take(template, "t:a", 100).OK)
	w.at("2026-02-15T00:00:00Z")
	require.False(t, w.take(template, "t:a", 1).OK)
	w.at("2026-03-01T00:00:00Z")
	require.False(t, w.take(template, "t:a", 1).OK, "March may have been credited while the clock was ahead")
	w.at("2026-04-01T00:00:00Z")
	require.True(t, w.take(template, "t:a", 100).OK, "the later step is credited")
	require.False(t, w.take(template, "t:a", 1).OK)
}

// Two programs have different rules of the same time zone. For one of them the period begins an hour later.
func TestProgramsWithOtherDataOfAZoneCreditAPeriodOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-15T00:00:00Z")
	early := calendar(t, "0 0 1 * *", "UTC")
	p := policy.Policy{Capacity: 100, Steps: early, StepTokens: 100}
	set, err := policy.NewTemplates(1, []policy.Template{{Prefix: "t:", Policy: p}}, nil)
	require.NoError(t, err)
	first := lua.NewTemplate(set.Of("t:"), false)
	rule := *set.Of("t:")
	rule.Policy.Steps = calendar(t, "0 1 1 * *", "UTC") // the terms name the schedule as before
	second := lua.NewTemplate(&rule, false)
	require.True(t, w.take(first, "t:a", 100).OK)
	w.at("2026-02-01T00:30:00Z")
	require.False(t, w.take(second, "t:a", 1).OK)
	w.at("2026-02-01T00:31:00Z")
	require.False(t, w.take(first, "t:a", 1).OK, "the other consumer stored 01:00 as the next step")
	w.at("2026-02-01T01:00:00Z")
	require.True(t, w.take(second, "t:a", 100).OK)
	require.False(t, w.take(first, "t:a", 1).OK)
	w.at("2026-03-01T00:30:00Z")
	require.False(t, w.take(first, "t:a", 1).OK, "the second consumer's next step is stored")
	w.at("2026-03-01T01:00:00Z")
	require.True(t, w.take(first, "t:a", 100).OK)
	require.False(t, w.take(second, "t:a", 1).OK)
}

// side is one of two buckets with the same schedule: a configured bucket that is refilled at each step, or a budget.
type side struct {
	key      string
	template *lua.Template // nil: configured
	steps    policy.Steps
	terms    policy.Terms
	seen     policy.Version
	step     int64
}

// refill credits each step that is due, as refillers do.
func (s *side) refill(w *world) {
	w.Helper()
	for range 50 {
		require.NoError(w, sweepAll(w, s.key))
		due, next := policy.Due(s.steps, s.step, w.now.UnixMicro(), 2*s.terms.Fill())
		out, err := lua.Refill(context.Background(), w.rdb, s.key, policy.Call{Version: s.seen, Terms: &s.terms,
			Create: policy.CreateInitial, Step: due, Next: next})
		require.NoError(w, err)
		s.seen, s.step = out.Version, out.Step
		if out.Status == policy.StatusEarly {
			w.now = w.now.Add(time.Duration(s.terms.Interval) * time.Microsecond)
			w.SetTime(w.now)
			continue
		}
		if due == 0 && out.Status != policy.StatusStale {
			return
		}
	}
	w.Fatal("the refills do not end")
}

// sweepAll ends reservations and leases whose time is over, as refillers do.
func sweepAll(w *world, key string) error {
	err := lua.SweepOne(context.Background(), w.rdb, key, 1000)
	if errors.Is(err, lua.ErrUnknownBucket) {
		return nil
	}
	return err
}

// open prepares a budget for a script, as the SDK does.
func (s *side) open(w *world) {
	w.Helper()
	if s.template == nil {
		return
	}
	_, err := lua.TakeWhole(context.Background(), w.rdb, lua.Takes{Key: s.key, Template: s.template, Hold: time.Hour})
	require.NoError(w, err)
}

// do makes call number op with n tokens, for a budget or for a bucket that was just refilled. It returns the contents
// of the reply.
func (s *side) do(w *world, op, n int64, id string) string {
	w.Helper()
	ctx := context.Background()
	if op < 3 {
		if s.template != nil {
			require.NoError(w, sweepAll(w, s.key)) // a take that has enough tokens doesn't end expired records first
		}
		r := w.take(s.template, s.key, n)
		wait := time.Duration(0)
		if !r.OK {
			wait = r.Runs[0].Wait
		}
		return fmt.Sprintf("take %d: %v, %d left, wait %s", n, r.OK, r.Remaining, wait)
	}
	s.open(w)
	switch op {
	case 3:
		r, err := lua.Reserve(ctx, w.rdb, s.key, lua.ReserveCall{ID: id, N: n, TTL: time.Hour, Overrun: policy.OverrunDebt})
		require.NoError(w, err)
		return fmt.Sprintf("reserve %d: %v, %d left, wait %s", n, r.OK, r.Remaining, r.Wait)
	case 4:
		r, err := lua.Settle(ctx, w.rdb, s.key, id, n)
		if err != nil {
			return "settle: nothing held"
		}
		return fmt.Sprintf("settle %d: %+v, %d left", n, r.Settlement, r.Remaining)
	case 5:
		r, err := lua.Return(ctx, w.rdb, s.key, n, 0)
		require.NoError(w, err)
		return fmt.Sprintf("return %d: %+v", n, r)
	case 6:
		r, err := lua.Grant(ctx, w.rdb, s.key, n)
		require.NoError(w, err)
		return fmt.Sprintf("grant %d: %d, %d", n, r.Tokens, r.Clamped)
	default:
		r, err := lua.Reset(ctx, w.rdb, s.key, n%s.terms.Capacity)
		require.NoError(w, err)
		return fmt.Sprintf("reset: %d", r.Tokens)
	}
}

// A schedule has the same meaning in a template as in a configured bucket that is refilled all the time. The test
// compares both in random histories of takes, reservations with debt, settlements, returns, grants, resets and changes
// of the policy. Time passes over steps, and over several steps at once.
func TestAScheduleInATemplateMeansTheSameAsInABucket(t *testing.T) {
	t.Parallel()
	schedules := []policy.Steps{policy.Every(time.Hour), policy.Every(7 * time.Hour),
		calendar(t, "0 0 1 * *", "Europe/Berlin"), calendar(t, "*/20 2 * * *", "Europe/Berlin"),
		calendar(t, "0 9-17 * * 1-5", "America/New_York")}
	for seed := range uint64(24) {
		r := rand.New(rand.NewPCG(seed, 34)) //nolint:gosec // a test
		w := newWorld(t, "2026-03-01T00:00:10Z")
		draw := func() policy.Policy {
			tokens := 20 + r.Int64N(80)
			return policy.Policy{Capacity: tokens + r.Int64N(2)*r.Int64N(4*tokens), Steps: schedules[r.IntN(len(schedules))],
				StepTokens: tokens, CarryOver: policy.CarryOver(r.IntN(3)), Strict: r.IntN(4) == 0}
		}
		p := draw()
		version := int64(1)
		bucket, budget := &side{key: "b"}, &side{key: "t:a"}
		put := func() {
			bucket.steps, bucket.terms = p.Steps, p.Terms(policy.Fence{Epoch: version})
			budget.terms = bucket.terms
			budget.template = budgets(t, version, p, 0)
			budget.open(w)
			bucket.refill(w)
			require.NoError(t, sweepAll(w, bucket.key))
		}
		put()
		var history []string
		held, ends := "", time.Time{} // the last reservation
		expires := seed%2 == 0        // a policy that comes after a budget has expired finds nothing to carry over
		spans := []time.Duration{time.Minute, 3 * time.Hour, 400 * time.Hour}
		for i := range 60 {
			to := w.now.Add(time.Duration(r.Int64N(int64(spans[r.IntN(3)]))).Truncate(time.Microsecond))
			if expires {
				w.set(to)
			}
			w.now = to
			w.SetTime(to)
			bucket.refill(w)
			if !expires && r.IntN(15) == 0 {
				budget.open(w) // when another schedule begins, the script knows at most one step of the former schedule
				version++
				p = draw()
				put()
				history = append(history, fmt.Sprintf("%s policy %+v", w.now, p))
			}
			op, n := r.Int64N(8), 1+r.Int64N(120)
			id := fmt.Sprint(i)
			switch {
			case op == 3:
				held, ends = id, w.now.Add(time.Hour)
			case op == 4 && w.now.Before(ends):
				id = held
			case op == 4: // its record's life depends on when it was swept
				continue
			}
			want, got := bucket.do(w, op, n, id), budget.do(w, op, n, id)
			history = append(history, w.now.String()+" "+want)
			require.Equal(t, want, got, "seed %d: %v", seed, history)
		}
	}
}

// The clock goes forward and back. While it goes back by less than a period, no step is credited twice. If it goes back
// further, only the steps that it passes again are credited twice.
func TestABudgetNeverHasTwoPeriodsAtOnce(t *testing.T) {
	t.Parallel()
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 35)) //nolint:gosec // a test
		w := newWorld(t, "2026-01-10T00:00:00Z")
		template := budgets(t, 1, policy.Policy{Capacity: 100, Steps: policy.Every(time.Hour), StepTokens: 100}, 0)
		highest := w.now
		far := seed%2 == 1
		var spent, steps int64
		for range 100 {
			to := w.now.Add(time.Duration(r.Int64N(int64(2*time.Hour))) - 30*time.Minute)
			if far && r.IntN(10) == 0 {
				to = to.Add(-time.Duration(r.Int64N(int64(10 * time.Hour))))
			}
			if least := highest.Add(-59 * time.Minute); !far && to.Before(least) {
				to = least
			}
			from := w.now
			if !far {
				from = highest
			}
			steps += max(0, to.Unix()/3600-from.Unix()/3600)
			w.now = to
			w.SetTime(to) // not w.set, so that no key expires because of the changed clock
			if to.After(highest) {
				highest = to
			}
			n := 1 + r.Int64N(100)
			if w.take(template, "t:a", n).OK {
				spent += n
			}
		}
		require.LessOrEqual(t, spent, 100*(1+steps), "seed %d", seed)
		require.Greater(t, spent, 20*steps, "seed %d", seed)
	}
}

// This test uses a real server, and steps of two seconds.
func TestABudgetIsCreditedByTheServersClock(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	template := budgets(t, 1, policy.Policy{Capacity: 10, Steps: policy.Every(2 * time.Second), StepTokens: 10}, 0)
	take := func(n int64) lua.TakesReply {
		r, err := lua.TakeWhole(t.Context(), rdb, lua.Takes{Key: "t:a", Runs: one(n), Template: template})
		require.NoError(t, err)
		return r
	}
	for range 3 {
		for !take(10).OK {
			wait := take(10).Runs
			if len(wait) > 0 {
				require.LessOrEqual(t, wait[0].Wait, 2*time.Second)
				time.Sleep(wait[0].Wait)
			}
		}
	}
}

func TestABoundedTemplateOfBudgetsHasNoMoreKeys(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-10T00:00:00Z")
	template := budgets(t, 1, policy.Policy{Capacity: 10, Steps: policy.Every(time.Hour), StepTokens: 10}, 2)
	w.take(template, "t:a", 1)
	w.take(template, "t:b", 1)
	_, err := lua.TakeWhole(t.Context(), w.rdb, lua.Takes{Key: "t:c", Runs: one(1), Template: template})
	require.ErrorIs(t, err, lua.ErrTooManyBuckets)
	w.at("2026-01-10T01:59:59Z")
	w.take(template, "t:a", 1) // renewed
	w.at("2026-01-10T02:30:00Z")
	w.take(template, "t:c", 1)
	require.False(t, w.Exists("t:b"))
}

// If a budget has too few tokens for a take, the take ends the reservations whose time is over.
func TestATakeEndsWhatHasRunOutInABudget(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "2026-01-10T00:00:00Z")
	template := budgets(t, 1, policy.Policy{Capacity: 100, Steps: calendar(t, "0 0 1 * *", "UTC"), StepTokens: 100}, 0)
	for i := range 50 {
		_, err := lua.TakeWhole(t.Context(), w.rdb, lua.Takes{Key: "t:a", Template: template, Hold: time.Minute})
		require.NoError(t, err)
		_, err = lua.Reserve(t.Context(), w.rdb, "t:a", lua.ReserveCall{ID: fmt.Sprint(i), N: 2, TTL: time.Minute})
		require.NoError(t, err)
	}
	w.at("2026-01-10T00:00:59Z")
	require.False(t, w.take(template, "t:a", 1).OK)
	w.at("2026-01-10T00:01:00Z")
	require.True(t, w.take(template, "t:a", 100).OK)
}

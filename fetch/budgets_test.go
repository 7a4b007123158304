package fetch_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// yearly is a template of budgets that get their capacity at each new year.
func yearly(t *testing.T, prefix string, capacity int64) policy.Template {
	t.Helper()
	steps, err := policy.ParseCalendar("0 0 1 1 *", time.UTC)
	require.NoError(t, err)
	return policy.Template{Prefix: prefix, Policy: policy.Policy{Capacity: capacity, Steps: steps, StepTokens: capacity}}
}

func TestBudgetsHaveWhatRefilledBucketsHave(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		shadow := yearly(t, "shadow:", 10)
		shadow.Policy.Shadow = true
		bounded := yearly(t, "few:", 10)
		bounded.MaxKeys = 1
		publish(t, rdb, 7, yearly(t, "b:", 60), shadow, bounded)
		c := client(t, rdb)
		require.NoError(t, c.Ready(ctx))
		r, err := c.Peek(ctx, "b:1")
		require.NoError(t, err)
		require.EqualValues(t, 60, r.Remaining)
		require.Zero(t, size(t, rdb)-1, "a peek creates no key, so only the templates are stored")
		taken, err := c.Take(ctx, "b:1", 20)
		require.NoError(t, err)
		require.True(t, taken.OK)
		require.EqualValues(t, 40, taken.Remaining)
		now := time.Now().UTC()
		next := time.Date(now.Year()+1, 1, 1, 0, 0, 0, 0, time.UTC)
		require.InDelta(t, next.Sub(now), taken.ResetAfter, float64(time.Minute))
		require.InDelta(t, next.Sub(now), taken.MoreAfter, float64(time.Minute))
		denied, err := c.Take(ctx, "b:1", 41)
		require.NoError(t, err)
		require.False(t, denied.OK)
		require.InDelta(t, next.Sub(now), denied.RetryAfter, float64(time.Minute))
		require.NoError(t, c.Undo(ctx, "b:1", taken))
		for range 2 {
			r, err = c.Take(ctx, "b:1", 10, fetch.WithRequestID("one"))
			require.NoError(t, err)
			require.EqualValues(t, 50, r.Remaining)
		}
		r, err = c.Take(ctx, "b:1", 1, fetch.WithLeave(50))
		require.NoError(t, err)
		require.False(t, r.OK)
		all, err := c.TakeAll(ctx, []fetch.Request{{Key: "b:1", N: 10}, {Key: "b:2", N: 61 - 1}})
		require.NoError(t, err)
		require.True(t, all.OK)
		all, err = c.TakeAll(ctx, []fetch.Request{{Key: "b:1", N: 10}, {Key: "b:2", N: 1}})
		require.NoError(t, err)
		require.Equal(t, "b:2", all.Denied)
		held, err := c.Reserve(ctx, "b:1", 30, time.Minute, fetch.WithOverrun(policy.OverrunDebt))
		require.NoError(t, err)
		require.True(t, held.OK)
		s, err := held.Settle(ctx, 45)
		require.NoError(t, err)
		require.EqualValues(t, 10, s.Charged)
		require.EqualValues(t, 5, s.Owed)
		_, err = c.Take(ctx, "b:3", 61)
		require.ErrorIs(t, err, fetch.ErrExceedsCapacity)
		for range 3 {
			r, err = c.Take(ctx, "shadow:1", 5)
			require.NoError(t, err)
			require.True(t, r.OK)
		}
		require.True(t, r.Shadow)
		_, err = c.Take(ctx, "few:1", 1)
		require.NoError(t, err)
		_, err = c.Take(ctx, "few:2", 1)
		require.ErrorIs(t, err, lua.ErrTooManyBuckets)
		wait, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		_, err = c.Wait(wait, "b:2", 1)
		require.ErrorIs(t, err, fetch.ErrDeadline, "the token is due at the new year")
	})
}

// clocked returns a server, and a function that sets its clock.
func clocked(t *testing.T) (rdb *redis.Client, at func(time.Time)) {
	t.Helper()
	server := testenv.Redis(t, testenv.WithClock())
	return server.Client(), func(to time.Time) { server.StepClock(time.Until(to)) }
}

// Each call is the first call after the step. It finds the drained budget as full as if a refiller had credited it at
// the step.
func TestEachCallOfABudgetFindsTheStepThatHasCome(t *testing.T) {
	t.Parallel()
	rdb, at := clocked(t)
	ctx := t.Context()
	at(time.Date(2031, 12, 31, 23, 0, 0, 0, time.UTC))
	calls := map[string]func(c *fetch.Client, key string) (left int64, err error){
		"Take": func(c *fetch.Client, key string) (int64, error) {
			r, err := c.Take(ctx, key, 40)
			return r.Remaining, err
		},
		"TakeUpTo": func(c *fetch.Client, key string) (int64, error) {
			r, err := c.TakeUpTo(ctx, key, 40)
			return r.Remaining, err
		},
		"Take once": func(c *fetch.Client, key string) (int64, error) {
			r, err := c.Take(ctx, key, 40, fetch.WithRequestID("r"))
			return r.Remaining, err
		},
		"TakeAll": func(c *fetch.Client, key string) (int64, error) {
			r, err := c.TakeAll(ctx, []fetch.Request{{Key: key, N: 40}})
			return r.Results[0].Remaining, err
		},
		"Wait": func(c *fetch.Client, key string) (int64, error) {
			r, err := c.Wait(ctx, key, 40)
			return r.Remaining, err
		},
		"Reserve": func(c *fetch.Client, key string) (int64, error) {
			r, err := c.Reserve(ctx, key, 40, time.Minute)
			return r.Remaining, err
		},
		"Settle": func(c *fetch.Client, key string) (int64, error) {
			s, err := c.Settle(ctx, key, "held", 60)
			return s.Remaining, err
		},
		"Peek": func(c *fetch.Client, key string) (int64, error) {
			r, err := c.Peek(ctx, key)
			return r.Remaining - 40, err
		},
	}
	c := client(t, rdb, fetch.WithTemplates(yearly(t, "b:", 60)), fetch.WithDenyCache(false))
	for name := range calls {
		_, err := c.Reserve(ctx, "b:"+name, 20, 24*time.Hour, fetch.WithReservationID("held"))
		require.NoError(t, err)
		r, err := c.Take(ctx, "b:"+name, 40)
		require.NoError(t, err)
		require.True(t, r.OK)
		r, err = c.Take(ctx, "b:"+name, 1)
		require.NoError(t, err)
		require.False(t, r.OK)
		require.InDelta(t, time.Hour, r.RetryAfter, float64(time.Minute), "RetryAfter follows the server's clock")
	}
	at(time.Date(2032, 1, 1, 0, 0, 1, 0, time.UTC))
	for name, call := range calls {
		left, err := call(c, "b:"+name)
		require.NoError(t, err, name)
		require.EqualValues(t, 20, left, name)
		r, err := c.Take(ctx, "b:"+name, 61-1)
		require.NoError(t, err)
		require.Equal(t, name == "Peek", r.OK, "%s: the call takes its tokens once, a peek takes none", name)
	}
}

func TestAWaitForABudgetEndsAtItsStep(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	every := policy.Template{Prefix: "b:",
		Policy: policy.Policy{Capacity: 10, Steps: policy.Every(2 * time.Second), StepTokens: 10}}
	c := client(t, testenv.Redis(t).Client(), fetch.WithTemplates(every))
	r, err := c.Take(ctx, "b:1", 10)
	require.NoError(t, err)
	require.True(t, r.OK)
	for range 3 {
		r, err = c.Wait(ctx, "b:1", 10)
		require.NoError(t, err)
		require.True(t, r.OK)
		now := time.Now()
		require.Less(t, now.Sub(now.Truncate(2*time.Second)), time.Second, "the wait ends right after the step")
	}
}

// A policy that changes within a period adds no tokens before the next step. A policy is never replaced by one of an
// earlier version.
func TestABudgetsPolicyChangesWithinAPeriod(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	rdb, at := clocked(t)
	at(time.Date(2031, 6, 1, 0, 0, 0, 0, time.UTC))
	monthly, err := policy.ParseCalendar("0 0 1 * *", time.UTC)
	require.NoError(t, err)
	more := yearly(t, "b:", 100)
	later := more
	later.Policy.Steps = monthly
	versioned := func(version int64, template policy.Template) *fetch.Client {
		return client(t, rdb, fetch.WithTemplates(template), fetch.WithTemplatesVersion(version),
			fetch.WithDenyCache(false))
	}
	old := versioned(1, yearly(t, "b:", 60))
	take := func(c *fetch.Client, n int64) bool {
		t.Helper()
		r, err := c.Take(ctx, "b:1", n)
		require.NoError(t, err)
		return r.OK
	}
	require.True(t, take(old, 50))
	second := versioned(2, more)
	require.False(t, take(second, 11))
	require.True(t, take(second, 10))
	require.False(t, take(old, 1))
	third := versioned(3, later)
	require.False(t, take(third, 1), "the new schedule begins now")
	at(time.Date(2031, 7, 1, 0, 0, 1, 0, time.UTC))
	require.True(t, take(third, 100))
	require.False(t, take(third, 1))
	require.False(t, take(old, 1))
	at(time.Date(2032, 1, 1, 0, 0, 1, 0, time.UTC))
	require.True(t, take(old, 100), "a Client with an earlier version credits the step that the state names")
	require.False(t, take(third, 1))
}

// No refiller sweeps a budget: the take that lacks tokens does.
func TestAKilledConsumersReservationsInABudgetEnd(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	rdb, at := clocked(t)
	at(time.Date(2031, 6, 1, 0, 0, 0, 0, time.UTC))
	c := client(t, rdb, fetch.WithTemplates(yearly(t, "b:", 100)), fetch.WithDenyCache(false))
	for i := range 50 {
		r, err := c.Reserve(ctx, "b:1", 2, time.Minute, fetch.WithReservationID(fmt.Sprint(i)))
		require.NoError(t, err)
		require.True(t, r.OK)
	}
	r, err := c.Take(ctx, "b:1", 1)
	require.NoError(t, err)
	require.False(t, r.OK)
	at(time.Date(2031, 6, 1, 0, 5, 0, 0, time.UTC)) // long after the step, since this clock runs on during the test
	r, err = c.Take(ctx, "b:1", 100)
	require.NoError(t, err)
	require.True(t, r.OK, "the take gets the step's tokens without a refiller")
}

// Tokens that are returned after a step go into the new period. The budget never holds more than its capacity, whether
// the step was credited before the return or with it.
func TestWhatGoesBackAfterAStepAddsNoPeriod(t *testing.T) {
	t.Parallel()
	rdb, at := clocked(t)
	ctx := t.Context()
	at(time.Date(2031, 12, 31, 23, 0, 0, 0, time.UTC))
	c := client(t, rdb, fetch.WithTemplates(yearly(t, "b:", 60)), fetch.WithDenyCache(false))
	drained := map[string]fetch.Result{}
	for _, key := range []string{"b:due", "b:credited", "b:held"} {
		r, err := c.Take(ctx, key, 60)
		require.NoError(t, err)
		require.True(t, r.OK)
		drained[key] = r
	}
	require.NoError(t, c.Undo(ctx, "b:held", drained["b:held"]))
	held, err := c.Reserve(ctx, "b:held", 60, 24*time.Hour)
	require.NoError(t, err)
	require.True(t, held.OK)

	at(time.Date(2032, 1, 1, 0, 0, 1, 0, time.UTC))
	r, err := c.Take(ctx, "b:credited", 10)
	require.NoError(t, err)
	require.True(t, r.OK, "the take credits the step")
	require.NoError(t, c.Undo(ctx, "b:credited", drained["b:credited"]))
	require.NoError(t, c.Undo(ctx, "b:due", drained["b:due"]))
	require.NoError(t, held.Cancel(ctx))
	for key := range drained {
		r, err = c.Take(ctx, key, 60)
		require.NoError(t, err)
		require.True(t, r.OK, key)
		r, err = c.Take(ctx, key, 1)
		require.NoError(t, err)
		require.False(t, r.OK, key)
	}
}

// Blocks are a part of the budget from which they were taken. The takes from the bucket and its blocks together are at
// most one capacity before the step, and another one after it.
func TestBlocksOfABudgetServeEachPeriodOnce(t *testing.T) {
	t.Parallel()
	rdb, at := clocked(t)
	ctx := t.Context()
	at(time.Date(2031, 6, 1, 0, 0, 0, 0, time.UTC))
	strict := yearly(t, "b:", 600)
	strict.Policy.Strict = true
	served := func(c *fetch.Client) (n int) {
		t.Helper()
		for {
			r, err := c.Take(ctx, "b:1", 1)
			require.NoError(t, err)
			if !r.OK {
				return n
			}
			n++
		}
	}
	clients := make([]*fetch.Client, 2)
	for i := range clients {
		clients[i] = client(t, rdb, fetch.WithTemplates(strict), fetch.WithLease(50, time.Second))
	}
	total := served(clients[0]) + served(clients[1])
	require.LessOrEqual(t, total, 600)
	require.NoError(t, clients[0].Close(ctx)) // the tokens that are left in its blocks go back
	require.NoError(t, clients[1].Close(ctx))
	c := client(t, rdb, fetch.WithTemplates(strict), fetch.WithDenyCache(false))
	require.Equal(t, 600, total+served(c))

	at(time.Date(2032, 1, 1, 0, 0, 1, 0, time.UTC))
	require.Equal(t, 600, served(c))
}

// After a backup is restored, the takes since the backup are undone, but no step is credited twice.
func TestARestoredBudgetIsCreditedTheStepsSinceItsBackup(t *testing.T) {
	t.Parallel()
	rdb, at := clocked(t)
	ctx := t.Context()
	c := client(t, rdb, fetch.WithTemplates(yearly(t, "b:", 60)), fetch.WithDenyCache(false))
	took := func(want bool, n int64) {
		t.Helper()
		r, err := c.Take(ctx, "b:1", n)
		require.NoError(t, err)
		require.Equal(t, want, r.OK)
	}
	at(time.Date(2031, 6, 1, 0, 0, 0, 0, time.UTC))
	took(true, 50)
	backup := map[string]string{}
	keys, err := rdb.Keys(ctx, "*").Result()
	require.NoError(t, err)
	for _, key := range keys {
		backup[key] = rdb.Dump(ctx, key).Val()
	}
	restore := func() {
		t.Helper()
		require.NoError(t, rdb.FlushAll(ctx).Err())
		for key, data := range backup {
			require.NoError(t, rdb.RestoreReplace(ctx, key, 1000*time.Hour*24, data).Err())
		}
	}
	took(true, 10)
	restore()
	took(true, 10)
	took(false, 1)
	at(time.Date(2032, 1, 1, 0, 0, 1, 0, time.UTC))
	took(true, 60)
	restore()
	took(true, 60)
	took(false, 1)
}

package fetch_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func lazyTemplate(prefix string, capacity int64, rate policy.Rate) policy.Template {
	return policy.Template{Prefix: prefix, Enforce: policy.EnforceLazy,
		Policy: policy.Policy{Capacity: capacity, Rate: rate, Interval: time.Millisecond}}
}

func TestEveryKeyOfALazyTemplateIsABucket(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	c, err := fetch.New(rdb, fetch.WithTimeout(20*time.Second), fetch.WithTemplates(
		lazyTemplate("user:", 60, policy.Rate{Tokens: 1, Per: time.Hour}),
		lazyTemplate("user:fast:", 10, policy.PerSecond(200))))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close(context.WithoutCancel(ctx))) })

	r, err := c.Peek(ctx, "user:1")
	require.NoError(t, err)
	require.Equal(t, fetch.Result{OK: true, Remaining: 60, Limit: 60}, r)
	require.Zero(t, rdb.DBSize(ctx).Val(), "a full bucket has no key")

	r, err = c.Take(ctx, "user:1", 50)
	require.NoError(t, err)
	require.True(t, r.OK)
	require.EqualValues(t, 50, r.Taken)
	require.EqualValues(t, 10, r.Remaining)
	require.EqualValues(t, 60, r.Limit)
	r, err = c.Take(ctx, "user:1", 12)
	require.NoError(t, err)
	require.False(t, r.OK)
	require.InDelta(t, 2*time.Hour, r.RetryAfter, float64(5*time.Minute))
	r, err = c.TakeUpTo(ctx, "user:1", 12)
	require.NoError(t, err)
	require.EqualValues(t, 10, r.Taken)
	_, err = c.Take(ctx, "user:2", 61)
	require.ErrorIs(t, err, fetch.ErrExceedsCapacity)
	require.NoError(t, c.Return(ctx, "user:1", 5))
	r, err = c.Peek(ctx, "user:1")
	require.NoError(t, err)
	require.EqualValues(t, 5, r.Remaining)
	require.InDelta(t, 55*time.Hour, r.ResetAfter, float64(5*time.Minute))
	require.Equal(t, []string{lua.LazyKey("user:1")}, rdb.Keys(ctx, "*").Val())

	_, err = c.Take(ctx, "users", 1)
	require.ErrorIs(t, err, fetch.ErrUnknownBucket, "no template matches")
	require.EqualValues(t, 1, rdb.DBSize(ctx).Val())

	// The more specific template applies, and callers can wait for its tokens.
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() {
			if _, err := c.Wait(ctx, "user:fast:1", 1); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestATemplatesKeyMayHaveItsOwnPolicy(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	c, err := fetch.New(rdb, fetch.WithTimeout(20*time.Second),
		fetch.WithTemplates(lazyTemplate("user:", 60, policy.PerSecond(1))))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close(context.WithoutCancel(ctx))) })
	own, err := lazyTemplate("user:", 60, policy.PerSecond(1)).With(policy.Override{Capacity: 600})
	require.NoError(t, err)
	require.NoError(t, rdb.Set(ctx, lua.OverrideKey("user:1"), own.Terms(policy.Fence{Seq: 1}).Encode(), 0).Err())
	for key, limit := range map[string]int64{"user:1": 600, "user:2": 60} {
		r, err := c.Take(ctx, key, 1)
		require.NoError(t, err)
		require.Equal(t, limit, r.Limit)
		require.Equal(t, limit-1, r.Remaining)
	}
}

func TestConcurrentTakesOfALazyBucketAdmitItsCapacity(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	for _, remembers := range []bool{true, false} {
		c, err := fetch.New(rdb, fetch.WithTimeout(20*time.Second), fetch.WithDenyCache(false),
			fetch.WithTemplates(lazyTemplate("", 100, policy.Rate{Tokens: 1, Per: 24 * time.Hour})))
		require.NoError(t, err)
		var admitted atomic.Int64
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				for range 20 {
					r, err := c.Take(ctx, "any"+map[bool]string{true: "1", false: "2"}[remembers], 1)
					if err != nil {
						t.Error(err)
					} else if r.OK {
						admitted.Add(1)
					}
				}
			})
		}
		wg.Wait()
		require.EqualValues(t, 100, admitted.Load())
		require.NoError(t, c.Close(ctx))
	}
}

func TestTemplatesThatCannotBeServedAreRefused(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	refilled := lazyTemplate("user:", 60, policy.PerSecond(1))
	refilled.Enforce = policy.EnforceRefilled
	for want, list := range map[string][]policy.Template{
		"enforce is refilled": {refilled},
		`"user:" is there twice`: {lazyTemplate("user:", 60, policy.PerSecond(1)),
			lazyTemplate("user:", 6, policy.PerSecond(1))},
		"capacity": {lazyTemplate("user:", 0, policy.PerSecond(1))},
	} {
		_, err := fetch.New(rdb, fetch.WithTemplates(list...))
		require.ErrorIs(t, err, fetch.ErrInvalidOption)
		require.ErrorContains(t, err, want)
		require.True(t, errors.Is(err, policy.ErrPolicy) || want == "enforce is refilled")
	}
}

// Whatever the first call for a bucket is, it finds a template that was just published.
func TestEveryCallFindsATemplateThatWasJustPublished(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	calls := map[string]func(ctx context.Context, c *fetch.Client) error{
		"take once": func(ctx context.Context, c *fetch.Client) error {
			_, err := c.Take(ctx, "user:1", 1, fetch.WithRequestID("a"))
			return err
		},
		"reserve": func(ctx context.Context, c *fetch.Client) error {
			_, err := c.Reserve(ctx, "user:2", 1, time.Minute)
			return err
		},
		"peek": func(ctx context.Context, c *fetch.Client) error {
			_, err := c.Peek(ctx, "user:3")
			return err
		},
		"wait": func(ctx context.Context, c *fetch.Client) error {
			_, err := c.Wait(ctx, "user:4", 1)
			return err
		},
		"take all": func(ctx context.Context, c *fetch.Client) error {
			all, err := c.TakeAll(ctx, []fetch.Request{{Key: "old", N: 1}, {Key: "user:5", N: 1}, {Key: "lazy:5", N: 1}})
			if err == nil && !all.OK {
				err = errors.New("denied")
			}
			return err
		},
		"take all of one": func(ctx context.Context, c *fetch.Client) error {
			_, err := c.TakeAll(ctx, []fetch.Request{{Key: "lazy:6", N: 1}})
			return err
		},
		"return": func(ctx context.Context, c *fetch.Client) error { return c.Return(ctx, "lazy:7", 1) },
	}
	version := int64(1)
	for name, call := range calls {
		publish(t, rdb, version, lazyTemplate("old", 60, policy.PerSecond(1)))
		c := client(t, rdb)
		_, err := c.Peek(t.Context(), "old")
		require.NoError(t, err)
		time.Sleep(150 * time.Millisecond) // the templates are read ten times a second while a key is unknown
		publish(t, rdb, version+1, lazyTemplate("old", 60, policy.PerSecond(1)), refilledTemplate("user:", 60),
			lazyTemplate("lazy:", 60, policy.PerSecond(1)))
		require.NoError(t, call(t.Context(), c), name)
		version += 2
	}
}

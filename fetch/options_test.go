package fetch

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/policy"
)

func TestANilRedisClientIsRefused(t *testing.T) {
	for _, rdb := range []redis.UniversalClient{
		nil, (*redis.Client)(nil), (*redis.ClusterClient)(nil), (*redis.Ring)(nil),
	} {
		_, err := New(rdb)
		require.ErrorIs(t, err, ErrInvalidOption, "%T", rdb)
	}
}

// If a method would ignore an option, the call returns an error that names both.
func TestAnOptionThatDoesNothingIsRefused(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "b", hourly(5))
	c := newClient(t, rdb, slow(), WithRequestMemory(time.Hour)) // it applies to takes with a request id
	methods := map[string]func(...CallOption) error{
		"take": func(opts ...CallOption) error {
			_, err := c.Take(t.Context(), "b", 1, opts...)
			return err
		},
		"take_up_to": func(opts ...CallOption) error {
			_, err := c.TakeUpTo(t.Context(), "b", 1, opts...)
			return err
		},
		"take_all": func(opts ...CallOption) error {
			_, err := c.TakeAll(t.Context(), []Request{{Key: "b", N: 1}}, opts...)
			return err
		},
		"peek": func(opts ...CallOption) error {
			_, err := c.Peek(t.Context(), "b", opts...)
			return err
		},
		"wait":   func(opts ...CallOption) error { return errOf(c.Wait(t.Context(), "b", 1, opts...)) },
		"return": func(opts ...CallOption) error { return c.Return(t.Context(), "b", 1, opts...) },
		"reserve": func(opts ...CallOption) error {
			_, err := c.Reserve(t.Context(), "b", 1, time.Minute, opts...)
			return err
		},
		"settle": func(opts ...CallOption) error {
			_, err := c.Settle(t.Context(), "b", "r", 1, opts...)
			return err
		},
	}
	options := []struct {
		name   string
		option CallOption
		of     []string // the methods that accept the option
	}{
		{"WithLeave", WithLeave(1), []string{"take", "take_up_to", "take_all", "wait", "reserve"}},
		{"WithLeave", WithLeavePercent(1), []string{"take", "take_up_to", "take_all", "wait", "reserve"}},
		{"WithRequestID", WithRequestID("r"), []string{"take", "take_up_to", "take_all"}},
		{"WithRequestMemory", WithRequestMemory(time.Minute), nil},
		{"WithReservationID", WithReservationID("r"), []string{"reserve"}},
		{"WithOverrun", WithOverrun(policy.OverrunDebt), []string{"reserve"}},
	}
	for method, call := range methods {
		for _, o := range options {
			used := false
			for _, of := range o.of {
				used = used || of == method
			}
			if used {
				continue
			}
			err := call(o.option)
			require.ErrorIs(t, err, ErrInvalidOption, "%s of %s", o.name, method)
			require.ErrorContains(t, err, o.name+" ", method)
			require.ErrorContains(t, err, method)
		}
	}
	require.EqualValues(t, 5, tokens(t, rdb, "b"))
}

func TestCacheSizesOutOfRangeAreRefused(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	for _, n := range []int{-1, 0, maxCacheSize + 1} {
		_, err := New(rdb, WithCacheSize(n))
		require.ErrorIs(t, err, ErrInvalidOption)
	}
	require.Equal(t, 7, newClient(t, rdb, WithCacheSize(7)).buckets.shards[0].half)
	bs := newClient(t, rdb).buckets
	require.GreaterOrEqual(t, len(bs.shards)*bs.shards[0].half, defaultCacheSize)
	require.LessOrEqual(t, len(bs.shards)*bs.shards[0].half, defaultCacheSize+defaultCacheSize/8)
}

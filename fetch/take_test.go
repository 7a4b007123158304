package fetch

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestTakesUntilEmptyOnEveryKindOfServer(t *testing.T) {
	servers := map[string]func(t *testing.T) redis.UniversalClient{
		"single":   func(t *testing.T) redis.UniversalClient { return testenv.Redis(t).Client() },
		"sentinel": func(t *testing.T) redis.UniversalClient { return testenv.Sentinel(t).Client() },
		"cluster":  func(t *testing.T) redis.UniversalClient { return testenv.Cluster(t).Client() },
	}
	for name, start := range servers {
		t.Run(name, func(t *testing.T) {
			rdb := start(t)
			c := newClient(t, rdb, slow())
			for _, key := range []string{"checkout", "user:1", "user:2"} { // several slots
				createBucket(t, rdb, key, hourly(5))

				r, err := c.Take(t.Context(), key, 3)
				require.NoError(t, err)
				require.Equal(t, Result{OK: true, Taken: 3, Remaining: 2, Limit: 5, ResetAfter: 3 * time.Hour,
					MoreAfter: time.Hour}, timeless(r))

				r, err = c.Take(t.Context(), key, 3)
				require.NoError(t, err)
				require.False(t, r.OK)
				require.Zero(t, r.Taken)
				require.EqualValues(t, 2, r.Remaining)
				require.EqualValues(t, 5, r.Limit)
				require.InDelta(t, time.Hour, r.RetryAfter, float64(time.Minute))

				r, err = c.TakeUpTo(t.Context(), key, 10)
				require.NoError(t, err)
				require.True(t, r.OK)
				require.EqualValues(t, 2, r.Taken)
				require.Zero(t, r.Remaining)

				r, err = c.TakeUpTo(t.Context(), key, 10)
				require.NoError(t, err)
				require.False(t, r.OK)
				require.InDelta(t, time.Hour, r.RetryAfter, float64(time.Minute))
				require.InDelta(t, 5*time.Hour, r.ResetAfter, float64(time.Minute))

				require.NoError(t, c.Return(t.Context(), key, 4))
				r, err = c.Peek(t.Context(), key)
				require.NoError(t, err)
				require.True(t, r.OK)
				require.EqualValues(t, 4, r.Remaining)
				require.EqualValues(t, 5, r.Limit)
				require.Zero(t, r.RetryAfter)
				require.InDelta(t, time.Hour, r.ResetAfter, float64(time.Minute))

				require.NoError(t, errOf(c.Wait(t.Context(), key, 4)))
				require.Zero(t, tokens(t, rdb, key))
			}
		})
	}
}

func TestTakesFromManyGoroutinesTakeWhatTheBucketHolds(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "checkout", hourly(500))
	c := newClient(t, rdb, slow(), WithConcurrency(8))
	var (
		wg    sync.WaitGroup
		taken atomic.Int64
	)
	for range 50 {
		wg.Go(func() {
			for range 30 {
				r, err := c.Take(t.Context(), "checkout", 1)
				if err != nil {
					t.Error(err)
					return
				}
				taken.Add(r.Taken)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 500, taken.Load())
	require.Zero(t, tokens(t, rdb, "checkout"))
}

func TestRefusesWhatItCanNotTake(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "checkout", hourly(5))
	require.NoError(t, rdb.Set(t.Context(), "text", "hello", 0).Err())
	c := newClient(t, rdb, slow())

	calls := map[string]func(key string, n int64) error{
		"take": func(key string, n int64) error {
			_, err := c.Take(t.Context(), key, n)
			return err
		},
		"take up to": func(key string, n int64) error {
			_, err := c.TakeUpTo(t.Context(), key, n)
			return err
		},
		"wait":   func(key string, n int64) error { return errOf(c.Wait(t.Context(), key, n)) },
		"return": func(key string, n int64) error { return c.Return(t.Context(), key, n) },
		"peek (n = 1)": func(key string, _ int64) error {
			_, err := c.Peek(t.Context(), key)
			return err
		},
	}
	cases := []struct {
		key  string
		n    int64
		want error
		msg  string
	}{
		{"", 1, ErrInvalidKey, "empty"},
		{"a}b", 1, ErrInvalidKey, "brace"},
		{strings.Repeat("x", 513), 1, ErrInvalidKey, "512"},
		{"typo", 1, ErrUnknownBucket, `"typo"`},
		{"checkout", 0, ErrInvalidAmount, "1 to 1125899906842624"},
		{"checkout", -1, ErrInvalidAmount, "1 to"},
		{"checkout", policy.MaxTokens + 1, ErrInvalidAmount, "1 to"},
		{"checkout", math.MaxInt64, ErrInvalidAmount, "1 to"},
		{"text", 1, ErrMalformedBucket, "whole number"},
	}
	for name, call := range calls {
		for _, tc := range cases {
			if name == "peek (n = 1)" && errors.Is(tc.want, ErrInvalidAmount) {
				continue
			}
			if name == "return" && errors.Is(tc.want, ErrMalformedBucket) {
				continue // without state the bucket is unknown
			}
			err := call(tc.key, tc.n)
			require.ErrorIs(t, err, tc.want, "%s %q %d", name, tc.key, tc.n)
			require.ErrorContains(t, err, tc.msg)
			require.NotErrorIs(t, err, ErrUnavailable)
		}
	}
	for _, name := range []string{"take", "wait"} {
		err := calls[name]("checkout", 6)
		require.ErrorIs(t, err, ErrExceedsCapacity)
		require.ErrorContains(t, err, "at most 5")
	}

	keys, err := rdb.Keys(t.Context(), "*").Result()
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"text", "checkout", "{checkout}", "{checkout}:ctl"}, keys)
	require.EqualValues(t, 5, tokens(t, rdb, "checkout"))
}

func TestOptionsOutOfRangeAreRefused(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	for _, o := range []Option{WithTimeout(-1), WithConcurrency(0), WithConcurrency(maxConcurrency + 1), nil} {
		_, err := New(rdb, o)
		require.ErrorIs(t, err, ErrInvalidOption)
	}
	for _, none := range []redis.UniversalClient{
		nil, (*redis.Client)(nil), (*redis.ClusterClient)(nil), (*redis.Ring)(nil),
	} {
		_, err := New(none)
		require.ErrorIs(t, err, ErrInvalidOption)
	}
	createBucket(t, rdb, "checkout", hourly(5))
	c := newClient(t, rdb, slow())
	for _, o := range []CallOption{WithTimeout(-time.Second), nil} {
		_, err := c.Take(t.Context(), "checkout", 1, o)
		require.ErrorIs(t, err, ErrInvalidOption)
	}
	require.EqualValues(t, 5, tokens(t, rdb, "checkout"))
}

func TestRetryAfterIsWhenARefillBringsTheTokens(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	p := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(100), Interval: 200 * time.Millisecond, Initial: new(int64)}
	createBucket(t, rdb, "checkout", p)
	c := newClient(t, rdb, slow())
	r, err := c.Take(t.Context(), "checkout", 150)
	require.NoError(t, err)
	require.False(t, r.OK)
	// 150 tokens are earned in 1.5 s, and the refill at 1.6 s brings them. Some of that time has passed.
	require.LessOrEqual(t, r.RetryAfter, 1600*time.Millisecond)
	require.Greater(t, r.RetryAfter, time.Duration(0))
	require.Equal(t, 10*time.Second, r.ResetAfter)
	require.Zero(t, r.MoreAfter)

	peek, err := c.Peek(t.Context(), "checkout")
	require.NoError(t, err)
	require.False(t, peek.OK)
	require.LessOrEqual(t, peek.RetryAfter, 200*time.Millisecond)
	require.LessOrEqual(t, peek.ResetAfter, 10*time.Second)
	require.Greater(t, peek.ResetAfter, peek.RetryAfter)
}

// The Client denies takes because of a remembered denial. They get the same answer as from the bucket.
func TestRetryAfterOfARememberedDenialIsThatOfTheTake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(10), Interval: 100 * time.Millisecond, Initial: new(int64)}
		c := newClient(t, newFake(map[string]policy.Policy{"checkout": p}))
		r, err := c.Take(t.Context(), "checkout", 5)
		require.NoError(t, err)
		require.Equal(t, 500*time.Millisecond, r.RetryAfter)
		time.Sleep(50 * time.Millisecond)
		for want, take := range map[time.Duration]func() (Result, error){
			450 * time.Millisecond:  func() (Result, error) { return c.Take(t.Context(), "checkout", 5) },
			4950 * time.Millisecond: func() (Result, error) { return c.Take(t.Context(), "checkout", 50) },
			6950 * time.Millisecond: func() (Result, error) { return c.Take(t.Context(), "checkout", 50, WithLeave(20)) },
		} {
			r, err := take()
			require.NoError(t, err)
			require.Equal(t, SourceCached, r.Source.Kind)
			require.Equal(t, want, r.RetryAfter)
		}
	})
}

func TestResetAfterOfAScheduledBucketIsItsLastStep(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	p := policy.Policy{Capacity: 100, Steps: policy.Every(24 * time.Hour), StepTokens: 40}
	terms := p.Terms(policy.Fence{})
	now, err := rdb.Time(t.Context()).Result()
	require.NoError(t, err)
	next := now.Add(time.Hour)
	_, err = lua.Refill(t.Context(), rdb, "daily",
		policy.Call{Create: policy.CreateInitial, Terms: &terms, Next: next.UnixMicro()})
	require.NoError(t, err)

	c := newClient(t, rdb, slow())
	r, err := c.Take(t.Context(), "daily", 40)
	require.NoError(t, err)
	require.InDelta(t, time.Hour, r.ResetAfter, float64(time.Minute))
	r, err = c.Take(t.Context(), "daily", 60)
	require.NoError(t, err)
	require.InDelta(t, 3*time.Hour, r.ResetAfter, float64(2*time.Minute)) // two more steps, each of an hour like the first
	require.InDelta(t, time.Hour, r.MoreAfter, float64(time.Minute))
	r, err = c.Take(t.Context(), "daily", 1)
	require.NoError(t, err)
	require.False(t, r.OK)
	require.InDelta(t, time.Hour, r.RetryAfter, float64(time.Minute))
	r, err = c.Peek(t.Context(), "daily")
	require.NoError(t, err)
	require.InDelta(t, 3*time.Hour, r.ResetAfter, float64(2*time.Minute))
}

func TestABucketWithoutPolicyIsTakenFromAndPromisesNothing(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	_, err := lua.Add(t.Context(), rdb, "foreign", 3, 10, 0)
	require.NoError(t, err)
	c := newClient(t, rdb, slow())
	r, err := c.Take(t.Context(), "foreign", 2)
	require.NoError(t, err)
	require.Equal(t, Result{OK: true, Taken: 2, Remaining: 1, ResetAfter: Never, MoreAfter: Never}, timeless(r))
	r, err = c.Take(t.Context(), "foreign", 2)
	require.NoError(t, err)
	require.Equal(t, Result{Remaining: 1, RetryAfter: Never, ResetAfter: Never}, timeless(r))
	r, err = c.Peek(t.Context(), "foreign")
	require.NoError(t, err)
	require.Equal(t, Result{OK: true, Remaining: 1, ResetAfter: Never, MoreAfter: Never}, timeless(r))
	require.ErrorIs(t, c.Return(t.Context(), "foreign", 1), ErrUnknownBucket)
}

func TestATakeThatFitsCostsOneCommandBesideTheScript(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "checkout", hourly(1000))
	c := newClient(t, rdb, slow())
	_, err := c.Take(t.Context(), "checkout", 1) // reads the policy
	require.NoError(t, err)
	_, err = c.Take(t.Context(), "checkout", 1) // loads the script
	require.NoError(t, err)
	require.NoError(t, rdb.ConfigResetStat(t.Context()).Err())
	_, err = c.Take(t.Context(), "checkout", 1)
	require.NoError(t, err)
	require.Equal(t, map[string]int{"evalsha": 1, "exists": 1, "decrby": 1}, commandCalls(t, rdb))
}

// commandCalls counts the commands that the server ran. It leaves out the commands of a new connection, which a slow
// call may open, and those of the count itself.
func commandCalls(t *testing.T, rdb *redis.Client) map[string]int {
	t.Helper()
	info, err := rdb.Info(t.Context(), "commandstats").Result()
	require.NoError(t, err)
	calls := make(map[string]int)
	for line := range strings.Lines(info) {
		if name, rest, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls="); ok {
			count, _, _ := strings.Cut(rest, ",")
			calls[name], err = strconv.Atoi(count)
			require.NoError(t, err)
		}
	}
	for _, other := range []string{"hello", "ping", "client|setinfo", "config|resetstat", "info"} {
		delete(calls, other)
	}
	return calls
}

func TestTheBucketCacheIsBoundedAndKeepsTheLatest(t *testing.T) {
	for _, size := range []int{1, 1000, 10_000} {
		bs, now := newBuckets(size), time.Now()
		fresh := func(i *info) { i.asOf = now }
		for i := range 100_000 {
			bs.update("user:"+strconv.Itoa(i), fresh)
			bs.find("user:0") // in use
		}
		require.LessOrEqual(t, bs.held(), 2*size+2*size/8)
		require.True(t, bs.find("user:0").known.Load().fresh(now))
		for i := 100_000 - size; i < 100_000; i++ {
			require.True(t, bs.find("user:"+strconv.Itoa(i)).known.Load().fresh(now), i)
		}
		require.False(t, bs.find("user:99999").known.Load().fresh(now.Add(policyMaxAge)))
	}
}

// If find returns a bucket without the lock of its shard, it is the same bucket that the shard holds. This is also true
// while other buckets displace buckets of the shard.
func TestARecentBucketIsTheOneThatItsShardHas(t *testing.T) {
	bs := newBuckets(4)
	var wg sync.WaitGroup
	for of := range 4 {
		wg.Go(func() {
			for i := range 5_000 {
				key := "user:" + strconv.Itoa((i*7+of)%20)
				if bs.find(key) == unseenBucket {
					bs.obtain(key)
				}
			}
		})
	}
	wg.Wait()
	bs.obtain("user:0")
	bs.find("user:0")
	recent := 0
	for i := range bs.recent {
		if b := bs.recent[i].Load(); b != nil {
			recent++
			require.Same(t, bs.shard(b.key).young[b.key], b, b.key)
		}
	}
	require.NotZero(t, recent)
}

// A bucket for which callers wait, or that has a block, is remembered, however many other buckets are used meanwhile.
func TestBucketsInUseAreNotForgotten(t *testing.T) {
	c := newClient(t, newFake(nil), WithCacheSize(10))
	c.buckets.wait("line")
	blk := &block{key: "leased"}
	require.True(t, c.buckets.addBlock(blk))
	forgetUnused(c)
	require.True(t, c.buckets.find("line").waited())
	require.NotNil(t, c.buckets.find("leased").block.Load())
	c.buckets.find("line").lines.Load().waiters.Add(-1)
	c.buckets.removeBlock(blk)
	forgetUnused(c)
	require.Equal(t, unseenBucket, c.buckets.find("line"))
	require.Equal(t, unseenBucket, c.buckets.find("leased"))
}

// The second try of a request has only the time that the first one left.
func TestTheTimeoutIsOfAllTries(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, WithTimeout(1500*time.Millisecond))
	f.warm(t, c)
	require.NoError(t, f.proxy.Stall(faultproxy.ToClient))
	began := time.Now()
	// the first try fails; the second one gets no reply either
	reset := time.AfterFunc(1400*time.Millisecond, f.proxy.Reset)
	defer reset.Stop()
	_, err := c.Take(t.Context(), "checkout", 1, WithRequestID("r"))
	require.ErrorIs(t, err, ErrUnavailable)
	require.Less(t, time.Since(began), 1500*time.Millisecond+noise)
	require.Greater(t, time.Since(began), 1400*time.Millisecond)
}

// WithLeave and WithLeavePercent apply to every method, even while the capacity is unknown.
func TestEveryTakeLeavesTheConfiguredRemainder(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]CallOption{"tokens": WithLeave(30), "percent": WithLeavePercent(30)} {
		rdb := testenv.Redis(t).Client()
		createBucket(t, rdb, "checkout", hourly(100))
		calls := map[string]func(c *Client, n int64) (ok bool, retry time.Duration){
			"take": func(c *Client, n int64) (bool, time.Duration) {
				r, err := c.Take(t.Context(), "checkout", n, leave)
				require.NoError(t, err)
				return r.OK, r.RetryAfter
			},
			"take once": func(c *Client, n int64) (bool, time.Duration) {
				r, err := c.Take(t.Context(), "checkout", n, leave, WithRequestID(fmt.Sprint(name, n)))
				require.NoError(t, err)
				return r.OK, r.RetryAfter
			},
			"take all": func(c *Client, n int64) (bool, time.Duration) {
				r, err := c.TakeAll(t.Context(), []Request{{Key: "checkout", N: n}}, leave)
				require.NoError(t, err)
				return r.OK, r.RetryAfter
			},
			"reserve": func(c *Client, n int64) (bool, time.Duration) {
				r, err := c.Reserve(t.Context(), "checkout", n, time.Minute, leave)
				require.NoError(t, err)
				return r.OK, r.RetryAfter
			},
		}
		for method, call := range calls {
			_, err := lua.Reset(t.Context(), rdb, "checkout", 40)
			require.NoError(t, err)
			c := newClient(t, rdb, slow())
			ok, retry := call(c, 20)
			require.False(t, ok, "%s, %s", name, method)
			require.InDelta(t, 10*time.Hour, retry, float64(time.Hour), "%s, %s: time until 50 tokens", name, method)
			ok, _ = call(newClient(t, rdb, slow()), 10)
			require.True(t, ok, "%s, %s", name, method)
			require.EqualValues(t, 30, tokens(t, rdb, "checkout"))
		}
		c := newClient(t, rdb, slow())
		_, err := lua.Reset(t.Context(), rdb, "checkout", 40)
		require.NoError(t, err)
		r, err := c.TakeUpTo(t.Context(), "checkout", 100, leave)
		require.NoError(t, err)
		require.EqualValues(t, 10, r.Taken, name)
	}
}

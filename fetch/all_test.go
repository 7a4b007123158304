package fetch

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// sameSlot returns two keys of one slot.
func sameSlot() (a, b string) {
	seen := map[int]string{}
	for i := 0; ; i++ {
		key := fmt.Sprintf("twin:%d", i)
		if other, ok := seen[lua.Slot(key)]; ok {
			return other, key
		}
		seen[lua.Slot(key)] = key
	}
}

func TestTakeAllTakesFromAllBucketsOrNone(t *testing.T) {
	servers := map[string]func(t *testing.T) redis.UniversalClient{
		"single":  func(t *testing.T) redis.UniversalClient { return testenv.Redis(t).Client() },
		"cluster": func(t *testing.T) redis.UniversalClient { return testenv.Cluster(t).Client() },
		"ring": func(t *testing.T) redis.UniversalClient {
			ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": testenv.Redis(t).Addr(),
				"b": testenv.Redis(t).Addr()}, ContextTimeoutEnabled: true})
			t.Cleanup(func() { _ = ring.Close() })
			return ring
		},
	}
	for name, start := range servers {
		t.Run(name, func(t *testing.T) {
			rdb := start(t)
			twin, other := sameSlot()
			keys := []string{"team", "user", twin, other}
			for i, key := range keys {
				createBucket(t, rdb, key, hourly(int64(10*(i+1))))
			}
			left := func() (all []int64) {
				for _, key := range keys {
					all = append(all, tokens(t, rdb, key))
				}
				return all
			}
			c := newClient(t, rdb, slow())
			r, err := c.TakeAll(t.Context(), []Request{{Key: "team", N: 2}, {Key: "user", N: 3}, {Key: twin, N: 4},
				{Key: other, N: 5}, {Key: "team", N: 1}})
			require.NoError(t, err)
			require.True(t, r.OK)
			require.Empty(t, r.Denied)
			require.Zero(t, r.RetryAfter)
			require.Len(t, r.Results, 5)
			for i, taken := range []int64{2, 3, 4, 5, 1} {
				require.True(t, r.Results[i].OK)
				require.Equal(t, taken, r.Results[i].Taken)
			}
			require.EqualValues(t, 7, r.Results[0].Remaining)
			require.EqualValues(t, 10, r.Results[0].Limit)
			require.Equal(t, []int64{7, 17, 26, 35}, left())

			// Each of the two requests for team would fit, but both together don't fit.
			r, err = c.TakeAll(t.Context(), []Request{{Key: "user", N: 3}, {Key: "team", N: 4}, {Key: twin, N: 1},
				{Key: "team", N: 4}, {Key: other, N: 36}})
			require.NoError(t, err)
			require.False(t, r.OK)
			require.Equal(t, "team", r.Denied, "the first bucket that denied the request")
			require.InDelta(t, time.Hour, r.RetryAfter, float64(time.Minute))
			for i, ok := range []bool{true, false, true, false, false} {
				require.Equal(t, ok, r.Results[i].OK, i)
				require.Zero(t, r.Results[i].Taken, i)
			}
			require.EqualValues(t, 17, r.Results[0].Remaining)
			require.Equal(t, []int64{7, 17, 26, 35}, left(), "no bucket was charged")
			require.Zero(t, c.Stats().Lost)

			_, err = c.TakeAll(t.Context(), []Request{{Key: "user", N: 1}, {Key: "typo", N: 1}})
			require.ErrorIs(t, err, ErrUnknownBucket)
			require.ErrorContains(t, err, "typo")
			_, err = c.TakeAll(t.Context(), []Request{{Key: "user", N: 1}, {Key: "team", N: 11}})
			require.ErrorIs(t, err, ErrExceedsCapacity)
			require.ErrorContains(t, err, "team")
			require.Equal(t, []int64{7, 17, 26, 35}, left(), "no bucket was charged by a failed call")
		})
	}
}

func TestTakeAllRefusesWhatItCanNotTake(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "team", hourly(10))
	_, err := lua.Add(t.Context(), rdb, "foreign", 5, 10, 0)
	require.NoError(t, err)
	c := newClient(t, rdb, slow())
	for want, reqs := range map[error][][]Request{
		ErrInvalidAmount: {nil, make([]Request, MaxAll+1), {{Key: "team"}}, {{Key: "team", N: -1}},
			{{Key: "team", N: policy.MaxTokens}, {Key: "team", N: 1}}},
		ErrInvalidKey:    {{{Key: "team", N: 1}, {N: 1}}, {{Key: "te}am", N: 1}}},
		ErrUnknownBucket: {{{Key: "team", N: 1}, {Key: "foreign", N: 1}}},
	} {
		for _, r := range reqs {
			_, err := c.TakeAll(t.Context(), r)
			require.ErrorIs(t, err, want, "%v", r)
		}
	}
	require.EqualValues(t, 10, tokens(t, rdb, "team"))
	require.EqualValues(t, 5, tokens(t, rdb, "foreign"))
}

// Each call that takes from two buckets takes the same number of tokens from both, whatever other calls take.
func TestConcurrentTakesOfSeveralBucketsConserveTokens(t *testing.T) {
	rdb := testenv.Cluster(t).Client()
	keys := []string{"a", "b", "c"}
	for _, key := range keys {
		createBucket(t, rdb, key, hourly(60))
	}
	c := newClient(t, rdb, slow())
	var granted atomic.Int64
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			for range 20 {
				reqs := []Request{{Key: keys[i%3], N: 1}, {Key: keys[(i+1)%3], N: 1}, {Key: keys[(i+2)%3], N: 1}}
				r, err := c.TakeAll(t.Context(), reqs)
				if err != nil {
					t.Error(err)
					return
				}
				if r.OK {
					granted.Add(1)
				}
			}
		})
	}
	wg.Wait()
	for _, key := range keys {
		require.Equal(t, 60-granted.Load(), tokens(t, rdb, key), key)
	}
	require.NotZero(t, granted.Load())
}

// onReturn calls do before each script call for key except the first one.
type onReturn struct {
	key    string
	do     func()
	script atomic.Int64
}

func (o *onReturn) observe(cmds ...redis.Cmder) {
	for _, cmd := range cmds {
		if namesKey(cmd, o.key) && o.script.Add(1) == 2 {
			o.do()
		}
	}
}

// namesKey reports whether a command is a script call for a bucket. Its keys are sent by pointer.
func namesKey(cmd redis.Cmder, key string) bool {
	return slices.ContainsFunc(cmd.Args(), func(arg any) bool {
		s, ok := arg.(*string)
		return ok && *s == key
	})
}

func (o *onReturn) DialHook(next redis.DialHook) redis.DialHook { return next }
func (o *onReturn) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		o.observe(cmd)
		return next(ctx, cmd)
	}
}
func (o *onReturn) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		o.observe(cmds...)
		return next(ctx, cmds)
	}
}

// twoPhases returns a client of an unknown type for the faulty server. With it, a take from buckets in two slots makes
// two calls.
func twoPhases(t *testing.T, f *faulty, hook redis.Hook) redis.UniversalClient {
	t.Helper()
	rdb := redis.NewClient(&redis.Options{Addr: f.proxy.Addr(), ContextTimeoutEnabled: true, DialerRetries: 1})
	t.Cleanup(func() { _ = rdb.Close() })
	if hook != nil {
		rdb.AddHook(hook)
	}
	return wrapped{rdb}
}

func TestAClientCutOffBetweenPhasesLosesTokensAndMintsNone(t *testing.T) {
	f := newFaulty(t, nil)
	createBucket(t, f.direct, "empty", policy.Policy{Capacity: 10, Rate: policy.Rate{Tokens: 1, Per: time.Hour},
		Initial: new(int64)})
	require.NoError(t, lua.Load(t.Context(), f.direct))
	cut := &onReturn{key: "checkout", do: f.proxy.Cut}
	c := newClient(t, twoPhases(t, f, cut), slow())
	r, err := c.TakeAll(t.Context(), []Request{{Key: "checkout", N: 30}, {Key: "empty", N: 1}})
	require.NoError(t, err)
	require.False(t, r.OK)
	require.EqualValues(t, 2, cut.script.Load(), "the client tried to return the tokens")
	eventually(t, func() bool { return c.Stats().Lost == 30 }, "the lost tokens are counted")
	require.EqualValues(t, 70, tokens(t, f.direct, "checkout"), "the tokens are lost, as after a crash")
	require.Zero(t, tokens(t, f.direct, "empty"))
}

func TestARefundWhoseReplyIsLostIsMadeOnce(t *testing.T) {
	f := newFaulty(t, nil)
	createBucket(t, f.direct, "empty", policy.Policy{Capacity: 10, Rate: policy.Rate{Tokens: 1, Per: time.Hour},
		Initial: new(int64)})
	require.NoError(t, lua.Load(t.Context(), f.direct))
	c := newClient(t, twoPhases(t, f, nil), slow())
	seen := 0
	require.NoError(t, f.proxy.CutAfterReply(1, func(request []byte) bool {
		if isScript(request) && bytes.Contains(request, []byte("checkout")) {
			seen++
		}
		return seen == 2
	}))
	for range 2 { // a further take notices tokens that came back twice
		r, err := c.TakeAll(t.Context(), []Request{{Key: "checkout", N: 30}, {Key: "empty", N: 1}})
		require.NoError(t, err)
		require.False(t, r.OK)
	}
	require.Equal(t, 1, f.proxy.LostReplies())
	eventually(t, func() bool { return c.Stats().Lost+c.Stats().Returned == 60 }, "both refunds are counted")
	require.EqualValues(t, 100, tokens(t, f.direct, "checkout"))
}

func TestARefundGoesToTheEraOfTheTakeOnly(t *testing.T) {
	f := newFaulty(t, nil)
	createBucket(t, f.direct, "empty", policy.Policy{Capacity: 10, Rate: policy.Rate{Tokens: 1, Per: time.Hour},
		Initial: new(int64)})
	require.NoError(t, lua.Load(t.Context(), f.direct))
	fresh := policy.Policy{Capacity: 100, Rate: policy.Rate{Tokens: 1, Per: time.Hour}, Initial: new(int64)}
	replace := &onReturn{key: "checkout", do: func() {
		require.NoError(t, f.direct.Del(context.Background(), "checkout", lua.IndexKey("checkout"),
			lua.ControlKey("checkout")).Err())
		createBucket(t, f.direct, "checkout", fresh)
	}}
	c := newClient(t, twoPhases(t, f, replace), slow())
	r, err := c.TakeAll(t.Context(), []Request{{Key: "checkout", N: 30}, {Key: "empty", N: 1}})
	require.NoError(t, err)
	require.False(t, r.OK)
	require.Zero(t, tokens(t, f.direct, "checkout"), "the new bucket gets no tokens of the old one")
	require.EqualValues(t, 30, c.Stats().Lost)
}

// pausedReply is a hook that delays the replies to script calls for a key.
type pausedReply struct {
	key  string
	late time.Duration
}

func (l *pausedReply) DialHook(next redis.DialHook) redis.DialHook { return next }
func (l *pausedReply) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if namesKey(cmd, l.key) {
			time.Sleep(l.late)
		}
		return err
	}
}
func (l *pausedReply) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// The race detector reports it if a late reply is undone with values that the caller's goroutine changes, because
// another bucket is unknown. A channel in place of the pause would order both.
func TestALateReplyIsUndoneBesideAnUnknownBucket(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, nil)
	require.NoError(t, lua.Load(t.Context(), f.direct))
	c := newClient(t, twoPhases(t, f, &pausedReply{"checkout", 45 * time.Millisecond}))
	for range 3 {
		_, err := c.TakeAll(t.Context(), []Request{{Key: "checkout", N: 1}, {Key: "unknown", N: 1}},
			WithTimeout(30*time.Millisecond))
		require.Error(t, err)
	}
	eventually(t, func() bool { return tokens(t, f.direct, "checkout") == 100 }, "all tokens come back")
}

func TestCloseDuringATakeAllLosesNothing(t *testing.T) {
	t.Parallel()
	fast, far := testenv.Redis(t), testenv.Redis(t)
	proxy := testenv.Proxy(t, far.Addr(), 0)
	rdb := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"fast": fast.Addr(), "far": proxy.Addr()},
		HeartbeatFrequency: time.Hour})
	defer func() { _ = rdb.Close() }()
	var near, away string
	for i := 0; near == "" || away == ""; i++ {
		key := fmt.Sprint("user:", i)
		shard, err := rdb.GetShardClientForKey(key)
		require.NoError(t, err)
		if shard.Options().Addr == fast.Addr() {
			near = key
		} else {
			away = key
		}
	}
	createBucket(t, fast.Client(), near, hourly(10))
	createBucket(t, far.Client(), away, hourly(1))
	c, err := New(rdb, slow())
	require.NoError(t, err)
	_, err = c.Take(t.Context(), away, 1)
	require.NoError(t, err)
	_, err = c.Take(t.Context(), near, 1)
	require.NoError(t, err)
	require.NoError(t, proxy.Delay(faultproxy.ToClient, 300*time.Millisecond, 0))
	var wg sync.WaitGroup
	wg.Go(func() {
		r, err := c.TakeAll(context.Background(), []Request{{Key: near, N: 5}, {Key: away, N: 1}})
		assert.NoError(t, err)
		assert.False(t, r.OK)
	})
	eventually(t, func() bool { return tokens(t, fast.Client(), near) == 4 }, "the tokens are taken")
	require.NoError(t, c.Close(t.Context()))
	wg.Wait()
	require.Zero(t, c.Stats().Lost)
	require.EqualValues(t, 9, tokens(t, fast.Client(), near))
}

// A TakeAll opens the template's buckets that it needs in one round trip. Since they were full, it opens them once more
// after the take.
func TestTakeAllOpensTheBucketsOfATemplateTogether(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	set, err := policy.NewTemplates(1, []policy.Template{{Prefix: "user:", Policy: hourly(60)}}, nil)
	require.NoError(t, err)
	_, err = lua.PublishTemplates(t.Context(), rdb, set)
	require.NoError(t, err)
	require.NoError(t, lua.Load(t.Context(), rdb))
	c := newClient(t, rdb, slow())
	_, err = c.Take(t.Context(), "user:0", 1)
	require.NoError(t, err)
	reqs := make([]Request, MaxAll)
	for i := range reqs {
		reqs[i] = Request{Key: fmt.Sprint("user:", i+1), N: 1}
	}
	require.NoError(t, rdb.ConfigResetStat(t.Context()).Err())
	all, err := c.TakeAll(t.Context(), reqs)
	require.NoError(t, err)
	require.True(t, all.OK)
	require.LessOrEqual(t, commandCalls(t, rdb)["evalsha"], 24, "script calls for %d buckets", MaxAll)
}

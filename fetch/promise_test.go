package fetch

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Over a long round trip, callers with little time fail, but callers of other buckets that have more time don't.
func TestShortDeadlinesFailNoOtherCaller(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, nil)
	for i := range 20 {
		createBucket(t, f.direct, fmt.Sprint("patient", i), hourly(policy.MaxTokens))
	}
	c := newClient(t, f.rdb, WithTimeout(5*time.Second))
	_, err := c.Take(t.Context(), "checkout", 1)
	require.NoError(t, err)
	require.NoError(t, f.proxy.Delay(faultproxy.ToClient, 20*time.Millisecond, 0))
	var takes, failed, hasty atomic.Int64
	var wg sync.WaitGroup
	end := time.Now().Add(1500 * time.Millisecond)
	take := func(key string, within time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		_, err := c.Take(ctx, key, 1)
		return err
	}
	for i := range 20 {
		wg.Go(func() {
			for time.Now().Before(end) {
				takes.Add(1)
				if err := take(fmt.Sprint("patient", i), 5*time.Second); err != nil && failed.Add(1) == 1 {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for time.Now().Before(end) {
				if take("checkout", 12*time.Millisecond) != nil {
					hasty.Add(1)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d patient takes, %d failed; %d hasty ones failed", takes.Load(), failed.Load(), hasty.Load())
	require.Positive(t, hasty.Load())
	require.Zero(t, failed.Load())
	require.Greater(t, takes.Load(), int64(20))
}

// The deadline of a bucket's first caller doesn't apply to the other callers.
func TestTheFirstCallersDeadlineIsItsOwn(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	c := newClient(t, f.rdb, WithTimeout(5*time.Second))
	_, err := c.Take(t.Context(), "checkout", 1)
	require.NoError(t, err)
	require.NoError(t, f.proxy.Delay(faultproxy.ToClient, 200*time.Millisecond, 0))
	var wg sync.WaitGroup
	var wrong atomic.Int64
	wg.Go(func() {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		_, err := c.Take(ctx, "checkout", 1)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	})
	for range 40 {
		wg.Go(func() {
			if _, err := c.Take(t.Context(), "checkout", 1); err != nil {
				wrong.Add(1)
			}
		})
	}
	wg.Wait()
	require.Zero(t, wrong.Load(), "no take without a deadline fails")
}

// The first take from a template's key waits for a connection that opens slowly.
func TestTheFirstTakeOfATemplatesKeyFindsItsBucket(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	set, err := policy.NewTemplates(1, []policy.Template{{Prefix: "user:", Policy: hourly(60)}}, nil)
	require.NoError(t, err)
	_, err = lua.PublishTemplates(t.Context(), server.Client(), set)
	require.NoError(t, err)
	o := server.ClientOptions()
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		time.Sleep(30 * time.Millisecond)
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	for range 10 {
		rdb := redis.NewClient(o)
		_, err := newClient(t, rdb).Take(t.Context(), "user:7", 1)
		require.NotErrorIs(t, err, ErrUnknownBucket)
		require.NoError(t, rdb.Close())
	}
}

// No more round trips are under way than WithConcurrency allows, whatever the calls are.
func TestConcurrencyBoundsWhatIsUnderWay(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, nil)
	for i := range 100 {
		createBucket(t, f.direct, fmt.Sprint("user", i), hourly(100))
	}
	var most, open atomic.Int64
	o := f.rdb.(*redis.Client).Options()
	o.ContextTimeoutEnabled = true
	dial := o.Dialer
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &counted{Conn: conn, open: &open, most: &most}, nil
	}
	rdb := redis.NewClient(o)
	defer func() { require.NoError(t, rdb.Close()) }()
	c := newClient(t, rdb, WithConcurrency(2), WithTimeout(time.Minute))
	require.NoError(t, f.proxy.Delay(faultproxy.ToClient, 20*time.Millisecond, 0))
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			for n := range int64(3) {
				if _, err := c.Take(t.Context(), fmt.Sprint("user", i), 1, WithRequestID(fmt.Sprint(n))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.LessOrEqual(t, most.Load(), int64(2), "at most two calls are under way")
}

// counted is a connection that counts the connections on which a reply is awaited.
type counted struct {
	net.Conn
	open, most *atomic.Int64
	waits      atomic.Bool
}

func (c *counted) Write(p []byte) (int, error) {
	if !c.waits.Swap(true) {
		for n := c.open.Add(1); ; {
			if m := c.most.Load(); n <= m || c.most.CompareAndSwap(m, n) {
				break
			}
		}
	}
	return c.Conn.Write(p)
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.waits.Swap(false) {
		c.open.Add(-1)
	}
	return n, err
}

// If a shard of a Ring is unavailable, only its breaker opens, and takes from the others go on.
func TestEachShardOfARingHasABreakerOfItsOwn(t *testing.T) {
	t.Parallel()
	away, there := testenv.Redis(t), testenv.Redis(t)
	rdb := redis.NewRing(&redis.RingOptions{
		Addrs: map[string]string{"away": away.Addr(), "there": there.Addr()}, HeartbeatFrequency: time.Hour, MaxRetries: -1,
		DialTimeout: 100 * time.Millisecond, DialerRetries: 1,
	})
	defer func() { require.NoError(t, rdb.Close()) }()
	var lost, kept []string
	for i := 0; len(lost) < 40 || len(kept) < 300; i++ {
		key := fmt.Sprint("user:", i)
		shard, err := rdb.GetShardClientForKey(key)
		require.NoError(t, err)
		createBucket(t, shard, key, hourly(100))
		if shard.Options().Addr == away.Addr() {
			lost = append(lost, key)
		} else {
			kept = append(kept, key)
		}
	}
	c := newClient(t, rdb, WithTimeout(time.Second))
	away.Kill()
	refused := 0
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end) && refused == 0; {
		for _, key := range lost {
			_, err := c.Take(t.Context(), key, 1)
			require.ErrorIs(t, err, ErrUnavailable)
		}
		refused = int(c.Stats().BreakerOpened)
	}
	require.Equal(t, 1, refused, "one breaker opens")
	for _, key := range kept {
		_, err := c.Take(t.Context(), key, 1)
		require.NoError(t, err)
	}
}

// A Client that starts while the server of the templates is silent waits for the templates only in its first takes.
func TestASilentServerOfTheTemplatesHoldsUpOnlyTheFirstTakes(t *testing.T) {
	t.Parallel()
	servers := map[string]*testenv.RedisServer{}
	addrs := map[string]string{}
	for _, name := range []string{"a", "b"} {
		s := testenv.Redis(t)
		servers[s.Addr()], addrs[name] = s, s.Addr()
	}
	rdb := redis.NewRing(&redis.RingOptions{Addrs: addrs, HeartbeatFrequency: time.Hour})
	defer func() { require.NoError(t, rdb.Close()) }()
	silent, err := rdb.GetShardClientForKey(lua.TemplatesKey)
	require.NoError(t, err)
	var keys []string
	for i := 0; len(keys) < 2; i++ {
		key := fmt.Sprint("checkout", i)
		shard, err := rdb.GetShardClientForKey(key)
		require.NoError(t, err)
		if shard.Options().Addr != silent.Options().Addr {
			keys = append(keys, key)
		}
	}
	there, missing := keys[0], keys[1]
	createBucket(t, rdb, there, hourly(100))
	servers[silent.Options().Addr].Pause()
	const timeout = 2 * time.Second
	c := newClient(t, rdb, WithTimeout(timeout))
	began := time.Now()
	for range 20 {
		_, err := c.Take(t.Context(), there, 1)
		require.NoError(t, err)
	}
	require.Less(t, time.Since(began), 5*timeout, "20 takes need less than five timeouts")
	_, err = c.Take(t.Context(), missing, 1, WithTimeout(timeout/10))
	require.NotErrorIs(t, err, ErrUnknownBucket, "the client can't know whether a template matches")
	require.ErrorIs(t, err, ErrUnavailable)
	servers[silent.Options().Addr].Resume()
	_, err = c.Take(t.Context(), missing, 1)
	require.ErrorIs(t, err, ErrUnknownBucket)
}

// The first take of a Client costs two round trips: one to greet the server and one for the script with its text.
func TestTheFirstTakeNeedsTwoRoundTrips(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, nil)
	var requests atomic.Int64 // each request waits for the reply to the previous one
	require.NoError(t, f.proxy.CutAfterReply(1, func(request []byte) bool {
		if request[0] == '*' { // otherwise it is the rest of a large request
			requests.Add(1)
		}
		return false
	}))
	c := newClient(t, f.rdb, WithTimeout(patience), WithPublishedTemplates(false))
	for _, want := range []int64{2, 1} {
		before := requests.Load()
		_, err := c.Take(t.Context(), "checkout", 1)
		require.NoError(t, err)
		require.Equal(t, want, requests.Load()-before)
	}
}

package fetch

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// distant is a server with a long round trip.
type distant struct {
	direct *redis.Client // without the distance
	proxy  *faultproxy.Proxy
	trip   time.Duration
}

// newDistant starts a server whose round trip is trip. The server has loaded the scripts, as with a running refiller,
// and has the template "user:".
func newDistant(t *testing.T, trip time.Duration) *distant {
	t.Helper()
	server := testenv.Redis(t)
	d := &distant{direct: server.Client(), proxy: testenv.Proxy(t, server.Addr(), 0), trip: trip}
	require.NoError(t, lua.Load(t.Context(), d.direct))
	set, err := policy.NewTemplates(1, []policy.Template{{Prefix: "user:", Policy: hourly(10)}}, nil)
	require.NoError(t, err)
	_, err = lua.PublishTemplates(t.Context(), d.direct, set)
	require.NoError(t, err)
	require.NoError(t, d.proxy.Delay(faultproxy.Both, trip/2, 0))
	return d
}

// process returns a Client that has sent nothing yet, as in a new process.
func (d *distant) process(t *testing.T, opts ...Option) *Client {
	t.Helper()
	return newClient(t, d.redis(t, nil), opts...)
}

func (d *distant) redis(t *testing.T, change func(*redis.Options)) *redis.Client {
	t.Helper()
	o := &redis.Options{Addr: d.proxy.Addr()}
	if change != nil {
		change(o)
	}
	rdb := redis.NewClient(o)
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// steady returns a Client that has measured the distance.
func (d *distant) steady(t *testing.T, opts ...Option) *Client {
	t.Helper()
	c := d.process(t, opts...)
	createBucket(t, d.direct, "steady", hourly(1000))
	for range 10 {
		_, err := c.Take(t.Context(), "steady", 1, slow())
		require.NoError(t, err)
	}
	return c
}

// atDistances runs a test at each distance.
func atDistances(t *testing.T, test func(t *testing.T, d *distant)) {
	for _, trip := range []time.Duration{5 * time.Millisecond, 20 * time.Millisecond, 60 * time.Millisecond,
		150 * time.Millisecond} {
		t.Run(trip.String(), func(t *testing.T) {
			t.Parallel()
			test(t, newDistant(t, trip))
		})
	}
}

// empty is the policy of a bucket that has no tokens at first and gains one token an hour.
func empty() policy.Policy {
	p := hourly(10)
	p.Initial = new(int64)
	return p
}

// overdue is a policy of an empty bucket whose refill is overdue after a few milliseconds.
func overdue() policy.Policy {
	return policy.Policy{Capacity: 1000, Rate: policy.PerSecond(1000), Interval: time.Millisecond, Initial: new(int64)}
}

// succeeds makes a call until it succeeds, at most five times; nth is the number of the call. A call may fail only if
// it lasted at least least. Then this process may not have run meanwhile.
func succeeds(t *testing.T, least time.Duration, name string, call func(nth string) error) {
	t.Helper()
	for i := range 5 {
		began := time.Now()
		err := call(fmt.Sprint(name, i))
		if err == nil {
			return
		}
		require.GreaterOrEqual(t, time.Since(began), least, "%s: %v", name, err)
	}
	t.Fatalf("%s: the call failed five times", name)
}

func TestTheDefaultTimeoutByDistance(t *testing.T) {
	t.Parallel()
	for trip, want := range map[time.Duration]time.Duration{
		0:                      time.Second, // there was no answer yet
		time.Millisecond / 10:  50 * time.Millisecond,
		12 * time.Millisecond:  50 * time.Millisecond,
		20 * time.Millisecond:  80 * time.Millisecond,
		150 * time.Millisecond: 600 * time.Millisecond,
		300 * time.Millisecond: time.Second,
	} {
		require.Equal(t, want, distance(trip).timeout(), "a round trip of %s", trip)
	}
}

func TestTheFirstCallOfAProcessSucceedsAtEveryDistance(t *testing.T) {
	t.Parallel()
	atDistances(t, func(t *testing.T, d *distant) {
		createBucket(t, d.direct, "checkout", hourly(100))
		createBucket(t, d.direct, "empty", empty())
		createBucket(t, d.direct, "overdue", overdue())
		calls := map[string]func(c *Client, nth string) error{
			"take":     func(c *Client, _ string) error { return granted(c.Take(t.Context(), "checkout", 1)) },
			"denial":   func(c *Client, _ string) error { return denied(c.Take(t.Context(), "empty", 1)) },
			"rescue":   func(c *Client, _ string) error { return granted(c.Take(t.Context(), "overdue", 1)) },
			"template": func(c *Client, nth string) error { return granted(c.Take(t.Context(), "user:"+nth, 1)) },
			"request id": func(c *Client, nth string) error {
				return granted(c.Take(t.Context(), "user:"+nth, 1, WithRequestID("r")))
			},
			"take all":          func(c *Client, nth string) error { return c.takeAllOf(t, "checkout", "user:"+nth) },
			"reserve":           func(c *Client, _ string) error { return c.reserveOf(t, "checkout") },
			"template, reserve": func(c *Client, nth string) error { return c.reserveOf(t, "user:"+nth) },
			"wait":              func(c *Client, _ string) error { return granted(c.Wait(t.Context(), "checkout", 1)) },
			"peek": func(c *Client, _ string) error {
				_, err := c.Peek(t.Context(), "checkout")
				return err
			},
		}
		for name, call := range calls {
			succeeds(t, maxDefaultTimeout-d.trip, name, func(nth string) error { return call(d.process(t), nth) })
		}
	})
}

func TestEveryCallSucceedsAtEveryDistance(t *testing.T) {
	t.Parallel()
	atDistances(t, func(t *testing.T, d *distant) {
		c := d.steady(t)
		least := distance(d.trip).timeout() - d.trip // a rescue that has no time for the fourth trip is a denial
		for i := range 2 {
			key := func(nth string) string { return fmt.Sprint(nth, "-", i) }
			take := func(key string) (Result, error) { return c.Take(t.Context(), key, 1) }
			succeeds(t, least, "take", func(string) error { return granted(take("steady")) })
			succeeds(t, least, "first denial", func(nth string) error {
				createBucket(t, d.direct, key(nth), hourly(1))
				_, err := c.Take(t.Context(), key(nth), 1, slow())
				require.NoError(t, err)
				return denied(take(key(nth)))
			})
			succeeds(t, least, "rescue", func(nth string) error {
				createBucket(t, d.direct, key(nth), overdue())
				return granted(take(key(nth)))
			})
			succeeds(t, least, "template", func(nth string) error { return granted(take("user:" + key(nth))) })
			succeeds(t, least, "take all", func(nth string) error { return c.takeAllOf(t, "steady", "user:"+key(nth)) })
			succeeds(t, least, "reserve", func(nth string) error { return c.reserveOf(t, "user:"+key(nth)) })
		}
		require.Zero(t, c.Stats().BreakerOpened)
	})
}

func granted(r Result, err error) error {
	if err == nil && (!r.OK || r.Source.Kind == SourceFallback) {
		err = fmt.Errorf("not granted by the bucket: %+v", r)
	}
	return err
}

func denied(r Result, err error) error {
	if err == nil && r.OK {
		err = fmt.Errorf("granted: %+v", r)
	}
	return err
}

func (c *Client) takeAllOf(t *testing.T, keys ...string) error {
	reqs := make([]Request, len(keys))
	for i, key := range keys {
		reqs[i] = Request{Key: key, N: 1}
	}
	all, err := c.TakeAll(t.Context(), reqs)
	if err == nil && !all.OK {
		err = fmt.Errorf("denied: %+v", all)
	}
	return err
}

func (c *Client) reserveOf(t *testing.T, key string) error {
	r, err := c.Reserve(t.Context(), key, 1, time.Minute)
	if err != nil {
		return err
	}
	return granted(r.Result, nil)
}

// If a healthy server is far away, callers get the tokens that its bucket holds, and no more.
func TestModeOpenAdmitsNoMoreThanTheBucketAtADistance(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string][]Option{
		"the default timeout":                       nil,
		"a timeout for a take but not for a denial": {WithTimeout(90 * time.Millisecond)},
		"a timeout that is shorter than the trip":   {WithTimeout(40 * time.Millisecond)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDistant(t, 60*time.Millisecond)
			c := d.steady(t, opts...)
			p := hourly(100)
			p.Degraded = policy.DegradedOpen
			createBucket(t, d.direct, "checkout", p)
			_, err := c.Take(t.Context(), "checkout", 1, slow()) // now the policy is known
			require.NoError(t, err)
			var late atomic.Int64 // calls that failed because this process did not run
			var wg sync.WaitGroup
			for range 10 {
				wg.Go(func() {
					for range 20 {
						began := time.Now()
						r, err := c.Take(t.Context(), "checkout", 1)
						if err != nil && (opts == nil || ReasonOf(err) != ReasonDistance) {
							t.Error(err)
						}
						if r.Source.Kind == SourceFallback {
							late.Add(1)
							if took := time.Since(began); took < 4*d.trip {
								t.Errorf("a take beyond the bucket's tokens was admitted after only %s", took)
							}
						}
					}
				})
			}
			wg.Wait()
			require.Less(t, late.Load(), int64(20))
			require.Zero(t, c.Stats().BreakerOpened)
		})
	}
}

// If the caller's time is too short, the call fails whatever the bucket's degraded mode is, because the server is
// available.
func TestATimeThatIsTooShortForTheDistanceIsAnError(t *testing.T) {
	t.Parallel()
	const short = 20 * time.Millisecond
	d := newDistant(t, 60*time.Millisecond)
	c := d.steady(t)
	for key, mode := range map[string]policy.Degraded{
		"open": policy.DegradedOpen, "local": policy.DegradedLocal, "closed": policy.DegradedClosed,
	} {
		p := hourly(100)
		p.Degraded = mode
		createBucket(t, d.direct, key, p)
		_, err := c.Take(t.Context(), key, 1)
		require.NoError(t, err)
		for range 20 {
			ctx, cancel := context.WithTimeout(t.Context(), short)
			r, err := c.Take(ctx, key, 1)
			cancel()
			if err == nil || errors.Is(err, ErrUnavailable) { // otherwise the context had ended before the call
				requireTooFar(t, r.Source, err)
			}
			r, err = c.Take(t.Context(), key, 1, WithTimeout(short))
			requireTooFar(t, r.Source, err)
		}
		r, err := c.Wait(t.Context(), key, 1, WithTimeout(short))
		requireTooFar(t, r.Source, err)
		all, err := c.TakeAll(t.Context(), []Request{{Key: key, N: 1}}, WithTimeout(short))
		all.Results = append(all.Results, Result{})
		requireTooFar(t, all.Results[0].Source, err)
		held, err := c.Reserve(t.Context(), key, 1, time.Minute, WithTimeout(short))
		if err == nil {
			requireTooFar(t, held.Source, nil)
		} else {
			requireTooFar(t, Source{}, err)
		}
	}
	require.GreaterOrEqual(t, c.Stats().Degraded[ReasonDistance], int64(30))
	require.Zero(t, c.Stats().BreakerOpened)
	require.NoError(t, granted(c.Take(t.Context(), "open", 1)))
}

// requireTooFar checks the result of a call whose time is shorter than the round trip. Such a call succeeds only if
// this process did not run meanwhile.
func requireTooFar(t *testing.T, source Source, err error) {
	t.Helper()
	if err == nil {
		require.NotEqual(t, SourceFallback, source.Kind)
		return
	}
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, ReasonDistance, ReasonOf(err), "%v", err)
	require.Regexp(t, `a round trip of \d+(\.\d)?ms`, err.Error())
}

// A call ends at the context's deadline or after its timeout, whichever is earlier.
func TestAContextsDeadlineGetsTheDegradedMode(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, nil)
	open := hourly(100)
	open.Degraded = policy.DegradedOpen
	createBucket(t, f.direct, "open", open)
	for _, timeout := range []time.Duration{30 * time.Millisecond, time.Minute} {
		c := newClient(t, f.rdb, WithTimeout(timeout))
		f.warm(t, c)
		_, err := c.Take(t.Context(), "open", 1, slow())
		require.NoError(t, err)
		require.NoError(t, f.proxy.Stall(faultproxy.Both))
		within := func(call func(ctx context.Context)) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
			defer cancel()
			call(ctx)
		}
		within(func(ctx context.Context) {
			r, err := c.Take(ctx, "open", 1)
			require.NoError(t, err)
			require.Equal(t, Source{Kind: SourceFallback, Reason: ReasonDeadline}, r.Source)
		})
		within(func(ctx context.Context) {
			all, err := c.TakeAll(ctx, []Request{{Key: "open", N: 1}})
			require.NoError(t, err)
			require.True(t, all.OK)
		})
		within(func(ctx context.Context) {
			r, err := c.Reserve(ctx, "open", 1, time.Minute)
			require.NoError(t, err)
			require.True(t, r.OK)
		})
		within(func(ctx context.Context) {
			_, err := c.Take(ctx, "checkout", 1)
			require.ErrorIs(t, err, ErrUnavailable)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, ReasonDeadline, ReasonOf(err))
		})
		require.NoError(t, f.proxy.Heal())
	}
}

// Connections may be opened at any time, for example when there are more calls. The time for this counts only for
// callers that set a timeout.
func TestOpeningConnectionsDoesNotCount(t *testing.T) {
	t.Parallel()
	d := newDistant(t, 20*time.Millisecond)
	createBucket(t, d.direct, "checkout", hourly(1000))
	var pause atomic.Int64 // before each connection, like a TLS handshake or a name lookup over a distance
	rdb := d.redis(t, func(o *redis.Options) {
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if !timing.Sleep(ctx.Done(), time.Duration(pause.Load())) {
				return nil, ctx.Err()
			}
			return new(net.Dialer).DialContext(ctx, network, addr)
		}
	})
	c := newClient(t, rdb)
	for range 5 {
		require.NoError(t, granted(c.Take(t.Context(), "checkout", 1)))
	}
	pause.Store(int64(300 * time.Millisecond))
	d.proxy.Reset()
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			began := time.Now()
			err := granted(c.Take(t.Context(), "checkout", 1))
			if err != nil && ReasonOf(err) != ReasonConnection && time.Since(began) < maxDefaultTimeout {
				t.Error(err) // the first call meets the reset
			}
		})
	}
	wg.Wait()
	pause.Store(int64(time.Minute))
	d.proxy.Reset()
	err := error(nil)
	for err == nil || ReasonOf(err) == ReasonConnection {
		_, err = c.Take(t.Context(), "checkout", 1, WithTimeout(200*time.Millisecond))
	}
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

// Buckets of one call may need a further script before their takes can be repeated: a new bucket of a bounded template
// is counted, and a budget ends its expired reservations. At a distance the calls of these scripts must share a round
// trip.
func TestFurtherStepsOfManyBucketsShareARoundTrip(t *testing.T) {
	t.Parallel()
	const buckets = 30
	steps, err := policy.ParseCalendar("0 0 1 1 *", time.UTC)
	require.NoError(t, err)
	set, err := policy.NewTemplates(2, []policy.Template{
		{Prefix: "bounded:", Policy: hourly(10), MaxKeys: 1000},
		{Prefix: "budget:", Policy: policy.Policy{Capacity: 10, Steps: steps, StepTokens: 10}},
	}, nil)
	require.NoError(t, err)
	d := newDistant(t, 60*time.Millisecond)
	_, err = lua.PublishTemplates(t.Context(), d.direct, set)
	require.NoError(t, err)
	near := newClient(t, d.direct, slow())
	for i := range buckets {
		r, err := near.Reserve(t.Context(), "budget:"+strconv.Itoa(i), 10, time.Millisecond)
		require.NoError(t, granted(r.Result, err))
	}
	c := newClient(t, wrapped{d.redis(t, nil)}, slow()) // as on a Cluster, a call has one slot
	require.NoError(t, c.Ready(t.Context()))
	for _, prefix := range []string{"bounded:", "budget:"} {
		began := time.Now()
		var wg sync.WaitGroup
		for i := range buckets {
			wg.Go(func() {
				if err := granted(c.Take(t.Context(), prefix+strconv.Itoa(i), 1)); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		require.Less(t, time.Since(began), buckets/3*d.trip, prefix)
	}
}

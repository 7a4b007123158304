package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// provoked is a server on which a test causes a failure.
type provoked struct {
	t      *testing.T
	server *testenv.RedisServer
	admin  *redis.Client
	proxy  *faultproxy.Proxy
	opts   *redis.Options // of the client under test
}

func (p *provoked) config(name, value string) {
	p.t.Helper()
	require.NoError(p.t, p.admin.ConfigSet(context.Background(), name, value).Err())
}

// failuresOfServers are the failures of a server or of its connection. Each is caused on a real server.
var failuresOfServers = []struct {
	name    string // the name of the error in Redis, or of the event
	why     Reason
	args    []string
	provoke func(p *provoked)
}{
	{name: "silence", why: ReasonDeadline, provoke: func(p *provoked) { p.server.Pause() }},
	{name: "lost reply", why: ReasonConnection, provoke: func(p *provoked) {
		require.NoError(p.t, p.proxy.CutAfterReply(1, isScript))
	}},
	{name: "no connection free", why: ReasonPool, provoke: func(p *provoked) {
		p.opts.PoolSize = 1
		p.opts.MaxActiveConns = 1
		p.opts.PoolTimeout = 5 * time.Millisecond
		busy := redis.NewClient(p.opts)
		p.t.Cleanup(func() { _ = busy.Close() })
	}},
	{name: "READONLY", why: ReasonReadOnly, provoke: func(p *provoked) {
		require.NoError(p.t, p.admin.ReplicaOf(context.Background(), "127.0.0.1", "1").Err())
	}},
	{name: "MASTERDOWN", why: ReasonMasterDown, provoke: func(p *provoked) {
		p.config("replica-serve-stale-data", "no")
		require.NoError(p.t, p.admin.ReplicaOf(context.Background(), "127.0.0.1", "1").Err())
	}},
	{name: "OOM", why: ReasonMemory, provoke: func(p *provoked) { p.config("maxmemory", "1") }},
	{name: "BUSY", why: ReasonBusy, args: []string{"--busy-reply-threshold", "1"}, provoke: func(p *provoked) {
		spin := redis.NewClient(&redis.Options{Addr: p.server.Addr(), MaxRetries: -1, ReadTimeout: patience})
		p.t.Cleanup(func() { _ = spin.Close() })
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = spin.Eval(context.Background(), "while true do end", nil).Err() // killed
		}()
		eventually(p.t, func() bool { return redis.HasErrorPrefix(p.admin.Ping(context.Background()).Err(), "BUSY") },
			"Redis is busy")
		p.t.Cleanup(func() {
			require.NoError(p.t, p.admin.ScriptKill(context.Background()).Err())
			<-done
		})
	}},
	{name: "LOADING", why: ReasonLoading, args: []string{"--key-load-delay", "1000",
		"--loading-process-events-interval-bytes", "1024"}, provoke: func(p *provoked) {
		ctx := context.Background()
		for i := range 4000 {
			require.NoError(p.t, p.admin.Set(ctx, fmt.Sprintf("filler:%d", i), "some text to load", 0).Err())
		}
		require.NoError(p.t, p.admin.Save(ctx).Err())
		reload := redis.NewClient(&redis.Options{Addr: p.server.Addr(), MaxRetries: -1, ReadTimeout: patience})
		p.t.Cleanup(func() { _ = reload.Close() })
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = reload.Do(ctx, "DEBUG", "RELOAD", "NOSAVE").Err() // the test ends it
		}()
		p.t.Cleanup(func() {
			p.server.Kill()
			<-done
		})
		eventually(p.t, func() bool { return redis.HasErrorPrefix(p.admin.Get(ctx, "checkout").Err(), "LOADING") },
			"Redis is loading")
	}},
	{name: "NOPERM", why: ReasonRefused, provoke: func(p *provoked) {
		require.NoError(p.t, p.admin.Do(context.Background(), "ACL", "SETUSER", "poor", "on", ">secret", "~*", "+ping").Err())
		p.opts.Username, p.opts.Password = "poor", "secret"
	}},
	{name: "NOREPLICAS", why: ReasonMasterDown, provoke: func(p *provoked) { p.config("min-replicas-to-write", "1") }},
	{name: "MISCONF", why: ReasonDisk, provoke: func(p *provoked) {
		p.config("save", "3600 1")
		require.NoError(p.t, os.RemoveAll(p.server.DataDir()))
		require.NoError(p.t, p.admin.BgSave(context.Background()).Err())
		eventually(p.t, func() bool {
			return redis.HasErrorPrefix(p.admin.Set(context.Background(), "x", 1, 0).Err(), "MISCONF")
		}, "Redis can't save")
	}},
}

func TestEveryFailureOfAServerHasItsReason(t *testing.T) {
	for _, f := range failuresOfServers {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			why := f.why
			p := &provoked{t: t, server: testenv.Redis(t, testenv.WithArgs(f.args...), testenv.WithDataDir(t.TempDir()))}
			p.admin = p.server.Client()
			createBucket(t, p.admin, "checkout", hourly(100))
			require.NoError(t, lua.Load(t.Context(), p.admin))
			p.proxy = testenv.Proxy(t, p.server.Addr(), 0)
			p.opts = &redis.Options{Addr: p.proxy.Addr(), MaxRetries: -1, DialerRetries: 1, ReadTimeout: patience}
			f.provoke(p)
			rdb := redis.NewClient(p.opts)
			t.Cleanup(func() { _ = rdb.Close() })
			deadline := patience
			var client redis.UniversalClient = rdb
			switch why {
			case ReasonDeadline:
				deadline = 30 * time.Millisecond
			case ReasonPool: // another caller has the only connection
				conn := rdb.Conn()
				t.Cleanup(func() { _ = conn.Close() })
				require.NoError(t, conn.Ping(t.Context()).Err())
				client = wrapped{rdb}
			}
			c, err := New(client, WithTimeout(deadline))
			require.NoError(t, err)
			_, err = c.Take(t.Context(), "checkout", 1)
			require.ErrorIs(t, err, ErrUnavailable)
			require.Equal(t, why, ReasonOf(err), "%v", err)
			require.Equal(t, map[Reason]int64{why: 1}, c.Stats().Degraded)
			if why == ReasonDeadline {
				p.server.Resume()
			}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			require.NoError(t, c.Close(ctx))
		})
	}
}

func TestASlotThatIsElsewhereOrNowhereIsAReasonOfTheCluster(t *testing.T) {
	t.Parallel()
	cluster := testenv.Cluster(t)
	one := redis.NewClient(&redis.Options{Addr: cluster.Addrs()[0], MaxRetries: -1})
	t.Cleanup(func() { _ = one.Close() })
	lone := testenv.Redis(t, testenv.WithArgs("--cluster-enabled", "yes")).Client()
	moved := 0
	c := newClient(t, one, slow())
	for i := range 20 {
		_, err := c.Take(t.Context(), fmt.Sprintf("bucket%d", i), 1)
		if !errors.Is(err, ErrUnknownBucket) {
			moved++
			require.Equal(t, ReasonCluster, ReasonOf(err), "%v", err) // MOVED
		}
	}
	require.NotZero(t, moved)
	_, err := newClient(t, lone, slow()).Take(t.Context(), "bucket", 1)
	require.Equal(t, ReasonCluster, ReasonOf(err), "%v", err) // CLUSTERDOWN
}

// A client of the Cluster follows a slot that moves. A client of a single server gets an error that names the slot's
// new server.
func TestASlotOnItsWayIsFollowed(t *testing.T) {
	t.Parallel()
	cluster := testenv.Cluster(t)
	rdb := cluster.Client()
	createBucket(t, rdb, "checkout", hourly(10))
	require.NoError(t, lua.Load(t.Context(), rdb))
	slot := lua.Slot("checkout")
	from := cluster.Owner(slot)
	to := cluster.Nodes()[0]
	if to == from {
		to = cluster.Nodes()[1]
	}
	all, alone := newClient(t, rdb, slow()), newClient(t, from.Client(), slow())
	take := func(c *Client, want string) {
		t.Helper()
		r, err := c.Take(t.Context(), "checkout", 1)
		if want == "" {
			require.NoError(t, err)
			require.True(t, r.OK)
			return
		}
		require.Equal(t, ReasonCluster, ReasonOf(err), "%v", err)
		require.ErrorContains(t, err, want)
	}
	take(alone, "")
	move, err := cluster.StartMove(slot, to)
	require.NoError(t, err)
	take(alone, "")
	require.NoError(t, move.MoveKeys("checkout"))
	take(alone, "ASK") // for the key of the tokens, the only key of the call
	require.NoError(t, move.MoveKeys())
	take(alone, "ASK")
	take(all, "")
	require.NoError(t, move.Finish())
	take(alone, "MOVED")
	take(all, "")
	require.EqualValues(t, 6, tokens(t, rdb, "checkout"),
		"each take was charged once, and no redirected call was")
	require.Zero(t, all.Stats().Lost+alone.Stats().Lost)
}

func TestAForgottenScriptIsNoFailure(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "checkout", hourly(100))
	c := newClient(t, rdb, slow())
	require.NoError(t, rdb.ScriptFlush(t.Context()).Err())
	r, err := c.Take(t.Context(), "checkout", 1)
	require.NoError(t, err)
	require.Equal(t, Source{}, r.Source)
}

func TestErrorsAreClassifiedByTheirWord(t *testing.T) {
	for text, want := range map[string]Reason{
		"NOREPLICAS Not enough good replicas to write.":           ReasonMasterDown,
		"MISCONF Redis is configured to save RDB snapshots":       ReasonDisk,
		"TRYAGAIN Multiple keys request during rehashing of slot": ReasonCluster, "ASK 5 127.0.0.1:1": ReasonCluster,
		"CROSSSLOT Keys in request don't hash to the same slot": ReasonCluster, "NOSCRIPT No matching script.": ReasonScript,
		"NOAUTH Authentication required.": ReasonRefused, "BUSYKEY Target key name already exists.": ReasonRefused,
		"ERR unknown command": ReasonRefused,
	} {
		require.Equal(t, want, ReasonOf(failure(context.Background(), redisError(text))), text)
	}
	for err, want := range map[error]Reason{
		io.EOF: ReasonConnection, syscall.ECONNRESET: ReasonConnection, redis.ErrPoolTimeout: ReasonPool,
		redis.ErrClosed:          ReasonConnection,
		context.DeadlineExceeded: ReasonDeadline, lua.ErrUnknownBucket: ReasonNone, lua.ErrBadReply: ReasonNone,
	} {
		require.Equal(t, want, ReasonOf(failure(context.Background(), err)), "%v", err)
	}
	for _, err := range []error{nil, context.Canceled, ErrClosed, ErrDeadline, ErrInvalidKey, context.DeadlineExceeded} {
		require.Equal(t, ReasonNone, ReasonOf(err), "%v: not an error of the server", err)
	}
	require.Equal(t, ReasonBusy, ReasonOf(fmt.Errorf("%w: %w", ErrUnavailable, &openError{ReasonBusy})))
	require.Equal(t, "invalid", reasons.String())
	for r := range reasons {
		require.NotEqual(t, "invalid", r.String())
	}
}

type redisError string

func (e redisError) Error() string { return string(e) }
func (redisError) RedisError()     {}

// The degraded mode of a bucket is that of its policy. Before the Client knows the policy, the option
// WithUnknownDegraded determines the mode.
func TestEachPolicyDecidesHowItsTakesAreAnsweredWithoutItsServer(t *testing.T) {
	f := newFaulty(t, nil)
	mode := func(m policy.Degraded) policy.Policy {
		p := hourly(10)
		p.Degraded = m
		return p
	}
	for key, m := range map[string]policy.Degraded{"closed": policy.DegradedClosed, "open": policy.DegradedOpen,
		"local": policy.DegradedLocal} {
		createBucket(t, f.direct, key, mode(m))
	}
	c := newClient(t, f.rdb, slow())
	opener := newClient(t, f.rdb, slow(), WithUnknownDegraded(policy.DegradedOpen))
	for _, key := range []string{"closed", "open", "local"} {
		_, err := c.Take(t.Context(), key, 2)
		require.NoError(t, err)
	}
	eventually(t, func() bool { return f.direct.Exists(t.Context(), lua.LiveKey("local")).Val() == 1 },
		"the client sends a heartbeat")
	countsConsumers(t, c, "local", 1)
	f.proxy.Cut()
	from := Source{Kind: SourceFallback, Reason: ReasonConnection}

	_, err := c.Take(t.Context(), "closed", 1)
	require.ErrorIs(t, err, ErrUnavailable)
	_, err = c.Take(t.Context(), "never-seen", 1)
	require.ErrorIs(t, err, ErrUnavailable)
	r, err := opener.Take(t.Context(), "never-seen", 1000)
	require.NoError(t, err)
	require.Equal(t, Result{OK: true, Taken: 1000, ResetAfter: Never, MoreAfter: Never,
		Source: from}, timeless(r))

	for _, key := range []string{"closed", "open", "local"} { // these methods have no degraded mode
		_, err = c.Peek(t.Context(), key)
		require.Equal(t, ReasonConnection, ReasonOf(err))
		require.Equal(t, ReasonConnection, ReasonOf(c.Return(t.Context(), key, 1)))
		_, err = c.Settle(t.Context(), key, "made before", 1)
		require.Equal(t, ReasonConnection, ReasonOf(err))
	}

	for range 5 { // 50 tokens, although the bucket holds 10
		r, err = c.Take(t.Context(), "open", 10)
		require.NoError(t, err)
		require.Equal(t, Result{OK: true, Taken: 10, Limit: 10, ResetAfter: Never, MoreAfter: Never,
			Source: from}, timeless(r))
	}
	_, err = c.Take(t.Context(), "open", 11)
	require.ErrorIs(t, err, ErrExceedsCapacity)
	require.NoError(t, errOf(c.Wait(t.Context(), "open", 10)))

	r, err = c.Take(t.Context(), "local", 5)
	require.NoError(t, err)
	require.EqualValues(t, 5, r.loan.left)
	r.loan = nil
	require.Equal(t, Result{OK: true, Taken: 5, Remaining: 3, Limit: 10, ResetAfter: Never, MoreAfter: Never,
		Source: from}, timeless(r))
	r, err = c.Take(t.Context(), "local", 4)
	require.NoError(t, err)
	require.False(t, r.OK)
	require.InDelta(t, time.Hour, r.RetryAfter, float64(time.Minute))
	all, err := c.TakeAll(t.Context(), []Request{{Key: "local", N: 2}, {Key: "open", N: 3}})
	require.NoError(t, err)
	require.True(t, all.OK)
	all, err = c.TakeAll(t.Context(), []Request{{Key: "open", N: 3}, {Key: "local", N: 2}})
	require.NoError(t, err)
	require.False(t, all.OK)
	require.Equal(t, "local", all.Denied)
	_, err = c.TakeAll(t.Context(), []Request{{Key: "local", N: 1}, {Key: "closed", N: 1}})
	require.ErrorIs(t, err, ErrUnavailable)
	r, err = c.TakeUpTo(t.Context(), "local", 9)
	require.NoError(t, err)
	require.EqualValues(t, 1, r.Taken, "the share still has the tokens that no caller got")
	r, err = c.TakeUpTo(t.Context(), "local", 9)
	require.NoError(t, err)
	require.False(t, r.OK)
	r, err = c.TakeUpTo(t.Context(), "open", 99)
	require.NoError(t, err)
	require.EqualValues(t, 10, r.Taken)
	require.NotZero(t, c.Stats().Degraded[ReasonConnection])
}

package replica_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/replica"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/refill"
)

// parse returns a configuration for the server at url. buckets is the text after the line "buckets:".
func parse(t *testing.T, url string, version int64, buckets string) config.Config {
	t.Helper()
	cfg, err := config.Load(config.Source{Data: fmt.Appendf(nil,
		"redis: {url: %q}\nlisten: 127.0.0.1:0\nversion: %d\nbuckets:\n%s", url,
		version, buckets)})
	require.NoError(t, err)
	return cfg
}

// elected returns a configuration in elected mode. more is the rest of the file.
func elected(t *testing.T, server *testenv.RedisServer, etcd *testenv.EtcdCluster, version int64,
	more string) config.Config {
	t.Helper()
	cfg, err := config.Load(config.Source{Data: fmt.Appendf(nil, "redis: {url: %q}\nlisten: 127.0.0.1:0\nversion: %d\n"+
		"election: {mode: etcd, ttl: 2s, endpoints: [%s]}\n%s", server.URL(), version, etcd.Endpoints()[0], more)})
	require.NoError(t, err)
	return cfg
}

// consumer returns a Client with a long timeout. It is closed when the test ends.
func consumer(t *testing.T, rdb redis.UniversalClient, opts ...fetch.Option) *fetch.Client {
	t.Helper()
	c, err := fetch.New(rdb, append(opts, fetch.WithTimeout(20*time.Second))...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close(context.WithoutCancel(t.Context()))) })
	return c
}

// running runs a replica until the test ends.
func running(t *testing.T, cfg config.Config, opts replica.Options) *replica.Replica {
	t.Helper()
	r, _ := stoppable(t, cfg, opts)
	return r
}

// stoppable starts a replica; stop ends it and waits.
func stoppable(t *testing.T, cfg config.Config, opts replica.Options) (r *replica.Replica, stop func()) {
	t.Helper()
	if opts.Logger == nil {
		opts.Logger = hclog.NewNullLogger()
	}
	r, err := replica.New(cfg, opts)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
	})
	t.Cleanup(stop)
	return r, stop
}

func peek(t *testing.T, rdb *redis.Client, key string) lua.PeekReply {
	t.Helper()
	p, err := lua.Peek(t.Context(), rdb, key, 1)
	require.NoError(t, err)
	return p
}

// eventually polls until holds returns true. what describes the state that the test waits for.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	require.Eventually(t, holds, 20*time.Second, 5*time.Millisecond, what)
}

func TestAStormOfReloadsMintsNothing(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb := server.Client()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))

	// The rate stays the same, so that the number of due tokens is known. Everything else changes.
	cfg := func(version int64) config.Config {
		capacity, interval := 1_000_000+rng.Int64N(1_000_000), 20+rng.IntN(80)
		return parse(t, server.URL(), version, fmt.Sprintf(
			"  - {key: a, capacity: %d, rate: 500/s, interval: %dms, initial: 0}\n  - {key: b, capacity: %d, rate: 500/s, initial: 0, carry_over: proportional}\n",
			capacity, interval, capacity))
	}
	var mu sync.Mutex
	failed := 0
	observe := func(e refill.Event) {
		mu.Lock()
		defer mu.Unlock()
		if e.Err != nil {
			failed++
		}
	}
	var replicas []*replica.Replica
	for range 3 {
		replicas = append(replicas, running(t, cfg(1), replica.Options{Observe: observe}))
	}
	eventually(t, "the buckets exist", func() bool { return rdb.Exists(t.Context(), "a", "b").Val() == 2 })
	const storm = 1000
	for version := int64(2); version < 2+storm; version++ {
		require.NoError(t, replicas[rng.IntN(len(replicas))].Reload(cfg(version), "storm"))
	}
	for _, key := range []string{"a", "b"} {
		before := peek(t, rdb, key).Version.Index
		eventually(t, "refills go on", func() bool { return peek(t, rdb, key).Version.Index > before+3 })
		p := peek(t, rdb, key)
		due := (p.Last - p.Version.Era) * 500 / 1_000_000 // the era is the instant of creation
		if key == "b" {
			require.LessOrEqual(t, p.Tokens, due)
			continue
		}
		require.Equal(t, due, p.Tokens, "the bucket has exactly the tokens due since its creation")
		require.EqualValues(t, 1+storm, p.Terms.Fence.Epoch)
	}
	mu.Lock()
	defer mu.Unlock()
	require.Zero(t, failed, "a reload cuts off no call")
}

func TestAReloadThatIsRefusedChangesNothingAndIsReported(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	asked := make(chan string)
	var next config.Config
	var loadErr error
	r := running(t, parse(t, server.URL(), 7, "  - {key: a, capacity: 1000, rate: 500/s}\n"), replica.Options{
		Reload: asked, Load: func() (config.Config, error) { return next, loadErr },
	})
	status := func() admin.Status { return r.Status(t.Context(), admin.Query{Limit: 10}) }
	eventually(t, "the bucket exists", func() bool { return status().Buckets[0].Error == "" })

	loadErr = config.Problems{{Source: "f", Line: 1, Msg: "one"}, {Source: "f", Line: 2, Msg: "two"}}
	asked <- "file changed"
	eventually(t, "the reload is refused", func() bool { return status().Reload.Refused == 1 })
	got := status().Reload
	require.Equal(t, "refused", got.Result)
	require.Equal(t, "file changed", got.Cause)
	require.Equal(t, []string{"f:1:0: one", "f:2:0: two"}, got.Problems)

	loadErr = errors.New("config: gone")
	asked <- "SIGHUP"
	eventually(t, "the reload is refused", func() bool { return status().Reload.Refused == 2 })
	require.Equal(t, []string{"config: gone"}, status().Reload.Problems)

	lower := parse(t, server.URL(), 6, "  - {key: a, capacity: 10, rate: 1/s}\n")
	require.ErrorContains(t, r.Reload(lower, "test"), "version: 6 is below 7")
	same := parse(t, server.URL(), 7, "  - {key: a, capacity: 10, rate: 1/s}\n")
	require.ErrorContains(t, r.Reload(same, "test"), "raise it with every change of a policy")
	s := status()
	require.EqualValues(t, 7, s.Config)
	require.EqualValues(t, 1000, s.Buckets[0].Capacity)
	require.Equal(t, "500/s", s.Buckets[0].Rate)
	require.EqualValues(t, 4, s.Reload.Refused)

	next, loadErr = parse(t, server.URL(), 8, "  - {key: a, capacity: 10, rate: 1/s, interval: 1s}\n"), nil
	asked <- "file changed"
	eventually(t, "a valid reload is applied", func() bool { return status().Reload.Applied == 1 })
	require.Empty(t, status().Reload.Problems)
	eventually(t, "the new version is in force", func() bool { return status().Buckets[0].Policy == 8 })
}

func TestAReloadReportsWhatNeedsARestart(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	bucket := "  - {key: a, capacity: 1000, rate: 500/s}\n"
	level := hclog.New(&hclog.LoggerOptions{Level: hclog.Error, Output: io.Discard})
	r := running(t, parse(t, server.URL(), 1, bucket), replica.Options{Logger: level})
	next := parse(t, "redis://127.0.0.1:1/0", 2, bucket+"region: elsewhere\nlog: {level: warn}\n")
	require.NoError(t, r.Reload(next, "test"))
	s := r.Status(t.Context(), admin.Query{Limit: 10})
	require.Equal(t, "applied", s.Reload.Result)
	require.Equal(t, []string{"region", "redis"}, s.Reload.Restart)
	require.Empty(t, s.Region, "a new region applies from the next start on")
	require.EqualValues(t, 2, s.Config)
	require.Equal(t, hclog.Warn, level.GetLevel(), "the log level changes at once")

	require.NoError(t, r.Reload(next, "test"))
	require.Equal(t, "unchanged", r.Status(t.Context(), admin.Query{Limit: 10}).Reload.Result)
	require.Equal(t, []string{"region", "redis"}, r.Status(t.Context(), admin.Query{Limit: 10}).Reload.Restart,
		"the region and redis still need a restart")
}

// The file in force says that a bucket is emptied after Redis lost writes. The policy in the backup said otherwise.
func TestARestoredBackupFollowsTheOnRollbackOfTheFileInForce(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	ctx := t.Context()
	rdb := server.Client()
	file := func(version int64, more string) config.Config {
		return parse(t, server.URL(), version, "  - {key: a, capacity: 1000, rate: 1/m"+more+"}\n")
	}
	r := running(t, file(1, ", on_rollback: keep"), replica.Options{})
	eventually(t, "a exists", func() bool { return rdb.Exists(ctx, "a").Val() == 1 })
	backup := map[string]string{}
	for _, key := range []string{"a", lua.IndexKey("a"), lua.ControlKey("a")} {
		backup[key] = rdb.Dump(ctx, key).Val()
	}
	require.NoError(t, r.Reload(file(2, ""), "test"))
	eventually(t, "version 2 is in force", func() bool { return peek(t, rdb, "a").Terms.Fence.Epoch == 2 })
	require.Zero(t, rdb.DecrBy(ctx, "a", 1000).Val())
	before := peek(t, rdb, "a")
	eventually(t, "the replica has refilled a", func() bool {
		return peek(t, rdb, "a").Version.Index > before.Version.Index
	})
	_, err := rdb.TxPipelined(ctx, func(p redis.Pipeliner) error {
		for key, dump := range backup {
			p.RestoreReplace(ctx, key, 0, dump)
		}
		return nil
	})
	require.NoError(t, err)
	eventually(t, "the loss is detected", func() bool { return peek(t, rdb, "a").Version.Era > before.Version.Era })
	restored := peek(t, rdb, "a")
	require.EqualValues(t, 2, restored.Terms.Fence.Epoch)
	require.LessOrEqual(t, restored.Tokens, int64(1))
}

package refill

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/tokenrefill/refiller/internal/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// manyKeys is how many buckets replicas are killed over; CONTRIBUTING.md asks for 10000
// where the refill loop has changed.
var manyKeys = flag.Int("keys", 150, "buckets over which replicas are killed at random")

// wins collects how often each index of each bucket was won.
type wins struct {
	mu    sync.Mutex
	won   map[string]map[policy.Version]int
	worst map[string]int64 // the longest stretch that a refill of the bucket settled, µs
	calls int
}

func (w *wins) observe(e Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls++
	if e.Err != nil || !e.Outcome.Status.Wrote() {
		return
	}
	if w.won[e.Key] == nil {
		w.won[e.Key] = map[policy.Version]int{}
	}
	w.won[e.Key][e.Outcome.Version]++
	w.worst[e.Key] = max(w.worst[e.Key], e.Outcome.Elapsed)
}

// consumer takes from a template's buckets as the SDK does.
type consumer struct {
	rdb   redis.UniversalClient
	terms policy.Terms
	apart bool
}

func newConsumer(rdb redis.UniversalClient, terms policy.Terms) *consumer {
	_, apart := rdb.(*redis.ClusterClient)
	return &consumer{rdb, terms, apart}
}

func (c *consumer) take(ctx context.Context, key string, n int64) (bool, error) {
	call := lua.TemplateCall{Prefix: "user:", Terms: c.terms.Encode(), Capacity: c.terms.Capacity, Apart: c.apart}
	r, err := lua.TakeTemplate(ctx, c.rdb, key, call, []policy.Run{{N: n, Count: 1}}, false, false)
	if err == nil && r.Enter {
		err = lua.Enter(ctx, c.rdb, "user:", key)
	}
	if err == nil && c.apart && r.Was != r.Till {
		_, err = lua.Count(ctx, c.rdb, "user:", r.Was, r.Till)
	}
	return r.OK, err
}

// activeKeys counts the names in the template's active set.
func activeKeys(ctx context.Context, rdb redis.UniversalClient) (n int64) {
	for i := range lua.ActiveShards {
		count, err := lua.Shard{Prefix: "user:", Number: i}.Count(ctx, rdb)
		if err != nil {
			return -1
		}
		n += count
	}
	return n
}

func TestRandomKillsOverManyBucketsMintAndLoseNothing(t *testing.T) {
	t.Run("Redis", func(t *testing.T) {
		t.Parallel()
		server := testenv.Redis(t)
		killOverMany(t, func() redis.UniversalClient { return redis.NewClient(server.ClientOptions()) })
	})
	t.Run("Cluster", func(t *testing.T) {
		t.Parallel()
		c := testenv.Cluster(t)
		killOverMany(t, func() redis.UniversalClient {
			return redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs(), ContextTimeoutEnabled: true, DialerRetries: 1})
		})
	})
}

func killOverMany(t *testing.T, dial func() redis.UniversalClient) {
	const interval = 500 * time.Millisecond
	rng := rand.New(rand.NewPCG(testSeed(t), 0))
	set, err := policy.NewTemplates(1, []policy.Template{{
		Prefix: "user:", Policy: policy.Policy{Capacity: 1000, Rate: policy.Rate{Tokens: 700, Per: 3 * time.Second}, Interval: interval},
	}}, nil)
	require.NoError(t, err)
	terms := set.All()[0].Terms
	ctx := t.Context()
	rdb := dial()
	t.Cleanup(func() { _ = rdb.Close() })
	require.NoError(t, lua.Load(ctx, rdb))

	w := &wins{won: map[string]map[policy.Version]int{}, worst: map[string]int64{}}
	start := func() (kill func()) {
		own := dial()
		r, err := New(Config{Redis: own, Templates: set, Version: 1, Logger: hclog.NewNullLogger(), ObserveActive: w.observe})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		return sync.OnceFunc(func() {
			_ = own.Close() // its connections break, with calls under way
			cancel()
			require.NoError(t, <-done)
		})
	}
	kills := []func(){start(), start(), start()}
	defer func() {
		for _, kill := range kills {
			kill()
		}
	}()

	keys := make([]string, *manyKeys)
	since, made, taken := make([]time.Time, len(keys)), make([]time.Time, len(keys)), make([]int64, len(keys))
	c := newConsumer(rdb, terms)
	each := func(do func(i int) error) { // several at once
		g := errgroup.Group{}
		g.SetLimit(16)
		for i := range keys {
			g.Go(func() error { return do(i) })
		}
		require.NoError(t, g.Wait())
	}
	const drained = 900 // of 1000 tokens: it takes some four seconds to earn them
	each(func(i int) error {
		keys[i] = fmt.Sprintf("user:%d", i)
		since[i] = time.Now()
		_, err := c.take(ctx, keys[i], drained)
		made[i], taken[i] = time.Now(), drained
		return err
	})
	// Each round lasts a second; what falls due meanwhile is taken, so nothing is
	// clamped, and all that fell due must be there in the end.
	for range 6 {
		which := rng.IntN(len(kills))
		kills[which]()
		time.Sleep(time.Duration(rng.IntN(500)) * time.Millisecond)
		kills[which] = start()
		time.Sleep(time.Duration(200+rng.IntN(300)) * time.Millisecond)
		n := 100 + rng.Int64N(100)
		each(func(i int) error {
			ok, err := c.take(ctx, keys[i], n)
			if ok {
				taken[i] += n
			}
			return err
		})
	}
	exact := 0
	rate := func(d time.Duration) int64 { return terms.Rate().Over(d) }
	for i, key := range keys {
		reply, err := lua.Peek(ctx, rdb, key, 1)
		require.NoError(t, err)
		read := time.Now()
		require.LessOrEqual(t, taken[i], terms.Capacity+rate(read.Sub(since[i]))+1, "I2: %s", key)
		if reply.Tokens == terms.Capacity {
			continue // the machine was so slow that the bucket became full
		}
		w.mu.Lock()
		won, worst := w.won[key], w.worst[key]
		w.mu.Unlock()
		for version, n := range won {
			require.Equal(t, 1, n, "I4: index %v of %s", version, key)
		}
		// I5: what was added is what fell due between the first take and the last refill,
		// unless a refill came so late that credit was lost, or its answer got lost.
		added, last := reply.Tokens+taken[i]-terms.Capacity, time.UnixMicro(reply.Last)
		require.LessOrEqual(t, added, rate(last.Sub(since[i]))+1, "I5: %s", key)
		if int64(len(won)) == reply.Version.Index-1 && worst <= terms.MaxElapsed {
			exact++
			require.GreaterOrEqual(t, added, rate(last.Sub(made[i]))-1, "I5: %s", key)
		}
	}
	t.Logf("%d of %d buckets have had every refill answered, and in time", exact, len(keys))
	// No bucket starves: left alone, all become full and leave the active set.
	require.Eventually(t, func() bool { return activeKeys(ctx, rdb) == 0 }, 2*time.Minute, 100*time.Millisecond)
	for i, key := range keys {
		reply, err := lua.Peek(ctx, rdb, key, 1)
		require.NoError(t, err)
		require.Equal(t, terms.Capacity, reply.Tokens, "%d: %s", i, key)
	}
	w.mu.Lock()
	before := w.calls
	w.mu.Unlock()
	time.Sleep(2 * interval)
	w.mu.Lock()
	defer w.mu.Unlock()
	require.Equal(t, before, w.calls, "nobody refills full buckets")
}

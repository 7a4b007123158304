package refill

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// manyKeys is the number of buckets in the tests that kill replicas. CONTRIBUTING.md asks for 10000 after a change of
// the refill loop.
var manyKeys = flag.Int("keys", 150, "buckets over which replicas are killed at random")

// refills collects the refills that replicas observed.
type refills struct {
	mu    sync.Mutex
	of    map[string][]refilling
	calls int
}

// refilling is one refill that wrote.
type refilling struct {
	version                 policy.Version
	elapsed, added, clamped int64
}

func (r *refills) observe(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls++
	if o := e.Outcome; e.Err == nil && o.Status.Wrote() {
		r.of[e.Key] = append(r.of[e.Key], refilling{o.Version, o.Elapsed, o.Added, o.Clamped})
	}
}

func (r *refills) made() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.calls
}

// consumer takes from a template's buckets as the SDK does.
type consumer struct {
	rdb       redis.UniversalClient
	crossSlot bool // buckets and active sets are in different slots
}

func newConsumer(rdb redis.UniversalClient) *consumer {
	_, cluster := rdb.(*redis.ClusterClient)
	return &consumer{rdb, cluster}
}

// take takes n tokens; withTerms also asks for the policy, as a client does every few seconds.
func (c *consumer) take(ctx context.Context, template *policy.CompiledTemplate, key string, n int64,
	withTerms bool) (bool, error) {
	of := lua.NewTemplate(template, c.crossSlot)
	takes := lua.Takes{Key: key, Runs: []policy.Run{{N: n, Count: 1}}, Below: template.Terms.Capacity, Template: of,
		Whole: withTerms, Terms: withTerms}
	for {
		replies, err := new(lua.TakesCall).Do(ctx, c.rdb, []lua.Takes{takes})
		if err != nil {
			return false, err
		}
		r := replies[0]
		if r.Missed {
			takes.Whole = true
			continue
		}
		if r.Err == nil && r.Till != 0 {
			r.Err = of.Enter(ctx, c.rdb, key, r.Till)
		}
		return r.OK, r.Err
	}
}

// activeKeys counts the names in the templates' active sets.
func activeKeys(ctx context.Context, rdb redis.UniversalClient, set *policy.Templates) (n int64) {
	for _, t := range set.All() {
		shards := make([]lua.Shard, lua.ActiveShards)
		for i := range shards {
			shards[i] = lua.Shard{Prefix: t.Prefix, Number: i}
		}
		for _, c := range lua.Counts(ctx, rdb, shards) {
			if c.Err != nil {
				return -1
			}
			n += c.Count
		}
	}
	return n
}

func TestRandomKillsOverManyBucketsMintAndLoseNothing(t *testing.T) {
	t.Run("Redis", func(t *testing.T) {
		t.Parallel()
		server := testenv.Redis(t)
		killOverMany(t, func(dial dialer) redis.UniversalClient {
			opts := server.ClientOptions()
			opts.Dialer = dial
			return redis.NewClient(opts)
		})
	})
	t.Run("Cluster", func(t *testing.T) {
		t.Parallel()
		c := testenv.Cluster(t)
		killOverMany(t, func(dial dialer) redis.UniversalClient {
			return redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs(), Dialer: dial,
				ContextTimeoutEnabled: true, DialerRetries: 1})
		})
	})
}

type dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

// process has the connections of a simulated process, which end with it.
type process struct {
	mu    sync.Mutex
	conns []net.Conn
	dead  bool
}

func (p *process) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns = append(p.conns, conn)
	if p.dead {
		return nil, errors.Join(net.ErrClosed, conn.Close())
	}
	return conn, nil
}

// die ends the connections. Commands that are under way get no reply, and no more commands are sent.
func (p *process) die() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dead = true
	for _, conn := range p.conns {
		_ = conn.Close()
	}
}

// killOverMany kills replicas at random while they refill many buckets. One half of the buckets is never full
// meanwhile, so not a unit of their credit may be missing. The buckets of the other half are full now and then, so they
// often leave the active set and enter it again.
func killOverMany(t *testing.T, connect func(dialer) redis.UniversalClient) {
	const (
		large   = 1_000_000
		drained = large * 9 / 10
	)
	slower := max(1, *manyKeys/2000) // so that two processors can do all of it
	interval, small := time.Duration(slower)*500*time.Millisecond, int64(500*slower)
	rng := rand.New(rand.NewPCG(testSeed(t), 0))
	rate := policy.Rate{Tokens: 700, Per: 3 * time.Second}
	set, err := policy.NewTemplates(1, []policy.Template{
		{Prefix: "large:", Policy: policy.Policy{Capacity: large, Rate: rate, Interval: interval}},
		{Prefix: "small:", Policy: policy.Policy{Capacity: small, Rate: rate, Interval: interval}},
	}, nil)
	require.NoError(t, err)
	ctx := t.Context()
	rdb := connect((&process{}).dial)
	t.Cleanup(func() { _ = rdb.Close() })
	require.NoError(t, lua.Load(ctx, rdb))

	seen := &refills{of: map[string][]refilling{}}
	start := func() (kill func()) {
		var replica process
		own := connect(replica.dial)
		r, err := New(Config{Redis: own, Templates: set, Version: 1, Logger: hclog.NewNullLogger(),
			ObserveActive: seen.observe})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		return sync.OnceFunc(func() {
			replica.die()
			cancel()
			require.NoError(t, <-done)
			_ = own.Close()
		})
	}
	kills := []func(){start(), start(), start()}
	defer func() {
		for _, kill := range kills {
			kill()
		}
	}()

	type bucket struct {
		key     string
		of      *policy.CompiledTemplate
		since   time.Time // just before its first take
		created int64     // its first take, µs on the server's clock; 0 if a refill hid it
		taken   int64
		holds   lua.PeekReply // by the last reading
		readAt  time.Time     // just after the last reading
	}
	buckets := make([]bucket, *manyKeys)
	c := newConsumer(rdb)
	each := func(do func(b *bucket) error) { // several at once
		g := errgroup.Group{}
		g.SetLimit(16)
		for i := range buckets {
			g.Go(func() error { return do(&buckets[i]) })
		}
		require.NoError(t, g.Wait())
	}
	readAll := func() {
		each(func(b *bucket) (err error) {
			b.holds, err = lua.Peek(ctx, rdb, b.key, 1)
			b.readAt = time.Now()
			if errors.Is(err, lua.ErrUnknownBucket) && b.of.Terms.Capacity == small {
				b.holds.Tokens, err = small, nil // it was full for a minute, and has expired
			}
			return err
		})
	}
	for i := range buckets {
		prefix := []string{"large:", "small:"}[i%2]
		buckets[i].key = fmt.Sprintf("%s%d", prefix, i)
		buckets[i].of = set.Of(buckets[i].key)
	}
	each(func(b *bucket) error {
		n := small / 2
		if b.of.Terms.Capacity == large {
			n = drained
		}
		b.since = time.Now()
		if _, err := c.take(ctx, b.of, b.key, n, false); err != nil {
			return err
		}
		b.taken = n
		reply, err := lua.Peek(ctx, rdb, b.key, 1)
		if reply.Version.Index == 1 {
			b.created = reply.Last
		}
		return err
	})
	for range 6 {
		which := rng.IntN(len(kills))
		kills[which]()
		time.Sleep(time.Duration(rng.Int64N(int64(interval))))
		kills[which] = start()
		time.Sleep(time.Duration(rng.Int64N(int64(interval))+int64(interval)) / 2)
		n := small/5 + rng.Int64N(small/5)
		each(func(b *bucket) error {
			ok, err := c.take(ctx, b.of, b.key, n, false)
			if ok {
				b.taken += n
			}
			return err
		})
	}

	exact := 0
	least := 0
	whole := 0
	worst := time.Duration(0)
	readAll()
	for _, b := range buckets {
		reply, terms := b.holds, b.of.Terms
		require.LessOrEqual(t, b.taken, terms.Capacity+rate.Over(b.readAt.Sub(b.since))+1, "I2: %s", b.key)
		seen.mu.Lock()
		refills := slices.Clone(seen.of[b.key])
		seen.mu.Unlock()
		won := map[policy.Version]bool{}
		answered := int64(1)
		answeredTime := int64(0) // between the refills that were answered, µs
		credited := int64(0)
		for _, r := range refills {
			require.False(t, won[r.version], "I4: index %v of %s was won twice", r.version, b.key)
			won[r.version] = true
			if r.version.Index > reply.Version.Index {
				continue // since it was read
			}
			worst = max(worst, time.Duration(r.elapsed)*time.Microsecond)
			el := min(r.elapsed, terms.MaxElapsed)
			answered++
			answeredTime += r.elapsed
			credited += el
			// I5 of one refill. The carry of the refill before it adds less than a token.
			require.Less(t, (r.added+r.clamped)*terms.Per, el*terms.Tokens+terms.Per, "I5: %s", b.key)
			if r.clamped == 0 {
				require.Greater(t, (r.added+1)*terms.Per, el*terms.Tokens, "I5: %s", b.key)
			}
		}
		if terms.Capacity == small {
			continue
		}
		// I5 of the bucket: the tokens that were added, in units of 1/Per of a token, are exactly the credit of the time from
		// the first take to the last refill. Only time beyond the longest stretch that one refill credits is missing. The
		// time between answered refills belongs to refills of replicas that were killed before the reply came.
		units := (reply.Tokens+b.taken-large)*terms.Per + reply.Carry
		if b.created == 0 {
			require.LessOrEqual(t, units, terms.Tokens*b.readAt.Sub(b.since).Microseconds(), "I5: %s", b.key)
			continue
		}
		unansweredTime := reply.Last - b.created - answeredTime
		require.GreaterOrEqual(t, unansweredTime, int64(0), "I5: %s", b.key)
		require.LessOrEqual(t, units, (credited+unansweredTime)*terms.Tokens, "I5: %s", b.key)
		if unansweredTime > terms.MaxElapsed {
			least++
			require.GreaterOrEqual(t, units, (credited+terms.MaxElapsed)*terms.Tokens, "I5: %s", b.key)
			continue
		}
		require.Equal(t, (credited+unansweredTime)*terms.Tokens, units, "I5: %s", b.key)
		exact++
		if answered == reply.Version.Index {
			whole++
		}
	}
	require.Positive(t, exact)
	t.Logf("of %d buckets that were never full, %d have the exact credit (%d of these had every refill answered) and %d have at least the credit of the answered refills; the longest time between two refills was %s, the interval is %s",
		len(buckets)/2, exact, whole, least, worst.Round(time.Millisecond), interval)

	// No bucket starves: without takes, all become full and leave the active set. On a Cluster a bucket leaves it in two
	// steps, and a kill between these may have lost its entry. The entry comes back when a client asks for the policy.
	if c.crossSlot {
		each(func(b *bucket) error {
			_, err := c.take(ctx, b.of, b.key, 1, true)
			return err
		})
	}
	each(func(b *bucket) error {
		if b.of.Terms.Capacity == small {
			return nil
		}
		reply, err := lua.Peek(ctx, rdb, b.key, 1)
		if err == nil {
			_, err = lua.Return(ctx, rdb, b.key, large-reply.Tokens-small/2, 0)
		}
		return err
	})
	require.Eventually(t, func() bool { return activeKeys(ctx, rdb, set) == 0 }, 2*time.Minute, 100*time.Millisecond)
	readAll()
	for _, b := range buckets {
		require.Equal(t, b.of.Terms.Capacity, b.holds.Tokens, "%s", b.key)
	}
	// No replica refills full buckets. A replica whose shard was taken over detects that in its next round.
	require.Eventually(t, func() bool {
		before := seen.made()
		time.Sleep(2 * interval)
		return seen.made() == before
	}, time.Minute, time.Millisecond)
}

// On a Cluster a shard may hold names of buckets that are on another master.
func TestAnUnavailableMasterDelaysNoBucketOfAnother(t *testing.T) {
	for name, disturb := range map[string]func(*testenv.RedisServer){
		"killed": (*testenv.RedisServer).Kill, "paused": (*testenv.RedisServer).Pause,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := testenv.Cluster(t)
			rdb := c.Client()
			masters, err := newRedisStore(rdb).masters(t.Context())
			require.NoError(t, err)
			set, err := policy.NewTemplates(1, []policy.Template{{
				Prefix: "user:", Policy: policy.Policy{Capacity: 1000, Rate: policy.PerSecond(1), Interval: interval},
			}}, nil)
			require.NoError(t, err)
			find := func(want func(shard, home, at int) bool) string {
				for i := 0; ; i++ {
					key := fmt.Sprintf("user:%d", i)
					shard := lua.Shard{Prefix: "user:", Number: lua.ActiveShard(key)}
					if want(shard.Number, ownerOf(masters, shard.Slot()), ownerOf(masters, lua.Slot(key))) {
						return key
					}
				}
			}
			with, owner := 0, 0
			away := find(func(shard, home, at int) bool {
				with, owner = shard, home
				return home != at
			})
			others := []Bucket{
				{Key: find(func(shard, _, at int) bool { return shard == with && at == owner })},
				{Key: find(func(shard, _, at int) bool { return shard != with && at == owner })},
			}
			for _, key := range []string{away, others[0].Key, others[1].Key} {
				ok, err := newConsumer(rdb).take(t.Context(), set.Of(key), key, 900, false)
				require.NoError(t, err)
				require.True(t, ok)
			}
			w := newWatch()
			_, stop := runningWith(t, Config{Redis: rdb, Templates: set, ObserveActive: w.observe,
				Logger: hclog.NewNullLogger()})
			w.until(t, "refills", appliedTo(append(others, Bucket{Key: away})))
			disturb(c.Owner(lua.Slot(away)))
			for range 5 {
				w.forget()
				w.until(t, "refills of the other buckets", appliedTo(others))
			}
			stop()
		})
	}
}

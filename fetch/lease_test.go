package fetch

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const hold = time.Second

// inShadow is the key under which takeEvery counts the takes that a bucket in shadow mode admitted.
const inShadow SourceKind = 100

// leasing makes a Client that has leases of the buckets of a fake server.
func leasing(t *testing.T, b *fake, most int64, opts ...Option) *Client {
	t.Helper()
	c := newClient(t, b, append([]Option{WithLease(most, hold)}, opts...)...)
	c.jitter = func() float64 { return 0 }
	return c
}

// holding makes a fake server with one bucket, and a Client that holds a block of it, of up to most tokens. held is the
// number of tokens in the block, and left the number in the bucket.
func holding(t *testing.T, capacity, most int64) (b *fake, c *Client, held, left int64) {
	t.Helper()
	b = newFake(map[string]policy.Policy{"checkout": hourly(capacity)})
	c = leasing(t, b, most)
	takeEvery(t, c, 1, time.Millisecond, 20*time.Millisecond)
	synctest.Wait()
	held, left = c.Stats().Leased, inBucket(b)
	require.Positive(t, held)
	return b, c, held, left
}

// takeEvery takes n tokens from the bucket after each pause, for d. It counts the granted takes by their source.
func takeEvery(t *testing.T, c *Client, n int64, pause, d time.Duration) map[SourceKind]int {
	t.Helper()
	got := make(map[SourceKind]int)
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(pause) {
		r, err := c.Take(t.Context(), "checkout", n)
		require.NoError(t, err)
		switch {
		case r.Shadow:
			got[inShadow]++
		case r.OK:
			require.Equal(t, n, r.Taken)
			got[r.Source.Kind]++
		}
	}
	return got
}

func outstanding(b *fake) (n int64) {
	b.with("checkout", func(bucket *oracle.Bucket) { n = bucket.Control.Outstanding })
	return n
}

func inBucket(b *fake) (n int64) {
	b.with("checkout", func(bucket *oracle.Bucket) { n = *bucket.Tokens })
	return n
}

func TestABlockIsAskedForBeforeItRunsDry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFake(map[string]policy.Policy{"checkout": hourly(100_000)})
		b.trip = 3 * time.Millisecond
		c := leasing(t, b, 10_000)
		takeEvery(t, c, 1, time.Millisecond, hold) // the block gets its size
		calls, takes := b.called("lease"), b.called("take", "takes")
		got := takeEvery(t, c, 1, time.Millisecond, 10*hold)
		require.Equal(t, map[SourceKind]int{SourceLeased: 10_000}, got, "no take waits for a call")
		require.Equal(t, takes, b.called("take", "takes"))
		require.LessOrEqual(t, b.called("lease")-calls, 100, "a few calls a second")
	})
}

func TestABlockIsAsLargeAsWhatIsTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFake(map[string]policy.Policy{"checkout": hourly(1_000_000)})
		c := leasing(t, b, 2000)
		most := int64(0)
		phase := func(pause time.Duration) (largest int64) {
			takeEvery(t, c, 1, pause, 5*hold)
			for range 100 {
				takeEvery(t, c, 1, pause, hold/20)
				require.LessOrEqual(t, c.Stats().Leased, outstanding(b), "the bucket counts all leased tokens")
				largest = max(largest, outstanding(b))
			}
			most = max(most, largest)
			return largest
		}
		require.InDelta(t, 375, phase(time.Millisecond), 125, "1,000 takes a second")
		require.InDelta(t, 37, phase(10*time.Millisecond), 13, "100 takes a second")
		require.EqualValues(t, 2000, phase(100*time.Microsecond), "10,000 takes a second and the option's bound")
		require.LessOrEqual(t, most, int64(2000))
	})
}

func TestUnusedTokensOfABlockGoBackWithinTheHoldTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFake(map[string]policy.Policy{"checkout": hourly(10_000)})
		c := leasing(t, b, 1000)
		got := takeEvery(t, c, 1, time.Millisecond, 3*hold)
		taken := int64(got[SourceShared] + got[SourceLeased])
		require.Positive(t, c.Stats().Leased)
		require.EqualValues(t, 10_000-taken-c.Stats().Leased, inBucket(b))
		time.Sleep(hold)
		require.Zero(t, c.Stats().Leased)
		require.EqualValues(t, 10_000-taken, inBucket(b))
		time.Sleep(2 * hold)
		require.Zero(t, outstanding(b))
		require.Zero(t, openBlocks(c), "an unused bucket has no block")
		b.with("checkout", func(bucket *oracle.Bucket) { require.Empty(t, bucket.Held) })
		calls := b.called("lease")
		time.Sleep(time.Hour)
		require.Equal(t, calls, b.called("lease"))
		require.NoError(t, c.Close(t.Context()))
		require.Zero(t, c.Stats().Lost)
	})
}

func TestCloseGivesBlocksBackAlthoughRepliesAreLost(t *testing.T) {
	for _, f := range []fault{none, lostCall, lostReply} {
		synctest.Test(t, func(t *testing.T) {
			b := newFake(map[string]policy.Policy{"checkout": hourly(10_000)})
			c := leasing(t, b, 1000)
			got := takeEvery(t, c, 1, time.Millisecond, 3*hold)
			require.Positive(t, c.Stats().Leased)
			lost := 0
			b.fail(func(string) fault {
				lost++
				if lost <= 2 {
					return f
				}
				return none
			})
			require.NoError(t, c.Close(t.Context()))
			require.EqualValues(t, 10_000-got[SourceShared]-got[SourceLeased], inBucket(b), "fault %d", f)
			require.Zero(t, outstanding(b))
			require.Zero(t, c.Stats().Leased)
			require.Zero(t, c.Stats().Lost)
			_, err := c.Take(t.Context(), "checkout", 1)
			require.ErrorIs(t, err, ErrClosed)
		})
	}
}

func TestABlockIsNotTakenFromAfterItsEra(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFake(map[string]policy.Policy{"checkout": hourly(10_000)})
		c := leasing(t, b, 1000)
		takeEvery(t, c, 1, time.Millisecond, 3*hold)
		held := c.Stats().Leased
		require.Positive(t, held)
		b.with("checkout", func(bucket *oracle.Bucket) { // the server lost a write, so the bucket becomes empty
			out := bucket.Refill(policy.Call{Version: policy.Version{Era: bucket.Control.Era, Index: *bucket.Index + 1}},
				time.Now().UnixMicro())
			require.Equal(t, policy.StatusRolledBack, out.Status)
		})
		time.Sleep(hold)
		require.Zero(t, c.Stats().Leased)
		require.Equal(t, held, c.Stats().Lost)
		require.Zero(t, inBucket(b), "no tokens return to another era")
		require.Zero(t, outstanding(b))
		r, err := c.Take(t.Context(), "checkout", 1)
		require.NoError(t, err)
		require.False(t, r.OK)
		require.NoError(t, c.Close(t.Context()))
		require.Zero(t, inBucket(b))
	})
}

func TestWithoutItsServerABlockIsUsedUpBeforeTheDegradedMode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := hourly(10_000)
		p.Degraded = policy.DegradedOpen
		b := newFake(map[string]policy.Policy{"checkout": p})
		c := leasing(t, b, 1000)
		before := takeEvery(t, c, 1, time.Millisecond, 3*hold)
		away, held := time.Now(), c.Stats().Leased
		b.fail(func(string) fault { return lostCall })
		last := away
		got := make(map[SourceKind]int)
		for time.Since(away) < 10*hold {
			r, err := c.Take(t.Context(), "checkout", 1)
			require.NoError(t, err)
			require.True(t, r.OK)
			got[r.Source.Kind]++
			if r.Source.Kind == SourceLeased {
				last = time.Now()
			}
			time.Sleep(10 * time.Millisecond)
		}
		require.Positive(t, got[SourceLeased])
		require.LessOrEqual(t, int64(got[SourceLeased]), held)
		require.LessOrEqual(t, last.Sub(away), hold+leaseGrace-leaseMargin)
		require.Positive(t, got[SourceFallback])
		require.Zero(t, c.Stats().Leased, "no block is used for too long")
		b.fail(nil)
		time.Sleep(hold)
		require.Zero(t, outstanding(b))
		require.EqualValues(t, 10_000-before[SourceShared]-before[SourceLeased]-int(held), inBucket(b),
			"the tokens of a block are not given twice")
		require.Positive(t, takeEvery(t, c, 1, time.Millisecond, hold)[SourceLeased])
	})
}

func TestConsumersWithLeasesDoNotStarveEachOther(t *testing.T) {
	// Each consumer takes greedily for some time, and otherwise only now and then. Although one consumer could hold the
	// whole bucket, the other gets tokens again within two hold times: one in which the block holds the tokens, and one in
	// which the greedy consumer may be the first after each refill.
	rng := seeded(t)
	synctest.Test(t, func(t *testing.T) {
		p := policy.Policy{Capacity: 20, Rate: policy.PerSecond(100), Interval: 100 * time.Millisecond}
		b := newFake(map[string]policy.Policy{"checkout": p})
		b.trip = 100 * time.Microsecond
		var wg sync.WaitGroup
		for i := range 2 {
			c := leasing(t, b, 20)
			c.jitter = rand.New(rand.NewPCG(rng.Uint64(), 0)).Float64
			wg.Go(func() {
				last := time.Now()
				for turn := range 20 {
					pause := 200 * time.Microsecond
					if turn%2 == i {
						pause = 9 * time.Millisecond
					}
					for end := time.Now().Add(2 * hold); time.Now().Before(end); time.Sleep(pause) {
						r, err := c.Take(t.Context(), "checkout", 1)
						if err != nil {
							t.Error(err)
							return
						}
						if !r.OK {
							continue
						}
						if since := time.Since(last); since > 2*hold {
							t.Errorf("consumer %d got nothing for %s", i, since)
						}
						last = time.Now()
					}
				}
				if err := c.Close(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		require.Positive(t, b.called("lease"))
	})
}

func TestUnusedLeasesGoBackWithinTheHoldTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFake(map[string]policy.Policy{"checkout": hourly(100)})
		hoarder, other := leasing(t, b, 100), leasing(t, b, 100)
		got := takeEvery(t, hoarder, 1, 10*time.Millisecond, hold/2)
		left := 100 - int64(got[SourceShared]+got[SourceLeased])
		require.Positive(t, hoarder.Stats().Leased)
		denied := 0
		for end := time.Now().Add(hold); time.Now().Before(end); time.Sleep(time.Millisecond) {
			r, err := other.TakeUpTo(t.Context(), "checkout", 1)
			require.NoError(t, err)
			left -= r.Taken
			if !r.OK {
				denied++
			}
		}
		time.Sleep(denialMaxAge)
		r, err := other.TakeUpTo(t.Context(), "checkout", 100)
		require.NoError(t, err)
		require.Equal(t, left, r.Taken, "the take gets all tokens that the other consumer held")
		require.NoError(t, hoarder.Close(t.Context()))
		require.NoError(t, other.Close(t.Context()))
		require.Zero(t, inBucket(b))
	})
}

func TestWaitersComeBeforeTheBlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFake(map[string]policy.Policy{"checkout": hourly(1000)})
		c := leasing(t, b, 1000)
		got := takeEvery(t, c, 1, time.Millisecond, hold/2)
		left := 1000 - int64(got[SourceShared]+got[SourceLeased])
		held := c.Stats().Leased
		require.Positive(t, held)
		calls := b.called("take", "takes")
		require.NoError(t, errOf(c.Wait(t.Context(), "checkout", 1)))
		require.Equal(t, held-1, c.Stats().Leased, "the block has enough tokens")
		require.Equal(t, calls, b.called("take", "takes"))

		began := time.Now()
		require.NoError(t, errOf(c.Wait(t.Context(), "checkout", left-1)), "the wait needs the block's tokens, too")
		require.Less(t, time.Since(began), hold/10, "the block's tokens are returned at once")
		require.Zero(t, inBucket(b))
		require.Zero(t, outstanding(b))
	})
}

func TestABucketHasNoBlockWhileACallerWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(1000), Interval: 100 * time.Millisecond,
			Initial: new(int64)}
		b := newFake(map[string]policy.Policy{"checkout": p})
		c := leasing(t, b, 1000)
		takeEvery(t, c, 1, 2*time.Millisecond, 2*hold)
		require.Positive(t, c.Stats().Leased)
		waited := make(chan error)
		began := time.Now()
		go func() { waited <- errOf(c.Wait(t.Context(), "checkout", 1000)) }()
		synctest.Wait()
		got := takeEvery(t, c, 1, 100*time.Millisecond, hold/2)
		require.Zero(t, got[SourceLeased])
		require.NoError(t, <-waited)
		require.Less(t, time.Since(began), 2*hold, "no block competes with the waiter")
		require.Positive(t, takeEvery(t, c, 1, 2*time.Millisecond, 2*hold)[SourceLeased], "blocks serve takes after the wait")
	})
}

func TestCallsThatABlockDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFake(map[string]policy.Policy{"checkout": hourly(100)})
		c := leasing(t, b, 50)
		takeEvery(t, c, 2, time.Millisecond, 10*time.Millisecond)
		held := c.Stats().Leased
		require.Positive(t, held)
		r, err := c.Take(t.Context(), "checkout", held+1)
		require.NoError(t, err)
		require.Equal(t, SourceShared, r.Source.Kind, "the take needs more tokens than the block has")
		_, err = c.Take(t.Context(), "checkout", 101)
		require.ErrorIs(t, err, ErrExceedsCapacity)

		all, err := c.TakeUpTo(t.Context(), "checkout", 1)
		require.NoError(t, err)
		require.Equal(t, SourceLeased, all.Source.Kind)
		synctest.Wait() // the block gets its tokens
		held, left := c.Stats().Leased, inBucket(b)
		require.Positive(t, held)
		require.Positive(t, left)
		all, err = c.TakeUpTo(t.Context(), "checkout", 1000)
		require.NoError(t, err)
		require.Equal(t, SourceShared, all.Source.Kind)
		require.Greater(t, all.Taken, held, "the take gets the block's tokens and some of the bucket's")
		synctest.Wait()
		require.Equal(t, held+left, all.Taken+c.Stats().Leased+inBucket(b))
	})
}

func TestPeekReturnsTheOutstandingTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFake(map[string]policy.Policy{"checkout": hourly(1000)})
		c, other := leasing(t, b, 100), leasing(t, b, 100)
		takeEvery(t, c, 1, time.Millisecond, hold/4)
		r, err := other.Peek(t.Context(), "checkout")
		require.NoError(t, err)
		require.Positive(t, r.Outstanding)
		require.Equal(t, outstanding(b), r.Outstanding)
		require.GreaterOrEqual(t, r.Outstanding, c.Stats().Leased)
		require.NoError(t, c.Close(t.Context()))
		require.NoError(t, other.Close(t.Context()))
	})
}

func TestABlockOfABucketInShadowModeGivesWhatTheBucketHas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := hourly(100)
		p.Shadow = true
		b := newFake(map[string]policy.Policy{"checkout": p})
		c := leasing(t, b, 50)
		got := takeEvery(t, c, 1, time.Millisecond, hold)
		require.EqualValues(t, 100, got[SourceLeased]+got[SourceShared])
		require.EqualValues(t, c.Stats().Shadowed, got[inShadow])
		require.Equal(t, 1000-100, got[inShadow])
	})
}

func TestABucketInLittleUseHasNoBlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFake(map[string]policy.Policy{"checkout": hourly(100)})
		c := leasing(t, b, 50)
		require.Equal(t, map[SourceKind]int{SourceShared: 5}, takeEvery(t, c, 1, 2*hold, 10*hold))
		require.Zero(t, takeEvery(t, c, 1, hold/6, 10*hold)[SourceLeased])
		require.Zero(t, b.called("lease"))
		require.Positive(t, takeEvery(t, c, 1, hold/10, 2*hold)[SourceLeased])
	})
}

// openBlocks returns how many blocks a Client has.
func openBlocks(c *Client) int {
	c.leases.mu.Lock()
	defer c.leases.mu.Unlock()
	return len(c.leases.blocks)
}

func TestTheBlocksOfAClientAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		buckets := make(map[string]policy.Policy)
		for i := range 2 * maxLeases {
			buckets["user:"+strconv.Itoa(i)] = hourly(100)
		}
		b := newFake(buckets)
		c := leasing(t, b, 50)
		for key := range buckets {
			for range leaseFrom {
				_, err := c.Take(t.Context(), key, 1)
				require.NoError(t, err)
			}
		}
		require.Equal(t, maxLeases, openBlocks(c))
		time.Sleep(3 * hold)
		require.Zero(t, openBlocks(c))
		for key := range buckets {
			require.Nil(t, c.buckets.find(key).block.Load())
		}
	})
}

func TestABlockIsNotUsedAfterItsExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := leasing(t, newFake(nil), 10)
		b := newBlock(c.leases, "checkout", nil, leaseRule{10, hold}) // without a keeper
		b.view.Store(&view{until: c.leases.now() + hold, limit: 10})
		b.left.Store(5)
		time.Sleep(hold - time.Nanosecond)
		r, _ := b.takeLocal(1, 1, policy.Leave{})
		require.True(t, r.OK)
		time.Sleep(time.Nanosecond)
		r, _ = b.takeLocal(1, 1, policy.Leave{})
		require.False(t, r.OK)
	})
}

// slowLeases is a fake that answers calls about blocks late.
type slowLeases struct {
	*fake
	late time.Duration
}

// Process implements lua.Client.
func (s *slowLeases) Process(ctx context.Context, cmd redis.Cmder) error {
	before := s.called("lease")
	err := s.fake.Process(ctx, cmd)
	if s.called("lease") > before && err == nil {
		err = pause(ctx, s.late)
	}
	if err != nil {
		cmd.SetErr(err)
	}
	return err
}

// A call about a block may need several round trips, and no caller waits for it.
func TestACallAboutABlockMayTakeLongerThanATake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &slowLeases{newFake(map[string]policy.Policy{"checkout": hourly(100_000)}), 40 * time.Millisecond}
		c := newClient(t, b, WithLease(1000, 500*time.Millisecond), WithTimeout(30*time.Millisecond))
		takeEvery(t, c, 1, time.Millisecond, 5*time.Second)
		require.Positive(t, c.Stats().Leased)
		require.Zero(t, c.Stats().Lost)
	})
}

func TestABlockEndsWithItsLostBucket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFake(map[string]policy.Policy{"checkout": hourly(1000)})
		c := leasing(t, b, 100)
		takeEvery(t, c, 1, time.Millisecond, hold/4)
		require.Positive(t, c.Stats().Leased)
		b.mu.Lock()
		delete(b.buckets, "checkout")
		b.mu.Unlock()
		time.Sleep(hold)
		_, err := c.Take(t.Context(), "checkout", 1)
		require.ErrorIs(t, err, ErrUnknownBucket)
		require.Zero(t, c.Stats().Leased)
	})
}

func TestLeaseOptions(t *testing.T) {
	for name, opts := range map[string][]Option{
		"no tokens":       {WithLease(0, hold)},
		"too many tokens": {WithLease(policy.MaxTokens+1, hold)},
		"too short":       {WithLease(1, minLeaseHold-1)},
		"too long":        {WithLease(1, maxLeaseHold+1)},
		"no key":          {WithLease(1, hold).ForKeys("a}")},
		"empty keys":      {WithLease(1, hold).ForKeys().ForPrefix("a")},
		"all twice":       {WithLease(1, hold), WithLease(2, hold)},
		"a key twice":     {WithLease(1, hold).ForKeys("a"), WithLease(2, hold).ForKeys("b", "a")},
		"a prefix twice":  {WithLease(1, hold).ForPrefix("a"), WithLease(2, hold).ForPrefix("a")},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := New(generous(), opts...)
			require.ErrorIs(t, err, ErrInvalidOption)
		})
	}
	rules := newClient(t, generous(), WithLease(2, hold).ForPrefix("user:").ForPrefix("team:"),
		WithLease(1, hold).ForKeys("user:1"),
		WithLease(3, hold).ForPrefix("user:vip:")).leases.rules
	for key, want := range map[string]int64{"user:1": 1, "user:2": 2, "team:1": 2, "user:vip:1": 3, "user": 0} {
		rule, ok := rules.of(key)
		require.Equal(t, want > 0, ok, key)
		require.Equal(t, want, rule.most, key)
	}
	every := WithLease(5, hold)
	rules = newClient(t, generous(), every.ForPrefix("user:"), every).leases.rules
	for _, key := range []string{"user:1", "checkout"} {
		_, ok := rules.of(key)
		require.True(t, ok, "ForPrefix does not change the option")
	}
}

func TestALeasedTakeAllocatesNothing(t *testing.T) {
	c := newClient(t, newFake(map[string]policy.Policy{"checkout": hourly(1_000_000)}), WithLease(100_000, maxLeaseHold),
		slow())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	eventually(t, func() bool {
		r, err := c.Take(ctx, "checkout", 1000)
		require.NoError(t, err)
		return r.Source.Kind == SourceLeased && c.Stats().Leased > 10_000
	}, "the client has a block")
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		if r, err := c.Take(ctx, "checkout", 1); err != nil || r.Source.Kind != SourceLeased {
			panic(fmt.Sprint(r, err))
		}
	}))
}

func TestLeasesOnEveryKindOfServerLeaveNothingBehind(t *testing.T) {
	const (
		consumers  = 3
		goroutines = 8
		takes      = 300
		capacity   = 100_000
	)
	for name, start := range map[string]func(t *testing.T) redis.UniversalClient{
		"single":  func(t *testing.T) redis.UniversalClient { return testenv.Redis(t).Client() },
		"cluster": func(t *testing.T) redis.UniversalClient { return testenv.Cluster(t).Client() },
	} {
		t.Run(name, func(t *testing.T) {
			rdb := start(t)
			keys := []string{"checkout", "user:1", "user:2"} // several slots
			for _, key := range keys {
				createBucket(t, rdb, key, hourly(capacity))
			}
			var (
				wg     sync.WaitGroup
				leased atomic.Int64
			)
			for range consumers {
				c := newClient(t, rdb, slow(), WithLease(500, 200*time.Millisecond))
				var takers sync.WaitGroup
				for i := range goroutines {
					takers.Go(func() {
						for j := range takes {
							r, err := c.Take(t.Context(), keys[(i+j)%len(keys)], 1)
							if err != nil || !r.OK {
								t.Error(r, err)
								return
							}
							if r.Source.Kind == SourceLeased {
								leased.Add(1)
							}
						}
					})
				}
				wg.Go(func() {
					takers.Wait()
					if err := c.Close(t.Context()); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			require.Positive(t, leased.Load())
			left := int64(0)
			for _, key := range keys {
				left += tokens(t, rdb, key)
				r, err := lua.Peek(t.Context(), rdb, key, 1)
				require.NoError(t, err)
				require.Zero(t, r.Outstanding)
				held, err := rdb.Exists(t.Context(), lua.OutstandingKey(key)).Result()
				require.NoError(t, err)
				require.Zero(t, held)
			}
			require.EqualValues(t, 3*capacity-consumers*goroutines*takes, left)
		})
	}
}

// A take of all tokens may be denied often, but this doesn't count as use of the block. So the block goes back, and
// then the bucket has enough tokens.
func TestATakeThatNeedsBlockAndBucketIsDeniedUntilTheBlockGoesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, c, held, left := holding(t, 100, 40)
		_, err := c.Take(t.Context(), "checkout", 101)
		require.ErrorIs(t, err, ErrExceedsCapacity)
		r, err := c.Take(t.Context(), "checkout", held+left)
		require.NoError(t, err)
		require.False(t, r.OK)
		synctest.Wait()
		require.Equal(t, held+left, c.Stats().Leased+inBucket(b), "no tokens are lost")
		for end := time.Now().Add(2 * hold); !r.OK && time.Now().Before(end); time.Sleep(time.Millisecond) {
			r, err = c.Take(t.Context(), "checkout", held+left)
			require.NoError(t, err)
		}
		require.True(t, r.OK, "the block's tokens returned to the bucket")
		require.NoError(t, c.Close(t.Context()))
	})
}

// While a call about a block is under way, its tokens are neither in the bucket nor in the block.
func TestTakeUpToGetsWhatACallAboutTheBlockHasMoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, c, held, left := holding(t, 100, 100)
		k := c.buckets.find("checkout").block.Load()
		k.left.Store(0) // as if the tokens were on their way to the block
		b.trip = time.Millisecond
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(b.trip / 2)
			k.left.Add(held)
		})
		r, err := c.TakeUpTo(t.Context(), "checkout", 1000)
		wg.Wait()
		require.NoError(t, err)
		require.Equal(t, held+left, r.Taken)
	})
}

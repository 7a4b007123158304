package fetch

import (
	"context"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func localTerms(capacity int64, rate policy.Rate) policy.Terms {
	return policy.Policy{Capacity: capacity, Rate: rate, Degraded: policy.DegradedLocal}.Terms(policy.Fence{})
}

// The shares of all consumers together hold no more tokens than the bucket did. They gain no more tokens than the
// bucket would have gained.
func TestSharesTogetherAdmitWhatTheBucketWouldHave(t *testing.T) {
	rng := seeded(t)
	for range 200 {
		live := 1 + rng.Int64N(8)
		rate := policy.Rate{Tokens: live * (1 + rng.Int64N(50)), Per: time.Second}
		capacity := live * (1 + rate.Tokens)
		left := rng.Int64N(capacity + 1)
		admitted, began := int64(0), time.Duration(rng.Int64N(int64(time.Hour)))
		span := time.Duration(1 + rng.Int64N(int64(5*time.Second)))
		for range live {
			s := &share{terms: localTerms(capacity, rate)}
			s.count(live, 0)
			s.record(left, began)
			for at := time.Duration(0); at <= span; at += time.Duration(1 + rng.Int64N(int64(20*time.Millisecond))) {
				for s.take(1, 1, 0, began+at).OK {
					admitted++
				}
			}
		}
		due := float64(rate.Tokens) * span.Seconds()
		require.LessOrEqual(t, float64(admitted), float64(left)+due+1)
		afterLast := 0.02 * float64(rate.Tokens) // tokens that fell due after the last take
		require.GreaterOrEqual(t, float64(admitted), float64(left)+due-afterLast-2*float64(live))
	}
}

// tokensIn returns the number of tokens in a share. It makes a take that is denied, whose result has this number.
func tokensIn(s *share, now time.Duration) int64 {
	return s.take(policy.MaxTokens, policy.MaxTokens, 0, now).Tokens
}

func TestAShareStartsWithItsPartOfTheTokensAndOfTheRate(t *testing.T) {
	terms := localTerms(100, policy.PerSecond(20))
	s := &share{terms: terms}
	s.record(100, 0)
	require.False(t, s.take(1, 1, 0, 0).Known, "the share has not counted the consumers yet")
	s.count(4, 0)
	require.True(t, s.take(25, 25, 0, 0).OK, "a quarter of the bucket's tokens")
	require.False(t, s.take(1, 1, 0, 0).OK)
	require.True(t, s.take(5, 5, 0, time.Second).OK, "a quarter of the rate")
	require.False(t, s.take(1, 1, 0, time.Second).OK)

	// The bucket answers again, and is drained. So the next outage begins without tokens, however long the share was
	// filled before.
	s.record(0, time.Minute)
	require.False(t, s.take(1, 1, 0, time.Minute).OK)
	require.True(t, s.take(1, 1, 0, time.Minute+200*time.Millisecond).OK)

	// The bucket answers again and again with many tokens. This adds no tokens to the share, since the takes from the
	// share count.
	admitted := 0
	for i := range 100 {
		s.record(100, 2*time.Minute+time.Duration(i)*time.Millisecond)
		if s.take(1, 1, 0, 2*time.Minute+time.Duration(i)*time.Millisecond).OK {
			admitted++
		}
	}
	require.LessOrEqual(t, admitted, 26, "at most the share's capacity and rate")

	w := s.take(101, 101, 0, time.Hour)
	require.False(t, w.OK)
	require.EqualValues(t, -1, w.Wait, "the take exceeds the bucket's capacity")
	require.EqualValues(t, 25, s.take(1, 25, 0, time.Hour).Taken)
	l := &loan{share: s, asOf: s.applied, left: 25}
	require.EqualValues(t, 5, l.giveBack(5))
	require.EqualValues(t, 20, l.giveBack(25), "the share gave 25")
	require.Zero(t, l.giveBack(1))
	require.EqualValues(t, 25, tokensIn(s, time.Hour))
	s.count(2, 59*time.Second)
	require.EqualValues(t, 25, tokensIn(s, time.Hour), "a lower count of consumers applies only after a while")
	require.EqualValues(t, 4, s.live)
	s.count(2, 89*time.Second)
	require.EqualValues(t, 2, s.live)
	s.count(50, 89*time.Second)
	require.LessOrEqual(t, tokensIn(s, time.Hour), int64(2), "a higher count of consumers applies at once")
}

// After Redis lost the list of the consumers, a consumer that registers more often than the others counts itself again
// and again before all others are back. Its share must not grow meanwhile.
func TestALostListOfConsumersLeavesTheShareAsItIs(t *testing.T) {
	for name, interval := range map[string]time.Duration{"each denial": registerEvery, "each second": recountAfter} {
		t.Run(name, func(t *testing.T) {
			s := &share{terms: localTerms(100, policy.PerSecond(20))}
			for at := time.Duration(0); at <= time.Minute; at += policyMaxAge {
				s.count(4, at)
			}
			for at := time.Minute; at <= time.Minute+liveFor-policyMaxAge; at += interval {
				s.count(1, at)
				require.EqualValues(t, 4, s.live, "%s after the loss", at-time.Minute)
			}
		})
	}
}

// However long the time between two takes is, the share is credited only at the second one, with all of that time.
func TestAShareThatIsSeldomTakenFromEarnsItsPartOfTheRate(t *testing.T) {
	s := &share{terms: localTerms(1000, policy.PerSecond(8))}
	s.record(0, 0)
	s.count(4, 0)
	for i := range time.Duration(20) {
		require.False(t, s.take(121, 121, 0, (i+1)*time.Minute-time.Second).OK)
		require.True(t, s.take(120, 120, 0, (i+1)*time.Minute).OK, "a minute at 2/s")
	}
	s = &share{terms: localTerms(policy.MaxTokens, policy.Rate{Tokens: 1<<40 + 1, Per: 12 * 24 * time.Hour})}
	s.record(0, 0)
	s.count(4, 0)
	tokensIn(s, 0)
	require.Positive(t, tokensIn(s, 10*365*24*time.Hour))
}

func TestAShareCountsNeitherScheduledStepsNorGrants(t *testing.T) {
	stepped := policy.Policy{Capacity: 100, Steps: policy.Every(time.Minute), StepTokens: 50}.Terms(policy.Fence{})
	s := &share{terms: stepped}
	s.count(2, 0)
	s.record(40, 0)
	require.True(t, s.take(20, 20, 0, 0).OK)
	require.False(t, s.take(1, 1, 0, time.Hour).OK, "the share does not know the next instant")

	granted := localTerms(100, policy.PerSecond(2))
	granted.GrantTokens = 1000
	granted.GrantEnd = 1 << 50
	granted.GrantEra = 1
	s = &share{terms: granted}
	s.count(2, 0)
	s.record(0, 0)
	s.take(1, 1, 0, 0)
	require.EqualValues(t, 2, tokensIn(s, 2*time.Second), "the share fills at the floor's rate")
}

// An idle Client sends nothing. A Client in use registers with each bucket no more often than it asks for the bucket's
// policy.
func TestConsumersRegisterWhenTheyAskWhole(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	const buckets = 200
	p := hourly(1_000_000) // the takes below repeat, and none may be denied: a denial would be a call more
	p.Degraded = policy.DegradedLocal
	c := newClient(t, rdb, slow())
	takes := func() {
		for i := range buckets {
			_, err := c.Take(t.Context(), strconv.Itoa(i), 1)
			require.NoError(t, err)
		}
	}
	registered := func() (n int64) {
		for i := range buckets {
			n += rdb.ZCard(t.Context(), lua.LiveKey(strconv.Itoa(i))).Val()
		}
		return n
	}
	for i := range buckets {
		createBucket(t, rdb, strconv.Itoa(i), p)
	}
	takes()
	eventually(t, func() bool { return registered() == buckets }, "the consumer is registered with all buckets")
	ttl := rdb.PTTL(t.Context(), lua.LiveKey("0")).Val()
	require.InDelta(t, liveFor, ttl, float64(5*time.Second))
	eventually(t, func() bool { // after a second, the Client counts the consumers of each bucket again
		takes()
		for i := range buckets {
			if !known(c, strconv.Itoa(i)).share.found.Load() {
				return false
			}
		}
		return true
	}, "all buckets are counted a second time")
	sent := commandCalls(t, rdb)["evalsha"]
	takes()
	time.Sleep(1500 * time.Millisecond)
	require.LessOrEqual(t, commandCalls(t, rdb)["evalsha"]-sent, buckets, "the takes are the only calls")
	for i := range buckets {
		rdb.Del(t.Context(), lua.LiveKey(strconv.Itoa(i)))
		c.buckets.update(strconv.Itoa(i), func(k *info) { k.asOf = k.asOf.Add(-policyMaxAge) })
		known(c, strconv.Itoa(i)).share.registered.set(0, time.Now())
	}
	takes()
	eventually(t, func() bool { return registered() == buckets }, "the consumer is registered again")
}

// A take that doesn't bring the policy doesn't register its Client, however long ago the last registration was. With
// many buckets, these round trips would be a noticeable part of the server's work.
func TestATakeWithoutThePolicyRegistersNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := hourly(1000)
		p.Degraded = policy.DegradedLocal
		c := newClient(t, newFake(map[string]policy.Policy{"checkout": p}))
		takes := func(d time.Duration) {
			for range d / time.Second {
				require.NoError(t, errOf(c.Take(t.Context(), "checkout", 1)))
				synctest.Wait()
				time.Sleep(time.Second)
			}
		}
		takes(3 * time.Second) // in this time it counts twice
		s := known(c, "checkout").share
		require.True(t, s.found.Load())
		before := s.registered.until.Load()
		takes(registerEvery + time.Second)
		require.Equal(t, before, s.registered.until.Load())
		takes(policyMaxAge)
		require.NotEqual(t, before, s.registered.until.Load(), "the take requests the policy again")
	})
}

// A probe enters its Client as a consumer. If consumers start during an outage, their probes succeed one by one when it
// ends. So the first registration of a share, which finds what the probe has entered, must be followed by a second one.
func TestAShareCountsAgainAfterAProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := hourly(1000)
		p.Degraded = policy.DegradedLocal
		f := newFake(map[string]policy.Policy{"checkout": p})
		c := newClient(t, f)
		key := "checkout"
		c.nodes.single.probe.Store(&key)
		require.NoError(t, c.probe(t.Context(), c.nodes.single))
		for registrations := range 3 {
			require.NoError(t, errOf(c.Take(t.Context(), key, 1)))
			synctest.Wait()
			require.Equal(t, 1+min(registrations+1, 2), f.called("heartbeat"))
			require.Equal(t, registrations > 0, known(c, key).share.found.Load())
			time.Sleep(recountAfter)
		}
	})
}

// A consumer that makes a call at least every ten seconds registers before the others forget it.
func TestAConsumerRegistersAtLeastEvery25Seconds(t *testing.T) {
	for _, every := range []time.Duration{time.Second, 6 * time.Second, policyMaxAge - 1} {
		synctest.Test(t, func(t *testing.T) {
			p := hourly(100_000)
			p.Degraded = policy.DegradedLocal
			f := newFake(map[string]policy.Policy{"checkout": p})
			c := newClient(t, f)
			last, sent := time.Now(), 0
			for began := time.Now(); time.Since(began) < 10*time.Minute; time.Sleep(every) {
				require.NoError(t, errOf(c.Take(t.Context(), "checkout", 1)))
				synctest.Wait()
				now := f.called("heartbeat")
				if now > sent {
					sent = now
					last = time.Now()
				}
				require.LessOrEqual(t, time.Since(last), 25*time.Second)
			}
		})
	}
}

// Consumers that start at the same time count one another, although the first count of the first consumer has none of
// the others. This also applies if Redis loses the list of the consumers before they count again.
func TestConsumersThatStartTogetherCountOneAnother(t *testing.T) {
	for name, loss := range map[string]bool{"the list stays": false, "the list is lost": true} {
		t.Run(name, func(t *testing.T) {
			rdb := testenv.Redis(t).Client()
			p := hourly(1000)
			p.Degraded = policy.DegradedLocal
			createBucket(t, rdb, "checkout", p)
			clients := make([]*Client, 3)
			for i := range clients {
				clients[i] = newClient(t, rdb, slow())
				require.NoError(t, errOf(clients[i].Take(t.Context(), "checkout", 1)))
				countsConsumers(t, clients[i], "checkout", int64(i+1))
			}
			if loss {
				require.NoError(t, rdb.Del(t.Context(), lua.LiveKey("checkout")).Err())
			}
			eventually(t, func() bool {
				all := true
				for _, c := range clients {
					require.NoError(t, errOf(c.Take(t.Context(), "checkout", 1)))
					all = all && consumersOf(known(c, "checkout").share) == 3
				}
				return all
			}, "takes soon after the first count all consumers")
			require.Less(t, clients[0].consumers.now(), registerEvery)
		})
	}
}

// outage has what several consumers of one bucket measured while its server was stopped.
type outage struct {
	stopped  time.Duration // for how long
	admitted int64         // tokens that all consumers admitted meanwhile
	worst    time.Duration // p99.9 of the time of a take meanwhile
	recovery time.Duration // until the bucket answered every consumer again
}

// freeze stops a server while consumers take from one of its buckets, which has degraded mode local.
func freeze(t testing.TB, consumers, callers int, rate policy.Rate, length time.Duration, opts ...Option) outage {
	server := testenv.Redis(t)
	rdb := server.Client()
	p := policy.Policy{Capacity: rate.Tokens, Rate: rate, Interval: 20 * time.Millisecond, Degraded: policy.DegradedLocal,
		Initial: new(int64)}
	createBucket(t, rdb, "checkout", p)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var (
		wg       sync.WaitGroup
		stopped  atomic.Bool
		admitted atomic.Int64
		shared   = make([]atomic.Int64, consumers) // answers by the bucket
		mu       sync.Mutex
		times    []time.Duration
	)
	clients := make([]*Client, consumers)
	for i := range clients {
		clients[i] = newClient(t, server.Client(), opts...) // the consumers' rescues refill the bucket
		for range callers {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(i), 1))
				var own []time.Duration
				for ctx.Err() == nil {
					during := stopped.Load()
					began := time.Now()
					r, err := clients[i].Take(context.Background(), "checkout", 1)
					if during && stopped.Load() {
						own = append(own, time.Since(began))
						admitted.Add(r.Taken)
					}
					if err == nil && (r.Source.Kind == SourceShared || r.Source.Kind == SourceRescued) {
						shared[i].Add(1)
					}
					time.Sleep(time.Millisecond + time.Duration(rng.Int64N(int64(time.Millisecond))))
				}
				mu.Lock()
				defer mu.Unlock()
				times = append(times, own...)
			})
		}
	}
	eventually(t, func() bool { // each consumer has counted all of them
		for _, c := range clients {
			k := known(c, "checkout")
			if k.share == nil {
				return false
			}
			if consumersOf(k.share) != int64(consumers) {
				return false
			}
		}
		return true
	}, "every consumer has counted all consumers")

	var o outage
	stopped.Store(true)
	server.Pause()
	began := time.Now()
	time.Sleep(length)
	o.stopped = time.Since(began)
	stopped.Store(false)
	before := make([]int64, consumers)
	for i := range shared {
		before[i] = shared[i].Load()
	}
	server.Resume()
	began = time.Now()
	for i := range shared {
		eventually(t, func() bool { return shared[i].Load() > before[i] }, "the consumer gets tokens from the bucket again")
	}
	o.recovery = time.Since(began)
	stop()
	wg.Wait()
	slices.Sort(times)
	o.admitted, o.worst = admitted.Load(), times[len(times)*999/1000]
	eventually(t, func() bool { return rdb.Exists(context.Background(), lua.LiveKey("checkout")).Val() == 1 },
		"the consumers still send heartbeats")
	return o
}

// The bounds are wide enough for a very busy machine. BenchmarkFrozenServer reports the exact figures.
func TestConsumersOfAFrozenServerKeepToThePolicy(t *testing.T) {
	const rate = 400
	served := false
	for tries := 0; !served && tries < 6; tries++ { // other programs may keep this process from running for a while
		o := freeze(t, 4, 4, policy.PerSecond(rate), 3*time.Second, WithTimeout(500*time.Millisecond))
		t.Logf("%+v", o)
		due := rate * o.stopped.Seconds()
		require.LessOrEqual(t, float64(o.admitted), 1.1*due)
		require.Less(t, o.recovery, 20*time.Second)
		served = float64(o.admitted) >= 0.5*due && o.worst < 2500*time.Millisecond
	}
	require.True(t, served)
}

// BenchmarkFrozenServer stops a server for three seconds while four consumers take from a bucket with degraded mode
// local.
func BenchmarkFrozenServer(b *testing.B) {
	var ratio, worst, recovery []float64
	for b.Loop() {
		o := freeze(b, 4, 16, policy.PerSecond(1000), 3*time.Second)
		ratio = append(ratio, float64(o.admitted)/(1000*o.stopped.Seconds()))
		worst = append(worst, o.worst.Seconds()*1000)
		recovery = append(recovery, o.recovery.Seconds()*1000)
	}
	b.ReportMetric(slices.Max(ratio), "of-policy")
	b.ReportMetric(slices.Max(worst), "p99.9-ms")
	b.ReportMetric(slices.Max(recovery), "recovery-ms")
	b.ReportMetric(0, "ns/op")
}

func TestTakeUpToLeavesSomeInDegradedModes(t *testing.T) {
	for name, mode := range map[string]policy.Degraded{"open": policy.DegradedOpen, "local": policy.DegradedLocal} {
		t.Run(name, func(t *testing.T) {
			server := testenv.Redis(t)
			p := hourly(100)
			p.Degraded = mode
			createBucket(t, server.Client(), "b", p)
			c := newClient(t, server.Client(), WithTimeout(500*time.Millisecond))
			_, err := c.Take(t.Context(), "b", 1)
			require.NoError(t, err)
			if mode == policy.DegradedLocal {
				countsConsumers(t, c, "b", 1)
			}
			server.Pause()
			defer server.Resume()
			r, err := c.TakeUpTo(t.Context(), "b", 1000, WithLeave(20))
			require.NoError(t, err)
			require.Equal(t, SourceFallback, r.Source.Kind)
			require.True(t, r.OK)
			require.InDelta(t, 80, r.Taken, 1)
		})
	}
}

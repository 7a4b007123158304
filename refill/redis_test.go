package refill

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// watch collects the events of one or more refillers.
type watch struct {
	mu     sync.Mutex
	events map[string][]Event
	more   chan struct{}
}

func newWatch() *watch { return &watch{events: map[string][]Event{}, more: make(chan struct{}, 1)} }

func (w *watch) observe(e Event) {
	w.mu.Lock()
	w.events[e.Key] = append(w.events[e.Key], e)
	w.mu.Unlock()
	select {
	case w.more <- struct{}{}:
	default:
	}
}

// until waits until the condition holds for the events so far.
func (w *watch) until(t *testing.T, what string, holds func(events map[string][]Event) bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		w.mu.Lock()
		ok := holds(w.events)
		w.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-w.more:
		case <-deadline:
			require.Fail(t, "timed out", "waiting for %s", what)
		}
	}
}

func (w *watch) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = map[string][]Event{}
}

// appliedTo returns a condition: every bucket has had a refill that wrote.
func appliedTo(buckets []Bucket) func(map[string][]Event) bool {
	return func(events map[string][]Event) bool {
		for _, b := range buckets {
			found := false
			for _, e := range events[b.Key] {
				found = found || e.Err == nil && e.Outcome.Status == policy.StatusApplied
			}
			if !found {
				return false
			}
		}
		return true
	}
}

// running starts a refiller; stop ends it and waits.
func running(t *testing.T, rdb redis.UniversalClient, w *watch, elected bool, buckets []Bucket) (r *Refiller,
	stop func()) {
	t.Helper()
	return runningWith(t, Config{Redis: rdb, Buckets: buckets, Elected: elected, Observe: w.observe,
		Logger: hclog.NewNullLogger()})
}

// runningWith starts a refiller; stop ends it and waits.
func runningWith(t *testing.T, cfg Config) (r *Refiller, stop func()) {
	t.Helper()
	r, err := New(cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
	})
	t.Cleanup(stop)
	return r, stop
}

func manyBuckets(n int) []Bucket {
	buckets := make([]Bucket, n)
	for i := range buckets {
		buckets[i] = checkout(1000)
		buckets[i].Key = fmt.Sprintf("bucket-%d", i)
	}
	return buckets
}

func TestClusterBucketsOfEverySlotAreRefilledWhileSlotsMove(t *testing.T) {
	c := testenv.Cluster(t)
	rdb := c.Client()
	buckets := manyBuckets(60)
	w := newWatch()
	r, stop := running(t, rdb, w, false, buckets)
	w.until(t, "every bucket to be refilled", appliedTo(buckets))
	r.mu.Lock()
	workers := len(r.workers)
	r.mu.Unlock()
	require.Equal(t, 3, workers, "each master has a worker")
	for _, b := range buckets[:5] {
		slot := lua.Slot(b.Key)
		require.EqualValues(t, slot, rdb.ClusterKeySlot(t.Context(), b.Key).Val())
		from := c.Owner(slot)
		for _, node := range c.Nodes() {
			if node != from {
				require.NoError(t, c.MoveSlot(slot, node))
				break
			}
		}
	}
	w.forget()
	w.until(t, "every bucket to be refilled after the move", appliedTo(buckets))
	stop()
}

// The pulse of a configuration that no replica has any more must not stay in Redis.
func TestAPulseExpires(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	w := newWatch()
	leader, stop := running(t, rdb, w, true, manyBuckets(1))
	ctx, cancel := context.WithCancel(t.Context())
	led := make(chan error, 1)
	go func() { led <- leader.Lead(ctx, 1) }()
	w.until(t, "the pulse to have an expiry", func(map[string][]Event) bool {
		for _, key := range []string{leader.pulse, lua.IndexKey(leader.pulse), lua.ControlKey(leader.pulse)} {
			if rdb.TTL(context.Background(), key).Val() <= 0 {
				return false
			}
		}
		return true
	})
	cancel()
	require.ErrorIs(t, <-led, context.Canceled)
	stop()
}

func TestClusterStandbyTakesOverOnEveryMaster(t *testing.T) {
	c := testenv.Cluster(t)
	buckets := manyBuckets(30)
	first, second := newWatch(), newWatch()
	leader, stopLeader := running(t, c.Client(), first, true, buckets)
	standby, stopStandby := running(t, c.Client(), second, true, buckets)
	ctx, cancel := context.WithCancel(t.Context())
	led := make(chan error, 1)
	go func() { led <- leader.Lead(ctx, 1) }()
	first.until(t, "the leader to refill", appliedTo(buckets))
	pulses := func(events map[string][]Event) bool {
		beats := 0
		for i := range 64 {
			for _, e := range events[fmt.Sprintf("%s:%d", leader.pulse, i)] {
				if e.Outcome.Status == policy.StatusApplied {
					beats++
					break
				}
			}
		}
		return beats == 3
	}
	first.until(t, "a pulse on each of three masters", pulses)
	stopLeader() // without resigning, as if its process were killed
	second.until(t, "the standby to refill everything", appliedTo(buckets))
	require.True(t, standby.Stats().Racing)
	cancel()
	require.ErrorIs(t, <-led, context.Canceled)
	stopStandby()
}

// A standby with nothing to announce only reads the pulse.
func TestAStandbyReportsThatItsServerIsSilent(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	proxy := testenv.Proxy(t, server.Addr(), 0)
	rdb := redis.NewClient(&redis.Options{Addr: proxy.Addr(), ContextTimeoutEnabled: true})
	t.Cleanup(func() { _ = rdb.Close() })
	w := newWatch()
	leader, stopLeader := running(t, server.Client(), w, true, manyBuckets(1))
	ctx, resign := context.WithCancel(t.Context())
	led := make(chan error, 1)
	go func() { led <- leader.Lead(ctx, 1) }()
	w.until(t, "refills", appliedTo(manyBuckets(1)))

	var log lockedBuffer
	announced := newWatch()
	standby, stop := runningWith(t, Config{Redis: rdb, Buckets: manyBuckets(1), Elected: true, Observe: announced.observe,
		Logger: hclog.New(&hclog.LoggerOptions{Output: &log})})
	announced.until(t, "the terms are announced", func(events map[string][]Event) bool {
		e := events[manyBuckets(1)[0].Key]
		return len(e) > 0 && e[len(e)-1].Err == nil
	})
	require.NoError(t, proxy.Stall(faultproxy.ToClient))
	require.Eventually(t, func() bool { return standby.Stats().Away != nil }, time.Minute, time.Millisecond)
	require.NoError(t, proxy.Heal())
	require.Eventually(t, func() bool { return standby.Stats().Away == nil }, time.Minute, time.Millisecond)
	stop()
	resign()
	require.ErrorIs(t, <-led, context.Canceled)
	stopLeader()
	require.Equal(t, strings.Count(log.String(), "refills go on"), strings.Count(log.String(), "refills pause"),
		log.String())
}

func TestSentinelFailoverRefillsGoOnAgainstTheNewMaster(t *testing.T) {
	s := testenv.Sentinel(t)
	buckets := manyBuckets(3)
	w := newWatch()
	_, stop := running(t, s.Client(), w, false, buckets)
	w.until(t, "refills on the master", appliedTo(buckets))
	s.KillMaster()
	w.forget()
	w.until(t, "refills on the promoted replica", appliedTo(buckets))
	stop()
}

// Almost none of thousands of refills is so late that credit is lost. The machine may be busy with something else, so
// it gets more than one chance.
func TestThousandsOfBucketsKeepTheirInterval(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	buckets := manyBuckets(3000)
	for i := range buckets {
		buckets[i].Policy.Interval = 500 * time.Millisecond
	}
	most := buckets[0].Policy.Terms(policy.Fence{}).MaxElapsed
	w := newWatch()
	_, stop := running(t, rdb, w, false, buckets)
	defer stop()
	var seen []string
	for range 4 {
		refills, late := 0, 0
		w.until(t, "five refills of each bucket", func(events map[string][]Event) bool {
			refills, late = 0, 0
			for _, b := range buckets {
				if len(events[b.Key]) < 5 {
					return false
				}
				for _, e := range events[b.Key] {
					refills++
					if e.Outcome.Elapsed > most {
						late++
					}
				}
			}
			return true
		})
		if late < refills/10 {
			return
		}
		seen = append(seen, fmt.Sprintf("%d of %d late", late, refills))
		w.forget()
	}
	t.Fatal(seen)
}

// A server that doesn't answer gets one batch at a time, each smaller than the
// one before, however many buckets are due.
func TestCallsDoNotPileUpBeforeASlowServer(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	proxy := testenv.Proxy(t, server.Addr(), 0)
	rdb := redis.NewClient(&redis.Options{Addr: proxy.Addr(), ContextTimeoutEnabled: true})
	t.Cleanup(func() { _ = rdb.Close() })
	buckets := make([]Bucket, 1000)
	for i := range buckets {
		buckets[i] = Bucket{Key: fmt.Sprintf("slow%d", i), Policy: policy.Policy{Capacity: 1000,
			Rate: policy.PerSecond(10), Interval: 100 * time.Millisecond}}
	}

	w := newWatch()
	r, err := New(Config{Redis: rdb, Buckets: buckets, Logger: hclog.NewNullLogger(), Observe: w.observe,
		Timeout: time.Second, Batch: 400})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	defer func() {
		cancel()
		require.NoError(t, <-done)
	}()
	w.until(t, "all buckets are refilled", appliedTo(buckets))

	// batch is a failed batch: its size, and its times.
	type batch struct {
		size          int
		sent, replied time.Time
	}
	batches := func(events map[string][]Event) (list []batch) {
		bySent := map[time.Time]*batch{}
		for _, of := range events {
			for _, e := range of {
				if e.Err == nil {
					continue
				}
				if bySent[e.Sent] == nil {
					bySent[e.Sent] = &batch{sent: e.Sent, replied: e.Replied}
				}
				bySent[e.Sent].size++
			}
		}
		for _, b := range bySent {
			list = append(list, *b)
		}
		slices.SortFunc(list, func(a, b batch) int { return a.sent.Compare(b.sent) })
		return list
	}
	w.forget()
	idle := proxy.Connections()
	require.NoError(t, proxy.Stall(faultproxy.ToClient))
	calls := func() int64 { return scriptCalls(t, server.Client()) }
	before := calls()
	const failures = 3
	w.until(t, "batches fail", func(events map[string][]Event) bool { return len(batches(events)) >= failures })
	sent, connections := calls()-before, proxy.Connections()

	w.mu.Lock()
	failed := batches(w.events) // there may be more by now
	w.mu.Unlock()
	for i, b := range failed {
		// two batches were under way when the server stopped answering
		require.LessOrEqual(t, b.size, 400>>max(0, i-1), "batch %d", i)
		if i > 1 {
			require.False(t, b.sent.Before(failed[i-1].replied), "a batch is sent after the reply to the previous one")
		}
	}
	require.Less(t, sent, int64(1000), "some hundred buckets were sent, though a thousand came due ten times a second")
	require.LessOrEqual(t, connections, len(failed)+max(idle, 2), "each failed batch uses at most one connection")

	w.forget()
	require.NoError(t, proxy.Heal())
	w.until(t, "all buckets are refilled again", appliedTo(buckets))
}

// scriptCalls returns how many scripts the server has run.
func scriptCalls(t *testing.T, rdb *redis.Client) int64 {
	t.Helper()
	info, err := rdb.InfoMap(t.Context(), "commandstats").Result()
	require.NoError(t, err)
	n := int64(0)
	_, err = fmt.Sscanf(info["Commandstats"]["cmdstat_evalsha"], "calls=%d", &n)
	require.NoError(t, err)
	return n
}

// A plain client tries to take before the first refill, and again after everything was lost. Both times it leaves an
// empty key behind. Nevertheless the bucket begins with its initial tokens, and comes back with the tokens that on_loss
// determines.
func TestAPlainClientThatAsksFirstTakesNoInitialTokensAway(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	ctx := t.Context()
	b := checkout(1000)
	b.Policy.Rate = policy.Rate{Tokens: 1, Per: time.Hour}
	b.Policy.OnLoss = policy.LossFull
	ask := func() {
		require.EqualValues(t, -1, rdb.Decr(ctx, b.Key).Val())
		require.Zero(t, rdb.Incr(ctx, b.Key).Val())
	}
	created := func(n int64) func(map[string][]Event) bool {
		return func(events map[string][]Event) bool {
			return slices.ContainsFunc(events[b.Key], func(e Event) bool {
				return e.Outcome.Status == policy.StatusInitialised && e.Outcome.Tokens == n
			})
		}
	}
	ask()
	w := newWatch()
	for range 2 {
		_, stop := running(t, rdb, w, false, []Bucket{b})
		defer stop()
	}
	w.until(t, "the bucket to be created with its initial tokens", created(1000))
	w.forget()
	_, err := rdb.TxPipelined(ctx, func(p redis.Pipeliner) error { // so that no refill comes between
		p.FlushAll(ctx)
		p.Decr(ctx, b.Key)
		p.Incr(ctx, b.Key)
		return nil
	})
	require.NoError(t, err)
	w.until(t, "the bucket to be created full", created(1000))
}

package refill

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testenv"
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
	deadline := time.After(20 * time.Second)
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

// appliedTo reports whether every bucket had a refill that wrote.
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
func running(t *testing.T, rdb redis.UniversalClient, w *watch, elected bool, buckets []Bucket) (r *Refiller, stop func()) {
	t.Helper()
	r, err := New(Config{Redis: rdb, Buckets: buckets, Elected: elected, Observe: w.observe, Logger: hclog.NewNullLogger()})
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
	lanes := len(r.lanes)
	r.mu.Unlock()
	require.Equal(t, 3, lanes, "a lane per master")
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
			for _, e := range events[fmt.Sprintf("refiller:pulse:%d", i)] {
				if e.Outcome.Status == policy.StatusApplied {
					beats++
					break
				}
			}
		}
		return beats == 3
	}
	first.until(t, "a pulse on each of three masters", pulses)

	stopLeader() // without resigning: its process is gone
	second.until(t, "the standby to refill everything", appliedTo(buckets))
	require.True(t, standby.Stats().Racing)
	cancel()
	require.ErrorIs(t, <-led, context.Canceled)
	stopStandby()
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

func TestThousandsOfBucketsKeepTheirInterval(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	buckets := manyBuckets(3000)
	for i := range buckets {
		buckets[i].Policy.Interval = 500 * time.Millisecond
	}
	w := newWatch()
	_, stop := running(t, rdb, w, false, buckets)
	w.until(t, "five refills of each", func(events map[string][]Event) bool {
		for _, b := range buckets {
			if len(events[b.Key]) < 5 {
				return false
			}
		}
		return true
	})
	stop()
	for _, b := range buckets {
		for _, e := range w.events[b.Key] {
			require.Less(t, e.Outcome.Elapsed, b.Policy.Terms(policy.Fence{}).MaxElapsed*2, "no refill is so late that credit is lost by half")
		}
	}
}

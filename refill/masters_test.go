package refill

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// simCluster is a simulated Cluster: the masters that own the slots of one simulated server.
type simCluster struct {
	mu    sync.Mutex
	list  []master
	away  map[string]bool // by the master's id: calls fail at once
	hangs map[string]bool // by the master's id: calls get no reply
	empty bool            // the list of masters is empty
}

func twoMasters() *simCluster {
	return &simCluster{list: []master{
		{"one", []slotRange{{0, 8191}}}, {"two", []slotRange{{8192, lua.Slots - 1}}},
	}, away: map[string]bool{}, hangs: map[string]bool{}}
}

func (c *simCluster) set(change func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change()
}

func (c *simCluster) owner(key string) string { return c.list[ownerOf(c.list, lua.Slot(key))].id }

// bucket returns a bucket of 1000 tokens on a master.
func (c *simCluster) bucket(id string) Bucket {
	b := checkout(1000)
	for n := 0; c.owner(b.Key) != id; n++ {
		b.Key = fmt.Sprintf("checkout%d", n)
	}
	return b
}

// sharded is a replica's connection to a simulated Cluster.
type sharded struct {
	*link
	c *simCluster
}

func (s *sharded) masters(context.Context) ([]master, error) {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if s.c.empty {
		return nil, nil
	}
	return slices.Clone(s.c.list), nil
}

func (s *sharded) refill(ctx context.Context, calls []lua.RefillCall, _ int) []lua.RefillResult {
	results := make([]lua.RefillResult, len(calls))
	var at []int
	var answered []lua.RefillCall
	hangs := false
	s.c.mu.Lock()
	for i, call := range calls {
		switch id := s.c.owner(call.Key); {
		case s.c.hangs[id]:
			hangs, results[i].Err = true, context.DeadlineExceeded
		case s.c.away[id]:
			results[i].Err = errAway
		default:
			at, answered = append(at, i), append(answered, call)
		}
	}
	s.c.mu.Unlock()
	if len(answered) > 0 {
		for i, r := range s.link.refill(ctx, answered, len(answered)) {
			results[at[i]] = r
		}
	}
	if hangs {
		<-ctx.Done()
	}
	return results
}

// startOn starts a racing replica on a simulated Cluster.
func (r *rig) startOn(c *simCluster, name string, buckets ...Bucket) *replica {
	l := &link{name: name, server: r.server, rng: rand.New(rand.NewPCG(r.rng.Uint64(), 0)),
		latency: 200 * time.Microsecond}
	cfg := Config{Buckets: buckets, Version: 1, Seed: r.rng.Uint64() | 1,
		Logger: hclog.New(&hclog.LoggerOptions{Name: name, Output: r.log, Level: hclog.Debug, DisableTime: true})}
	cfg.setDefaults()
	rf := newRefiller(cfg, &sharded{l, c})
	ctx, cancel := context.WithCancel(r.t.Context())
	done := make(chan error, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- fmt.Errorf("Run panicked: %v", p)
			}
		}()
		done <- rf.Run(ctx)
	}()
	rep := &replica{link: l, Refiller: rf}
	rep.stop = func() {
		cancel()
		require.NoError(r.t, <-done)
	}
	return rep
}

// A node that has lost its configuration, or doesn't belong to its Cluster yet, lists no master with slots.
func TestAListOfNoMastersDoesNotEndTheReplica(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		c := twoMasters()
		b := c.bucket("one")
		a := r.startOn(c, "a", b)
		time.Sleep(time.Second)
		c.set(func() { c.empty = true })
		time.Sleep(topologyInterval)
		c.set(func() { c.empty = false })
		time.Sleep(topologyInterval)
		a.stop()
		require.LessOrEqual(t, slices.Max(r.server.gaps(b.Key)), 2*time.Second)
	})
}

// The same with real servers: all masters have lost their data and their Cluster, as after a restart without
// nodes.conf. Until go-redis reads its slots again, the masters that it knows list none with slots.
func TestServersThatForgotTheirClusterDoNotEndTheReplica(t *testing.T) {
	t.Parallel()
	cluster := testenv.Cluster(t)
	rf, err := New(Config{Redis: cluster.Client(), Buckets: []Bucket{checkout(1000)}, Logger: hclog.NewNullLogger()})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 3*topologyInterval)
	defer cancel()
	time.AfterFunc(topologyInterval-100*time.Millisecond, func() {
		for _, node := range cluster.Nodes() {
			_ = node.Client().FlushAll(ctx)
			_ = node.Client().Do(ctx, "cluster", "reset", "soft")
		}
	})
	require.NotPanics(t, func() { require.NoError(t, rf.Run(ctx)) })
}

// Buckets that are removed during an outage leave a master without calls, so nothing shows that it is back.
func TestAnOutageOfAMasterEndsAlthoughItsBucketsWereRemoved(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		c := twoMasters()
		one, two := c.bucket("one"), c.bucket("two")
		a := r.startOn(c, "a", one, two)
		time.Sleep(time.Second)
		c.set(func() { c.away["two"] = true })
		time.Sleep(3 * time.Second)
		require.ErrorIs(t, a.Stats().Away, errAway)
		require.NoError(t, a.Update([]Bucket{one}, nil, 2))
		c.set(func() { c.away["two"] = false })
		time.Sleep(time.Hour)
		require.NoError(t, a.Stats().Away, "no refill pauses, and the master has been back for an hour")
		a.stop()
	})
}

func TestAnOutageEndsAlthoughTheBucketsWereRemoved(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a := r.start("a", false, 1, checkout(1000))
		time.Sleep(time.Second)
		r.server.set(func() { r.server.away = true })
		time.Sleep(3 * time.Second)
		require.NoError(t, a.Update(nil, nil, 2))
		r.server.set(func() { r.server.away = false })
		time.Sleep(time.Hour)
		require.NoError(t, a.Stats().Away, "no refill pauses, and the server has been back for an hour")
		a.stop()
	})
}

// A slow or silent master delays only its own worker, also when the configuration changes.
func TestAnUpdateDuringAnOutageOfOneMasterDelaysNoOther(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		c := twoMasters()
		one, two := c.bucket("one"), c.bucket("two")
		a := r.startOn(c, "a", one, two)
		time.Sleep(time.Second)
		r.server.take(one.Key, 1000)
		c.set(func() { c.hangs["two"] = true })
		time.Sleep(10 * time.Second)
		require.LessOrEqual(t, slices.Max(r.server.gaps(one.Key)), 2*interval, "without an update")
		for range 20 {
			require.NoError(t, a.Update([]Bucket{one, two}, nil, 1))
			time.Sleep(5*time.Second + time.Duration(r.rng.IntN(3000))*time.Millisecond)
			r.server.take(one.Key, 1000)
		}
		a.stop()
		require.LessOrEqual(t, slices.Max(r.server.gaps(one.Key)), 2*interval, "with updates")
	})
}

// A busy bucket that fills in 0.2 s loses what is due in the rest of the pause.
func TestAnUpdateDuringAnOutageOfOneMasterLosesNoTokensOfAnother(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		c := twoMasters()
		one, two := c.bucket("one"), c.bucket("two")
		one.Policy.Capacity = 100
		a := r.startOn(c, "a", one, two)
		time.Sleep(time.Second)
		c.set(func() { c.hangs["two"] = true })
		time.Sleep(10 * time.Second)
		r.server.take(one.Key, 100)
		taken := int64(0)
		for i := range 5000 { // 50 s
			if i%500 == 250 {
				require.NoError(t, a.Update([]Bucket{one, two}, nil, 1))
			}
			time.Sleep(10 * time.Millisecond)
			taken += r.server.take(one.Key, 100)
		}
		a.stop()
		require.GreaterOrEqual(t, taken, int64(50*500-100), "25000 tokens are due")
	})
}

// The same when the list of masters changes, as after every fail-over of a master that hangs.
func TestAFailOverOfOneMasterDelaysNoOther(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		c := twoMasters()
		one, two := c.bucket("one"), c.bucket("two")
		a := r.startOn(c, "a", one, two)
		for i := range 20 {
			time.Sleep(2 * topologyInterval)
			c.set(func() { c.hangs[c.list[1].id] = true })
			time.Sleep(2*topologyInterval + time.Duration(r.rng.IntN(5000))*time.Millisecond)
			c.set(func() { c.list = []master{c.list[0], {fmt.Sprint("two.", i), c.list[1].slots}} })
		}
		time.Sleep(2 * topologyInterval)
		a.stop()
		require.LessOrEqual(t, slices.Max(r.server.gaps(one.Key)), 2*interval)
	})
}

// As "redis-cli --cluster fix" does: a master that works takes over the slots of one that is lost with its data.
func TestALateStarterMintsNothingWhenAWorkingMasterTakesOverTheSlots(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		whole := []master{{"one", []slotRange{{0, lua.Slots - 1}}}}
		c := twoMasters()
		two := c.list
		one, b := c.bucket("one"), c.bucket("two")
		a := r.startOn(c, "a", one, b)
		time.Sleep(time.Second)
		r.server.take(b.Key, 1000)
		c.set(func() { c.away["two"] = true })
		time.Sleep(3 * time.Second)
		for range 20 {
			late := r.startOn(c, "late", one, b)
			time.Sleep(topologyInterval - 150*time.Millisecond)
			r.server.lose()
			c.set(func() { c.list = whole })
			time.Sleep(600 * time.Millisecond)
			require.LessOrEqual(t, r.server.take(b.Key, 5000), int64(300), "only tokens due since the loss are added")
			time.Sleep(3 * topologyInterval)
			r.server.take(b.Key, 5000)
			late.stop()
			c.set(func() { c.list = two })
			time.Sleep(3*topologyInterval + time.Duration(r.rng.IntN(1000))*time.Millisecond)
		}
		a.stop()
	})
}

// A master that does not answer is replaced by another one that does not answer.
func TestAFailOverDuringAnOutageDoesNotEndIt(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a := r.start("a", false, 1, checkout(1000))
		time.Sleep(topologyInterval + time.Second)
		r.server.set(func() { r.server.away = true })
		time.Sleep(3 * time.Second)
		r.server.set(func() { r.server.master = "successor" })
		for end := time.Now().Add(topologyInterval); time.Now().Before(end); {
			synctest.Wait()
			require.ErrorIs(t, a.Stats().Away, errAway, "no server has answered")
			time.Sleep(100 * time.Microsecond)
		}
		a.stop()
	})
}

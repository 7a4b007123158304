// Package faults has the faults of the robustness tests. Each fault affects a running system and is then healed. It
// records its effect on the state of buckets, so that the verifier knows what may be missing. The package doesn't judge
// a run: see package verify.
package faults

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/test/robustness/record"
	"github.com/tokenrefill/refiller/test/robustness/system"
)

// Groups of faults. Two faults of one group are never combined.
const (
	Replicas = "replicas"
	Network  = "network"
	Etcd     = "etcd"
	Redis    = "redis"
)

// Fault is a kind of fault.
type Fault struct {
	Name     string
	Group    string
	Servers  []string      // kinds of Redis that the fault works with; nil: all
	Etcd     int           // smallest number of etcd members
	Replicas int           // smallest number of replicas
	Durable  bool          // the fault needs a Redis that keeps its data
	Slow     bool          // the fault needs a Redis that takes a while to load its data
	Clock    bool          // the fault needs a Redis whose clock can be stepped
	Real     bool          // the fault needs a Redis, not the embedded store
	Spares   bool          // some replica can refill while the fault lasts
	Once     bool          // the fault is never drawn at random: a plan has it only by its name
	Later    bool          // the fault needs a spec with a later version of the configuration
	Hold     time.Duration // how long the fault lasts on average
	strike   func(e *env) (heal func())
}

// env is the system that a fault strikes, and the record of the fault.
type env struct {
	*system.System
	rng         *rand.Rand
	what        *record.Fault   // the record; the fault fills it in
	moreRecords []*record.Fault // more records, if the fault has several effects
}

func (e *env) pick() *system.Replica { return e.Replicas[e.rng.IntN(len(e.Replicas))] }

func (e *env) must(err error) {
	if err != nil {
		e.T.Errorf("fault %s: %v", e.what.Name, err)
	}
}

// victim picks the active replica, or half of the time a random one, and records it as the victim.
func (e *env) victim() *system.Replica {
	r := e.Active()
	if e.rng.IntN(2) == 0 {
		r = e.pick()
	}
	e.what.Victim = r.Name
	return r
}

// masters calls do for each server that holds buckets.
func (e *env) masters(do func(ctx context.Context, c *redis.Client) error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for _, c := range e.Masters() {
		e.must(do(ctx, c))
	}
}

// Active is a fault that has begun and is not healed yet.
type Active struct {
	e     *env
	heal  func()
	Fault Fault
}

// Strike begins a fault.
func (f Fault) Strike(s *system.System, rng *rand.Rand) *Active {
	e := &env{System: s, rng: rng, what: &record.Fault{Name: f.Name, Spares: f.Spares, Start: time.Now().UnixNano()}}
	return &Active{e, f.strike(e), f}
}

// Heal ends the fault and records it.
func (a *Active) Heal() {
	a.heal()
	end := time.Now().UnixNano()
	for _, f := range append([]*record.Fault{a.e.what}, a.e.moreRecords...) {
		if f.End == 0 {
			f.End = end
		}
		a.e.AddFault(*f)
	}
}

// Named returns the fault with a name.
func Named(name string) (Fault, error) {
	for _, f := range All {
		if f.Name == name {
			return f, nil
		}
	}
	return Fault{}, fmt.Errorf("faults: no fault is called %q", name)
}

// Must is like Named, but panics if there is no such fault.
func Must(name string) Fault {
	f, err := Named(name)
	if err != nil {
		panic(err)
	}
	return f
}

// Goes reports whether the fault can strike a system with the spec. A caller that can choose Durable, Slow and Clock
// sets them in the spec first.
func (f Fault) Goes(spec system.Spec) bool {
	return (f.Servers == nil || slices.Contains(f.Servers, spec.Servers)) && spec.Etcd >= f.Etcd &&
		spec.Replicas >= f.Replicas &&
		(!f.Durable || spec.Durable) && (!f.Slow || spec.Slow) && (!f.Clock || spec.Clock) && (!f.Real || !spec.Embedded) &&
		(!f.Later || spec.Later > 0)
}

var single = []string{system.Single}

// All has all kinds of faults.
var All = []Fault{
	{Name: "replica-kill", Group: Replicas, Replicas: 2, Spares: true, Hold: time.Second, strike: func(e *env) func() {
		r := e.victim()
		r.Kill()
		return r.Restart
	}},
	{Name: "replica-pause", Group: Replicas, Replicas: 2, Spares: true, Hold: 2 * time.Second,
		strike: func(e *env) func() {
			r := e.victim()
			r.Pause()
			return r.Resume
		}},
	{Name: "replica-pause-past-lease", Group: Replicas, Replicas: 2, Etcd: 1, Spares: true, Hold: 4 * time.Second,
		strike: func(e *env) func() {
			r := e.Active()
			e.what.Victim = r.Name
			r.Pause()
			return r.Resume
		}},
	{Name: "replicas-pause-all", Group: Replicas, Hold: time.Second, strike: func(e *env) func() {
		for _, r := range e.Replicas {
			r.Pause()
		}
		return func() {
			for _, r := range e.Replicas {
				r.Resume()
			}
		}
	}},
	{Name: "replicas-kill-all", Group: Replicas, Hold: time.Second, strike: func(e *env) func() {
		for _, r := range e.Replicas {
			r.Kill()
		}
		return func() {
			for _, r := range e.Replicas {
				r.Restart()
			}
		}
	}},
	{Name: "replica-reads-a-later-file", Group: Replicas, Later: true, Once: true, Spares: true, Hold: 2 * time.Second,
		strike: func(e *env) func() {
			e.Reload(e.pick())
			return func() {}
		}},
	{Name: "replicas-rolling-restart", Group: Replicas, Replicas: 2, Hold: 200 * time.Millisecond,
		strike: func(e *env) func() {
			return func() {
				for _, r := range e.Replicas {
					r.Restart()
					time.Sleep(300 * time.Millisecond) // an orchestrator waits until one is up before it restarts the next
				}
			}
		}},

	{Name: "network-slow", Group: Network, Servers: single, Hold: time.Second, strike: func(e *env) func() {
		mean := time.Duration(1+e.rng.IntN(60)) * time.Millisecond
		return e.network(func(p *faultproxy.Proxy) error { return p.Delay(faultproxy.Both, mean, mean) })
	}},
	{Name: "network-lossy", Group: Network, Servers: single, Hold: 1500 * time.Millisecond,
		strike: func(e *env) func() {
			return e.network(func(p *faultproxy.Proxy) error { return p.Loss(faultproxy.Both, 0.05, 200*time.Millisecond) })
		}},
	{Name: "network-reset", Group: Network, Servers: single, Hold: 300 * time.Millisecond, strike: func(e *env) func() {
		return e.network(func(p *faultproxy.Proxy) error {
			p.Reset()
			return nil
		})
	}},
	{Name: "network-half-open", Group: Network, Servers: single, Hold: time.Second, strike: func(e *env) func() {
		return e.network(func(p *faultproxy.Proxy) error {
			p.HalfOpen()
			return nil
		})
	}},
	{Name: "replica-cut-from-redis", Group: Network, Replicas: 2, Servers: single, Spares: true,
		Hold: 1500 * time.Millisecond, strike: func(e *env) func() {
			r := e.victim()
			r.Redis.Cut()
			return func() { e.must(r.Redis.Heal()) }
		}},
	{Name: "replica-one-way-partition", Group: Network, Replicas: 2, Servers: single, Spares: true,
		Hold: 1500 * time.Millisecond, strike: func(e *env) func() {
			r := e.victim()
			d := []faultproxy.Direction{faultproxy.ToServer, faultproxy.ToClient}[e.rng.IntN(2)]
			e.must(r.Redis.BlackHole(d))
			return func() { e.must(r.Redis.Heal()) }
		}},
	{Name: "replica-stalled", Group: Network, Replicas: 2, Servers: single, Spares: true, Hold: time.Second,
		strike: func(e *env) func() {
			r := e.victim()
			e.must(r.Redis.Stall([]faultproxy.Direction{faultproxy.ToServer, faultproxy.ToClient,
				faultproxy.Both}[e.rng.IntN(3)]))
			return func() { e.must(r.Redis.Heal()) }
		}},
	{Name: "replies-lost", Group: Network, Servers: single, Hold: time.Second, strike: func(e *env) func() {
		return e.network(func(p *faultproxy.Proxy) error {
			return p.CutAfterReply(3, func(request []byte) bool {
				return bytes.Contains(bytes.ToLower(request),
					[]byte("evalsha"))
			})
		})
	}},
	{Name: "clients-one-way-partition", Group: Network, Servers: single, Hold: time.Second,
		strike: func(e *env) func() {
			d := []faultproxy.Direction{faultproxy.ToServer, faultproxy.ToClient}[e.rng.IntN(2)]
			e.must(e.Clients.BlackHole(d))
			return func() { e.must(e.Clients.Heal()) }
		}},

	{Name: "replica-cut-from-etcd", Group: Etcd, Replicas: 2, Etcd: 1, Spares: true, Hold: 4 * time.Second,
		strike: func(e *env) func() {
			r := e.victim()
			for _, p := range r.Etcd {
				e.must(p.BlackHole(faultproxy.Both))
			}
			return func() {
				for _, p := range r.Etcd {
					e.must(p.Heal())
				}
			}
		}},
	{Name: "etcd-leader-kill", Group: Etcd, Etcd: 3, Spares: true, Hold: 2 * time.Second, strike: func(e *env) func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		m, ok := e.Etcd.Leader(ctx)
		if !ok {
			m = e.Etcd.Members()[0]
		}
		m.Kill()
		return m.Restart
	}},
	{Name: "etcd-quorum-loss", Group: Etcd, Etcd: 1, Spares: true, Hold: 4 * time.Second, strike: func(e *env) func() {
		down := e.Etcd.Members()
		down = down[:len(down)/2+1]
		for _, m := range down {
			m.Kill()
		}
		return func() {
			for _, m := range down {
				m.Restart()
			}
		}
	}},
	// This fault also pauses etcd: only standbys without a leader need the pulse.
	{Name: "pulse-unreadable", Group: Etcd, Etcd: 1, Replicas: 2, Servers: single, Spares: true, Hold: 8 * time.Second,
		strike: spoilPulse},
	{Name: "etcd-stands-still", Group: Etcd, Etcd: 1, Spares: true, Hold: 4 * time.Second, strike: func(e *env) func() {
		for _, m := range e.Etcd.Members() {
			m.Pause()
		}
		return func() {
			for _, m := range e.Etcd.Members() {
				m.Resume()
			}
		}
	}},

	{Name: "redis-kill", Group: Redis, Servers: single, Hold: 700 * time.Millisecond, strike: func(e *env) func() {
		e.Redis.Kill()
		if !e.Durable {
			e.what.Effect = record.Lose
		}
		return e.Redis.Restart
	}},
	{Name: "redis-kill-keeps-data", Group: Redis, Servers: single, Durable: true, Hold: 700 * time.Millisecond,
		strike: func(e *env) func() {
			e.Redis.Kill()
			return e.Redis.Restart
		}},
	{Name: "redis-loading", Group: Redis, Servers: single, Durable: true, Slow: true, Hold: 200 * time.Millisecond,
		strike: func(e *env) func() {
			e.Redis.Kill()
			return e.Redis.Restart // Redis replies LOADING for a while
		}},
	{Name: "redis-pause", Group: Redis, Servers: single, Hold: 1200 * time.Millisecond, strike: func(e *env) func() {
		e.Redis.Pause()
		return e.Redis.Resume
	}},
	{Name: "redis-script-flush", Group: Redis, Hold: 300 * time.Millisecond, strike: func(e *env) func() {
		e.masters(func(ctx context.Context, c *redis.Client) error { return c.ScriptFlush(ctx).Err() })
		return func() {}
	}},
	{Name: "redis-flushall", Group: Redis, Hold: 500 * time.Millisecond, strike: func(e *env) func() {
		e.what.Effect = record.Lose
		e.masters(func(ctx context.Context, c *redis.Client) error { return c.FlushAll(ctx).Err() })
		e.what.End = time.Now().UnixNano()
		return func() {}
	}},
	{Name: "redis-evict", Group: Redis, Hold: 500 * time.Millisecond, strike: func(e *env) func() {
		b := e.bucket(func(b system.Bucket) bool { return b.Kind != record.Lazy })
		part := []string{"tokens", "index", "control"}[e.rng.IntN(3)]
		key := map[string]string{"tokens": lua.TokensKey(b), "index": lua.IndexKey(b),
			"control": lua.ControlKey(b)}[part]
		e.what.Effect = record.Lose
		e.what.Key = b
		e.what.Parts = []string{part}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		e.must(e.Direct.Del(ctx, key).Err())
		e.what.End = time.Now().UnixNano()
		return func() {}
	}},
	{Name: "redis-rollback", Group: Redis, Servers: single, Real: true, Hold: 700 * time.Millisecond,
		strike: rollBack},
	{Name: "redis-forbids-a-bucket", Group: Redis, Servers: single, Real: true, Spares: true, Hold: 3 * time.Second,
		strike: forbid},
	// The script runs only for a short time. Otherwise a Sentinel would promote the replica.
	{Name: "redis-busy", Group: Redis, Real: true, Hold: 100 * time.Millisecond, strike: func(e *env) func() {
		e.masters(func(ctx context.Context, c *redis.Client) error {
			return c.Eval(ctx, "for i = 1, 12000000 do end return 1", nil).Err()
		})
		return func() {}
	}},
	{Name: "redis-oom", Group: Redis, Real: true, Hold: 500 * time.Millisecond, strike: func(e *env) func() {
		limit := func(n string) {
			e.masters(func(ctx context.Context, c *redis.Client) error {
				return c.ConfigSet(ctx, "maxmemory",
					n).Err()
			})
		}
		limit("1")
		return func() { limit("0") }
	}},
	{Name: "redis-readonly", Group: Redis, Servers: single, Real: true, Hold: 500 * time.Millisecond,
		strike: func(e *env) func() {
			e.masters(func(ctx context.Context, c *redis.Client) error { return c.ReplicaOf(ctx, "127.0.0.1", "1").Err() })
			return func() {
				e.masters(func(ctx context.Context, c *redis.Client) error { return c.ReplicaOf(ctx, "NO", "ONE").Err() })
			}
		}},
	{Name: "redis-clock-forward", Group: Redis, Servers: single, Clock: true, Hold: 600 * time.Millisecond,
		strike: func(e *env) func() {
			return e.step([]time.Duration{30 * time.Millisecond, 300 * time.Millisecond, 3 * time.Second,
				time.Minute}[e.rng.IntN(4)])
		}},
	{Name: "redis-clock-back", Group: Redis, Servers: single, Clock: true, Hold: 600 * time.Millisecond,
		strike: func(e *env) func() {
			return e.step(-[]time.Duration{30 * time.Millisecond, 300 * time.Millisecond, 3 * time.Second,
				time.Minute}[e.rng.IntN(4)])
		}},
	{Name: "redis-clock-far-ahead-and-back", Group: Redis, Servers: single, Clock: true, Hold: 2 * time.Second,
		strike: func(e *env) func() {
			const far = 30 * 24 * time.Hour
			e.step(far)
			ahead := *e.what
			ahead.End = time.Now().UnixNano()
			return func() {
				e.moreRecords = append(e.moreRecords, &ahead)
				e.what.Start = time.Now().UnixNano()
				e.step(-far)
			}
		}},
	{Name: "redis-failover-to-lagging-replica", Group: Redis, Servers: []string{system.Sentinel}, Once: true,
		Hold: time.Second, strike: failOverToLagging},
	{Name: "redis-failover-from-frozen-master", Group: Redis, Servers: []string{system.Sentinel}, Once: true,
		Hold: time.Second, strike: failOverFromFrozen},
	{Name: "cluster-master-killed", Group: Redis, Servers: []string{system.Replicated}, Once: true, Hold: time.Second,
		strike: func(e *env) func() {
			return e.stopMaster(func(s *testenv.RedisServer) { s.Kill() })
		}},
	{Name: "cluster-master-frozen", Group: Redis, Servers: []string{system.Replicated}, Once: true, Hold: time.Second,
		strike: func(e *env) func() {
			return e.stopMaster(func(s *testenv.RedisServer) { s.Pause() })
		}},
	{Name: "cluster-reshard", Group: Redis, Servers: []string{system.Cluster}, Hold: 300 * time.Millisecond,
		strike: func(e *env) func() {
			key := e.Buckets[e.rng.IntN(len(e.Buckets))].Key
			slot := e.Cluster.Slot(key)
			owner := e.Cluster.Owner(slot)
			to := e.Cluster.Nodes()[e.rng.IntN(3)]
			for to == owner {
				to = e.Cluster.Nodes()[e.rng.IntN(3)]
			}
			move, err := e.Cluster.StartMove(slot, to)
			e.must(err)
			return func() {
				e.must(move.MoveKeys(lua.IndexKey(key))) // the bucket's keys are on both nodes: the reply is TRYAGAIN
				time.Sleep(200 * time.Millisecond)
				e.must(move.MoveKeys()) // all keys are on the new node: the former owner replies ASK
				time.Sleep(200 * time.Millisecond)
				e.must(move.Finish()) // from here on the former owner replies MOVED
			}
		}},
	{Name: "cluster-node-loses-data", Group: Redis, Servers: []string{system.Cluster}, Hold: 700 * time.Millisecond,
		strike: func(e *env) func() {
			node := e.Cluster.Nodes()[e.rng.IntN(3)]
			for _, b := range e.Buckets {
				if e.Cluster.Owner(e.Cluster.Slot(b.Key)) == node {
					e.moreRecords = append(e.moreRecords, &record.Fault{Name: e.what.Name, Start: e.what.Start, Effect: record.Lose,
						Key: b.Key})
				}
			}
			node.Kill()
			return node.Restart
		}},
}

// bucket picks one of the buckets that are eligible, and returns its key.
func (e *env) bucket(eligible func(system.Bucket) bool) string {
	var keys []string
	for _, b := range e.Buckets {
		if eligible(b) {
			keys = append(keys, b.Key)
		}
	}
	return keys[e.rng.IntN(len(keys))]
}

// step moves the clock of Redis forward by d, or back if d is negative.
func (e *env) step(d time.Duration) func() {
	e.what.Effect, e.what.Jump = record.Clock, d
	e.Offset += d
	e.Redis.StepClock(e.Offset)
	return func() {}
}

// network applies a fault to the proxy between each replica and Redis. Half of the time it also applies the fault to
// the proxy between the clients and Redis.
func (e *env) network(do func(*faultproxy.Proxy) error) (heal func()) {
	var proxies []*faultproxy.Proxy
	for _, r := range e.Replicas {
		proxies = append(proxies, r.Redis)
	}
	if e.rng.IntN(2) == 0 {
		proxies = append(proxies, e.Clients)
	}
	for _, p := range proxies {
		e.must(do(p))
	}
	return func() {
		for _, p := range proxies {
			e.must(p.Heal())
		}
	}
}

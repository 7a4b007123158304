package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
)

// node is where calls go together: a server that holds keys, with a queue, a breaker and connections of its own.
type node struct {
	lost                    error  // why there is none; nil otherwise
	addr                    string // names the server to users; empty: it is whichever the Redis client chooses
	queue                   *engine.Queue[ask]
	breaker                 *engine.Breaker
	takeLoaded, takesLoaded atomic.Bool // it knows these scripts, as far as is known
	flowsLoaded             atomic.Bool
	probe                   atomic.Pointer[string] // a key of the server
}

// open returns the error of a call while there is no server, or its breaker is open.
func (s *node) open(key string) error {
	if s.lost != nil {
		return s.lost
	}
	cause := s.breaker.Open()
	if cause != nil || s.probe.Load() == nil { // a key may move to another server while the breaker is open
		probe := key // key itself would be allocated by each call
		s.probe.Store(&probe)
	}
	return s.refuses()
}

// refuses returns the error of calls while the breaker is open.
func (s *node) refuses() error {
	if why := s.why(); why != ReasonNone {
		return fmt.Errorf("%w: %w", ErrUnavailable, &openError{why})
	}
	return nil
}

// why returns the reason for which the breaker is open, ReasonNone while it is closed.
func (s *node) why() Reason {
	return causeOf(s.breaker.Open()).reason
}

// nodes finds the node of a key.
type nodes struct {
	c        *Client
	bySlot   bool                 // a script call is of one slot
	single   *node                // for all keys, or those of a Cluster whose server isn't known yet; nil for a Ring
	cluster  *redis.ClusterClient // the Client's own
	ring     *redis.Ring
	own      []io.Closer
	slots    []mark   // by slot: it was moving a moment ago; without slots there is one
	byClient sync.Map // *redis.Client → *node: a Cluster's masters and replicas, a Ring's shards
}

// newNodes makes the queues of a Redis client. A client of one server and a Cluster's are used by their options only:
// calls then have connections and timeouts of their own, whatever else the Redis client does and however it is set up.
// A Sentinel client's pool is shared, since Sentinels purge it when the master changes, and so are those of a Ring,
// whose shards come and go. Any other client is used as it is.
func newNodes(c *Client, rdb redis.UniversalClient) *nodes {
	ns := &nodes{c: c, bySlot: true, slots: make([]mark, lua.Slots)}
	switch rdb := rdb.(type) {
	case *redis.Client:
		ns.bySlot = false
		ns.slots = make([]mark, 1)
		if rdb.Options().Addr == "FailoverClient" {
			ns.single = ns.shared(rdb)
		} else {
			ns.single = ns.newSingle(rdb)
		}
	case *redis.ClusterClient:
		ns.cluster = redis.NewClusterClient(ns.ownClusterOptions(*rdb.Options()))
		ns.own = append(ns.own, ns.cluster)
		connects := func() bool { return true } // to ask for the slots
		ns.single = ns.add(&node{}, ns.cluster, c.config.concurrency, connects, nil)
	case *redis.Ring:
		ns.ring = rdb
		ns.slots = make([]mark, 1)
	default:
		ns.single = ns.add(&node{}, rdb, c.config.concurrency, nil, nil)
	}
	return ns
}

// foreign reports whether a call, or a connection for it, runs code of the user's, which could hold its caller.
func foreign(o *redis.Options) bool {
	return o.CredentialsProvider != nil || o.CredentialsProviderContext != nil || o.StreamingCredentialsProvider != nil ||
		o.OnConnect != nil || o.Limiter != nil
}

// add makes the queue of a server, of at most most calls at once. excuse reports whether calls wait for a connection.
// If express isn't nil, lone calls are made through it by their callers.
func (ns *nodes) add(s *node, rdb redis.UniversalClient, most int, excuse func() bool,
	express *engine.Express[ask]) *node {
	s.breaker = &engine.Breaker{
		Patience: max(ns.c.config.timeout, DefaultTimeout),
		Probe:    func(ctx context.Context) error { return ns.c.probe(ctx, s) },
		Excuse:   excuse,
		Silent:   func() { s.eachSocket((*engine.Sockets).Distrust) },
		Changed:  func(open bool) { ns.c.breakerChanged(s, open) },
	}
	s.queue = engine.NewQueue(ns.c.sender(s, rdb), most, s.breaker, express)
	return s
}

// eachSocket does something to the connections of the server, unless they are the Redis client's.
func (s *node) eachSocket(do func(*engine.Sockets)) {
	for _, of := range s.queue.Sockets {
		do(of)
	}
}

// newSingle makes the queue of a client's only server. The caller of a lone call has a connection for itself, if there
// may be two.
func (ns *nodes) newSingle(rdb *redis.Client) *node {
	most := ns.most(rdb.Options().PoolSize, rdb.Options().MaxActiveConns)
	s := &node{addr: rdb.Options().Addr}
	var all []*engine.Sockets
	open := func(conns int) (*redis.Client, *engine.Sockets) {
		sockets := &engine.Sockets{}
		own := redis.NewClient(ownOptions(*rdb.Options(), conns, sockets))
		ns.own = append(ns.own, own)
		all = append(all, sockets)
		return own, sockets
	}
	var express *engine.Express[ask]
	if most > 1 && !foreign(rdb.Options()) {
		most--
		own, sockets := open(1)
		express = &engine.Express[ask]{Send: ns.c.sender(s, own), Interrupt: sockets.Drop}
	}
	own, sockets := open(most)
	ns.add(s, own, most, sockets.Dialing, express)
	s.queue.Sockets = all
	return s
}

// shared makes the queue of a server whose pool is its Redis client's. A call's deadline is its context's alone.
func (ns *nodes) shared(rdb *redis.Client) *node {
	copied := rdb.WithTimeout(0)
	o := copied.Options()
	o.ContextTimeoutEnabled = true // of the copy
	return ns.add(&node{addr: o.Addr}, copied, ns.most(o.PoolSize, o.MaxActiveConns),
		func() bool { return rdb.PoolStats().PendingRequests > 0 }, nil)
}

// most returns how many calls may be under way to a server: no more than there may be connections.
func (ns *nodes) most(poolSize, maxActive int) int {
	most := min(ns.c.config.concurrency, poolSize)
	if maxActive > 0 {
		most = min(most, maxActive)
	}
	return most
}

// ended is the context of what is asked for only if it is known.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// of returns the server of a key. If there is none, lost is the reason.
func (ns *nodes) of(key string) *node {
	if ns.ring != nil {
		shard, err := ns.ring.GetShardClientForKey(key)
		if err != nil {
			return &node{lost: fmt.Errorf("%w: %w", ErrUnavailable, err)}
		}
		return ns.nodeOf(shard)
	}
	if ns.cluster != nil {
		if master, err := ns.cluster.MasterForKey(ended, key); err == nil {
			if s, ok := ns.byClient.Load(master); ok {
				return s.(*node)
			}
		}
	}
	return ns.single
}

// nodeOf returns the node of a client of a Cluster's node, which is known since it was connected to, or of a Ring's
// shard.
func (ns *nodes) nodeOf(client *redis.Client) *node {
	if s, ok := ns.byClient.Load(client); ok {
		return s.(*node)
	}
	ns.forgetClosed()
	s, _ := ns.byClient.LoadOrStore(client, ns.shared(client))
	return s.(*node)
}

// forgetClosed forgets the nodes that have left: go-redis has closed their clients. It closes their queues later, since
// callers may have found them a moment ago.
func (ns *nodes) forgetClosed() {
	ns.byClient.Range(func(client, left any) bool {
		if err := client.(*redis.Client).Ping(ended).Err(); !errors.Is(err, redis.ErrClosed) { // it sends nothing
			return true
		}
		ns.c.life.spawn(func() {
			if ns.byClient.CompareAndDelete(client, left) {
				timing.Sleep(ns.c.life.quit, maxDefaultTimeout)
				_ = left.(*node).queue.Close(context.Background())
			}
		})
		return true
	})
}

// all calls do for each server.
func (ns *nodes) all(do func(*node)) {
	if ns.single != nil {
		do(ns.single)
	}
	ns.byClient.Range(func(_, s any) bool {
		do(s.(*node))
		return true
	})
}

// callGroup returns a number that is equal for buckets which can go into one script call.
func (ns *nodes) callGroup(key string) int {
	if len(ns.slots) > 1 {
		return lua.Slot(key)
	}
	return 0
}

// moving returns the mark of a callGroup.
func (ns *nodes) moving(group int) *mark { return &ns.slots[group] }

// crossSlot reports whether the active sets of templates are in other slots than their buckets.
func (ns *nodes) crossSlot() bool { return ns.bySlot }

// close ends the queues and the connections when nothing is under way any more.
func (ns *nodes) close() error {
	ns.all(func(s *node) { _ = s.queue.Close(context.Background()) })
	var errs []error
	for _, own := range ns.own {
		errs = append(errs, own.Close())
	}
	return errors.Join(errs...)
}

// callSize is more than a script's source and its arguments have, in bytes. A server that wants a password refuses the
// first of them and closes the connection: in a second write the refusal would be lost.
const callSize = 64 << 10

// ownOptions makes options of a client with connections of its own: a call's deadline is its context's alone, nothing
// is sent twice, and pools aren't waited for.
func ownOptions(o redis.Options, conns int, sockets *engine.Sockets) *redis.Options {
	o.ContextTimeoutEnabled = true
	o.ReadTimeout = -1
	o.WriteTimeout = -1
	o.MaxRetries = -1
	o.DialerRetries = 1
	o.DisableIdentity = true // to say who this is would be a round trip
	o.MaxIdleConns = 0
	o.MinIdleConns = 0
	o.MaxActiveConns = 0
	o.PoolSize = conns
	o.MaxConcurrentDials = 0
	o.PipelinePoolSize = -1
	o.WriteBufferSize = max(o.WriteBufferSize, callSize)
	if o.Dialer == nil {
		o.Dialer = redis.NewDialer(&o)
	}
	o.Dialer = sockets.Dialer(o.Dialer)
	o.AutoPipelineOptions = nil
	o.ClientSideCache = nil
	o.ClientSideCacheConfig = nil
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return &o
}

// ownClusterOptions makes options of a Cluster's client that makes a server, and a client of ownOptions, of each node.
// Nothing is read from replicas: they may be behind, and they do not send calls on for keys that have moved.
func (ns *nodes) ownClusterOptions(o redis.ClusterOptions) *redis.ClusterOptions {
	most := ns.most(o.PoolSize, o.MaxActiveConns)
	o.ReadOnly = false
	o.RouteByLatency = false
	o.RouteRandomly = false
	o.ContextTimeoutEnabled = true
	o.ReadTimeout = -1
	o.WriteTimeout = -1
	o.DialTimeout = min(o.DialTimeout, engine.FirstTime) // the slots are asked of one node after the other
	o.MaxRetries = -1
	if o.MaxRedirects == 0 { // none; said again it would be the default
		o.MaxRedirects = -1
	}
	newClient := o.NewClient
	o.NewClient = func(o *redis.Options) *redis.Client {
		sockets := &engine.Sockets{}
		client := newClient(ownOptions(*o, most, sockets))
		s := ns.add(&node{addr: o.Addr}, ns.cluster, most, sockets.Dialing, nil)
		s.queue.Sockets = []*engine.Sockets{sockets}
		ns.forgetClosed()
		ns.byClient.Store(client, s)
		return client
	}
	o.MaintNotificationsConfig = nil // nodes have none
	return &o
}

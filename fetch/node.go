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

// node is a server that holds keys. It has its own queue, which combines calls, and its own breaker and connections.
type node struct {
	lost                    error  // why no server has the key; nil if this one does
	addr                    string // names the server to users; empty if the Redis client chooses the server
	queue                   *engine.Queue[ask]
	after                   *engine.Commands  // sends the commands of leftovers
	sockets                 []*engine.Sockets // make its connections; none if the Redis client makes them
	breaker                 *engine.Breaker
	takeLoaded, takesLoaded atomic.Bool // the server has loaded these scripts, as far as is known
	flowsLoaded             atomic.Bool
	probe                   atomic.Pointer[string] // a key that the server has, for probes
}

// open returns nil if a call about a key may be made. It returns an error if no server has the key, or if the server's
// breaker is open.
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

// available reports whether calls are made.
func (s *node) available() bool { return s.lost == nil && s.breaker.Open() == nil }

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
	bySlot   bool                 // all keys of a script call must be in one slot
	single   *node                // of all keys, or of those whose server in a Cluster isn't known yet; nil for a Ring
	cluster  *redis.ClusterClient // made by the Client
	ring     *redis.Ring
	own      []io.Closer   // go-redis clients that the Client closes
	express  *redis.Client // of own, the one for lone calls; nil if there is none
	slots    []mark        // for each slot, whether it was moving a moment ago; a single one if there are no slots
	byClient sync.Map      // *redis.Client → *node: a Cluster's masters and replicas, a Ring's shards
}

// newNodes makes the nodes of a Redis client. Of a client of one server or of a Cluster it uses only the options. Calls
// then have connections and timeouts of their own, which depend neither on the other uses of the Redis client nor on
// its timeouts. The pool of a Sentinel client is shared with the Redis client, since Sentinels purge it when the master
// changes. The pools of a Ring are shared as well, because its shards come and go. Any other client is used as it is.
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
		connects := func() bool { return true } // such a call always connects, to ask for the slots
		ns.single = ns.add(&node{}, ns.cluster, c.config.concurrency, connects, nil)
	case *redis.Ring:
		ns.ring = rdb
		ns.slots = make([]mark, 1)
	default:
		ns.single = ns.add(&node{}, rdb, c.config.concurrency, nil, nil)
	}
	return ns
}

// foreign reports whether a call, or a connection for it, runs code of the user, which could block the caller.
func foreign(o *redis.Options) bool {
	return o.CredentialsProvider != nil || o.CredentialsProviderContext != nil || o.StreamingCredentialsProvider != nil ||
		o.OnConnect != nil || o.Limiter != nil
}

// add makes the breaker of a server and its queue, with at most most calls at once. excuse reports whether calls wait
// for a connection. If express isn't nil, a caller whose call is the only one makes it with express.
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
	s.after = engine.NewCommands(rdb, min(most, mostLeftovers))
	return s
}

// eachSocket calls do for all Sockets of the server.
func (s *node) eachSocket(do func(*engine.Sockets)) {
	for _, of := range s.sockets {
		do(of)
	}
}

// newSingle makes the node of a client of one server. If the client may have two connections, one of them is reserved
// for lone calls, which their callers make themselves.
func (ns *nodes) newSingle(rdb *redis.Client) *node {
	most := ns.most(rdb.Options().PoolSize, rdb.Options().MaxActiveConns)
	s := &node{addr: rdb.Options().Addr}
	open := func(conns int) (*redis.Client, *engine.Sockets) {
		sockets := &engine.Sockets{}
		own := redis.NewClient(ownOptions(*rdb.Options(), conns, sockets))
		ns.own = append(ns.own, own)
		s.sockets = append(s.sockets, sockets)
		return own, sockets
	}
	var express *engine.Express[ask]
	if most > 1 && !foreign(rdb.Options()) {
		most--
		own, sockets := open(1)
		ns.express = own
		express = &engine.Express[ask]{
			Send:      ns.c.sender(s, own),
			Interrupt: sockets.Drop,
			Alive:     sockets.Alive,
			Open:      func(ctx context.Context) error { return own.Ping(ctx).Err() },
		}
	}
	own, sockets := open(most)
	ns.add(s, own, most, sockets.Dialing, express)
	s.queue.Sockets = sockets
	return s
}

// shared makes the node of a server whose pool belongs to the Redis client. Only its context limits the time of a call.
func (ns *nodes) shared(rdb *redis.Client) *node {
	copied := rdb.WithTimeout(0)
	o := copied.Options()
	o.ContextTimeoutEnabled = true // of the copy
	return ns.add(&node{addr: o.Addr}, copied, ns.most(o.PoolSize, o.MaxActiveConns),
		func() bool { return rdb.PoolStats().PendingRequests > 0 }, nil)
}

// most returns how many calls may be under way to a server. There are no more than there may be connections.
func (ns *nodes) most(poolSize, maxActive int) int {
	most := min(ns.c.config.concurrency, poolSize)
	if maxActive > 0 {
		most = min(most, maxActive)
	}
	return most
}

// of returns the node of a key. If no server has the key, lost of the node is the reason.
func (ns *nodes) of(key string) *node {
	if ns.ring != nil {
		shard, err := engine.OwnerOf(ns.ring, key)
		if err != nil {
			return &node{lost: fmt.Errorf("%w: %w", ErrUnavailable, err)}
		}
		return ns.nodeOf(shard)
	}
	if ns.cluster != nil {
		if master, err := engine.OwnerOf(ns.cluster, key); err == nil {
			if s, ok := ns.byClient.Load(master); ok {
				return s.(*node)
			}
		}
	}
	return ns.single
}

// nodeOf returns the node of a go-redis client that belongs to a server of a Cluster or to a shard of a Ring. The node
// of a Cluster's server exists since its client was made. The node of a shard is made if it doesn't exist yet.
func (ns *nodes) nodeOf(client *redis.Client) *node {
	if s, ok := ns.byClient.Load(client); ok {
		return s.(*node)
	}
	ns.forgetClosed()
	s, _ := ns.byClient.LoadOrStore(client, ns.shared(client))
	return s.(*node)
}

// forgetClosed removes the nodes whose clients go-redis has closed, because their servers have left. It closes their
// queues later, since callers may have found the nodes a moment ago.
func (ns *nodes) forgetClosed() {
	ns.byClient.Range(func(client, left any) bool {
		if !engine.HasLeft(client.(*redis.Client)) {
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

// all calls do for each node.
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

// close waits until no call is under way any more, and closes the queues and the connections.
func (ns *nodes) close() error {
	ns.all(func(s *node) { _ = s.queue.Close(context.Background()) })
	ns.c.life.after.Wait() // only calls that were under way have leftovers
	var errs []error
	for _, own := range ns.own {
		errs = append(errs, own.Close())
	}
	return errors.Join(errs...)
}

// callSize is larger than the text of any script with its arguments, in bytes, so that a call is written at once. A
// server that requires a password refuses the first write and closes the connection. With a second write the refusal
// would be lost.
const callSize = 64 << 10

// ownOptions returns the options of a client with connections of its own. Only its context limits the time of a call,
// no command is sent twice, and no call waits for a pool.
func ownOptions(o redis.Options, conns int, sockets *engine.Sockets) *redis.Options {
	o.ContextTimeoutEnabled = true
	o.ReadTimeout = -1
	o.WriteTimeout = -1
	o.MaxRetries = -1
	o.DialerRetries = 1
	o.DisableIdentity = true // CLIENT SETINFO would cost a round trip
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

// ownClusterOptions returns the options of a client of a Cluster. For each server that client makes a node and a
// go-redis client with ownOptions. Nothing is read from replicas, because they may be behind and do not redirect calls
// for keys that have moved.
func (ns *nodes) ownClusterOptions(o redis.ClusterOptions) *redis.ClusterOptions {
	most := ns.most(o.PoolSize, o.MaxActiveConns)
	o.ReadOnly = false
	o.RouteByLatency = false
	o.RouteRandomly = false
	o.ContextTimeoutEnabled = true
	o.ReadTimeout = -1
	o.WriteTimeout = -1
	o.DialTimeout = min(o.DialTimeout, engine.FirstTime)
	o.MaxRetries = -1
	if o.MaxRedirects == 0 { // the client follows none, but 0 as an option would be the default
		o.MaxRedirects = -1
	}
	newClient, seeds := o.NewClient, o.Addrs
	o.NewClient = func(o *redis.Options) *redis.Client {
		sockets := &engine.Sockets{}
		client := newClient(ownOptions(*o, most, sockets))
		engine.AskOthers(client, *o, seeds, func(o redis.Options) *redis.Client {
			return newClient(ownOptions(o, 1, &engine.Sockets{}))
		})
		s := &node{addr: o.Addr, sockets: []*engine.Sockets{sockets}}
		ns.add(s, ns.cluster, most, sockets.Dialing, nil)
		s.queue.Sockets = sockets
		ns.forgetClosed()
		ns.byClient.Store(client, s)
		return client
	}
	o.MaintNotificationsConfig = nil // a Cluster's servers send no such notifications
	return &o
}

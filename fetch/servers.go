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
	"github.com/tokenrefill/refiller/lua"
)

// server is where calls go together: a server that holds keys, with a queue, a breaker and connections of its own.
type server struct {
	lost                    error  // why there is none; nil otherwise
	addr                    string // names the server to users; empty: it is whichever the Redis client chooses
	queue                   *engine.Queue[ask]
	breaker                 *engine.Breaker
	takeLoaded, takesLoaded atomic.Bool            // it knows these scripts, as far as is known
	probe                   atomic.Pointer[string] // a key of the server
}

// open is the error of a call while there is no server, or its breaker is open.
func (s *server) open(key string) error {
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

// refuses is the error of calls while the breaker is open.
func (s *server) refuses() error {
	if why := s.why(); why != ReasonNone {
		return fmt.Errorf("%w: %w", ErrUnavailable, &openError{why})
	}
	return nil
}

// why is the reason for which the breaker is open, ReasonNone while it is closed.
func (s *server) why() Reason {
	if cause := s.breaker.Open(); cause != nil {
		return ReasonOf(fmt.Errorf("%w: %w", ErrUnavailable, cause))
	}
	return ReasonNone
}

// servers finds the server of a key.
type servers struct {
	c       *Client
	bySlot  bool                 // a script call is of one slot
	single  *server              // for all keys, or those of a Cluster whose server isn't known yet; nil for a Ring
	cluster *redis.ClusterClient // the Client's own
	ring    *redis.Ring
	own     []io.Closer
	slots   []mark   // by slot: it was moving a moment ago; without slots there is one
	nodes   sync.Map // *redis.Client → *server: a Cluster's masters and replicas, a Ring's shards
}

// newServers makes the queues of a Redis client. A client of one server and a Cluster's are used by their options only:
// calls then have connections and timeouts of their own, whatever else the Redis client does and however it is set up.
// A Sentinel client's pool is shared, since Sentinels purge it when the master changes, and so are those of a Ring,
// whose shards come and go. Any other client is used as it is.
func newServers(c *Client, rdb redis.UniversalClient) *servers {
	ss := &servers{c: c, bySlot: true, slots: make([]mark, lua.Slots)}
	switch rdb := rdb.(type) {
	case *redis.Client:
		ss.bySlot = false
		ss.slots = make([]mark, 1)
		if rdb.Options().Addr == "FailoverClient" {
			ss.single = ss.shared(rdb)
		} else {
			ss.single = ss.alone(rdb)
		}
	case *redis.ClusterClient:
		ss.cluster = redis.NewClusterClient(ss.ownClusterOptions(*rdb.Options()))
		ss.own = append(ss.own, ss.cluster)
		connects := func() bool { return true } // to ask for the slots
		ss.single = ss.add(&server{}, ss.cluster, c.config.concurrency, connects, nil)
	case *redis.Ring:
		ss.ring = rdb
		ss.slots = make([]mark, 1)
	default:
		ss.single = ss.add(&server{}, rdb, c.config.concurrency, nil, nil)
	}
	return ss
}

// foreign reports whether a call, or a connection for it, runs code of the user's, which could hold its caller.
func foreign(o *redis.Options) bool {
	return o.CredentialsProvider != nil || o.CredentialsProviderContext != nil || o.StreamingCredentialsProvider != nil ||
		o.OnConnect != nil || o.Limiter != nil
}

// add makes the queue of a server, of at most most calls at once. excuse reports whether calls wait for a connection.
// If express isn't nil, lone calls are made through it by their callers.
func (ss *servers) add(s *server, rdb redis.UniversalClient, most int, excuse func() bool,
	express *engine.Express[ask]) *server {
	s.breaker = &engine.Breaker{
		Patience: max(ss.c.config.timeout, DefaultTimeout),
		Probe:    func(ctx context.Context) error { return ss.c.probe(ctx, s) },
		Excuse:   excuse,
		Silent:   func() { s.eachSocket((*engine.Sockets).Distrust) },
		Changed:  func(open bool) { ss.c.breakerChanged(s, open) },
	}
	s.queue = engine.NewQueue(ss.c.sender(s, rdb), most, s.breaker, express)
	return s
}

// eachSocket does something to the connections of the server, unless they are the Redis client's.
func (s *server) eachSocket(do func(*engine.Sockets)) {
	for _, of := range s.queue.Sockets {
		do(of)
	}
}

// alone makes the queue of a client's only server. The caller of a lone call has a connection for itself, if there may
// be two.
func (ss *servers) alone(rdb *redis.Client) *server {
	most := ss.most(rdb.Options().PoolSize, rdb.Options().MaxActiveConns)
	s := &server{addr: rdb.Options().Addr}
	var all []*engine.Sockets
	open := func(conns int) (*redis.Client, *engine.Sockets) {
		sockets := &engine.Sockets{}
		own := redis.NewClient(ownOptions(*rdb.Options(), conns, sockets))
		ss.own = append(ss.own, own)
		all = append(all, sockets)
		return own, sockets
	}
	var express *engine.Express[ask]
	if most > 1 && !foreign(rdb.Options()) {
		most--
		own, sockets := open(1)
		express = &engine.Express[ask]{Send: ss.c.sender(s, own), Interrupt: sockets.Drop}
	}
	own, sockets := open(most)
	ss.add(s, own, most, sockets.Dialing, express)
	s.queue.Sockets = all
	return s
}

// shared makes the queue of a server whose pool is its Redis client's. A call's deadline is its context's alone.
func (ss *servers) shared(rdb *redis.Client) *server {
	copied := rdb.WithTimeout(0)
	o := copied.Options()
	o.ContextTimeoutEnabled = true // of the copy
	return ss.add(&server{addr: o.Addr}, copied, ss.most(o.PoolSize, o.MaxActiveConns),
		func() bool { return rdb.PoolStats().PendingRequests > 0 }, nil)
}

// most returns how many calls may be under way to a server: no more than there may be connections.
func (ss *servers) most(poolSize, maxActive int) int {
	most := min(ss.c.config.concurrency, poolSize)
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

// of is the server of a key. If there is none it says why.
func (ss *servers) of(key string) *server {
	if ss.ring != nil {
		shard, err := ss.ring.GetShardClientForKey(key)
		if err != nil {
			return &server{lost: fmt.Errorf("%w: %w", ErrUnavailable, err)}
		}
		return ss.node(shard)
	}
	if ss.cluster != nil {
		if master, err := ss.cluster.MasterForKey(ended, key); err == nil {
			if s, ok := ss.nodes.Load(master); ok {
				return s.(*server)
			}
		}
	}
	return ss.single
}

// node is the server of a Cluster's node, which is known since it was connected to, or of a Ring's shard.
func (ss *servers) node(node *redis.Client) *server {
	if s, ok := ss.nodes.Load(node); ok {
		return s.(*server)
	}
	s, _ := ss.nodes.LoadOrStore(node, ss.shared(node))
	return s.(*server)
}

// all calls do for each server.
func (ss *servers) all(do func(*server)) {
	if ss.single != nil {
		do(ss.single)
	}
	ss.nodes.Range(func(_, s any) bool {
		do(s.(*server))
		return true
	})
}

// callGroup returns a number that is equal for buckets which can go into one script call.
func (ss *servers) callGroup(key string) int {
	if len(ss.slots) > 1 {
		return lua.Slot(key)
	}
	return 0
}

// moving returns the mark of a callGroup.
func (ss *servers) moving(group int) *mark { return &ss.slots[group] }

// apart reports whether the active sets of templates are on other servers than their buckets.
func (ss *servers) apart() bool { return ss.bySlot }

// close ends the queues and the connections when nothing is under way any more.
func (ss *servers) close() error {
	ss.all(func(s *server) { _ = s.queue.Close(context.Background()) })
	var errs []error
	for _, own := range ss.own {
		errs = append(errs, own.Close())
	}
	return errors.Join(errs...)
}

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
func (ss *servers) ownClusterOptions(o redis.ClusterOptions) *redis.ClusterOptions {
	most := ss.most(o.PoolSize, o.MaxActiveConns)
	o.ReadOnly = false
	o.RouteByLatency = false
	o.RouteRandomly = false
	o.ContextTimeoutEnabled = true
	o.ReadTimeout = -1
	o.WriteTimeout = -1
	o.MaxRetries = -1
	if o.MaxRedirects == 0 { // none; said again it would be the default
		o.MaxRedirects = -1
	}
	newClient := o.NewClient
	o.NewClient = func(o *redis.Options) *redis.Client {
		sockets := &engine.Sockets{}
		node := newClient(ownOptions(*o, most, sockets))
		s := ss.add(&server{addr: o.Addr}, ss.cluster, most, sockets.Dialing, nil)
		s.queue.Sockets = []*engine.Sockets{sockets}
		ss.nodes.Store(node, s)
		return node
	}
	o.MaintNotificationsConfig = nil // nodes have none
	return &o
}

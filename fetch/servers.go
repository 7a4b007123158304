package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/lua"
)

// slotRanges is into how many ranges the slots of a Cluster are split, each with a queue and a breaker of its own:
// slots of one master mostly follow one another, and one master's outage is not all buckets'.
const slotRanges = 32

// server is where calls go together: a server, or a range of a Cluster's slots.
type server struct {
	lost                    error // why there is none; nil otherwise
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
	if s.probe.Load() == nil {
		probe := key // key itself would be allocated by each call
		s.probe.Store(&probe)
	}
	if cause := s.breaker.Open(); cause != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, &openError{ReasonOf(fmt.Errorf("%w: %w", ErrUnavailable, cause))})
	}
	return nil
}

// servers finds the server of a key.
type servers struct {
	c      *Client
	most   int       // calls under way to each
	bySlot bool      // a script call is of one slot
	ranges []*server // of a Cluster; one for all keys otherwise
	ring   *redis.Ring
	own    []io.Closer

	mu     sync.Mutex
	shards map[*redis.Client]*server // of the ring
}

// newServers makes the queues of a Redis client. A client of one server and a Cluster's are used by their options only:
// calls then have connections and timeouts of their own, whatever else the Redis client does and however it is set up.
// A Sentinel client's pool is shared, since Sentinels purge it when the master changes, and so are those of a Ring,
// whose shards come and go. Any other client is used as it is.
func newServers(c *Client, rdb redis.UniversalClient) *servers {
	ss := &servers{c: c, most: c.config.concurrency, bySlot: true}
	sockets := &engine.Sockets{}
	switch rdb := rdb.(type) {
	case *redis.Client:
		ss.bySlot = false
		if rdb.Options().Addr == "FailoverClient" {
			ss.ranges = []*server{ss.shared(rdb)}
			break
		}
		all, alone := redis.NewClient(ownOptions(rdb, ss.most, sockets)), &engine.Sockets{}
		ss.own = append(ss.own, all)
		var one *redis.Client
		if !foreign(rdb.Options()) {
			one = redis.NewClient(ownOptions(rdb, ss.most, alone))
			ss.own = append(ss.own, one)
		}
		ss.ranges = []*server{ss.add(all, ss.most, sockets.Dialing, one, alone)}
	case *redis.ClusterClient:
		ss.most = max(1, ss.most/slotRanges)
		own := redis.NewClusterClient(ownClusterOptions(rdb, ss.most*slotRanges, sockets))
		ss.own = append(ss.own, own)
		for range slotRanges {
			ss.ranges = append(ss.ranges, ss.add(own, ss.most, sockets.Dialing, nil, nil))
		}
	case *redis.Ring:
		ss.ring, ss.shards = rdb, make(map[*redis.Client]*server)
	default:
		ss.ranges = []*server{ss.add(rdb, ss.most, nil, nil, nil)}
	}
	return ss
}

// foreign reports whether a call, or a connection for it, runs code of the user's, which could hold its caller.
func foreign(o *redis.Options) bool {
	return o.CredentialsProvider != nil || o.CredentialsProviderContext != nil || o.StreamingCredentialsProvider != nil ||
		o.OnConnect != nil || o.Limiter != nil
}

// add makes the queue of a server, of at most most calls at once. excuse tells whether calls wait for a connection. If
// one isn't nil, lone calls are made through it by their callers, over the connection of alone.
func (ss *servers) add(rdb redis.UniversalClient, most int, excuse func() bool, one *redis.Client,
	alone *engine.Sockets) *server {
	s := &server{}
	s.breaker = &engine.Breaker{
		Patience: max(ss.c.config.timeout, DefaultTimeout),
		Probe:    func(ctx context.Context) error { return ss.c.probe(ctx, s) },
		Excuse:   excuse,
		Opened:   func() { ss.c.stats.opened.Add(1) },
	}
	var express *engine.Express[ask]
	if one != nil {
		express = &engine.Express[ask]{Send: ss.c.sender(s, one), Interrupt: alone.Interrupt}
	}
	s.queue = engine.NewQueue(ss.c.sender(s, rdb), most, s.breaker, express)
	return s
}

// shared makes the queue of a server whose pool is its Redis client's. A call's deadline is its context's alone.
func (ss *servers) shared(rdb *redis.Client) *server {
	copied := rdb.WithTimeout(0)
	copied.Options().ContextTimeoutEnabled = true // of the copy
	return ss.add(copied, min(ss.most, rdb.Options().PoolSize),
		func() bool { return rdb.PoolStats().PendingRequests > 0 }, nil, nil)
}

// of is the server of a key. If there is none it says why.
func (ss *servers) of(key string) *server {
	switch {
	case len(ss.ranges) == 1:
		return ss.ranges[0]
	case ss.ring == nil:
		return ss.ranges[lua.Slot(key)*len(ss.ranges)/lua.Slots]
	}
	shard, err := ss.ring.GetShardClientForKey(key)
	if err != nil {
		return &server{lost: fmt.Errorf("%w: %w", ErrUnavailable, err)}
	}
	ss.mu.Lock()
	defer ss.mu.Unlock()
	s := ss.shards[shard]
	if s == nil {
		s = ss.shared(shard)
		ss.shards[shard] = s
	}
	return s
}

// callGroup returns a number that is equal for buckets which can go into one script call.
func (ss *servers) callGroup(key string) int {
	if ss.bySlot && ss.ring == nil {
		return lua.Slot(key)
	}
	return 0
}

// apart reports whether the active sets of templates are on other servers than their buckets.
func (ss *servers) apart() bool { return ss.bySlot }

// close ends the queues and the connections when nothing is under way any more.
func (ss *servers) close() error {
	ss.mu.Lock()
	all := slices.AppendSeq(slices.Clone(ss.ranges), maps.Values(ss.shards))
	ss.mu.Unlock()
	for _, s := range all {
		_ = s.queue.Close(context.Background())
	}
	var errs []error
	for _, own := range ss.own {
		errs = append(errs, own.Close())
	}
	return errors.Join(errs...)
}

// ownOptions are those of a client of the same server with connections of its own: a call's deadline is its context's
// alone, nothing is sent twice, and pools aren't waited for.
func ownOptions(rdb *redis.Client, conns int, sockets *engine.Sockets) *redis.Options {
	o := *rdb.Options()
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
	o.Dialer = sockets.Dialer(o.Dialer)
	o.AutoPipelineOptions = nil
	o.ClientSideCache = nil
	o.ClientSideCacheConfig = nil
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return &o
}

// ownClusterOptions is ownOptions of a Cluster. Nothing is read from replicas: they may be behind, and they do not send
// calls on for keys that have moved.
func ownClusterOptions(rdb *redis.ClusterClient, conns int, sockets *engine.Sockets) *redis.ClusterOptions {
	o := *rdb.Options()
	o.ReadOnly = false
	o.RouteByLatency = false
	o.RouteRandomly = false
	o.ContextTimeoutEnabled = true
	o.ReadTimeout = -1
	o.WriteTimeout = -1
	o.MaxRetries = -1
	o.DialerRetries = 1
	o.DisableIdentity = true // to say who this is would be a round trip
	if o.MaxRedirects == 0 { // none; said again it would be the default
		o.MaxRedirects = -1
	}
	o.MaxIdleConns = 0
	o.MinIdleConns = 0
	o.MaxActiveConns = 0
	o.PoolSize = conns
	o.MaxConcurrentDials = 0
	o.PipelinePoolSize = -1
	newClient := o.NewClient
	o.NewClient = func(o *redis.Options) *redis.Client {
		if o.Dialer == nil {
			o.Dialer = redis.NewDialer(o)
		}
		o.Dialer = sockets.Dialer(o.Dialer)
		return newClient(o)
	}
	o.AutoPipelineOptions = nil
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return &o
}

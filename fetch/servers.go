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

// slotRanges is into how many ranges the slots of a Cluster are split, each with a queue and a breaker of its own:
// slots of one master mostly follow one another, and one master's outage is not all buckets'.
const slotRanges = 32

// server is where calls go together: a server, or a range of a Cluster's slots.
type server struct {
	rdb     redis.UniversalClient
	queue   *engine.Queue[ask]
	breaker *engine.Breaker
	alone   lonely
	probe   atomic.Pointer[string] // a key of the server
}

// open is the error of a call while the server's breaker is open.
func (s *server) open(key string) error {
	if s.probe.Load() == nil {
		s.probe.Store(&key)
	}
	if cause := s.breaker.Open(); cause != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, &openError{ReasonOf(fmt.Errorf("%w: %w", ErrUnavailable, cause))})
	}
	return nil
}

// servers finds the server of a key.
type servers struct {
	c      *Client
	rdb    redis.UniversalClient
	slots  *engine.Slots
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
	ss := &servers{c: c, rdb: rdb, slots: engine.NewSlots(c.config.concurrency), bySlot: true}
	switch rdb := rdb.(type) {
	case *redis.Client:
		ss.bySlot = false
		if rdb.Options().Addr == "FailoverClient" {
			ss.slots = engine.NewSlots(min(c.config.concurrency, rdb.Options().PoolSize))
			ss.ranges = []*server{ss.shared(rdb)}
			break
		}
		main, alone, sock := ownOptions(rdb, c.config.concurrency), ownOptions(rdb, c.config.concurrency), &engine.Socket{}
		alone.Dialer = sock.Dialer(alone.Dialer)
		all, one := redis.NewClient(main), redis.NewClient(alone)
		ss.own = append(ss.own, all, one)
		ss.ranges = []*server{ss.add(all, nil, &engine.Express[ask]{Interrupt: sock.Interrupt}, one)}
	case *redis.ClusterClient:
		own := redis.NewClusterClient(ownClusterOptions(rdb, c.config.concurrency))
		ss.own = append(ss.own, own)
		for range slotRanges {
			ss.ranges = append(ss.ranges, ss.add(own, nil, nil, nil))
		}
	case *redis.Ring:
		ss.ring, ss.shards = rdb, make(map[*redis.Client]*server)
	default:
		ss.ranges = []*server{ss.add(rdb, nil, nil, nil)}
	}
	return ss
}

// add makes the queue of a server. excuse tells whether calls wait for a connection; express, if it isn't nil, is for
// lone calls through a client of its own.
func (ss *servers) add(rdb redis.UniversalClient, excuse func() bool, express *engine.Express[ask], one *redis.Client) *server {
	s := &server{rdb: rdb}
	s.breaker = &engine.Breaker{
		Patience: max(ss.c.config.timeout, DefaultTimeout),
		Probe:    func(ctx context.Context) error { return ss.c.probe(ctx, s) },
		Excuse:   excuse,
		Opened:   func() { ss.c.stats.opened.Add(1) },
	}
	if express != nil {
		express.Send = ss.c.sender(s, one)
	}
	s.queue = engine.NewQueue(ss.c.sender(s, rdb), ss.slots, s.breaker, express)
	return s
}

// shared makes the queue of a server whose pool is its Redis client's.
func (ss *servers) shared(rdb *redis.Client) *server {
	copied := rdb
	if d := ss.c.config.timeout; d > 0 {
		copied = rdb.WithTimeout(d + engine.Grace)
	}
	return ss.add(copied, func() bool { return rdb.PoolStats().PendingRequests > 0 }, nil, nil)
}

// of is the server of a key.
func (ss *servers) of(key string) (*server, error) {
	switch {
	case len(ss.ranges) == 1:
		return ss.ranges[0], nil
	case ss.ring == nil:
		return ss.ranges[lua.Slot(key)*len(ss.ranges)/lua.Slots], nil
	}
	shard, err := ss.ring.GetShardClientForKey(key)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	ss.mu.Lock()
	defer ss.mu.Unlock()
	s := ss.shards[shard]
	if s == nil {
		s = ss.shared(shard)
		ss.shards[shard] = s
	}
	return s, nil
}

// call is which buckets can go into one script call: those of equal numbers.
func (ss *servers) call(key string) int {
	if ss.bySlot && ss.ring == nil {
		return lua.Slot(key)
	}
	return 0
}

// apart reports whether the active sets of templates are on other servers than their buckets.
func (ss *servers) apart() bool { return ss.bySlot }

// close ends the queues when nothing is under way any more, or ctx ends.
func (ss *servers) close(ctx context.Context) error {
	ss.mu.Lock()
	all := ss.ranges
	for _, s := range ss.shards {
		all = append(all[:len(all):len(all)], s)
	}
	ss.mu.Unlock()
	for _, s := range all {
		if err := s.queue.Close(ctx); err != nil {
			return fmt.Errorf("fetch: close: %w", err)
		}
	}
	for _, own := range ss.own {
		if err := own.Close(); err != nil && !errors.Is(err, redis.ErrClosed) {
			return fmt.Errorf("fetch: close: %w", err)
		}
	}
	return nil
}

// ownOptions are those of a client of the same server with connections of its own: a call's deadline is its context's
// alone, nothing is sent twice, and pools aren't waited for.
func ownOptions(rdb *redis.Client, conns int) *redis.Options {
	o := *rdb.Options()
	o.ContextTimeoutEnabled, o.ReadTimeout, o.WriteTimeout = true, -1, -1
	o.MaxRetries, o.DialerRetries = -1, 1
	o.MaxIdleConns, o.MinIdleConns, o.MaxActiveConns = min(o.PoolSize, conns), 0, 0
	o.PoolSize, o.MaxConcurrentDials, o.PipelinePoolSize = conns, 0, -1
	o.Dialer = engine.Patient(o.Dialer)
	o.AutoPipelineOptions, o.ClientSideCache, o.ClientSideCacheConfig = nil, nil, nil
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return &o
}

// ownClusterOptions is ownOptions of a Cluster.
func ownClusterOptions(rdb *redis.ClusterClient, conns int) *redis.ClusterOptions {
	o := *rdb.Options()
	o.ContextTimeoutEnabled, o.ReadTimeout, o.WriteTimeout = true, -1, -1
	o.MaxRetries, o.DialerRetries = -1, 1
	if o.MaxRedirects == 0 { // none; said again it would be the default
		o.MaxRedirects = -1
	}
	o.MaxIdleConns, o.MinIdleConns, o.MaxActiveConns = min(o.PoolSize, conns), 0, 0
	o.PoolSize, o.MaxConcurrentDials, o.PipelinePoolSize = conns, 0, -1
	newClient := o.NewClient
	o.NewClient = func(o *redis.Options) *redis.Client {
		if o.Dialer == nil {
			o.Dialer = redis.NewDialer(o)
		}
		o.Dialer = engine.Patient(o.Dialer)
		return newClient(o)
	}
	o.AutoPipelineOptions = nil
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return &o
}

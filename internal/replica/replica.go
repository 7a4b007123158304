package replica

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/tokenrefill/refiller/election"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/operate/membership"
	"github.com/tokenrefill/refiller/internal/operate/metrics"
	"github.com/tokenrefill/refiller/internal/operate/stats"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/refill"
)

// After resigning, a leader remains a standby for handover refill intervals, but not longer than maxHandover.
const (
	handover    = 3
	maxHandover = 2 * time.Second
)

// maxLoop is the time without a round after which the refill loop counts as hanging.
const maxLoop = 15 * time.Second

var errEnding = errors.New("replica: about to end")

// Options are the settings of a replica that are not in its configuration.
type Options struct {
	Identity string // names the replica for people; default: the host's name and the process number
	Build    string // the program's version
	Logger   hclog.Logger
	Observe  func(refill.Event) // called after every refill call

	// Load reads the configuration again; nil means that it never changes. It is called when Reload delivers a reason.
	Load   func() (config.Config, error)
	Reload <-chan string
}

// Replica is one refiller replica.
type Replica struct {
	load     func() (config.Config, error)
	asked    <-chan string
	stats    *stats.Stats
	metrics  *metrics.Metrics
	identity string
	build    string
	log      hclog.Logger
	started  time.Time
	rdb      redis.UniversalClient
	refiller *refill.Refiller
	elector  *election.Elector // nil in race mode
	who      *whoLeads         // nil in race mode
	pools    *pools            // nil if the replica takes no part in pools
	members  *membership.Members
	closers  []func() error
	listener net.Listener

	renewed     chan struct{} // holds one signal: the templates may have changed
	publishedID string        // id of the published templates that follow has read; only publishes uses it

	ending atomic.Bool // Run has begun to end

	reloading sync.Mutex // one reload at a time

	mu         sync.Mutex
	cfg        config.Config // in force
	lastReload admin.Reload
	// noTemplates reports that the file has no field for templates. Then those of cfg are the published ones, or nil.
	noTemplates bool
	// templatesConflict reports that other templates are published under the version of cfg. templatesOutdated is the
	// version of the published templates if it is later than that of cfg, otherwise 0.
	templatesConflict bool
	templatesOutdated int64

	reading sync.Mutex
	recent  map[string]readBucket // by key
}

var _ admin.Source = (*Replica)(nil)

// New makes a replica. It listens at once, and connects to servers when it runs. It must be run or closed.
func New(cfg config.Config, opts Options) (*Replica, error) {
	r := &Replica{
		cfg: cfg, noTemplates: cfg.Templates == nil, load: opts.Load, asked: opts.Reload, stats: stats.New(),
		recent:   map[string]readBucket{},
		renewed:  make(chan struct{}, 1),
		identity: opts.Identity, build: opts.Build, log: opts.Logger, started: time.Now(),
	}
	r.stats.Configure(buckets(cfg))
	r.metrics = metrics.New(opts.Build, cfg.Region, r.stats, r.state)
	if r.log == nil {
		r.log = hclog.Default().Named("refiller")
	}
	if r.identity == "" {
		r.identity = defaultIdentity()
	}
	if err := r.open(opts); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

func defaultIdentity() string {
	host, err := os.Hostname()
	if err != nil {
		host = "replica"
	}
	return host + "/" + strconv.Itoa(os.Getpid())
}

func (r *Replica) open(opts Options) error {
	var err error
	r.rdb, err = redisconn.Open(r.cfg.Redis)
	if err != nil {
		return fmt.Errorf("redis: %w", err)
	}
	r.closers = append(r.closers, r.rdb.Close)

	elected := r.cfg.Election.Mode == config.ModeEtcd
	observe := r.metrics.Observe
	active := func(e refill.Event) { r.stats.Active(e.Key, e.Outcome.Added, e.Replied) }
	if opts.Observe != nil {
		observe = func(e refill.Event) {
			opts.Observe(e)
			r.metrics.Observe(e)
		}
		count := active
		active = func(e refill.Event) {
			opts.Observe(e)
			count(e)
		}
	}
	r.refiller, err = refill.New(refill.Config{
		Redis: r.rdb, Buckets: buckets(r.cfg), Templates: r.cfg.Templates, Version: r.cfg.Version, Elected: elected,
		Pulse: "refiller:pulse:" + r.cfg.RefillPrefix(), Interval: r.cfg.RefillInterval, Logger: r.log.Named("refill"),
		Observe: observe, ObserveActive: active,
	})
	if err != nil {
		return err
	}
	r.members = membership.New(r.rdb, "refiller:replicas:"+r.cfg.RefillPrefix(), r.entry)
	if elected || r.cfg.Pooled() {
		if err := r.openEtcd(elected); err != nil {
			return err
		}
	}
	r.listener, err = net.Listen("tcp", r.cfg.Listen)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	r.closers = append(r.closers, func() error {
		if err := r.listener.Close(); !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	})
	return nil
}

// openEtcd makes the parts that use etcd: the election of the leader, and the pools.
func (r *Replica) openEtcd(elected bool) error {
	separate := r.cfg.HasSeparateRegistry()
	var client *clientv3.Client
	var err error
	if elected || !separate {
		client, err = r.dial(r.cfg.Election.Etcd)
		if err != nil {
			return fmt.Errorf("election: %w", err)
		}
	}
	if elected {
		r.elector, err = newElector(client, r.cfg.RefillPrefix(), r.identity, r.cfg.Election.TTL,
			r.log.Named("election"))
		if err != nil {
			return err
		}
		r.who = &whoLeads{elector: r.elector}
	}
	if !r.cfg.Pooled() {
		return nil
	}
	if separate {
		client, err = r.dial(r.cfg.PoolRegistry)
		if err != nil {
			return fmt.Errorf("pool_registry: %w", err)
		}
	}
	r.pools, err = newPools(r.cfg, client, r)
	return err
}

// dial makes a client of etcd. Closing the replica closes the client.
func (r *Replica) dial(e config.Etcd) (*clientv3.Client, error) {
	client, err := etcdconn.Open(e.Options)
	if err == nil {
		r.closers = append(r.closers, client.Close)
	}
	return client, err
}

// Addr returns where the admin server listens.
func (r *Replica) Addr() net.Addr { return r.listener.Addr() }

// Run refills and serves until ctx ends, and returns nil then. It ends in this order. First the replica is no longer
// ready. It resigns, if it takes part in an election. It remains a standby for a moment, so that the first refill of
// its successor comes within two intervals of its own last refill. Then Run waits for the refills under way and for all
// goroutines, and closes the replica.
func (r *Replica) Run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, r.Close()) }()
	r.log.Info("replica starts", append([]any{"identity", r.identity, "build", r.build, "admin", r.Addr().String()},
		r.config().LogFields()...)...)
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	g, serving := errgroup.WithContext(serving)
	g.Go(func() error {
		return admin.Serve(serving, r.listener, admin.Handler(r, r.metrics.Handler()), r.log.Named("admin"))
	})
	g.Go(func() error { return r.refiller.Run(serving) })
	g.Go(func() error {
		r.members.Run(serving)
		return nil
	})
	g.Go(func() error { return r.publishes(serving) })
	if r.load != nil {
		g.Go(func() error { return r.reloads(serving) })
	}
	if r.pools != nil {
		g.Go(func() error { return r.pools.agent.Run(serving) })
		g.Go(func() error {
			r.pools.sample(serving, r.config)
			return nil
		})
		g.Go(func() error {
			r.pools.regions.follow(serving, r.config)
			return nil
		})
	}
	g.Go(func() error {
		defer stop()
		return r.campaign(ctx, serving)
	})
	err = g.Wait()
	if err == nil {
		r.log.Info("replica stopped", "identity", r.identity)
	}
	return err
}

// campaign takes part in the elections until ctx or serving ends, and resigns. If it led, it remains a standby for a
// moment.
func (r *Replica) campaign(ctx, serving context.Context) error {
	candidacy, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(serving, cancel)()
	defer context.AfterFunc(candidacy, func() { r.ending.Store(true) })()
	var coordinating sync.WaitGroup
	defer coordinating.Wait()
	if r.pools != nil {
		coordinating.Go(func() {
			r.pools.coordinator.AwaitRights(candidacy)
			if err := r.pools.elector.Run(candidacy, r.pools.coordinator.Lead); err != nil {
				r.log.Error("this replica can't coordinate the pools", "error", err)
			}
		})
	}
	if r.elector == nil {
		<-candidacy.Done()
		return nil
	}
	led := false
	err := r.elector.Run(candidacy, func(ctx context.Context, term election.Term) error {
		err := r.refiller.Lead(ctx, term.Epoch)
		led = candidacy.Err() != nil
		return err
	})
	if led {
		r.log.Info("replica has resigned", "identity", r.identity)
		timing.Sleep(serving.Done(), min(handover*r.config().RefillInterval, maxHandover))
	}
	return err
}

// Close closes everything that New opened. It is idempotent.
func (r *Replica) Close() error {
	var errs []error
	for i := len(r.closers) - 1; i >= 0; i-- {
		errs = append(errs, r.closers[i]())
	}
	r.closers = nil
	return errors.Join(errs...)
}

// Alive implements admin.Source.
func (r *Replica) Alive() error {
	loop := r.refiller.Stats().LastLoop
	// The zero time means that no worker runs yet, because Redis' masters aren't known.
	if ago := time.Since(loop); !loop.IsZero() && ago > maxLoop {
		return fmt.Errorf("the refill loop has been stuck for %s", ago.Round(time.Second))
	}
	return nil
}

// Ready implements admin.Source.
func (r *Replica) Ready(ctx context.Context) error {
	if r.ending.Load() {
		return errEnding
	}
	if err := r.rdb.Ping(ctx).Err(); err != nil {
		return fmt.Errorf("redis: %w", err)
	}
	// PING doesn't suffice: a read-only server answers it.
	if err := r.refiller.Stats().Away; err != nil {
		return fmt.Errorf("redis: %w", err)
	}
	return nil
}

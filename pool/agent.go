package pool

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/internal/redisclient"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Refiller keeps the pools' buckets of its region full, under the terms that SetTerms sets. It is implemented by
// refill.Refiller.
type Refiller interface {
	SetTerms(key string, t policy.Terms) error
}

// AgentConfig configures an Agent.
type AgentConfig struct {
	Client   *clientv3.Client      // the caller closes it
	Prefix   string                // of the pools' keys, without a slash at the end
	Redis    redis.UniversalClient // of the region; the caller closes it
	Refiller Refiller              // may be nil
	Region   string
	Identity string // names the agent for people
	Settings Settings
	Timing   Timing
	Logger   hclog.Logger // nil means a default one named refiller.pool
}

// Agent represents a region. It reports the state of the region's buckets to the coordinator and applies the grants
// that the coordinator publishes. Every replica of a region runs an Agent. One of these agents reports. If it is
// silent, another one reports in its place. An Agent is safe for concurrent use.
type Agent struct {
	region, identity string
	timing           Timing
	log              hclog.Logger
	registry         registry
	buckets          buckets
	refiller         Refiller
	rng              *rand.Rand
	now              func() time.Time // our monotonic clock; tests replace now and raw
	raw              func() time.Time // a clock that isn't slewed, for the watchdog
	changed          chan struct{}    // holds one token when the settings have changed
	rewound          chan struct{}    // holds one token when a write has shown that etcd was restored

	mu       sync.Mutex
	settings Settings
	newest   Settings // the latest settings that were read from etcd; after a restore, etcd may have older ones
	state    AgentState
	revision int64 // the highest revision that was read from etcd in its present history
	// The following fields belong to the goroutine in Run.
	named    map[string]bool // the pools in etcd's settings, and whether the region is in each of them
	shared   map[string]bool // the pools in the region's share
	known    map[string]*bucket
	reported report    // the last report that is known to be in etcd
	loaded   bool      // all keys that concern the region have been read from etcd
	since    time.Time // when reported was recorded, or when writing a later report failed
	polled   time.Time // when Redis was last polled
	// unavailable is true while Redis doesn't answer, and cut while etcd doesn't.
	unavailable bool
	cut         bool
}

// bucket is what an agent knows of the region's bucket of one pool.
type bucket struct {
	terms   policy.Terms // the newest terms that the agent knows
	offered bool         // terms is set
	open    bool         // the pool lends more than floors
	doubled bool         // another Redis reports under the region's name
	demand  int64        // as the coordinator computed it, in units of the newest terms
	fence   policy.Fence // in force when the bucket was last polled
	// version is the latest version that was read. An older one does not replace it. Otherwise the next refill could not
	// detect that the server lost writes.
	version  policy.Version
	watchdog watchdog
	era      int64  // the last era that was read from our Redis
	before   int64  // the era that was read before it
	sample   sample // of demand, as the coordinator computes it from the reports
	counted  ticket // the ticket with the highest usage
}

// bucket returns the record of a pool's bucket. It creates an empty one if there is none.
func (a *Agent) bucket(pool string) *bucket {
	b := a.known[pool]
	if b == nil {
		b = &bucket{}
		a.known[pool] = b
	}
	return b
}

// AgentState is a snapshot of an agent's state.
type AgentState struct {
	Reports  int64 // written to etcd
	Failures int64 // reports that could not be written
	Voids    int64 // eras begun because a clock was wrong
	// ClockRate is the relative error of the rate of Redis' clock, compared with our clock: 0.01 means 1 % fast, and -0.01
	// means 1 % slow. If there are several servers, it is that of the clock which deviates most.
	ClockRate float64
	Away      string // why Redis doesn't answer; empty while it does
	Cut       string // why etcd doesn't answer; empty while it does
	Conflict  bool   // the pools in force differ from ours and have the same version
	Outdated  int64  // the version in force if it is higher than ours, and ours is therefore ignored; otherwise 0
	Unread    string // why the pools in etcd can't be read, and ours don't replace them; empty if they can be read
	Shares    []Share
}

// Share is a region's part of a pool's rate as the region's own server knows it.
type Share struct {
	Pool      string
	Rate      policy.Rate   // the rate in force: that of the grant while it lasts, otherwise the floor
	Floor     policy.Rate   // the rate that is always the region's
	Capacity  int64         // of the region's bucket
	Tokens    int64         // in the region's bucket
	Demand    policy.Rate   // the rate that the region could use, as the coordinator computed it for the newest grant
	Open      bool          // the pool lends more than floors
	Doubled   bool          // another Redis reports under the region's name, too, and gets the floor only
	Remaining time.Duration // of the grant, on the region's clock; 0 if the region has no grant
	Used      int64         // tokens that the region's consumers took so far, as RegionStatus.Used; -1 if unknown
}

// buckets accesses the pools' buckets on a region's own server.
type buckets interface {
	tickets(ctx context.Context, keys []string) []lua.TicketResult
	refill(ctx context.Context, calls []lua.RefillCall) []lua.RefillResult
}

// refillsPerCall is the most buckets whose terms one script call puts in force, so that it doesn't block the server for
// long.
const refillsPerCall = 50

// redisBuckets implements buckets with Redis.
type redisBuckets struct{ rdb redis.UniversalClient }

var _ buckets = redisBuckets{}

func (b redisBuckets) tickets(ctx context.Context, keys []string) []lua.TicketResult {
	return lua.Tickets(ctx, b.rdb, keys)
}

func (b redisBuckets) refill(ctx context.Context, calls []lua.RefillCall) []lua.RefillResult {
	return lua.EachAlone(calls, refillsPerCall, func(calls []lua.RefillCall, perCall int) []lua.RefillResult {
		return lua.RefillBatch(ctx, b.rdb, calls, perCall)
	}, func(r *lua.RefillResult) error { return r.Err })
}

// NewAgent returns an Agent, or an error if cfg is invalid. It makes no request.
func NewAgent(cfg AgentConfig) (*Agent, error) {
	if cfg.Client == nil || cfg.Prefix == "" || redisclient.IsNil(cfg.Redis) {
		return nil, fmt.Errorf("%w: Client, Prefix and Redis are required", ErrPool)
	}
	if !validName(cfg.Region) {
		return nil, fmt.Errorf("%w: Region %q: want 1 to %d letters, digits and any of . _ : -", ErrPool, cfg.Region, MaxName)
	}
	if err := errors.Join(cfg.Timing.Validate(), cfg.Settings.Validate()); err != nil {
		return nil, err
	}
	return newAgent(cfg, newEtcdRegistry(cfg.Client, cfg.Prefix), redisBuckets{cfg.Redis}, rand.Uint64()), nil
}

func newAgent(cfg AgentConfig, r registry, b buckets, seed uint64) *Agent {
	if cfg.Logger == nil {
		cfg.Logger = hclog.Default().Named("refiller.pool")
	}
	return &Agent{
		// The suffix distinguishes two agents with the same identity, so that each knows which reports are its own.
		region: cfg.Region, identity: cfg.Identity + "#" + strconv.FormatUint(seed, 36),
		timing: cfg.Timing, log: cfg.Logger, registry: r, buckets: b, refiller: cfg.Refiller, now: time.Now, raw: timing.Raw,
		rng: rand.New(rand.NewPCG(seed, 2)), changed: make(chan struct{}, 1), rewound: make(chan struct{}, 1),
		settings: cfg.Settings, newest: noSettings, known: map[string]*bucket{},
	}
}

// Update replaces the agent's settings. It returns an error if the new settings differ from the present ones without
// having a higher version. The agent then writes them to etcd, which puts them in force in all regions.
func (a *Agent) Update(s Settings) error {
	if err := s.Validate(); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if s.Version <= a.settings.Version && !s.Equal(a.settings) {
		return fmt.Errorf("%w: version %d is not above the one in force, %d", ErrPool, s.Version, a.settings.Version)
	}
	a.settings = s
	timing.Signal(a.changed)
	return nil
}

// State returns a snapshot.
func (a *Agent) State() AgentState {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.state
	s.Shares = slices.Clone(s.Shares)
	return s
}

// setState changes the state that State returns.
func (a *Agent) setState(change func(*AgentState)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(&a.state)
}

// Run reports and applies grants until ctx ends, and then returns nil. All its goroutines have ended when it returns.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	events := make(chan entry, 64)
	wg.Go(func() { a.listen(ctx, events) })

	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-events:
			news := a.applyEntry(e)
			if news {
				a.pushTerms()
			}
			// The reporter applies new terms at once. The other replicas apply them when they next poll, if the reporter
			// has not.
			news = news && a.isReporter()
			if news {
				a.apply(ctx)
			}
			if news || e == allRead {
				a.poll(ctx, news)
			}
		case <-timer.C:
			a.pushTerms() // a later configuration may have given the pool to the refiller
			a.poll(ctx, false)
		}
		timer.Reset(a.next().Sub(a.now()))
	}
}

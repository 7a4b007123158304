package replica

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/election"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/operate/metrics"
	"github.com/tokenrefill/refiller/internal/operate/stats"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/pool"
	"github.com/tokenrefill/refiller/refill"
)

// pools is the replica's part in the pools. It reports for its region, applies the region's grants, and is a candidate
// for the coordination of all regions.
type pools struct {
	agent       *pool.Agent
	coordinator *pool.Coordinator
	elector     *election.Elector // of the coordinator
	who         *whoLeads
	lease       time.Duration // of a grant
	trends      stats.Shares  // of the replica's region, by pool
	regions     regions
}

// sampling is the time between two readings of the shares for their trends.
const sampling = time.Second

// sample records the region's shares until ctx ends.
func (p *pools) sample(ctx context.Context, cfg func() config.Config) {
	ticker := time.NewTicker(sampling)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticker.C:
			points := map[string]stats.SharePoint{}
			for _, s := range p.shares(cfg()) {
				if s.Limit > 0 {
					floor := min(s.Floor, s.Rate)
					points[s.Pool] = stats.SharePoint{
						Floor: floor / s.Limit, Lent: (s.Rate - floor) / s.Limit, Demand: s.Demand / s.Limit,
					}
				}
			}
			p.trends.Add(now, points)
		}
	}
}

// settings returns the settings of the pools that all regions share, from a configuration.
func settings(cfg config.Config) pool.Settings {
	return pool.Settings{Version: cfg.PoolsVersion, Pools: cfg.Pools}
}

// newPools makes the replica's part in the pools. It sends no request.
func newPools(cfg config.Config, client *clientv3.Client, r *Replica) (*pools, error) {
	timing := pool.ForTTL(cfg.PoolRegistry.TTL)
	log := r.log.Named("pool")
	identity := cfg.Region + "/" + r.identity
	agent, err := pool.NewAgent(pool.AgentConfig{
		Client: client, Prefix: cfg.PoolsPrefix(), Redis: r.rdb, Refiller: r.refiller, Region: cfg.Region, Identity: identity,
		Settings: settings(cfg), Timing: timing, Logger: log,
	})
	if err != nil {
		return nil, err
	}
	coordinator, err := pool.NewCoordinator(pool.CoordinatorConfig{Client: client, Prefix: cfg.PoolsPrefix(),
		Timing: timing, Logger: log})
	if err != nil {
		return nil, err
	}
	elector, err := newElector(client, cfg.PoolsPrefix(), identity, cfg.PoolRegistry.TTL, log.Named("election"))
	if err != nil {
		return nil, err
	}
	read := func(ctx context.Context) (pool.Status, error) { return pool.ReadStatus(ctx, client, cfg.PoolsPrefix()) }
	return &pools{
		agent: agent, coordinator: coordinator, elector: elector, who: &whoLeads{elector: elector}, lease: timing.Lease,
		regions: regions{read: read},
	}, nil
}

// newElector makes a candidate for the election under a prefix.
func newElector(client *clientv3.Client, prefix, identity string, ttl time.Duration,
	log hclog.Logger) (*election.Elector, error) {
	cfg := election.DefaultConfig()
	cfg.Client = client
	cfg.Prefix = prefix
	cfg.Identity = identity
	cfg.TTL = ttl
	cfg.SafetyMargin = ttl / 5
	cfg.Logger = log
	return election.New(cfg)
}

// status returns the pools as this replica sees them.
func (p *pools) status(ctx context.Context, cfg config.Config) *admin.Pools {
	state, coordinator := p.agent.State(), p.coordinator.Stats()
	out := &admin.Pools{
		Coordinating: coordinator.Leading, Epoch: coordinator.Epoch, Cut: state.Cut, Away: state.Away, Shares: p.shares(cfg),
	}
	now := time.Now()
	for i, s := range out.Shares {
		for _, point := range p.trends.Trend(s.Pool, now) {
			out.Shares[i].Trend = append(out.Shares[i].Trend, admin.ShareTrendPoint(point))
		}
		out.Shares[i].Regions = p.regions.of(s.Pool, now)
	}
	var err error
	out.Coordinator, err = p.who.ask(ctx)
	if err != nil {
		out.Election = err.Error()
	}
	return out
}

// Shares implements admin.Source.
func (r *Replica) Shares() []admin.ShareHistory {
	if r.pools == nil {
		return []admin.ShareHistory{}
	}
	return r.pools.regions.hour(time.Now())
}

// shares returns the region's shares.
func (p *pools) shares(cfg config.Config) []admin.Share {
	rates := map[string]policy.Rate{}
	for _, pool := range cfg.Pools {
		rates[pool.Name] = pool.Rate
	}
	list := []admin.Share{}
	for _, s := range p.agent.State().Shares {
		share := admin.Share{
			Pool: s.Pool, Rate: perSecond(s.Rate), Floor: perSecond(s.Floor), Demand: perSecond(s.Demand),
			Tokens: s.Tokens, Capacity: s.Capacity, Remaining: s.Remaining.Seconds(),
		}
		if s.Remaining > 0 {
			share.Age = max(0, p.lease-s.Remaining).Seconds()
		}
		if r, ok := rates[s.Pool]; ok {
			share.Limit = perSecond(r)
		}
		list = append(list, share)
	}
	return list
}

// state returns the state of the pools for the metrics.
func (p *pools) state() *metrics.PoolState {
	candidate := p.elector.State()
	return &metrics.PoolState{
		Coordinated: candidate.Role == election.RoleLeader || candidate.Role == election.RoleStandby,
		Agent:       p.agent.State(), Coordinator: p.coordinator.Stats(), Sums: p.coordinator.Sums(),
		Regions: p.coordinator.Regions(), Terms: candidate.Terms,
	}
}

func perSecond(r policy.Rate) float64 {
	if r.Per == 0 {
		return 0
	}
	return float64(r.Tokens) / r.Per.Seconds()
}

// pooled returns the buckets of the pools that the region takes part in.
func pooled(cfg config.Config) []refill.Bucket {
	var list []refill.Bucket
	for _, p := range cfg.OwnPools() {
		start := p.Start(cfg.Region, cfg.PoolsVersion)
		list = append(list, refill.Bucket{
			Key: p.Name, Policy: policy.Policy{Interval: p.Interval, Flows: p.Flows}, Pooled: true, Start: &start,
		})
	}
	return list
}

// whoLeads asks an election service for the leader, at most once a second.
type whoLeads struct {
	elector *election.Elector

	mu     sync.Mutex
	leader *admin.Leader
	err    error
	at     time.Time
}

func (w *whoLeads) ask(ctx context.Context) (*admin.Leader, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.at) < time.Second {
		return w.leader, w.err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	l, err := w.elector.Leader(ctx)
	before := w.leader
	w.leader = nil
	w.err = err
	w.at = time.Now()
	if err == nil {
		w.leader = &admin.Leader{Identity: l.Identity, Epoch: l.Epoch, Since: w.at}
		if before != nil && before.Epoch == l.Epoch {
			w.leader.Since = before.Since
		}
	}
	return w.leader, w.err
}

// pooledAs returns the next configuration with the pools and the region that the running replica can use. A replica
// that started without pools can't have any, and a replica that started with pools keeps them if next has no field for
// them.
func (r *Replica) pooledAs(next config.Config) config.Config {
	switch {
	case r.pools == nil:
		next.Pools = nil
	case !next.Pooled():
		next.Pools = r.config().Pools
	}
	next.Region = r.config().Region
	return next
}

// updatePools puts the pools of the next configuration in force.
func (r *Replica) updatePools(next config.Config) error {
	if r.pools == nil || !next.Pooled() {
		return nil
	}
	if err := r.pools.agent.Update(settings(next)); err != nil {
		return fmt.Errorf("pools: %w", err)
	}
	return nil
}

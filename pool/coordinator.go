package pool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/election"
	"github.com/tokenrefill/refiller/internal/timing"
)

// pace is the shortest time between two rounds of planning. So the coordinator answers all events that arrive at about
// the same time with one write.
const pace = 50 * time.Millisecond

// maxPace is the longest time between two rounds of planning while there is work. The coordinator lengthens the pace so
// that it plans for about a tenth of the time, but never beyond maxPace.
const maxPace = time.Second

// errStuck ends a term in which etcd renews the coordinator's leadership but accepts none of its writes.
var errStuck = errors.New("pool: shares can't be written: another coordinator is to try")

// CoordinatorConfig configures a Coordinator.
type CoordinatorConfig struct {
	Client *clientv3.Client // the caller closes it
	Prefix string           // of the pools' keys, without a slash at the end
	Timing Timing
	Logger hclog.Logger // nil means a default one named refiller.pool
}

// Coordinator hands out the shares of all pools below a prefix while it leads. It is safe for concurrent use.
type Coordinator struct {
	timing   Timing
	log      hclog.Logger
	registry registry
	now      func() time.Time // the monotonic clock, which stops while the host is suspended

	mu      sync.Mutex
	stats   CoordinatorStats
	pools   map[string]PoolSum // while it leads
	regions map[string]RegionSeen
}

// CoordinatorStats counts what a coordinator has done since it was made.
type CoordinatorStats struct {
	Leading bool
	Epoch   int64 // of the present or last term
	Commits int64 // transactions that were made
	Refused int64 // transactions that were not made, since a key had changed
	Errors  int64 // requests to etcd that failed
	Writes  int64 // shares written
	// TooLarge counts the shares that were not written because etcd would have refused them.
	TooLarge int64
	// Unread is the number of records that can't be read now. While there are any, shares are renewed as they are, and no
	// region gets more.
	Unread int
	// Foreign counts the tickets that showed grants which are not in etcd. Either etcd was restored or lost, or another
	// coordinator grants the same pool. For a lease after each such ticket, no region gets more.
	Foreign int64
}

// PoolSum is what a pool's regions may be using together, in tokens per second.
type PoolSum struct {
	Rate    float64 // R, which Claimed never exceeds; 0 after the pool was removed from the configuration
	Claimed float64 // the most that the regions may be using: offers that no acknowledgement has replaced
	Demand  float64 // the rate that the regions could use
	// Waits are the regions that have neither acknowledged terms of the pool nor been fenced. As long as there are any, no
	// region gets more than its floor.
	Waits []string
}

// RegionSeen is what the coordinator knows of a region.
type RegionSeen struct {
	LastReport  time.Time // when its last report arrived; zero for never in this term
	Since       time.Time // since when the coordinator knows the region
	OtherServer bool      // another Redis reports under the region's name, too
	Fenced      bool      // an operator has fenced or drained the region
}

// NewCoordinator returns a Coordinator, or an error if cfg is invalid. It makes no request.
func NewCoordinator(cfg CoordinatorConfig) (*Coordinator, error) {
	if cfg.Client == nil || cfg.Prefix == "" {
		return nil, fmt.Errorf("%w: Client and Prefix are required", ErrPool)
	}
	if err := cfg.Timing.Validate(); err != nil {
		return nil, err
	}
	return newCoordinator(newEtcdRegistry(cfg.Client, cfg.Prefix), cfg.Timing, cfg.Logger), nil
}

func newCoordinator(r registry, t Timing, log hclog.Logger) *Coordinator {
	if log == nil {
		log = hclog.Default().Named("refiller.pool")
	}
	return &Coordinator{
		timing: t, log: log, registry: r, now: time.Now, pools: map[string]PoolSum{}, regions: map[string]RegionSeen{},
	}
}

// Lead coordinates under a term. It returns when ctx ends, when another coordinator leads, or when it can't write for a
// third of a lease. It is the function that an election among all regions calls.
func (c *Coordinator) Lead(ctx context.Context, term election.Term) error {
	return c.govern(ctx, leadership{key: term.Key, revision: term.Epoch})
}

// Stats returns the counts.
func (c *Coordinator) Stats() CoordinatorStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stats
}

// Sums returns the sums of each pool by name. It is empty unless this coordinator leads.
func (c *Coordinator) Sums() map[string]PoolSum {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.pools)
}

// Regions returns each region that reports or should report, by name. It is empty unless this coordinator leads.
func (c *Coordinator) Regions() map[string]RegionSeen {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.regions)
}

// recordReported records that a region reported at the time now.
func (c *Coordinator) recordReported(region string, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := c.regions[region]
	r.LastReport = now
	if r.Since.IsZero() {
		r.Since = now
	}
	c.regions[region] = r
}

func (c *Coordinator) count(change func(*CoordinatorStats)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.stats)
}

func (c *Coordinator) enter(leading bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stats.Leading, c.stats.Unread = leading, 0
	c.pools, c.regions = map[string]PoolSum{}, map[string]RegionSeen{}
}

func (c *Coordinator) govern(ctx context.Context, l leadership) error {
	c.enter(true)
	defer c.enter(false)
	t := newTerm(c, l)
	failures := 0
	for ctx.Err() == nil {
		began := c.now()
		err := t.session(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, errDeposed):
			return err
		case c.now().Sub(t.able) > t.timing.Lease/3:
			return fmt.Errorf("%w: %w", errStuck, err)
		case c.now().Sub(began) > maxPace:
			failures = 0
		}
		c.count(func(s *CoordinatorStats) { s.Errors++ })
		failures++
		if failures == 1 {
			c.log.Warn("connection to etcd lost: shares stay as they are", "pool-epoch", t.epoch, "error", err)
		}
		timing.Sleep(ctx.Done(), backoff(failures))
	}
	return context.Cause(ctx)
}

// backoff returns the pause after a number of failures in a row.
func backoff(failures int) time.Duration { return timing.Doubled(pace, failures, maxPace) }

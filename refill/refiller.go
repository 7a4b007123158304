package refill

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/policy"
)

// topologyInterval is how often a Cluster's map of slots is read again.
const topologyInterval = 5 * time.Second

// Refiller keeps buckets full while Run runs.
//
// # Load on Redis
//
// There is a worker for each master. It has one batch, or two if it is behind, under way at a time. A batch is a
// pipeline of script calls, each for several buckets. On a Cluster, the buckets of a script call are in one slot.
//
// A script call has at most 50 buckets, and no more than the server refills in a quarter of a millisecond, by recent
// measurements. A batch has no more buckets than the server refills in a tenth of the timeout. After each batch that
// was not answered, the next one has half as many buckets. Buckets that fall due meanwhile wait, and their credit isn't
// lost.
//
// # Failures
//
//   - A script call that is refused because of one bad bucket is repeated for each of its buckets. The bad bucket is
//     tried again with growing delays.
//   - While Redis is unavailable, the buckets on that master wait with growing, jittered delays. Then the credit of the
//     gap is added, up to the policy's cap.
//   - The script detects a state that was lost or rolled back, and a clock that stepped back (see policy.Status). The
//     replica reports it once.
type Refiller struct {
	cfg   Config
	store store
	log   hclog.Logger
	rng   *rand.Rand // of the goroutine in Run

	update    chan struct{} // holds one token when buckets has changed
	published atomic.Int64  // the latest version that RecordVersion was given

	mu        sync.Mutex
	buckets   []Bucket
	templates *policy.Templates
	version   int64
	pulse     string                  // the name of the pulse of these buckets and templates
	pooled    map[string]*pooledTerms // by the keys of the pooled buckets
	running   bool
	leading   bool
	epoch     int64
	workers   []*worker
	away      error     // why the masters are unknown
	listed    time.Time // when they became known, if that failed at first
	memory    memory
	past      past

	stats         Stats
	templateStats map[string]*TemplateStats // of refilled templates, by prefix
}

// ErrRunning is returned when Run is called on a Refiller that runs.
var ErrRunning = errors.New("refill: already running")

// errNoMasters is the error of a Cluster in which no master has slots, as after all of its nodes have lost their
// configuration.
var errNoMasters = errors.New("refill: no master of the cluster has slots")

// New checks the configuration and returns a Refiller. It makes no call to Redis.
func New(cfg Config) (*Refiller, error) {
	cfg.setDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return newRefiller(cfg, newRedisStore(cfg.Redis)), nil
}

func newRefiller(cfg Config, s store) *Refiller {
	if cfg.Seed == 0 {
		cfg.Seed = rand.Uint64()
	}
	r := &Refiller{
		cfg: cfg, store: s, log: cfg.Logger, rng: rand.New(rand.NewPCG(cfg.Seed, 1)), update: make(chan struct{}, 1),
		stats: Stats{Calls: map[policy.Status]int64{}},
		past:  past{map[string]time.Time{}, map[string]time.Time{}},
	}
	r.configure(cfg.Buckets, cfg.Templates, cfg.Version)
	return r
}

// configure replaces the configuration. If r is shared already, it is called with the lock held. Pools that stay keep
// their terms, and templates that stay keep their counts.
func (r *Refiller) configure(buckets []Bucket, templates *policy.Templates, version int64) {
	earlier := r.templates
	before := r.buckets
	r.buckets = slices.Clone(buckets)
	r.templates = templates
	r.recordPast(earlier, before)
	r.version = version
	r.pulse = pulseName(r.cfg.Pulse, buckets, templates)
	terms, stats := r.pooled, r.templateStats
	r.pooled, r.templateStats = map[string]*pooledTerms{}, map[string]*TemplateStats{}
	for _, b := range buckets {
		if b.Pooled {
			r.pooled[b.Key] = cmp.Or(terms[b.Key], &pooledTerms{})
			r.pooled[b.Key].configure(b, version)
		}
	}
	for _, t := range refilled(templates) {
		r.templateStats[t.Prefix] = cmp.Or(stats[t.Prefix], newTemplateStats(t.Prefix))
	}
}

// Run refills until ctx ends, and then returns nil. All its goroutines have ended when it returns.
func (r *Refiller) Run(ctx context.Context) error {
	r.mu.Lock()
	if r.running {
		r.mu.Unlock()
		return ErrRunning
	}
	r.running = true
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.running = false
	}()

	var masters []master
	for failures := 0; ctx.Err() == nil; {
		if masters == nil {
			var err error
			masters, err = r.topology(ctx)
			r.mu.Lock()
			r.away = err
			if failures > 0 {
				r.listed = time.Now()
			}
			r.mu.Unlock()
			if err != nil {
				failures++
				if failures == 1 && ctx.Err() == nil {
					r.log.Warn("redis does not list its masters: refills pause", "error", err)
				}
				timing.Sleep(ctx.Done(), backoff(failures, maxBackoff, r.rng))
				continue
			}
			failures = 0
		}
		masters = r.work(ctx, masters)
	}
	return nil
}

// work refills on the masters until ctx ends, the buckets change or the masters change. It returns the masters with
// which to continue.
func (r *Refiller) work(ctx context.Context, masters []master) []master {
	workers := r.assign(masters)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for _, w := range workers {
		wg.Go(func() { w.run(ctx, stop) })
	}
	defer func() {
		close(stop)
		wg.Wait()
		r.mu.Lock()
		defer r.mu.Unlock()
		r.workers = nil
	}()

	poll := time.NewTicker(topologyInterval)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return masters
		case <-r.update:
			return masters
		case <-poll.C:
			now, err := r.topology(ctx)
			if err == nil && !slices.EqualFunc(masters, now, master.equal) {
				r.log.Info("redis masters have changed", "masters", len(now))
				return now
			}
		}
	}
}

// topology reads the list of the masters. It is never empty.
func (r *Refiller) topology(ctx context.Context) ([]master, error) {
	ctx, cancel := context.WithTimeout(ctx, connecting*r.cfg.Timeout)
	defer cancel()
	masters, err := r.store.masters(ctx)
	if err == nil && len(masters) == 0 {
		err = errNoMasters
	}
	return masters, err
}

// Update puts other buckets, other templates and a later version of the configuration in force. Each bucket changes
// with its next call, which comes at once, even from a standby. A template's bucket changes with its next refill.
// Removed buckets are no longer refilled. An error leaves everything as it was.
//
// The latest version that any living replica has is in force within a second, or within two refill intervals if they
// are longer. This doesn't depend on which replica leads:
//
//   - Every replica, even a standby, sends a later version to the server with one call per bucket.
//   - If the server reports a later version for a bucket, the replica stops sending its policy and does not create the
//     bucket. Otherwise it would restore an earlier policy after a loss. If the bucket has a schedule, only replicas
//     that know the schedule refill it. This ends when the replica's own file reaches that version.
//   - A leader to which a later version was reported, by the server or by [Refiller.RecordVersion], stops its pulse.
//     Then the standbys race.
//   - A standby races while the pulse has an earlier version than its own. Then the leader doesn't have the later file.
//   - A standby also races while the leader has other buckets, pools or refilled templates (see pulseName).
func (r *Refiller) Update(buckets []Bucket, templates *policy.Templates, version int64) error {
	if err := cmp.Or(checkVersion(version), checkBuckets(buckets)); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if version < r.version {
		return fmt.Errorf("%w: version %d is below the one in force, %d", ErrConfig, version, r.version)
	}
	r.configure(buckets, templates, version)
	timing.Signal(r.update)
	return nil
}

// RecordTemplates records the templates of an earlier configuration, such as those that were published before this
// replica's. Buckets of those templates that aren't full are refilled under the template that matches them now. Update
// calls RecordTemplates for the templates that it replaces.
func (r *Refiller) RecordTemplates(earlier *policy.Templates) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.recordPast(earlier, nil)
	timing.Signal(r.update)
}

// RecordVersion records that a version of the configuration is in use elsewhere, for example in the published
// templates. A leader whose own version is lower stops its pulse, so that replicas with a later file race. When Update
// has given the leader that version, it resumes the pulse.
func (r *Refiller) RecordVersion(version int64) {
	for {
		latest := r.published.Load()
		if version <= latest || r.published.CompareAndSwap(latest, version) {
			return
		}
	}
}

// SetTerms sets the terms of a pooled bucket from its next call on. Terms with an older fence than the present terms
// are ignored. So an older grant never replaces a later one.
func (r *Refiller) SetTerms(key string, t policy.Terms) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	terms := r.pooled[key]
	if terms == nil {
		return &BucketError{Bucket: key, Err: fmt.Errorf("%w: it isn't a pooled bucket of this replica", ErrConfig)}
	}
	if old := terms.Load(); old == nil || old.Fence.Before(t.Fence) {
		terms.set(t)
	}
	return nil
}

// Lead makes this replica the leader, under the epoch of its term, until ctx ends. Then it refills once more the
// buckets that will be due soon, which gives a successor time to read the indexes. It returns the cause of ctx when all
// calls that it made as the leader have ended. Lead needs elected mode.
func (r *Refiller) Lead(ctx context.Context, epoch int64) error {
	if !r.cfg.Elected {
		return fmt.Errorf("%w: Lead needs Elected", ErrConfig)
	}
	r.setLeading(true, epoch)
	r.log.Info("this replica leads", "epoch", epoch)
	<-ctx.Done()
	r.setLeading(false, epoch)
	r.log.Info("this replica stands by", "epoch", epoch, "cause", context.Cause(ctx))
	return context.Cause(ctx)
}

// setLeading changes the role of every worker, and waits until no call of the old
// role is under way.
func (r *Refiller) setLeading(leading bool, epoch int64) {
	r.mu.Lock()
	r.leading, r.epoch = leading, epoch
	workers := r.workers
	r.mu.Unlock()
	var wg sync.WaitGroup
	for _, w := range workers {
		wg.Go(func() { w.assume(leading) })
	}
	wg.Wait()
}

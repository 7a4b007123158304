package refill

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

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// topologyInterval is how often a Cluster's map of slots is read again.
const topologyInterval = 5 * time.Second

// Refiller keeps buckets full while Run runs.
type Refiller struct {
	cfg   Config
	store store
	log   hclog.Logger
	rng   *rand.Rand // of the goroutine in Run

	update chan struct{} // holds one token when buckets has changed

	mu        sync.Mutex
	buckets   []Bucket
	templates *policy.Templates
	tallies   map[string]*TemplateStats // of refilled templates, by prefix
	version   int64
	pooled    map[string]*pooledTerms
	running   bool
	leading   bool
	epoch     int64
	lanes     []*lane
	stats     Stats
}

// Stats counts what this replica's calls did since it started.
type Stats struct {
	Calls    map[policy.Status]int64 // answers by status
	Errors   int64                   // calls without an answer
	Added    int64                   // tokens this replica added
	Clamped  int64                   // tokens due that full buckets could not hold
	Leading  bool
	Epoch    int64 // of the present or last term
	Racing   bool  // elected mode: standing in for a silent leader, on one master or more
	Version  int64
	Buckets  int
	LastLag  time.Duration // time between the last two refills of the bucket refilled last
	LastCall time.Time     // of the last answer; zero if none came yet
	LastTurn time.Time     // when the slowest lane last went round; zero while none runs

	Templates []TemplateStats // refilled ones; the counts above are without them
}

// ErrRunning is returned when Run is called on a Refiller that runs.
var ErrRunning = errors.New("refill: already running")

// New checks the configuration; it makes no call.
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
		buckets: slices.Clone(cfg.Buckets), version: cfg.Version, stats: Stats{Calls: map[policy.Status]int64{}}, pooled: map[string]*pooledTerms{},
		tallies: map[string]*TemplateStats{},
	}
	r.setTemplates(cfg.Templates)
	return r
}

// setTemplates is called with the lock held. What was counted of a template that
// stays is kept.
func (r *Refiller) setTemplates(set *policy.Templates) {
	r.templates = set
	before := r.tallies
	r.tallies = map[string]*TemplateStats{}
	for _, t := range refilled(set) {
		tally := before[t.Prefix]
		if tally == nil {
			tally = &TemplateStats{Prefix: t.Prefix, Calls: map[policy.Status]int64{}, Lag: make([]int64, len(LagBounds)+1)}
		}
		r.tallies[t.Prefix] = tally
	}
}

// Run refills until ctx ends, and returns nil then. It returns only after its
// goroutines have.
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

	known := known{buckets: map[string]*bucket{}, shards: map[lua.Shard]*shard{}}
	var masters []master
	for failures := 0; ctx.Err() == nil; {
		if masters == nil {
			var err error
			if masters, err = r.topology(ctx); err != nil {
				if failures++; failures == 1 && ctx.Err() == nil {
					r.log.Warn("redis is away: its masters are unknown", "error", err)
				}
				sleep(ctx, backoff(failures, maxBackoff, r.rng))
				continue
			}
			failures = 0
		}
		masters = r.runLanes(ctx, masters, known)
	}
	return nil
}

// known is what the replica has learned, from one set of lanes to the next.
type known struct {
	buckets map[string]*bucket
	shards  map[lua.Shard]*shard
}

// runLanes refills on the masters until ctx ends, the buckets change or the
// masters do; it returns the masters to go on with.
func (r *Refiller) runLanes(ctx context.Context, masters []master, known known) []master {
	lanes := r.makeLanes(masters, known)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for _, l := range lanes {
		wg.Go(func() { l.run(ctx, stop) })
	}
	defer func() {
		close(stop)
		wg.Wait()
		r.mu.Lock()
		defer r.mu.Unlock()
		r.lanes = nil
	}()

	look := time.NewTicker(topologyInterval)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return masters
		case <-r.update:
			return masters
		case <-look.C:
			now, err := r.topology(ctx)
			if err == nil && !slices.EqualFunc(masters, now, func(a, b master) bool { return a.id == b.id && slices.Equal(a.slots, b.slots) }) {
				r.log.Info("redis masters have changed", "masters", len(now))
				return now
			}
		}
	}
}

func (r *Refiller) topology(ctx context.Context) ([]master, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	return r.store.masters(ctx)
}

// makeLanes shares the buckets out to a lane per master, keeping what is known
// of them.
func (r *Refiller) makeLanes(masters []master, known known) []*lane {
	r.mu.Lock()
	defer r.mu.Unlock()
	lanes := make([]*lane, len(masters))
	for i, m := range masters {
		l := &lane{
			r: r, rng: rand.New(rand.NewPCG(r.rng.Uint64(), uint64(i))), leading: r.leading,
			lead: make(chan turn), done: make(chan struct{}), pace: newPace(r.cfg.Batch, r.cfg.Timeout),
		}
		l.turned.Store(time.Now().UnixNano())
		if r.cfg.Elected {
			l.pulse = newPulse(r.pulseKey(m), r.cfg.Interval, r.version, l.rng)
			if old := known.buckets[l.pulse.beat.key]; old != nil {
				l.pulse.beat.inherit(old)
			}
			known.buckets[l.pulse.beat.key] = l.pulse.beat
			l.pulse.turn(l.leading, time.Now())
		}
		lanes[i] = l
	}
	now := time.Now() // one time for all, so that those of a slot begin together
	for _, b := range r.buckets {
		nb, old := newBucket(b, r.version), known.buckets[b.Key]
		if b.Pooled {
			nb = newPooledBucket(b, r.termsOf(b.Key))
		}
		if old != nil {
			nb.inherit(old)
		}
		// The terms of a pooled bucket get to the server by the pool's agent.
		nb.due = now
		nb.news = r.cfg.Elected && !b.Pooled && (old == nil || old.news || old.pooled != nil || old.terms.Fence.Before(nb.terms.Fence))
		known.buckets[b.Key] = nb
		i := slices.IndexFunc(masters, func(m master) bool { return m.owns(nb.slot) })
		// A slot that no master owns is one that is moving: any lane will do,
		// its calls fail until it has arrived.
		l := lanes[max(i, 0)]
		if nb.news {
			l.news = append(l.news, nb)
		} else {
			l.buckets = append(l.buckets, entryOf(nb))
		}
	}
	shards := make([][]*shard, len(masters))
	for _, s := range shardsOf(r.templates, known.shards) {
		i := max(0, slices.IndexFunc(masters, func(m master) bool { return m.owns(s.Slot()) }))
		shards[i] = append(shards[i], s)
	}
	for i, l := range lanes {
		l.sets = newActiveSets(l, shards[i], masters[i].slots != nil)
	}
	r.lanes = lanes
	return lanes
}

// pulseKey is the name of the master's pulse: the first numbered one whose slot
// it owns.
func (r *Refiller) pulseKey(m master) string {
	if m.slots == nil {
		return r.cfg.Pulse
	}
	for n := 0; ; n++ {
		if key := r.cfg.Pulse + ":" + strconv.Itoa(n); m.owns(lua.Slot(key)) {
			return key
		}
	}
}

// Update puts other buckets, other templates and a later version of the
// configuration in force: each bucket changes with its next call, which comes at
// once, from a standby too; a template's bucket changes with its next refill. What is
// gone from it is no longer refilled. An error leaves everything as it was.
func (r *Refiller) Update(buckets []Bucket, templates *policy.Templates, version int64) error {
	if err := checkBuckets(buckets); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if version < r.version {
		return fmt.Errorf("%w: version %d is below the one in force, %d", ErrConfig, version, r.version)
	}
	r.buckets, r.version = slices.Clone(buckets), version
	r.setTemplates(templates)
	select {
	case r.update <- struct{}{}:
	default:
	}
	return nil
}

// SetTerms gives a pooled bucket its terms from the next call on. Terms whose
// fence is older than that of the present ones are ignored: a grant never goes
// back.
func (r *Refiller) SetTerms(key string, t policy.Terms) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.ContainsFunc(r.buckets, func(b Bucket) bool { return b.Key == key && b.Pooled }) {
		return &BucketError{Bucket: key, Err: fmt.Errorf("%w: it isn't a pooled bucket of this replica", ErrConfig)}
	}
	terms := r.termsOf(key)
	if old := terms.Load(); old == nil || old.Fence.Before(t.Fence) {
		terms.Store(&t)
	}
	return nil
}

// termsOf is called with the lock held.
func (r *Refiller) termsOf(key string) *pooledTerms {
	if r.pooled[key] == nil {
		r.pooled[key] = &pooledTerms{}
	}
	return r.pooled[key]
}

// Lead makes this replica the one that refills until ctx ends, under the epoch
// of its term. Then it refills once more what will be due soon, which leaves a
// successor the time to learn the indexes, and returns ctx's cause once no call
// made as the leader is under way. Only elected mode has leaders.
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

// setLeading tells every lane, which take it in between two batches, and waits
// until they have.
func (r *Refiller) setLeading(leading bool, epoch int64) {
	r.mu.Lock()
	r.leading, r.epoch = leading, epoch
	lanes := r.lanes
	r.mu.Unlock()
	var wg sync.WaitGroup
	for _, l := range lanes {
		wg.Go(func() {
			taken := make(chan struct{}, 1)
			select {
			case l.lead <- turn{leading, taken}:
			case <-l.done:
				return
			}
			select {
			case <-taken:
			case <-l.done:
			}
		})
	}
	wg.Wait()
}

// Stats is a snapshot of the counts.
func (r *Refiller) Stats() Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.stats
	s.Calls = make(map[policy.Status]int64, len(r.stats.Calls))
	for k, v := range r.stats.Calls {
		s.Calls[k] = v
	}
	for _, l := range r.lanes {
		s.Racing = s.Racing || l.racing
		if t := time.Unix(0, l.turned.Load()); s.LastTurn.IsZero() || t.Before(s.LastTurn) {
			s.LastTurn = t
		}
	}
	for _, t := range refilled(r.templates) {
		one := r.tallies[t.Prefix].snapshot()
		for _, l := range r.lanes {
			l.sets.count(&one)
		}
		s.Templates = append(s.Templates, one)
	}
	s.Leading, s.Epoch, s.Version, s.Buckets = r.leading, r.epoch, r.version, len(r.buckets)
	return s
}

func (r *Refiller) setRacing(l *lane, racing bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l.racing = racing
}

func (r *Refiller) observe(e Event) {
	r.mu.Lock()
	if e.Err != nil {
		r.stats.Errors++
	} else {
		r.stats.Calls[e.Outcome.Status]++
		r.stats.Added += e.Outcome.Added
		r.stats.Clamped += e.Outcome.Clamped
		r.stats.LastCall = e.Replied
		if e.Outcome.Status.Wrote() {
			r.stats.LastLag = time.Duration(e.Outcome.Elapsed) * time.Microsecond
		}
	}
	r.mu.Unlock()
	if r.cfg.Observe != nil {
		r.cfg.Observe(e)
	}
}

// observeActive takes in the answers to calls for buckets of a shard.
func (r *Refiller) observeActive(s *shard, calls []lua.RefillCall, results []lua.RefillResult, sent, replied time.Time) {
	r.mu.Lock()
	if tally := r.tallies[s.Prefix]; tally != nil {
		tally.tally(s.interval, results)
	}
	r.mu.Unlock()
	if r.cfg.ObserveActive == nil {
		return
	}
	for i := range results {
		r.cfg.ObserveActive(Event{Key: calls[i].Key, Sent: sent, Replied: replied, Call: calls[i].Call, Outcome: results[i].Outcome, Err: results[i].Err})
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

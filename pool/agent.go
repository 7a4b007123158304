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

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Refiller keeps the pools' buckets of its region full under the terms that it
// is given. refill.Refiller is one, with pooled buckets.
type Refiller interface {
	SetTerms(key string, t policy.Terms) error
}

// AgentConfig is what an Agent needs.
type AgentConfig struct {
	Client   *clientv3.Client      // stays the caller's
	Prefix   string                // of the pools' keys, without a slash at the end
	Redis    redis.UniversalClient // of the region; stays the caller's
	Refiller Refiller              // may be nil
	Region   string
	Identity string // names the agent to people
	Settings Settings
	Timing   Timing
	Logger   hclog.Logger // nil means a default one named refiller.pool
}

// Agent speaks for a region: it tells the coordinator where the region's buckets
// stand, and puts the grants that come back in force. Every replica of a region
// runs one; one of them reports, and the others stand in when it is silent. It
// is safe for concurrent use.
type Agent struct {
	region, identity string
	timing           Timing
	log              hclog.Logger
	registry         registry
	buckets          buckets
	refiller         Refiller
	rng              *rand.Rand
	changed          chan struct{} // holds one token when the settings have changed

	mu       sync.Mutex
	settings Settings
	state    AgentState

	// Of the goroutine in Run:
	terms    map[string]policy.Terms // the newest known
	demand   map[string]int64        // as the coordinator sees it, in units of the newest terms
	fences   map[string]policy.Fence // in force, as of the last look
	versions map[string]policy.Version
	watch    map[string]*watchdog
	reported report            // the last that is known to be in etcd
	samples  map[string]sample // of demand, as the coordinator takes them from the reports
	since    time.Time         // when that was learned
	looked   time.Time         // the last look at Redis
	away     bool              // Redis
	cut      bool              // etcd
}

// AgentState is what an agent knows at an instant.
type AgentState struct {
	Reports  int64  // written to etcd
	Failures int64  // reports that could not be written
	Voids    int64  // eras begun because a clock was wrong
	Away     string // why Redis doesn't answer; empty while it does
	Cut      string // why etcd doesn't answer; empty while it does
	Conflict bool   // other pools are in force under the version of ours
	Unread   string // why the pools in etcd can't be read, which ours don't replace; empty if they can
	Shares   []Share
}

// Share is a region's part of a pool's rate as the region's own server knows it.
type Share struct {
	Pool      string
	Rate      policy.Rate   // in force: the grant's while it lasts, else the floor's
	Floor     policy.Rate   // always the region's
	Capacity  int64         // of the region's bucket
	Tokens    int64         // in it
	Demand    policy.Rate   // what the region could use, as the coordinator saw it at the newest grant
	Remaining time.Duration // of the grant, on the region's clock; 0 if it is on its floor
}

// buckets are the pools' buckets on a region's own server.
type buckets interface {
	tickets(ctx context.Context, keys []string) []lua.TicketResult
	refill(ctx context.Context, calls []lua.RefillCall) []lua.RefillResult
}

// redisBuckets are buckets in Redis.
type redisBuckets struct{ rdb redis.UniversalClient }

var _ buckets = redisBuckets{}

func (b redisBuckets) tickets(ctx context.Context, keys []string) []lua.TicketResult {
	return lua.Tickets(ctx, b.rdb, keys)
}

func (b redisBuckets) refill(ctx context.Context, calls []lua.RefillCall) []lua.RefillResult {
	return lua.RefillBatch(ctx, b.rdb, calls, 1)
}

// NewAgent checks the configuration; it makes no request.
func NewAgent(cfg AgentConfig) (*Agent, error) {
	if cfg.Client == nil || cfg.Prefix == "" || cfg.Redis == nil {
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
		region: cfg.Region, identity: cfg.Identity + "#" + strconv.FormatUint(seed, 36), // two of a name must not take each other's reports for their own
		timing: cfg.Timing, log: cfg.Logger, registry: r, buckets: b, refiller: cfg.Refiller,
		rng: rand.New(rand.NewPCG(seed, 2)), changed: make(chan struct{}, 1), settings: cfg.Settings,
		terms: map[string]policy.Terms{}, demand: map[string]int64{}, fences: map[string]policy.Fence{}, versions: map[string]policy.Version{}, samples: map[string]sample{}, watch: map[string]*watchdog{},
	}
}

// Update puts other settings in force, if their version is later. They become
// those of all regions once this agent has reached etcd.
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
	select {
	case a.changed <- struct{}{}:
	default:
	}
	return nil
}

// State is a snapshot.
func (a *Agent) State() AgentState {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.state
	s.Shares = slices.Clone(s.Shares)
	return s
}

func (a *Agent) note(change func(*AgentState)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(&a.state)
}

// Run reports and applies grants until ctx ends, and returns nil then, once its
// goroutines have ended.
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
			if a.learn(e) && a.apply(ctx) {
				a.look(ctx, true)
			}
		case <-timer.C:
			a.look(ctx, false)
		}
		timer.Reset(time.Until(a.next()))
	}
}

// listen keeps up with the keys of etcd that concern this region.
func (a *Agent) listen(ctx context.Context, events chan<- entry) {
	keys := []string{configKey, shareKeys + a.region, reportKeys + a.region}
	for failures := 0; ctx.Err() == nil; {
		began := time.Now()
		err := a.follow(ctx, events, keys)
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, errRaced) {
			sleep(ctx, pace)
			continue
		}
		if time.Since(began) > maxPace {
			failures = 0
		}
		if failures++; failures == 1 {
			a.log.Warn("connection to etcd lost: grants last to their end", "region", a.region, "error", err)
		}
		a.note(func(s *AgentState) { s.Cut = err.Error() })
		sleep(ctx, min(pace<<min(failures, 5), maxPace)/2+time.Duration(rand.Int64N(int64(pace))))
	}
}

// follow reads the keys, then their changes, until something fails or the
// settings change.
func (a *Agent) follow(ctx context.Context, events chan<- entry, keys []string) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	loading, done := context.WithTimeout(ctx, a.timeout())
	entries, revision, err := a.registry.load(loading, keys...)
	done()
	if err != nil {
		return err
	}
	a.note(func(s *AgentState) { s.Cut = "" })
	var config entry
	for _, e := range entries {
		if e.key == configKey {
			config = e
		}
		select {
		case events <- e:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := a.propose(ctx, config); err != nil {
		return err
	}
	watched := make(chan error, 1)
	wg.Go(func() { watched <- a.registry.watch(ctx, revision+1, events, keys...) })
	for {
		select {
		case err := <-watched:
			return err
		case <-a.changed:
			reading, done := context.WithTimeout(ctx, a.timeout())
			entries, _, err := a.registry.load(reading, configKey)
			done()
			if err != nil {
				a.mustPropose()
				return err
			}
			config = entry{}
			if len(entries) > 0 {
				config = entries[0]
			}
			if err := a.propose(ctx, config); err != nil {
				a.mustPropose()
				return err
			}
		}
	}
}

func (a *Agent) mustPropose() {
	select {
	case a.changed <- struct{}{}:
	default:
	}
}

// errRaced is returned when another replica has written its settings while we
// were about to.
var errRaced = errors.New("pool: the settings in etcd have just changed")

// propose writes our settings if those in etcd are older.
func (a *Agent) propose(ctx context.Context, config entry) error {
	a.mu.Lock()
	ours := a.settings
	a.mu.Unlock()
	a.note(func(s *AgentState) { s.Conflict, s.Unread = false, "" })
	if config.revision > 0 {
		if theirs, err := decodeSettings(config.value); err != nil {
			// A later release wrote them, or nobody knows who: they are not ours to replace.
			a.note(func(s *AgentState) { s.Unread = err.Error() })
			a.log.Error("settings in etcd can't be read and stay", "error", err)
			return nil
		} else if theirs.Version >= ours.Version {
			if theirs.Version == ours.Version && !theirs.Equal(ours) {
				a.note(func(s *AgentState) { s.Conflict = true })
				a.log.Warn("pools changed under the same version and are ignored: raise the config's version", "version", ours.Version)
			}
			return nil
		}
	} else if len(ours.Pools) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, a.timeout())
	defer cancel()
	_, v, err := a.registry.commit(ctx, office{}, []write{{key: configKey, value: ours.record(), seen: config.revision}})
	if err == nil && v != committed {
		err = errRaced
	}
	return err
}

// timeout bounds a request to etcd.
func (a *Agent) timeout() time.Duration { return max(a.timing.Report, time.Second) }

// learn takes in a key and reports whether there are new terms.
func (a *Agent) learn(e entry) bool {
	switch {
	case e.deleted:
	case e.key == reportKeys+a.region:
		if r, err := decodeReport(e.value); err == nil {
			a.hear(r)
		}
	case e.key == shareKeys+a.region:
		s, err := decodeShare(e.value)
		if err != nil {
			a.log.Error("share can't be read and is ignored", "region", a.region, "error", err)
			return false
		}
		news := false
		for name, list := range s.terms {
			if t := list[0]; a.terms[name].Fence.Before(t.Fence) {
				a.terms[name], a.demand[name], news = t, s.demand[name], true
			}
		}
		return news
	}
	return false
}

// apply puts the newest terms in force, and reports whether that was news to
// the server.
func (a *Agent) apply(ctx context.Context) bool {
	var calls []lua.RefillCall
	for name, t := range a.terms {
		if a.fences[name].Before(t.Fence) {
			// The call settles under the old terms and switches, even if the index
			// has moved on since our last look; if it has gone back, the server has
			// lost writes, and the call finds that out. A bucket that is missing is
			// left to the refiller.
			calls = append(calls, lua.RefillCall{Key: name, Call: policy.Call{Version: a.versions[name], Terms: &t}})
		}
	}
	wrote := false
	if len(calls) > 0 {
		calling, cancel := context.WithTimeout(ctx, a.redisTimeout())
		for i, r := range a.buckets.refill(calling, calls) {
			if r.Err == nil && r.Status != policy.StatusUnknown {
				a.versions[calls[i].Key] = r.Version
				if r.Pool {
					a.fences[calls[i].Key] = r.Fence
				}
				wrote = wrote || r.Status.Wrote()
			}
		}
		cancel()
	}
	// The refiller comes second, so that the agent that made the change knows.
	if a.refiller != nil {
		for name, t := range a.terms {
			if err := a.refiller.SetTerms(name, t); err != nil {
				a.log.Debug("pool is not refilled here", "pool", name, "error", err)
			}
		}
	}
	return wrote
}

// redisTimeout bounds a request to Redis.
func (a *Agent) redisTimeout() time.Duration { return a.timing.Report / 2 }

// pools are the names of the pools to report on: those of the settings, and
// those that the region has a share in, were it only to be told to stop.
func (a *Agent) pools() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var list []string
	for _, p := range a.settings.Pools {
		if p.Has(a.region) {
			list = append(list, p.Name)
		}
	}
	for name := range a.terms {
		if !slices.Contains(list, name) {
			list = append(list, name)
		}
	}
	slices.Sort(list)
	return list
}

// look reads the tickets, watches the clocks, and reports if it must, or if it
// is this agent's turn or the coordinator doesn't know what it read.
func (a *Agent) look(ctx context.Context, must bool) {
	names := a.pools()
	asking, cancel := context.WithTimeout(ctx, a.redisTimeout())
	sent := time.Now()
	results := a.buckets.tickets(asking, names)
	replied := time.Now()
	cancel()
	a.looked = replied

	r := report{agent: a.identity, tickets: map[string]lua.Ticket{}}
	var voids []lua.RefillCall
	var failed error
	for i, res := range results {
		if res.Err != nil {
			failed = res.Err
			continue
		}
		t := res.Ticket
		if t.Version.Era != 0 && a.clockWrong(names[i], reading{sent, replied, t.Now}, t) {
			voids = append(voids, a.void(names[i], t))
			continue
		}
		r.tickets[names[i]] = t
		a.fences[names[i]], a.versions[names[i]] = t.Fence, a.remember(names[i], t.Version)
		before, known := a.reported.tickets[names[i]]
		must = must || !known || before.Fence != t.Fence || before.Version.Era != t.Version.Era || a.surges(names[i], t)
	}
	a.observeRedis(ctx, names, results, failed)
	if len(voids) > 0 {
		calling, cancel := context.WithTimeout(ctx, a.redisTimeout())
		a.buckets.refill(calling, voids)
		cancel()
		a.note(func(s *AgentState) { s.Voids += int64(len(voids)) })
	}
	if len(voids) > 0 || a.behind() && a.apply(ctx) {
		a.look(ctx, true) // what was read is no longer so
		return
	}
	if len(r.tickets) > 0 && (must || !time.Now().Before(a.turn())) {
		a.put(ctx, r)
	}
}

// sample is what was asked for until a ticket, in tokens per µs.
type sample struct {
	until lua.Ticket
	rate  float64
}

// hear takes in what has been reported.
func (a *Agent) hear(r report) {
	for name, t := range r.tickets {
		if s, ok := a.sample(name, t); ok {
			a.samples[name] = s
		}
	}
	a.reported, a.since = r, time.Now()
}

// sample is the one that a report of the ticket would make; not ok if it would
// make none, being too short.
func (a *Agent) sample(pool string, t lua.Ticket) (sample, bool) {
	from := a.samples[pool].until
	elapsed := time.Duration(t.Now-from.Now) * time.Microsecond
	if from.Version.Era != t.Version.Era || elapsed < 0 || t.Added < from.Added || t.Denied < from.Denied {
		return sample{until: t}, true
	}
	asked := t.Added - from.Added - t.Tokens + from.Tokens + t.Denied - from.Denied
	return sample{t, float64(asked) / float64(max(t.Now-from.Now, 1))}, elapsed >= a.timing.Report/2
}

// surges reports whether demand has risen so much since the last report that
// the coordinator should hear of it before the period is over.
func (a *Agent) surges(pool string, now lua.Ticket) bool {
	s, ok := a.sample(pool, now)
	t := a.terms[pool]
	step := 0.1 * float64(max(t.Tokens, t.GrantTokens)) / float64(max(t.Per, 1))
	return ok && s.rate > 1.2*a.samples[pool].rate+step
}

// remember is the later of two versions: what a server has lost must not be
// forgotten before a refill has found out.
func (a *Agent) remember(pool string, v policy.Version) policy.Version {
	if known := a.versions[pool]; v.Before(known) {
		return known
	}
	return v
}

// behind reports whether the server hasn't the newest terms.
func (a *Agent) behind() bool {
	for name, t := range a.terms {
		if a.fences[name].Before(t.Fence) {
			return true
		}
	}
	return false
}

func (a *Agent) clockWrong(pool string, r reading, t lua.Ticket) bool {
	w := a.watch[pool]
	if w == nil {
		w = &watchdog{}
		a.watch[pool] = w
	}
	if !w.check(r, t.Version.Era, a.timing.Lease) {
		return false
	}
	a.log.Warn("redis' clock doesn't agree with ours: bucket begins a new era", "pool", pool, "region", a.region, "era", t.Version.Era)
	return true
}

// void is the call that begins a new era: it claims to have seen more than the
// server has. The grant is of the era before, so it is over.
func (a *Agent) void(pool string, t lua.Ticket) lua.RefillCall {
	call := policy.Call{Version: policy.Version{Era: t.Version.Era + 1, Index: t.Version.Index}}
	if terms, ok := a.terms[pool]; ok {
		call.Terms = &terms
	}
	return lua.RefillCall{Key: pool, Call: call}
}

// observeRedis notes what the tickets tell of this region, and whether there are
// any.
func (a *Agent) observeRedis(ctx context.Context, names []string, results []lua.TicketResult, failed error) {
	var shares []Share
	for i, res := range results {
		if t, ok := a.terms[names[i]]; ok && res.Err == nil {
			share := shareOf(names[i], t, res.Ticket)
			share.Demand = policy.Rate{Tokens: a.demand[names[i]], Per: share.Floor.Per}
			shares = append(shares, share)
		}
	}
	a.note(func(s *AgentState) {
		if s.Shares, s.Away = shares, ""; failed != nil {
			s.Away = failed.Error()
		}
	})
	if away := failed != nil; away != a.away && ctx.Err() == nil {
		if a.away = away; away {
			a.log.Warn("redis is away: no tickets, so no grants", "region", a.region, "error", failed)
		} else {
			a.log.Info("redis is back: tickets go on", "region", a.region)
		}
	}
}

// shareOf is what is in force if the server has the newest terms.
func shareOf(pool string, t policy.Terms, at lua.Ticket) Share {
	s := Share{Pool: pool, Floor: t.Rate(), Capacity: t.Capacity, Tokens: at.Tokens}
	s.Rate = s.Floor
	if left := t.GrantEnd - at.Now; at.Fence == t.Fence && at.Version.Era == t.GrantEra && left > 0 {
		s.Remaining = time.Duration(left) * time.Microsecond
		s.Rate.Tokens = t.GrantTokens
	}
	return s
}

// put writes the report.
func (a *Agent) put(ctx context.Context, r report) {
	writing, cancel := context.WithTimeout(ctx, a.timeout())
	defer cancel()
	_, err := a.registry.put(writing, reportKeys+a.region, r.encode())
	if err == nil {
		a.hear(r)
		a.note(func(s *AgentState) { s.Reports, s.Cut = s.Reports+1, "" })
	} else if ctx.Err() == nil {
		a.since = time.Now() // so that the next try comes in its time
		a.note(func(s *AgentState) { s.Failures, s.Cut = s.Failures+1, err.Error() })
	}
	if cut := err != nil; cut != a.cut && ctx.Err() == nil {
		if a.cut = cut; cut {
			a.log.Warn("report can't be written", "region", a.region, "error", err)
		} else {
			a.log.Info("reports go on", "region", a.region)
		}
	}
}

// turn is when this agent reports next: the one that did last after a period,
// the others a little later.
func (a *Agent) turn() time.Time {
	if a.since.IsZero() || a.reported.agent == a.identity {
		return a.since.Add(a.timing.Report * 95 / 100)
	}
	return a.since.Add(a.timing.Report * 5 / 4)
}

// next is when to look again.
func (a *Agent) next() time.Time {
	at := a.looked.Add(a.timing.Report * 52 / 100)
	if a.reported.agent != a.identity {
		at = at.Add(time.Duration(a.rng.Int64N(int64(a.timing.Report / 8))))
		if turn := a.turn(); turn.Before(at) && turn.After(a.looked) {
			at = turn.Add(time.Duration(a.rng.Int64N(int64(a.timing.Report / 8))))
		}
	}
	return at
}

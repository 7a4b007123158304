package pool

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

var (
	errUnavailable = errors.New("server is unavailable")
	errNoSpace     = errors.New("no space")
	errCompacted   = errors.New("compacted")
)

// world has a simulated etcd, a simulated Redis for each region and the processes of all regions. They run on the clock
// of a synctest bubble.
type world struct {
	t       *testing.T
	rng     *rand.Rand // for the schedule; only one goroutine uses it
	log     hclog.Logger
	pool    Pool
	timing  Timing
	version int64
	sabotage

	mu        sync.Mutex
	noise     *rand.Rand // for latencies
	revision  int64
	keys      map[string]entry
	created   map[string]int64
	watchers  map[chan struct{}]bool
	history   []entry
	etcdDown  bool
	servers   map[string]*simRedis
	procs     []*proc
	lastFence map[string]policy.Fence
	limit     float64   // R, in tokens per second
	stock     float64   // C
	level     float64   // the part of the consumption that R has not covered yet
	at        time.Time // when level was computed
	slack     float64   // tokens that faults may have added
	maxGap    time.Duration
	worst     float64 // largest Σ rate in force / R
	worstI2   float64 // largest consumption / bound
	violation string
	events    []string
	wg        sync.WaitGroup
	stop      context.CancelFunc
	ctx       context.Context
	leader    *proc
	renewed   time.Time
	dethrone  context.CancelFunc
	host      *world // the world whose servers these processes use; nil if they use the servers of this one
	files     map[string]simFile
	extra     float64  // floors that are allowed above limit, for regions with two servers
	compacted int64    // watches can't begin at or before this revision
	backup    snapshot // an operator's backup of etcd
	tampering bool     // a client other than the coordinator writes
	resigned  *proc    // the last coordinator that resigned
}

// sabotage switches mechanisms off, to show that each one is needed.
type sabotage struct {
	lieAck       bool // reports acknowledge terms that were never applied
	noGuard      bool // transactions aren't guarded
	noQuarantine bool // a region that lost writes goes on as if nothing had happened
	unreserved   bool // the floor is an equal part of the rate, as if no other region used it
	reuse        bool // a grant is used after its end
	hideForeign  bool // reports don't show grants that etcd doesn't have
}

// simFile is the configuration of the bucket in a region's processes. plain is its policy if it is an ordinary bucket,
// and nil if it is the pool's.
type simFile struct {
	version int64
	plain   *policy.Policy
}

// home returns the world that has the servers.
func (w *world) home() *world {
	if w.host != nil {
		return w.host
	}
	return w
}

// simRedis is a region's server. It has a bucket of package policy and a clock.
type simRedis struct {
	region        string
	skew          time.Duration
	slew          slew
	down          bool
	full          bool // it refuses writes
	bucket        policy.Bucket
	added, denied int64
	taken         int64
	cuts          int  // how often the bucket's capacity was lowered
	pooled        bool // its bucket is the pool's
	// pending is set after a fail-over to an older state, or after the clock was set back, until a refill detects this.
	// That refill voids the grant.
	pending      bool
	pendingSince time.Time
	// suspectEra is the era in which the clock was last set back. If no replica refills until the clock has caught up, the
	// script can't detect this, and the grant of the era may last too long. suspectUntil is the time by which an agent
	// must have detected it; zero while no agent can read the server.
	suspectEra   int64
	suspectUntil time.Time
	copies       []simCopy
	demand       float64 // tokens per second
	drained      time.Time
	owed         float64
	eraFence     map[int64]policy.Fence
	granted      map[policy.Fence]policy.Terms // the terms as they were sent, before sabotage changed them
}

func newSimRedis(region string, skew time.Duration) *simRedis {
	return &simRedis{region: region, skew: skew, drained: time.Now(), eraFence: map[int64]policy.Fence{},
		granted: map[policy.Fence]policy.Terms{}}
}

type simCopy struct {
	at            time.Time
	bucket        policy.Bucket
	added, denied int64
}

func (s *simRedis) now() int64 { return time.Now().Add(s.skew + s.slew.gained()).UnixMicro() }

// slew describes a clock that runs fast, or slow if rate is below 0.
type slew struct {
	rate  float64 // as a part of 1
	since time.Time
	had   time.Duration
}

func (s slew) gained() time.Duration {
	return s.had + time.Duration(s.rate*float64(time.Since(s.since)))
}

// at returns the slew with another rate from now on.
func (s slew) at(rate float64) slew { return slew{rate, time.Now(), s.gained()} }

// maxSlew is the highest rate at which time daemons slew: chrony's maxslewrate is 83,333 ppm.
const maxSlew = 0.083333

// slews makes the clock of a region's server run fast or slow from now on, and the clocks of the processes of all
// regions.
func (w *world) slews(region string, server, procs float64) {
	for _, p := range w.of("") {
		p.set(func() { p.slew = p.slew.at(procs) })
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drain(w.servers[region])
	s := w.servers[region]
	s.slew = s.slew.at(server)
	w.record("the clock of %s's redis is slewed by %.3f, those of processes by %.3f", region, server, procs)
}

// fast returns the relative error of the fastest clock of a server, by which the server credits too much. w is locked.
func (w *world) fast() (most float64) {
	for _, s := range w.servers {
		most = max(most, s.slew.rate)
	}
	return most
}

func cloneBucket(b policy.Bucket) policy.Bucket {
	var c policy.Bucket
	if b.Tokens != nil {
		v := *b.Tokens
		c.Tokens = &v
	}
	if b.Index != nil {
		v := *b.Index
		c.Index = &v
	}
	if b.Control != nil {
		v := *b.Control
		c.Control = &v
	}
	return c
}

// rate returns the rate in force, in tokens per second.
func (s *simRedis) rate() float64 {
	c := s.bucket.Control
	if c == nil || s.pending { // the refill that detects a rollback credits nothing for the time before it
		return 0
	}
	n := c.Terms.Tokens
	suspect := s.suspectEra == c.Era && (s.suspectUntil.IsZero() || time.Now().Before(s.suspectUntil))
	if !suspect && c.Terms.GrantEra == c.Era && s.now() < c.Terms.GrantEnd {
		n = c.Terms.GrantTokens
	}
	return float64(n) * 1e6 / float64(c.Terms.Per)
}

// proc is one process of a region. It has an agent, a refill loop and a candidate for coordinator.
type proc struct {
	w           *world
	region      string
	server      string // its Redis: the region's, or a second one under the region's name
	name        string
	cancel      context.CancelFunc
	ctx         context.Context
	coordinator *Coordinator
	agent       *Agent

	mu      sync.Mutex
	thaw    chan struct{}
	asleep  time.Time // since when its host is suspended, if it is
	slew    slew
	behind  time.Duration // how long its host was suspended in all; its monotonic clock is behind by this time
	trap    int           // the number of commits until the process is paused; 0 for never
	etcd    fault
	redis   fault
	dead    bool
	terms   *policy.Terms
	version policy.Version
	file    simFile
}

type fault struct {
	noRequest, noReply, slow bool
	late                     time.Duration // the delay of requests
	readOnly                 bool          // etcd refuses the writes of a coordinator, as if it had no space left
}

// gate waits until the process isn't paused.
func (p *proc) gate() {
	for {
		p.mu.Lock()
		thaw := p.thaw
		p.mu.Unlock()
		if thaw == nil {
			return
		}
		<-thaw
	}
}

// call carries a request to a server and the reply back. A request still arrives if its sender has given up.
func (p *proc) call(ctx context.Context, f *fault, latency time.Duration, serve func() bool) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	p.gate() // a process that resumes still sends the request that it was about to send
	p.w.mu.Lock()
	there := latency/2 + time.Duration(p.w.noise.Int64N(int64(latency)))
	back := latency/2 + time.Duration(p.w.noise.Int64N(int64(latency)))
	p.mu.Lock()
	if f.slow && p.w.noise.IntN(3) == 0 {
		there += time.Duration(p.w.noise.Int64N(int64(4 * time.Second)))
	}
	there += f.late
	lost := f.noRequest
	p.mu.Unlock()
	p.w.mu.Unlock()
	answered := make(chan struct{})
	if !lost {
		time.AfterFunc(there, func() {
			p.w.mu.Lock()
			ok := serve()
			p.w.mu.Unlock()
			p.mu.Lock()
			ok = ok && !f.noReply
			p.mu.Unlock()
			if ok {
				time.AfterFunc(back, func() { close(answered) })
			}
		})
	}
	select {
	case <-ctx.Done():
		p.gate()
		return ctx.Err()
	case <-answered:
		p.gate()
		return nil
	}
}

const etcdLatency, redisLatency = 40 * time.Millisecond, time.Millisecond

// The registry of one process.

var _ registry = (*proc)(nil)

func (p *proc) toEtcd(ctx context.Context, serve func()) error {
	return p.call(ctx, &p.etcd, etcdLatency, func() bool {
		if p.w.etcdDown {
			return false
		}
		serve()
		return true
	})
}

func (p *proc) load(ctx context.Context, keys ...string) ([]entry, int64, error) {
	var entries []entry
	var revision int64
	err := p.toEtcd(ctx, func() {
		for k, e := range p.w.keys {
			if !strings.HasPrefix(k, leaderKeys) && (len(keys) == 0 || slices.Contains(keys, k)) {
				entries = append(entries, e)
			}
		}
		revision = p.w.revision
	})
	if err != nil { // the reply may still arrive and change entries
		return nil, 0, err
	}
	slices.SortFunc(entries, func(a, b entry) int { return strings.Compare(a.key, b.key) })
	return entries, revision, nil
}

func (p *proc) watch(ctx context.Context, from int64, to chan<- entry, keys ...string) error {
	wake := make(chan struct{}, 1)
	p.w.mu.Lock()
	p.w.watchers[wake] = true
	p.w.mu.Unlock()
	defer func() {
		p.w.mu.Lock()
		delete(p.w.watchers, wake)
		p.w.mu.Unlock()
	}()
	for {
		p.gate()
		var send []entry
		var compacted bool
		p.mu.Lock()
		cut := p.etcd.noReply || p.etcd.noRequest
		p.mu.Unlock()
		p.w.mu.Lock()
		if !cut && !p.w.etcdDown {
			compacted = from <= p.w.compacted
			i, _ := slices.BinarySearchFunc(p.w.history, from, func(e entry, r int64) int { return int(e.revision - r) })
			for _, e := range p.w.history[i:] {
				if len(keys) == 0 || slices.Contains(keys, e.key) {
					send = append(send, e)
				}
				from = e.revision + 1
			}
		}
		delay := etcdLatency/2 + time.Duration(p.w.noise.Int64N(int64(etcdLatency)))
		p.w.mu.Unlock()
		if compacted {
			return errCompacted
		}
		if len(send) > 0 {
			timing.Sleep(ctx.Done(), delay)
			p.gate()
		}
		for _, e := range send {
			select {
			case to <- e:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-wake:
		case <-time.After(time.Second): // a partition may have ended
		}
	}
}

// set writes or deletes a key. w is locked.
func (w *world) set(key, value string, deleted bool) {
	e := entry{key: key, value: value, revision: w.revision, deleted: deleted}
	if deleted {
		delete(w.keys, key)
	} else {
		w.keys[key] = e
	}
	if !strings.HasPrefix(key, leaderKeys) {
		w.history = append(w.history, e)
	}
	if region, ok := e.under(shareKeys); ok && !deleted {
		s, err := decodeShare(value)
		if err != nil && !w.tampering {
			w.fail("share of %s: %v", region, err)
		} else if list := s.pools[w.pool.Name].terms; len(list) > 0 {
			if list[0].Fence.Before(w.lastFence[region]) && !w.noGuard {
				w.fail("I6: the fence of %s falls in etcd from %v to %v", region, w.lastFence[region], list[0].Fence)
			}
			w.lastFence[region] = list[0].Fence
		}
	}
	if region, ok := e.under(reportKeys); ok && !deleted && w.host == nil {
		w.checkUsage(region, value)
	}
	if os.Getenv("TRACE") != "" {
		w.record("SET %s", strings.ReplaceAll(key+" "+value, "\n", " | "))
	}
	for wake := range w.watchers {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
}

// checkUsage asserts that a region reports no more usage than there was. Each time its capacity is lowered, it may
// report as much more as two seconds of the rate. w is locked.
func (w *world) checkUsage(region, value string) {
	r, err := decodeReport(value)
	if s := w.servers[region]; err == nil && s != nil && w.servers[second(region)] == nil {
		if over := float64(r.tickets[w.pool.Name].used - s.taken); over > w.slack+2*w.limit*float64(1+s.cuts) {
			w.fail("%s reports %.0f tokens more than were taken", region, over)
		}
	}
}

func (p *proc) put(ctx context.Context, key, value string) (int64, error) {
	var revision int64
	err := p.toEtcd(ctx, func() {
		if region, ok := strings.CutPrefix(key, reportKeys); ok && p.w.lieAck {
			value = p.w.lie(region, value)
		}
		if region, ok := strings.CutPrefix(key, reportKeys); ok && p.w.hideForeign {
			value = p.w.hide(region, value)
		}
		p.w.revision++
		p.w.set(key, value, false)
		revision = p.w.revision
	})
	if err != nil {
		return 0, err
	}
	return revision, nil
}

// lie changes a report so that it acknowledges the newest offer.
func (w *world) lie(region, value string) string {
	r, err := decodeReport(value)
	s, err2 := decodeShare(w.keys[shareKeys+region].value)
	if err != nil || err2 != nil || len(s.pools[w.pool.Name].terms) == 0 {
		return value
	}
	t := r.tickets[w.pool.Name]
	t.kind, t.terms = pooled, s.pools[w.pool.Name].terms[0]
	r.tickets[w.pool.Name] = t
	return r.encode()
}

// hide changes a report so that it shows no grant that isn't in the region's share.
func (w *world) hide(region, value string) string {
	r, err := decodeReport(value)
	if err != nil {
		return value
	}
	s, _ := decodeShare(w.keys[shareKeys+region].value) // none if it can't be read
	known := slices.ContainsFunc(s.pools[w.pool.Name].terms,
		func(t policy.Terms) bool { return r.tickets[w.pool.Name].acknowledges(t) })
	if t := r.tickets[w.pool.Name]; !known && t.kind == pooled {
		r.tickets[w.pool.Name] = ticket{now: t.now, era: t.era}
	}
	return r.encode()
}

func (p *proc) commit(ctx context.Context, l leadership, writes []write) (int64, error) {
	p.set(func() {
		if p.trap > 0 && l.key != "" {
			p.trap--
			if p.trap == 0 {
				p.thaw = make(chan struct{})
			}
		}
	})
	var revision int64
	var refused error
	err := p.toEtcd(ctx, func() {
		p.mu.Lock()
		readOnly := p.etcd.readOnly && l.key != ""
		p.mu.Unlock()
		refused = p.w.refuses(l, writes)
		if readOnly {
			refused = errNoSpace
		}
		if refused != nil {
			return
		}
		p.w.revision++
		for _, wr := range writes {
			p.w.set(wr.key, wr.value, wr.remove)
		}
		revision = p.w.revision
	})
	if err != nil { // the transaction may still be made or refused, and set revision and refused
		return 0, err
	}
	return revision, refused
}

// refuses returns the error of a transaction whose guards don't hold, or nil. w is locked.
func (w *world) refuses(l leadership, writes []write) error {
	if w.noGuard {
		return nil
	}
	if l.key != "" && w.created[l.key] != l.revision {
		return errDeposed
	}
	changed := func(wr write) bool { return w.keys[wr.key].revision != wr.seen }
	if l.epoch != 0 && w.keys[epochKey].value != strconv.FormatInt(l.epoch, 10) || slices.ContainsFunc(writes, changed) {
		return errConflict
	}
	return nil
}

// The region's Redis, as one process reaches it.

var _ buckets = (*proc)(nil)

func (p *proc) toRedis(ctx context.Context, serve func(s *simRedis)) error {
	return p.call(ctx, &p.redis, redisLatency, func() bool {
		home := p.w.home()
		if home != p.w {
			home.mu.Lock()
			defer home.mu.Unlock()
		}
		s := home.servers[p.server]
		if s == nil || s.down {
			return false
		}
		serve(s)
		return true
	})
}

func (p *proc) tickets(ctx context.Context, keys []string) []lua.TicketResult {
	results := make([]lua.TicketResult, len(keys))
	err := p.toRedis(ctx, func(s *simRedis) {
		if s.suspectEra != 0 && s.suspectUntil.IsZero() && !s.full { // an agent checks the clock
			s.suspectUntil = time.Now().Add(5 * p.w.timing.Report / 2)
		}
		p.w.home().drain(s)
		for i := range results {
			t := lua.Ticket{Now: s.now()}
			if c := s.bucket.Control; c != nil {
				terms := c.Terms
				if sent, ok := s.granted[terms.Fence]; ok && terms.Pool {
					terms = sent
				}
				t.Version, t.Terms = policy.Version{Era: c.Era, Index: *s.bucket.Index}, &terms
				if terms.Pool {
					t.Fence = terms.Fence
				}
				t.Tokens = *s.bucket.Tokens
				t.Added = s.added
				t.Denied = s.denied
			}
			results[i].Ticket = t
		}
	})
	if err != nil { // the reply may still arrive and change results
		failed := make([]lua.TicketResult, len(keys))
		for i := range failed {
			failed[i].Err = errUnavailable
		}
		return failed
	}
	return results
}

func (p *proc) refill(ctx context.Context, calls []lua.RefillCall) []lua.RefillResult {
	results := make([]lua.RefillResult, len(calls))
	err := p.toRedis(ctx, func(s *simRedis) {
		for i, c := range calls {
			results[i].Err = nil
			if s.full {
				results[i].Err = errNoSpace
				continue
			}
			results[i].Outcome = p.w.home().refillBucket(s, c.Call)
		}
	})
	if err != nil {
		failed := make([]lua.RefillResult, len(calls))
		for i := range failed {
			failed[i].Err = errUnavailable
		}
		return failed
	}
	return results
}

// refillBucket runs the refill script. w is locked.
func (w *world) refillBucket(s *simRedis, c policy.Call) policy.Outcome {
	if c.Terms != nil && (w.unreserved || w.reuse) {
		t := *c.Terms
		s.granted[t.Fence] = t
		if w.unreserved {
			t.Tokens = int64(float64(t.Per) / 1e6 * w.limit / float64(len(w.servers)))
		}
		if w.reuse && t.GrantEra != 0 {
			t.GrantEnd += time.Hour.Microseconds()
		}
		c.Terms = &t
	}
	w.drain(s)
	b := &s.bucket
	if w.noQuarantine && b.Control != nil {
		if stored := (policy.Version{Era: b.Control.Era, Index: *b.Index}); stored.Before(c.Version) {
			c.Version = stored
		}
	}
	capacity := int64(0)
	if b.Control != nil {
		capacity = b.Control.Terms.Capacity
	}
	o := b.Refill(c, s.now())
	if !o.Status.Wrote() {
		return o
	}
	if b.Control.Terms.Capacity < capacity {
		s.cuts++
	}
	if o.Status == policy.StatusRolledBack || o.Status == policy.StatusClock ||
		time.Since(s.pendingSince) > 5*simInterval {
		s.pending = false
	}
	if o.Pool { // the script counts only in a pool's bucket
		s.added += o.Added
	}
	w.maxGap = max(w.maxGap, min(time.Duration(o.Elapsed)*time.Microsecond,
		time.Duration(b.Control.Terms.MaxElapsed)*time.Microsecond))
	if s.pooled != o.Pool { // fences of a pool and of an ordinary bucket are not ordered
		s.pooled, s.eraFence = o.Pool, map[int64]policy.Fence{}
	}
	if last := s.eraFence[o.Version.Era]; o.Fence.Before(last) && !w.noQuarantine && !s.pending {
		w.fail("I6: the fence of %s falls in Redis from %v to %v", s.region, last, o.Fence)
	}
	s.eraFence[o.Version.Era] = o.Fence
	w.check()
	return o
}

// check asserts that the rates in force together are at most the limit (I1). It is called after each change of a rate,
// since between changes grants only end. w is locked.
func (w *world) check() {
	sum := 0.0
	for _, s := range w.servers {
		sum += s.rate()
	}
	limit := w.limit + w.extra
	w.worst = max(w.worst, sum/limit)
	if sum > limit*(1+1e-9) {
		rates := ""
		for _, s := range w.servers {
			rates += fmt.Sprintf(" %s %.1f", s.region, s.rate())
		}
		w.fail("I1: rates in force are %.4f of the permitted rates:%s", sum/limit, rates)
	}
}

// fail records the first violation. w is locked.
func (w *world) fail(format string, args ...any) {
	if w.violation == "" {
		w.violation = fmt.Sprintf(format, args...)
		w.record("VIOLATION %s", w.violation)
	}
}

func (w *world) record(format string, args ...any) {
	w.events = append(w.events, time.Now().UTC().Format("04:05.000 ")+fmt.Sprintf(format, args...))
}

const simInterval = 200 * time.Millisecond

func simPool(name string) Pool {
	return Pool{Name: name, Rate: policy.PerSecond(1000), Capacity: 3000, Interval: simInterval, Regions: []Region{
		{Name: "ap", Weight: 1, Floor: policy.PerSecond(50)},
		{Name: "eu", Weight: 2, Floor: policy.PerSecond(100)},
		{Name: "us", Weight: 1, Floor: policy.PerSecond(50)},
	}}
}

func newWorld(t *testing.T, seed uint64, p Pool, s sabotage) *world {
	w := &world{
		t: t, rng: rand.New(rand.NewPCG(seed, 1)), noise: rand.New(rand.NewPCG(seed, 2)), log: hclog.NewNullLogger(), pool: p,
		timing:   DefaultTiming(),
		sabotage: s, version: 1, keys: map[string]entry{}, created: map[string]int64{}, watchers: map[chan struct{}]bool{},
		servers: map[string]*simRedis{}, files: map[string]simFile{}, lastFence: map[string]policy.Fence{},
		limit: float64(p.Rate.Tokens) / p.Rate.Per.Seconds(), stock: float64(p.Capacity), at: time.Now(),
	}
	w.ctx, w.stop = context.WithCancel(t.Context())
	for _, r := range p.Regions {
		w.addRegion(r.Name)
	}
	w.wg.Go(w.elect)
	w.wg.Go(w.consume)
	return w
}

// beside returns a world whose processes use the servers of w, but another etcd.
func (w *world) beside() *world {
	other := &world{
		t: w.t, rng: w.rng, noise: rand.New(rand.NewPCG(w.rng.Uint64(), 2)), log: w.log, pool: w.pool, timing: w.timing,
		version: w.version,
		keys:    map[string]entry{}, created: map[string]int64{}, watchers: map[chan struct{}]bool{}, files: w.files,
		lastFence: map[string]policy.Fence{}, host: w, ctx: w.ctx,
	}
	w.wg.Go(other.elect)
	w.wg.Go(func() {
		<-w.ctx.Done()
		other.wg.Wait()
	})
	return other
}

func (w *world) addRegion(region string) {
	w.mu.Lock()
	w.servers[region] = newSimRedis(region, time.Duration(w.rng.Int64N(int64(time.Hour)))-30*time.Minute)
	w.mu.Unlock()
	for i := range 2 {
		w.startProc(region, fmt.Sprint(region, i))
	}
}

func (w *world) startProc(region, name string) *proc { return w.startOn(region, region, name) }

// startOn starts a process of a region that uses the given server.
func (w *world) startOn(server, region, name string) *proc {
	p := &proc{w: w, region: region, server: server, name: name}
	p.ctx, p.cancel = context.WithCancel(w.ctx)
	w.mu.Lock()
	settings := Settings{Version: w.version, Pools: []Pool{w.pool}}
	p.file = w.files[region]
	w.mu.Unlock()
	if p.file.plain != nil {
		settings = Settings{}
	}
	p.coordinator = newCoordinator(p, w.timing, w.log)
	p.coordinator.now = p.now
	p.agent = newAgent(AgentConfig{Refiller: p, Region: region, Identity: name, Settings: settings, Timing: w.timing,
		Logger: w.log}, p, p, w.rng.Uint64())
	p.agent.now = p.now
	p.agent.raw = p.raw
	w.mu.Lock()
	w.procs = append(w.procs, p)
	w.mu.Unlock()
	w.wg.Go(func() { _ = p.agent.Run(p.ctx) })
	w.wg.Go(p.refillLoop)
	return p
}

// SetTerms implements Refiller.
func (p *proc) SetTerms(_ string, t policy.Terms) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.terms == nil || p.terms.Fence.Before(t.Fence) {
		p.terms = &t
	}
	return nil
}

func (p *proc) refillLoop() {
	var missing time.Time
	won, plain := false, false
	for p.ctx.Err() == nil {
		wait := simInterval
		p.w.mu.Lock()
		if !won {
			wait += simInterval/20 + time.Duration(p.w.noise.Int64N(int64(simInterval/10)))
		}
		name := p.w.pool.Name
		p.w.mu.Unlock()
		timing.Sleep(p.ctx.Done(), wait)
		c := p.nextCall(plain, !missing.IsZero() && time.Since(missing) >= 2*simInterval)
		ctx, cancel := context.WithTimeout(p.ctx, 500*time.Millisecond)
		r := p.refill(ctx, []lua.RefillCall{{Key: name, Call: c}})[0]
		cancel()
		won = false
		switch {
		case r.Err != nil:
		case r.Status == policy.StatusUnknown:
			if missing.IsZero() {
				missing = time.Now()
			}
		default:
			missing = time.Time{}
			won = r.Status.Wrote()
			plain = !r.Pool
			p.mu.Lock()
			p.version = r.Version
			p.mu.Unlock()
		}
	}
}

// nextCall returns the call that a refill.Refiller would make with the process' file and the newest terms.
func (p *proc) nextCall(isPlain, create bool) policy.Call {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := policy.Call{Version: p.version, Create: policy.CreateLost}
	switch {
	case p.file.plain != nil:
		t := p.file.plain.Terms(policy.Fence{Epoch: p.file.version})
		c.Terms = &t
	case isPlain:
		t := p.w.pool.Start(p.region, p.w.version)
		t.Version = p.file.version
		c.Terms, c.Create = &t, policy.CreateNever
		return c
	case p.terms != nil:
		t := *p.terms
		t.Version = p.file.version
		c.Terms = &t
	}
	if create {
		c.Create = policy.CreateInitial
	}
	return c
}

// deploy gives a region's processes another file.
func (w *world) deploy(region string, f simFile) {
	w.locked(func() { w.files[region] = f })
	settings := Settings{Version: w.version, Pools: []Pool{w.pool}}
	for _, p := range w.of(region) {
		p.set(func() { p.file = f })
		if f.plain == nil {
			_ = p.agent.Update(settings)
		}
	}
	w.recordf("%s has a file of version %d, plain: %v", region, f.version, f.plain != nil)
}

// consume lets the consumers of all regions take tokens until the test ends. See drain.
func (w *world) consume() {
	for w.ctx.Err() == nil {
		timing.Sleep(w.ctx.Done(), 50*time.Millisecond)
		w.mu.Lock()
		for _, s := range w.servers {
			w.drain(s)
		}
		w.mu.Unlock()
	}
}

// drain makes a region's consumers take the tokens that they have wanted since the last drain, as far as there are any.
// It asserts that consumption in any window is within its bound (I2). w is locked.
func (w *world) drain(s *simRedis) {
	now := time.Now()
	w.level = max(0, w.level-(w.limit+w.extra)*(1+w.fast())*now.Sub(w.at).Seconds())
	w.at = now
	s.owed += s.demand * now.Sub(s.drained).Seconds()
	s.drained = now
	n := int64(s.owed)
	s.owed -= float64(n)
	if s.down || s.bucket.Control == nil {
		return
	}
	got := min(n, *s.bucket.Tokens)
	s.bucket.Take(got, s.now())
	s.denied += n - got
	s.taken += got
	w.level += float64(got)
	if last := len(s.copies) - 1; last < 0 || now.Sub(s.copies[last].at) >= 500*time.Millisecond {
		s.copies = append(s.copies, simCopy{now, cloneBucket(s.bucket), s.added, s.denied})
		s.copies = s.copies[max(0, len(s.copies)-8):]
	}
	bound := w.stock + w.limit*w.maxGap.Seconds() + w.slack
	w.worstI2 = max(w.worstI2, w.level/bound)
	if w.level > bound+1 {
		w.fail("I2: consumption is %.0f above R·w, bound %.0f", w.level, bound)
	}
}

const simTTL = 5 * time.Second

// elect keeps a coordinator elected. The leader must renew its lease once in a TTL.
func (w *world) elect() {
	for w.ctx.Err() == nil {
		timing.Sleep(w.ctx.Done(), 250*time.Millisecond)
		w.mu.Lock()
		now := time.Now()
		if w.etcdDown {
			w.renewed = w.renewed.Add(250 * time.Millisecond) // leases don't end without a quorum
			w.mu.Unlock()
			continue
		}
		switch {
		case w.leader != nil && w.leader.reachable() && w.created[leaderKeys+w.leader.name] != 0:
			w.renewed = now
		case w.leader != nil && now.Sub(w.renewed) < simTTL && w.created[leaderKeys+w.leader.name] != 0:
		default:
			if w.leader != nil {
				w.revision++
				delete(w.created, leaderKeys+w.leader.name)
				w.depose(w.leader, w.dethrone)
				w.leader = nil
			}
			var able []*proc
			for _, p := range w.procs {
				if p.reachable() {
					able = append(able, p)
				}
			}
			if len(able) > 1 { // the other candidates have waited for longer than one that has resigned
				able = slices.DeleteFunc(able, func(p *proc) bool { return p == w.resigned })
			}
			if len(able) > 0 {
				w.crown(able[w.noise.IntN(len(able))])
			}
		}
		w.mu.Unlock()
	}
}

// crown makes p the leader. w is locked.
func (w *world) crown(p *proc) {
	w.revision++
	o := leadership{key: leaderKeys + p.name, revision: w.revision}
	w.created[o.key] = o.revision
	w.leader, w.renewed = p, time.Now()
	ctx, cancel := context.WithCancel(p.ctx)
	w.dethrone = cancel
	w.record("%s leads from revision %d on", p.name, o.revision)
	w.wg.Go(func() {
		defer cancel()
		err := p.coordinator.govern(ctx, o)
		w.mu.Lock()
		defer w.mu.Unlock()
		if ctx.Err() == nil && w.created[o.key] == o.revision {
			w.record("%s resigns: %v", p.name, err)
			w.revision++
			delete(w.created, o.key)
			w.leader, w.resigned = nil, p
		}
	})
}

// depose makes the former leader detect the end of its term, up to two seconds later. If the process is paused, this
// time begins when it resumes. Until then the process acts as a leader.
func (w *world) depose(p *proc, end context.CancelFunc) {
	late := time.Duration(w.noise.Int64N(int64(2 * time.Second)))
	w.wg.Go(func() {
		p.gate()
		timing.Sleep(w.ctx.Done(), late)
		end()
	})
}

// reachable reports whether etcd receives requests of the process. w is locked.
func (p *proc) reachable() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.dead && p.thaw == nil && !p.etcd.noRequest && !p.etcd.noReply
}

func (p *proc) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
}

func (p *proc) kill() {
	p.set(func() { p.dead = true })
	p.cancel()
	p.w.mu.Lock()
	p.w.procs = slices.DeleteFunc(p.w.procs, func(q *proc) bool { return q == p })
	p.w.mu.Unlock()
}

// pause stops a process.
func (p *proc) pause() {
	p.set(func() { p.thaw = make(chan struct{}) })
}

// suspend stops a process and its monotonic clock.
func (p *proc) suspend() {
	p.pause()
	p.set(func() { p.asleep = time.Now() })
}

// now returns the time on the process' monotonic clock.
func (p *proc) now() time.Time {
	gained := time.Duration(0)
	p.set(func() { gained = p.slew.gained() })
	return p.raw().Add(gained)
}

// raw returns the time on the clock of the process' host that isn't slewed.
func (p *proc) raw() (now time.Time) {
	p.set(func() {
		now = time.Now().Add(-p.behind)
		if !p.asleep.IsZero() {
			now = p.asleep.Add(-p.behind)
		}
	})
	return now
}

// resume lets a paused or suspended process continue.
func (p *proc) resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.asleep.IsZero() {
		p.behind, p.asleep = p.behind+time.Since(p.asleep), time.Time{}
	}
	if p.thaw != nil {
		close(p.thaw)
		p.thaw = nil
	}
}

// of returns the processes of a region, or all processes if region is "".
func (w *world) of(region string) []*proc {
	w.mu.Lock()
	defer w.mu.Unlock()
	var list []*proc
	for _, p := range w.procs {
		if region == "" || p.region == region {
			list = append(list, p)
		}
	}
	return list
}

func (w *world) demands(d map[string]float64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for r, n := range d {
		w.drain(w.servers[r])
		w.servers[r].demand = n
	}
	w.record("demand %v", d)
}

// rates returns the rates in force, in tokens per second.
func (w *world) rates() map[string]float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := map[string]float64{}
	for name, s := range w.servers {
		r[name] = s.rate()
	}
	return r
}

// allocated returns the rates that the regions should get for their true demands.
func (w *world) allocated() map[string]float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	wants := map[string]float64{}
	for _, r := range w.pool.Regions {
		wants[r.Name] = (1 + headroom) * w.servers[r.Name].demand
	}
	return w.pool.Divide(wants, nil)
}

func (w *world) end() {
	for _, p := range w.of("") {
		p.resume()
	}
	w.stop()
	w.wg.Wait()
}

// failOver replaces a region's server by a replica that lags. It does so only if a process remembers the writes that
// the replica lacks. Without such a process the replica's state would count as the right one, which is a documented
// limit.
func (w *world) failOver(region string) {
	for _, p := range w.of(region) {
		p.set(func() { p.redis = fault{} })
	}
	time.Sleep(simInterval * 3)
	remembered := false
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.servers[region]
	for _, p := range w.procs {
		p.mu.Lock()
		remembered = remembered || p.server == region && p.thaw == nil && s.bucket.Index != nil &&
			p.version.Index >= *s.bucket.Index-1
		p.mu.Unlock()
	}
	if len(s.copies) == 0 || s.down || !remembered {
		return
	}
	c := s.copies[w.rng.IntN(len(s.copies))]
	if c.bucket.Control == nil {
		return
	}
	w.slack += float64(max(0, *c.bucket.Tokens-*s.bucket.Tokens))
	s.bucket = cloneBucket(c.bucket)
	s.added = c.added
	s.denied = c.denied
	s.pending, s.pendingSince = !w.noQuarantine, time.Now()
	w.record("%s fails over to a replica %s behind", region, time.Since(c.at))
	w.check()
}

// stepClock sets a region's clock.
func (w *world) stepClock(region string, by time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.servers[region]
	s.skew += by
	if by > 0 {
		w.slack += w.limit * min(by, 2*time.Second).Seconds()
	} else if c := s.bucket.Control; c != nil {
		if s.now() < c.Last-policy.ClockTolerance {
			s.pending, s.pendingSince = true, time.Now()
		}
		// If no replica refills until the clock has caught up, the script can't detect this step.
		s.suspectEra, s.suspectUntil = c.Era, time.Time{}
		if s.down || s.full {
			w.slack += w.limit * 5 / 2 * w.timing.Report.Seconds()
		}
	}
	w.record("clock of %s steps by %s", region, by)
	w.check()
}

// simSeed returns the seed in REFILLER_SEED, and true, or otherwise if it isn't set.
func simSeed(t *testing.T, otherwise uint64) (seed uint64, fixed bool) {
	if v := os.Getenv("REFILLER_SEED"); v != "" {
		n, err := strconv.ParseUint(v, 10, 64)
		require.NoError(t, err)
		return n, true
	}
	return otherwise, false
}

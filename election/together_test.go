package election

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
)

// schedules returns how many schedules TestElectionAndRefillLoopTogether plays: the number in REFILLER_SCHEDULES, or a
// few. Each schedule has the next seed.
func schedules(t *testing.T) int {
	t.Helper()
	v := os.Getenv("REFILLER_SCHEDULES")
	if v == "" {
		return 100
	}
	n, err := strconv.Atoi(v)
	require.NoError(t, err, "REFILLER_SCHEDULES")
	return n
}

// path is the network between one process and a server.
type path struct {
	dice *dice

	mu     sync.Mutex
	cut    bool // nothing gets through
	deaf   bool // no reply gets through
	slow   time.Duration
	paused time.Time // the process is stopped until then
}

func (p *path) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
}

// stopped waits until the process is no longer stopped. Even the end of a context doesn't cut the wait short.
func (p *path) stopped() {
	p.mu.Lock()
	until := p.paused
	p.mu.Unlock()
	time.Sleep(time.Until(until))
}

// carry brings one request to the server and waits for the reply. The request arrives even if its sender has given up.
func (p *path) carry(ctx context.Context, serve func() error) error {
	p.stopped()
	p.mu.Lock()
	cut := p.cut
	deaf := p.deaf
	slow := p.slow
	p.mu.Unlock()
	if cut {
		<-ctx.Done()
		return ctx.Err()
	}
	arrived := make(chan error, 1)
	time.AfterFunc(p.dice.upTo(time.Millisecond+slow), func() { arrived <- serve() })
	var err error
	select {
	case <-ctx.Done():
		return ctx.Err()
	case err = <-arrived:
	}
	if deaf {
		<-ctx.Done()
		return ctx.Err()
	}
	if !timing.Sleep(ctx.Done(), p.dice.upTo(time.Millisecond+slow)) {
		return ctx.Err()
	}
	p.stopped()
	return err
}

// plan decides what happens to a request to etcd.
func (p *path) plan(op string) call {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut {
		return call{lostThere: true}
	}
	c := call{there: p.dice.upTo(2*time.Millisecond+p.slow) + max(0, time.Until(p.paused)),
		back: p.dice.upTo(2*time.Millisecond + p.slow)}
	c.lostBack = p.deaf && op != "wait-deleted"
	return c
}

// process is one replica. It combines an elector and a refiller as internal/replica does.
type process struct {
	name        string
	refiller    *refill.Refiller
	version     int64 // of its configuration
	etcd, redis *path
	began       time.Time
	resign, end context.CancelFunc
	done        chan struct{} // closed when all goroutines of the process have ended
	crashed     bool
}

// simulation is one schedule.
type simulation struct {
	seed    uint64
	without mechanism
	elected bool
	etcd    *fakeServer
	redis   *fakeRedis
	running sync.WaitGroup

	accounts []*account
	version  atomic.Int64 // of the configuration

	mu        sync.Mutex
	processes []*process
	leads     map[int64]*leading
	epochs    int64
	revoked   int64 // the highest epoch whose lease an operator ended
	terms     int
	faults    []error
	started   int
}

// leading is a call of lead that hasn't returned.
type leading struct {
	elector *Elector
	process *process
	since   time.Time
}

func (s *simulation) fault(format string, args ...any) { // the caller holds s.mu
	s.faults = append(s.faults, fmt.Errorf(format, args...))
}

// begins judges a term at its begin. If two terms are trusted at the same time, both are trusted when the later one
// begins. A term is not judged if an operator revoked its lease: its leader may not have detected that yet. Such a term
// may even begin after the revocation, if the reply by which it won was on its way.
func (s *simulation) begins(p *process, e *Elector, term Term) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if term.Epoch > s.revoked {
		for epoch, l := range s.leads {
			if !l.process.crashed && epoch > s.revoked && l.elector.State().Role == RoleLeader {
				s.fault("epoch %d of %s begins while %d is trusted", term.Epoch, p.name, epoch)
			}
		}
		if term.Epoch <= s.epochs {
			s.fault("epoch %d of %s after epoch %d", term.Epoch, p.name, s.epochs)
		}
		s.epochs = term.Epoch
	}
	s.leads[term.Epoch] = &leading{elector: e, process: p, since: time.Now()}
	s.terms++
}

// asks judges a request of a process to etcd: a process must not delete its key before its call of lead has returned.
func (s *simulation) asks(p *process, op string) {
	if op != "remove" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for epoch, l := range s.leads {
		if l.process == p {
			s.fault("%s resigns while its Lead for epoch %d is still running", p.name, epoch)
		}
	}
}

func (s *simulation) ends(term Term) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.leads, term.Epoch)
}

// start starts a process with a version of the configuration.
func (s *simulation) start(version int64) *process {
	s.started++
	name := fmt.Sprint("replica-", s.started)
	p := &process{
		name: name, version: version, began: time.Now(), done: make(chan struct{}),
		etcd: &path{dice: newDice(s.seed, name+"etcd")}, redis: &path{dice: newDice(s.seed, name+"redis")},
	}
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	rdb.AddHook(&redisLink{p.redis, s.redis, name})
	random := newDice(s.seed, name)
	buckets, templates := s.configured(version)
	refiller, err := refill.New(refill.Config{
		Redis: rdb, Version: version, Elected: s.elected, Interval: interval, Logger: hclog.NewNullLogger(),
		Seed:    uint64(random.float()*(1<<53)) | 1,
		Buckets: buckets, Templates: templates,
	})
	if err != nil {
		panic(err)
	}
	p.refiller = refiller
	store := s.etcd.connect(name)
	store.setPlan(func(op string) call {
		s.asks(p, op)
		return p.etcd.plan(op)
	})
	cfg := testConfig(name)
	cfg.TTL = time.Second
	cfg.SafetyMargin = 200 * time.Millisecond
	cfg.RetryInterval = interval
	cfg.ResignTimeout = 500 * time.Millisecond
	if s.without == trustMargin {
		cfg.SafetyMargin = -cfg.SafetyMargin
	}
	cfg.Logger = hclog.NewNullLogger()
	elector := newElector(cfg, store)
	elector.random = random.float

	serving, end := context.WithCancel(context.Background())
	candidacy, resign := context.WithCancel(serving)
	p.end, p.resign = end, resign
	var running sync.WaitGroup
	running.Go(func() {
		if err := refiller.Run(serving); err != nil {
			panic(err)
		}
	})
	lead := func(ctx context.Context, term Term) error {
		s.begins(p, elector, term)
		err := refiller.Lead(ctx, term.Epoch)
		timing.Sleep(serving.Done(), random.upTo(3*interval)) // a real leader may have more to end
		s.ends(term)
		return err
	}
	if s.without == leadIsAwaited {
		awaited := lead
		lead = func(ctx context.Context, term Term) error {
			running.Go(func() { _ = awaited(ctx, term) })
			<-ctx.Done()
			return ctx.Err()
		}
	}
	running.Go(func() {
		if s.elected {
			if err := elector.Run(candidacy, lead); err != nil {
				panic(err)
			}
		}
		<-candidacy.Done()
		timing.Sleep(serving.Done(), 3*interval)
		end()
	})
	s.running.Go(func() {
		running.Wait()
		_ = rdb.Close()
		close(p.done)
	})
	return p
}

// configured returns the buckets and templates of a version of the configuration.
func (s *simulation) configured(version int64) (buckets []refill.Bucket, templates *policy.Templates) {
	var list []policy.Template
	for _, a := range s.accounts {
		if a.prefix != "" {
			list = append(list, policy.Template{Prefix: a.prefix, Policy: a.policies[version]})
		} else {
			buckets = append(buckets, refill.Bucket{Key: a.key, Policy: a.policies[version]})
		}
	}
	templates, err := policy.NewTemplates(version, list, nil)
	if err != nil {
		panic(err)
	}
	return buckets, templates
}

// update gives a process a version of the configuration while it runs.
func (s *simulation) update(p *process, version int64) {
	buckets, templates := s.configured(version)
	p.version = version
	if err := p.refiller.Update(buckets, templates, version); err != nil {
		panic(err)
	}
}

// crash ends a process. From now on no request of it reaches a server.
func (s *simulation) crash(p *process) {
	for _, way := range []*path{p.etcd, p.redis} {
		way.set(func() { way.cut, way.paused = true, time.Time{} })
	}
	s.mu.Lock()
	p.crashed = true
	s.mu.Unlock()
	p.end()
}

// revoke ends all leases, as an operator may.
func (s *simulation) revoke() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revoked = s.etcd.revokeAll()
}

// leader returns the process that has led for five intervals, or nil.
func (s *simulation) leader() *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.leads {
		if !l.process.crashed && l.elector.State().Role == RoleLeader && time.Since(l.since) > 5*interval {
			return l.process
		}
	}
	return nil
}

const (
	stormy   = 4 * time.Second
	settling = 2500 * time.Millisecond // longer than the longest back-off after a failed call, and than a lease
	calm     = time.Second
)

// play plays the schedule of a seed in a bubble of its own, and returns what was broken.
func play(t *testing.T, seed uint64, without mechanism) (s *simulation, faults []error) {
	synctest.Test(t, func(*testing.T) { s, faults = storm(seed, without) })
	return s, faults
}

func storm(seed uint64, without mechanism) (*simulation, []error) {
	d := newDice(seed, "schedule")
	pick := func(n int) int { return int(d.float() * float64(n)) }
	accounts := drawAccounts(d)
	s := &simulation{
		seed: seed, without: without, elected: d.float() < 0.7, etcd: newFakeServer(), redis: newFakeRedis(accounts,
			without), leads: map[int64]*leading{},
		accounts: accounts,
	}
	s.etcd.fast = 180 * time.Millisecond // the margin is 200 ms
	for range 2 + pick(2) {
		s.processes = append(s.processes, s.start(0))
	}
	ctx, cancel := context.WithCancel(context.Background())
	for _, a := range accounts {
		s.running.Go(func() { a.consume(ctx, newDice(seed, "consumer of "+a.key), s.version.Load) })
		if a.foreign {
			s.running.Go(func() { a.takePlain(ctx, newDice(seed, "foreign taker")) })
			s.running.Go(func() { a.addPlain(ctx, newDice(seed, "foreign adder")) })
		}
	}
	timing.Sleep(ctx.Done(), 5*interval)

	for begin := time.Now(); time.Since(begin) < stormy; timing.Sleep(ctx.Done(), d.upTo(4*interval)) {
		s.strike(ctx, d)
	}
	timing.Sleep(ctx.Done(), settling)
	from := time.Since(s.redis.start)
	timing.Sleep(ctx.Done(), calm)
	cancel()
	for _, p := range s.processes {
		p.end()
	}
	s.running.Wait()
	s.redis.mu.Lock() // a request whose sender has given up may still arrive
	defer s.redis.mu.Unlock()
	faults := s.faults
	for _, a := range accounts {
		faults = append(faults, a.judge(from)...)
	}
	return s, faults
}

// drawAccounts picks the buckets of a schedule. The first of allAccounts is always among them.
func drawAccounts(d *dice) []*account {
	all := allAccounts()
	drawn := all[:1:1]
	for _, a := range all[1:] {
		if d.float() < 0.4 {
			drawn = append(drawn, a)
		}
	}
	return drawn
}

// strike makes one fault happen, or one change of the configuration.
func (s *simulation) strike(ctx context.Context, d *dice) {
	pick := func(n int) int { return int(d.float() * float64(n)) }
	i := pick(len(s.processes))
	lasting := d.upTo(12 * interval)
	switch pick(18) {
	case 1, 2:
		s.crash(s.processes[i])
		s.processes[i] = s.start(s.version.Load())
	case 3:
		s.processes[i].resign()
		s.processes[i] = s.start(s.version.Load())
	case 12, 13: // a later configuration, in one process after the other
		s.version.Store(1)
		if d.float() < 0.5 {
			s.update(s.processes[i], 1)
		} else {
			s.crash(s.processes[i])
			s.processes[i] = s.start(1)
		}
		if d.float() < 0.3 {
			s.revoke()
		}
	case 0, 4, 5, 6:
		s.strikeNetwork(ctx, s.processes[i], pick(4), d, lasting)
	default:
		s.strikeRedis(ctx, i, pick(8), d, lasting)
	}
}

// strikeNetwork cuts a process off from Redis or etcd, stops it, or makes its network slow.
func (s *simulation) strikeNetwork(ctx context.Context, p *process, what int, d *dice, lasting time.Duration) {
	both := []*path{p.etcd, p.redis}
	one := both[:1]
	if d.float() < 0.5 {
		one = both[1:]
	}
	for _, way := range both {
		switch {
		case what == 0: // stopped and resumed
			way.set(func() { way.paused = time.Now().Add(lasting) })
		case what == 1:
			way.set(func() { way.slow = lasting / 4 })
		case way == one[0] && what == 2:
			way.set(func() { way.cut = true })
		case way == one[0]:
			way.set(func() { way.deaf = true })
		}
	}
	timing.Sleep(ctx.Done(), lasting)
	for _, way := range both {
		way.set(func() {
			way.cut = false
			way.deaf = false
			way.slow = 0
		})
	}
}

// strikeRedis makes Redis unavailable, or makes it lose state or read its clock wrong.
func (s *simulation) strikeRedis(ctx context.Context, i, what int, d *dice, lasting time.Duration) {
	r := s.redis
	one := s.accounts[int(d.float()*float64(len(s.accounts)))]
	switch what {
	case 0:
		r.change(func() { r.away = true })
		timing.Sleep(ctx.Done(), lasting)
		r.change(func() { r.away = false })
	case 1: // fails over to a replica that lags
		var restore func()
		r.change(func() { restore = r.snapshot() })
		timing.Sleep(ctx.Done(), d.upTo(8*interval))
		r.change(restore)
	case 2:
		s.loseAll(ctx, i, d)
	case 3:
		jump := d.upTo(10 * time.Second)
		r.change(func() { r.step(jump) })
	case 4:
		jump := d.upTo(10 * time.Second)
		if d.float() < 0.5 {
			jump /= 200 // too little to be detected
		}
		r.change(func() { r.step(-jump) })
	case 5: // far ahead for a moment
		far := 30 * 24 * time.Hour
		r.change(func() { r.step(far) })
		timing.Sleep(ctx.Done(), lasting)
		r.change(func() { r.step(-far) })
	case 6:
		r.change(func() { one.evict(r.bucket(one.key)) })
	case 7:
		r.change(func() { r.forbidden = one.key })
		timing.Sleep(ctx.Done(), lasting)
		r.change(func() { r.forbidden, one.allowed = "", time.Since(r.start) })
	}
}

// loseAll deletes all buckets in Redis just before a new process starts, which does not know that they existed. There
// may be an outage at that time. The new process may get its configuration again before the outage ends.
func (s *simulation) loseAll(ctx context.Context, i int, d *dice) {
	timing.Sleep(ctx.Done(), settling)
	mixed := slices.ContainsFunc(s.processes, func(p *process) bool { return p.version != s.version.Load() })
	if s.elected && s.leader() == nil || mixed { // a process with an older file remembers a bucket, but must not create it
		return
	}
	for s.elected && s.processes[i] == s.leader() {
		i = (i + 1) % len(s.processes)
	}
	outage := d.float() < 0.5
	if outage {
		s.redis.change(func() { s.redis.away = true })
		timing.Sleep(ctx.Done(), d.upTo(12*interval))
	}
	s.crash(s.processes[i])
	s.redis.change(s.redis.lose)
	s.processes[i] = s.start(s.version.Load())
	if outage {
		timing.Sleep(ctx.Done(), d.upTo(3*interval))
		if d.float() < 0.5 {
			s.update(s.processes[i], s.version.Load())
		}
		s.redis.change(func() { s.redis.away = false })
		timing.Sleep(ctx.Done(), settling) // the other processes may still back off
	}
	timing.Sleep(ctx.Done(), 5*interval)
}

// TestElectionAndRefillLoopTogether plays random schedules of replicas in race mode and under an election, with a
// simulated Redis and etcd. There are pauses, crashes, restarts, partitions both ways and one way, slow networks,
// outages, state that is lost or rolled back, clocks that step, and a later configuration. The calls that reach Redis
// are checked against the promises.
func TestElectionAndRefillLoopTogether(t *testing.T) {
	t.Parallel()
	first, n := propertySeed(t), schedules(t)
	var mu sync.Mutex
	seen, terms := map[policy.Status]int{}, 0
	t.Run("play", func(t *testing.T) {
		workers := runtime.GOMAXPROCS(0)
		for w := range workers {
			t.Run(fmt.Sprint(w), func(t *testing.T) {
				t.Parallel()
				for i := w; i < n; i += workers {
					s, faults := play(t, first+uint64(i), nothing)
					if len(faults) > 0 {
						t.Errorf("REFILLER_SEED=%d REFILLER_SCHEDULES=1: %v", first+uint64(i), errors.Join(faults...))
					}
					mu.Lock()
					for _, a := range s.accounts {
						for _, w := range a.writes {
							seen[w.outcome.Status]++
						}
					}
					terms += s.terms
					mu.Unlock()
				}
			})
		}
	})
	t.Logf("%d schedules from seed %d: %d terms, refills %v", n, first, terms, seen)
	if n < 100 {
		return
	}
	require.Greater(t, terms, n/2)
	for _, status := range []policy.Status{policy.StatusApplied, policy.StatusSwitched, policy.StatusInitialised,
		policy.StatusRolledBack, policy.StatusClock} {
		require.Positive(t, seen[status], "%s", status)
	}
}

// TestTheSimulationNoticesAMissingMechanism leaves out each mechanism in turn and requires that the simulation reports
// a fault. With an unlucky seed this lasts minutes. So without REFILLER_SEED it begins at a seed for which all faults
// occur early.
func TestTheSimulationNoticesAMissingMechanism(t *testing.T) {
	t.Parallel()
	first := uint64(2000)
	if os.Getenv("REFILLER_SEED") != "" {
		first = propertySeed(t)
	}
	for _, without := range mechanisms {
		t.Run(string(without), func(t *testing.T) {
			t.Parallel()
			const enough = 4000 // schedules; the rarest fault needs some two hundred on average
			for seed := first; seed < first+enough; seed++ {
				if _, faults := play(t, seed, without); len(faults) > 0 {
					t.Logf("seed %d, after %d schedules: %v", seed, seed-first, faults[0])
					return
				}
			}
			t.Errorf("none of %d schedules shows that the mechanism is missing", enough)
		})
	}
}

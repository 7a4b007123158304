package election

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
)

// schedules is how many TestElectionAndRefillLoopTogether plays, each with the next seed: REFILLER_SCHEDULES, or a few.
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

const interval = 100 * time.Millisecond

// policies of the one bucket, by version of the configuration.
func policies() []policy.Policy {
	return []policy.Policy{
		{Capacity: 150, Rate: policy.PerSecond(497), Interval: interval},
		{Capacity: 100, Rate: policy.PerSecond(211), Interval: interval},
	}
}

func terms() (list []policy.Terms) {
	for version, p := range policies() {
		list = append(list, p.Terms(policy.Fence{Epoch: int64(version)}))
	}
	return list
}

// path is how requests of one process get to a server, and its answers back.
type path struct {
	dice *dice

	mu     sync.Mutex
	cut    bool // nothing gets through
	deaf   bool // answers don't
	slow   time.Duration
	paused time.Time // the process is stopped until then
}

func (p *path) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
}

// stopped waits until the process isn't, and notices nothing meanwhile.
func (p *path) stopped() {
	p.mu.Lock()
	until := p.paused
	p.mu.Unlock()
	time.Sleep(time.Until(until))
}

// carry brings one request to the server. It travels on when its sender has given up.
func (p *path) carry(ctx context.Context, serve func() error) error {
	p.stopped()
	p.mu.Lock()
	cut, deaf, slow := p.cut, p.deaf, p.slow
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
	if !sleep(ctx, p.dice.upTo(time.Millisecond+slow)) {
		return ctx.Err()
	}
	p.stopped()
	return err
}

// plan is the path of requests to etcd.
func (p *path) plan(op string) call {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut {
		return call{lostThere: true}
	}
	c := call{there: p.dice.upTo(2*time.Millisecond+p.slow) + max(0, time.Until(p.paused)), back: p.dice.upTo(2*time.Millisecond + p.slow)}
	c.lostBack = p.deaf && op != "wait-deleted"
	return c
}

// process is one replica: an elector and a refiller as internal/replica puts them together.
type process struct {
	name        string
	etcd, redis *path
	began       time.Time
	resign, end context.CancelFunc
	done        chan struct{} // closed when nothing of it runs any more
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

	mu        sync.Mutex
	processes []*process
	leads     map[int64]*leading
	epochs    int64
	terms     int
	faults    []error
	started   int
}

// leading is a call of lead that hasn't returned.
type leading struct {
	elector *Elector
	process *process
	since   time.Time
	revoked bool // its lease is gone, and it may not have heard of it
}

func (s *simulation) fault(format string, args ...any) { // locked
	s.faults = append(s.faults, fmt.Errorf(format, args...))
}

// begins judges a term at its begin. Terms that are trusted at the same time are so when the last of them begins.
func (s *simulation) begins(p *process, e *Elector, term Term) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for epoch, l := range s.leads {
		if !l.process.crashed && !l.revoked && l.elector.State().Role == RoleLeader {
			s.fault("epoch %d of %s begins while %d is trusted", term.Epoch, p.name, epoch)
		}
	}
	if term.Epoch <= s.epochs {
		s.fault("epoch %d of %s after epoch %d", term.Epoch, p.name, s.epochs)
	}
	s.epochs = max(s.epochs, term.Epoch)
	s.leads[term.Epoch] = &leading{elector: e, process: p, since: time.Now()}
	s.terms++
}

// asks judges what a process asks etcd for: nobody gives its key away while its lead winds down.
func (s *simulation) asks(p *process, op string) {
	if op != "remove" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for epoch, l := range s.leads {
		if l.process == p {
			s.fault("%s resigns while lead of %d winds down", p.name, epoch)
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
		name: name, began: time.Now(), done: make(chan struct{}),
		etcd: &path{dice: newDice(s.seed, name+"etcd")}, redis: &path{dice: newDice(s.seed, name+"redis")},
	}
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	rdb.AddHook(&redisLink{p.redis, s.redis, name})
	random := newDice(s.seed, name)
	refiller, err := refill.New(refill.Config{
		Redis: rdb, Version: version, Elected: s.elected, Interval: interval, Logger: hclog.NewNullLogger(), Seed: uint64(random.float()*(1<<53)) | 1,
		Buckets: []refill.Bucket{{Key: s.redis.key, Policy: policies()[version]}},
	})
	if err != nil {
		panic(err)
	}
	store := s.etcd.connect(name)
	store.setPlan(func(op string) call {
		s.asks(p, op)
		return p.etcd.plan(op)
	})
	cfg := testConfig(name)
	cfg.TTL, cfg.SafetyMargin, cfg.RetryInterval, cfg.ResignTimeout = time.Second, 200*time.Millisecond, interval, 500*time.Millisecond
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
		sleep(serving, random.upTo(3*interval)) // whoever leads may have other things to end
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
		sleep(serving, 3*interval)
		end()
	})
	s.running.Go(func() {
		running.Wait()
		_ = rdb.Close()
		close(p.done)
	})
	return p
}

// crash ends a process that says nothing any more.
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
	s.etcd.revokeAll()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.leads {
		l.revoked = true
	}
}

// leader is the process that has led for five intervals, or nil.
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
	settling = 2500 * time.Millisecond // the longest delay after a failure, or a lease
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
	s := &simulation{
		seed: seed, without: without, elected: d.float() < 0.7, etcd: newFakeServer(), redis: newFakeRedis("checkout", without), leads: map[int64]*leading{},
	}
	s.etcd.fast = 180 * time.Millisecond // of the margin's 200
	version := int64(0)
	for range 2 + pick(2) {
		s.processes = append(s.processes, s.start(version))
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.running.Go(func() {
		consumer := newDice(seed, "consumer")
		for sleep(ctx, consumer.upTo(4*interval)) {
			s.redis.take()
		}
	})
	sleep(ctx, 5*interval)

	var restore func()
	for begin := time.Now(); time.Since(begin) < stormy; sleep(ctx, d.upTo(4*interval)) {
		i := pick(len(s.processes))
		p := s.processes[i]
		lasting := d.upTo(12 * interval)
		switch pick(13) {
		case 0: // stopped and resumed
			for _, way := range []*path{p.etcd, p.redis} {
				way.set(func() { way.paused = time.Now().Add(lasting) })
			}
			sleep(ctx, lasting)
		case 1, 2:
			s.crash(p)
			s.processes[i] = s.start(version)
		case 3:
			p.resign()
			s.processes[i] = s.start(version)
		case 4:
			way := []*path{p.etcd, p.redis}[pick(2)]
			way.set(func() { way.cut = true })
			sleep(ctx, lasting)
			way.set(func() { way.cut = false })
		case 5:
			way := []*path{p.etcd, p.redis}[pick(2)]
			way.set(func() { way.deaf = true })
			sleep(ctx, lasting)
			way.set(func() { way.deaf = false })
		case 6:
			for _, way := range []*path{p.etcd, p.redis} {
				way.set(func() { way.slow = lasting / 4 })
			}
			sleep(ctx, lasting)
			for _, way := range []*path{p.etcd, p.redis} {
				way.set(func() { way.slow = 0 })
			}
		case 7:
			s.redis.change(func() { s.redis.away = true })
			sleep(ctx, lasting)
			s.redis.change(func() { s.redis.away = false })
		case 8: // fails over to a replica that lags
			s.redis.change(func() { restore = s.redis.snapshot() })
			sleep(ctx, d.upTo(8*interval))
			s.redis.change(restore)
		case 9: // loses everything, just when a process starts that knows nothing
			sleep(ctx, settling)
			if s.elected && s.leader() == nil {
				continue
			}
			for s.elected && s.processes[i] == s.leader() {
				i = (i + 1) % len(s.processes)
			}
			s.crash(s.processes[i])
			s.redis.change(func() { s.redis.buckets = map[string]*policy.Bucket{} })
			s.processes[i] = s.start(version)
			sleep(ctx, 5*interval)
		case 10:
			jump := d.upTo(10 * time.Second)
			t := terms()[0]
			s.redis.change(func() {
				s.redis.skew += jump
				s.redis.slack += float64(min(jump.Microseconds(), t.MaxElapsed)) * float64(t.Tokens) / float64(t.Per)
			})
		case 11:
			jump := d.upTo(10 * time.Second)
			if d.float() < 0.5 {
				jump /= 200 // too little to notice
			}
			s.redis.change(func() { s.redis.skew -= jump })
		case 12:
			if version == 0 {
				version = 1
			}
			s.crash(p)
			s.processes[i] = s.start(version)
			if d.float() < 0.3 {
				s.revoke()
			}
		}
	}

	sleep(ctx, settling)
	from := time.Since(s.redis.start)
	sleep(ctx, calm)
	gap := s.redis.longest(from)
	cancel()
	for _, p := range s.processes {
		p.end()
	}
	s.running.Wait()
	faults := append(s.faults, s.redis.judge(terms())...)
	if gap > 3*interval {
		faults = append(faults, fmt.Errorf("no refill for %s after the storm", gap))
	}
	return s, faults
}

// TestElectionAndRefillLoopTogether plays random schedules of replicas in race mode and under an election, with a
// simulated Redis and etcd: pauses, crashes, restarts, partitions both ways and one way, slow networks, outages, state
// that is lost or rolled back, clocks that step, a later configuration. What Redis saw tells whether the promises were
// kept.
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
					for _, f := range s.redis.refills {
						seen[f.outcome.Status]++
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
	for _, status := range []policy.Status{policy.StatusApplied, policy.StatusSwitched, policy.StatusInitialised, policy.StatusRolledBack, policy.StatusClock} {
		require.Positive(t, seen[status], "%s", status)
	}
}

// The simulation notices each mechanism that is missing.
func TestTheSimulationNoticesAMissingMechanism(t *testing.T) {
	t.Parallel()
	first := propertySeed(t)
	for _, without := range []mechanism{
		indexCheck, elapsedCredit, creditCap, carry, clockCheck, quarantine, rollbackNotice, fenceOrder, twoIntervals, trustMargin, leadIsAwaited,
	} {
		t.Run(string(without), func(t *testing.T) {
			t.Parallel()
			const enough = 1000 // schedules; a hundredth of them is what it takes on average for the rarest
			for seed := first; seed < first+enough; seed++ {
				if _, faults := play(t, seed, without); len(faults) > 0 {
					t.Logf("seed %d, after %d schedules: %v", seed, seed-first, faults[0])
					return
				}
			}
			t.Errorf("none of %d schedules shows it", enough)
		})
	}
}

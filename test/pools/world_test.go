package pools

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// The pool. rate is R and capacity is C in docs/pools.md; floor is the floor of every region.
const (
	key      = "payments"
	rate     = 1000.0
	capacity = 3000.0
	floor    = 50.0
)

// patience is how long a test waits for a condition. The machine may be busy.
const patience = 90 * time.Second

// world has the regions of a pool, on real servers.
type world struct {
	t       *testing.T
	rng     *rand.Rand
	etcd    *testenv.EtcdCluster
	regions []*region
	version int // version of the regions' files

	mu        sync.Mutex
	violation string
	worst     float64 // largest sum of the rates in force, as a part of R
	used      float64 // largest consumption, as a part of its bound
	slack     float64 // tokens that the faults so far may have added
}

// region has a Redis, two replicas, the links to etcd, and consumers.
type region struct {
	name     string
	redis    *testenv.RedisServer
	rdb      *redis.Client
	links    []*faultproxy.Proxy // one for each member of etcd
	replicas []*replica
	skew     time.Duration // how far the clock of its Redis is ahead
	file     string        // configuration file
	lives    atomic.Int64  // how often its Redis has been restarted
	wants    atomic.Int64  // demand of its consumers, tokens per second
	taken    atomic.Int64  // tokens that its consumers have taken
}

// replica is a refiller process.
type replica struct {
	*testenv.Process
	starts int
}

var adminAddr = regexp.MustCompile(`replica starts: .*admin=(\S+)`)

// startWorld starts everything and waits until the rate is shared.
func startWorld(t *testing.T, seed uint64) *world {
	t.Helper()
	w := &world{t: t, rng: rand.New(rand.NewPCG(seed, 0)), etcd: testenv.Etcd(t, 3)}
	for _, name := range []string{"ap", "eu", "us"} {
		r := &region{name: name, redis: testenv.Redis(t, testenv.WithClock())}
		r.rdb, r.file = r.redis.Client(), filepath.Join(t.TempDir(), name+".yaml")
		for _, m := range w.etcd.Members() {
			r.links = append(r.links, testenv.Proxy(t, m.Addr(), w.rng.Uint64()))
		}
		w.slow(r)
		w.regions = append(w.regions, r)
	}
	w.configure(w.regions)
	for _, r := range w.regions {
		for i := range 2 {
			id := fmt.Sprint(r.name, i)
			r.replicas = append(r.replicas, &replica{Process: testenv.StartCommand(t, testenv.Command{
				Name: id, Path: testenv.Build(t, "./cmd/refiller"), Args: []string{"run", "--config", r.file, "--identity", id},
			})})
		}
	}
	w.eventually("the rate is shared", w.shared)
	return w
}

// double starts another replica with a region's name and with a different Redis. It runs until the returned function is
// called. That replica may use the region's floor in addition to the pool's rate. The tests don't count its tokens.
func (w *world) double(r *region) (end func()) {
	text, err := os.ReadFile(r.file)
	require.NoError(w.t, err)
	file := filepath.Join(w.t.TempDir(), r.name+"-second.yaml")
	second := strings.Replace(string(text), r.redis.URL(), testenv.Redis(w.t).URL(), 1)
	require.NotEqual(w.t, string(text), second)
	require.NoError(w.t, os.WriteFile(file, []byte(second), 0o600))
	p := testenv.StartCommand(w.t, testenv.Command{Name: r.name + "-second", Path: testenv.Build(w.t, "./cmd/refiller"),
		Args: []string{"run", "--config", file, "--identity", r.name + "-second"}})
	return p.Kill
}

// configure gives every region a later file, in which the pool has the regions of members. If there are none, the file
// has no pool.
func (w *world) configure(members []*region) {
	w.version++
	var pools, floors []string
	for _, r := range members {
		floors = append(floors, r.name+": {floor: 50/s}")
	}
	if len(floors) > 0 {
		pools = []string{fmt.Sprintf("{name: %s, rate: 1000/s, capacity: 3000, regions: {%s}}", key,
			strings.Join(floors, ", "))}
	}
	for _, r := range w.regions {
		var endpoints []string
		for _, l := range r.links {
			endpoints = append(endpoints, l.Addr())
		}
		require.NoError(w.t, os.WriteFile(r.file+".new", fmt.Appendf(nil, `region: %s
redis: {url: %q}
version: %d
election: {ttl: 2s, endpoints: [%s]}
pools: %s
listen: 127.0.0.1:0
`, r.name, r.redis.URL(), w.version, strings.Join(endpoints, ", "), pools), 0o600))
		require.NoError(w.t, os.Rename(r.file+".new", r.file))
	}
}

// slow gives the links of a region a random delay of 10 to 150 ms each way, with jitter and some loss.
func (w *world) slow(r *region) {
	mean := 10*time.Millisecond + time.Duration(w.rng.Int64N(int64(140*time.Millisecond)))
	for _, l := range r.links {
		require.NoError(w.t, l.Delay(faultproxy.Both, mean, mean/4))
		require.NoError(w.t, l.Loss(faultproxy.Both, 0.01, 200*time.Millisecond))
	}
}

// eventually waits, in the test's goroutine, until holds returns true.
func (w *world) eventually(what string, holds func() bool) {
	w.t.Helper()
	for began := time.Now(); !holds(); wait(w.t, 50*time.Millisecond) {
		require.Less(w.t, time.Since(began), patience, what)
	}
}

// read reads a region's bucket from its Redis. It returns nil if there is no bucket or no reply.
func (r *region) read(ctx context.Context) *lua.PeekReply {
	ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	p, err := lua.Peek(ctx, r.rdb, key, 1)
	if err != nil || p.Terms == nil {
		return nil
	}
	return &p
}

// ticket returns the bucket's ticket, as its agents read it.
func (r *region) ticket(ctx context.Context) lua.TicketResult {
	ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	return lua.Tickets(ctx, r.rdb, []string{key})[0]
}

// snapshot returns the path of the file from which the region's Redis loads its data.
func (r *region) snapshot() string { return filepath.Join(r.redis.DataDir(), "dump.rdb") }

func (r *region) restart() {
	r.lives.Add(1)
	r.redis.Restart()
}

// inForce returns the rate in force, in tokens per second. If the clock has stepped back, the next refill begins a new
// era, and the grant ends with its era. So such a refill credits nothing for the grant.
func inForce(p *lua.PeekReply) float64 {
	if p == nil {
		return 0
	}
	n := p.Terms.Tokens
	if p.Terms.Granted(p.Version.Era, p.Now) && p.Now >= p.Last-policy.ClockTolerance {
		n = p.Terms.GrantTokens
	}
	return float64(n) * 1e6 / float64(p.Terms.Per)
}

// inForce waits until a region's Redis answers, and returns the rate in force, or 0 if there is no bucket.
func (w *world) inForce(r *region) (rate float64) {
	w.eventually("redis answers", func() bool {
		p, err := lua.Peek(w.t.Context(), r.rdb, key, 1)
		if err == nil && p.Terms != nil {
			rate = inForce(&p)
		}
		return err == nil
	})
	return rate
}

// credited returns the number of tokens that refills have added to a region's bucket, and the time of the last refill.
func (w *world) credited(r *region) (added, last int64) {
	w.eventually("no refill comes between two readings", func() bool {
		p, ticket := r.read(w.t.Context()), r.ticket(w.t.Context())
		if p == nil || ticket.Err != nil || ticket.Version != p.Version {
			return false
		}
		added, last = ticket.Added, p.Last
		return true
	})
	return added, last
}

// shared reports whether all of the rate is in force.
func (w *world) shared() bool {
	sum := 0.0
	for _, r := range w.regions {
		sum += inForce(r.read(w.t.Context()))
	}
	return sum > 0.99*rate
}

// coordinator returns the replica that coordinates the pool, or nil.
func (w *world) coordinator() *replica {
	for _, r := range w.regions {
		for _, p := range r.replicas {
			if s := p.status(w.t.Context()); s != nil && s.Pools != nil && s.Pools.Coordinating {
				return p
			}
		}
	}
	return nil
}

// status returns the status of a replica, or nil if the replica doesn't answer.
func (p *replica) status(ctx context.Context) *admin.Status {
	found := adminAddr.FindAllStringSubmatch(p.Log(), -1)
	if len(found) <= p.starts || !p.Running() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+found[p.starts][1]+"/status", nil)
	if err != nil {
		return nil
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil
	}
	defer res.Body.Close()
	var s admin.Status
	if json.NewDecoder(res.Body).Decode(&s) != nil {
		return nil
	}
	return &s
}

func (p *replica) restart() {
	p.starts++
	p.Restart()
}

// consume takes as many tokens as the region's consumers want, until ctx ends.
func (r *region) consume(ctx context.Context) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	owed, last := 0.0, time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			owed = min(owed+float64(r.wants.Load())*now.Sub(last).Seconds(), float64(r.wants.Load()))
			last = now
		}
		n := int64(owed)
		if n < 1 {
			continue
		}
		owed -= float64(n)
		calling, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		// The reply also has the tokens that may have been taken by a call that failed.
		reply, err := lua.TakeUpTo(calling, r.rdb, key, n)
		r.taken.Add(reply.Taken)
		if err == nil && reply.Taken < n {
			_, _ = lua.Take(calling, r.rdb, key, n-reply.Taken, false) // most likely denied, which counts as demand
		}
		cancel()
	}
}

// watch runs consumers, and checks the invariants I1, I2, I4, I5 and I6, until the returned function is called.
func (w *world) watch() (stop func()) {
	ctx, cancel := context.WithCancel(w.t.Context())
	var all sync.WaitGroup
	for _, r := range w.regions {
		all.Go(func() { r.consume(ctx) })
	}
	all.Go(func() { w.judge(ctx) })
	return func() {
		cancel()
		all.Wait()
	}
}

// judge reads all regions, again and again, and checks the invariants. It reads the regions one after the other. So it
// counts only rates that were in force in two consecutive readings of a region. All first readings are before all
// second readings, so these rates were in force at the same time.
func (w *world) judge(ctx context.Context) {
	began := time.Now()
	least := 0.0 // smallest difference so far between the tokens taken and the tokens due
	gap := 0.1   // longest time between two refills, in seconds
	before := make([]*lua.PeekReply, len(w.regions))
	newest := map[string]policy.Fence{} // by region, life of its Redis, and era
	accounts, lives := make([]account, len(w.regions)), make([]life, len(w.regions))
	last := make([]int64, len(w.regions)) // time of the last refill that was read
	for i := range last {
		last[i] = math.MaxInt64
	}
	for ctx.Err() == nil {
		sum := 0.0
		taken := 0.0
		text := ""
		// The tokens are counted before the readings, which may be slow. The bound is for the time until this count.
		elapsed := time.Since(began).Seconds()
		for _, r := range w.regions {
			taken += float64(r.taken.Load())
		}
		for i, r := range w.regions {
			p := r.read(ctx)
			if !lives[i].refilled(r.lives.Load(), p) {
				p = nil // the rate in a restored bucket isn't in force: its first refill credits nothing
			}
			sum += min(inForce(before[i]), inForce(p))
			text += fmt.Sprintf(" %s %.1f", r.name, inForce(p))
			if fault := accounts[i].book(before[i], p, r.ticket(ctx)); fault != "" {
				w.violated("%s: %s", r.name, fault)
			}
			before[i] = p
			if p == nil {
				continue
			}
			gap = max(gap, min(float64(p.Now-p.Last)/1e6, 2), min(float64(p.Last-last[i])/1e6, 2))
			last[i] = p.Last
			history := fmt.Sprint(r.name, "/", lives[i].number, "/", p.Version.Era)
			if p.Terms.Fence.Before(newest[history]) {
				w.violated("I6: the fence of %s falls from %v to %v", history, newest[history], p.Terms.Fence)
			}
			newest[history] = p.Terms.Fence
		}
		if sum > rate*1.000001 {
			w.violated("I1: %.3f is in force:%s", sum, text)
		}
		// This is I2 for every window that ends now. Of the added 0.2 s, a tenth is
		// for calls under way, and a tenth is r·τ without a gap.
		over := taken - rate*elapsed - least
		least = min(least, taken-rate*elapsed)
		bound := capacity + rate*(gap+0.2) + w.forgiven()
		if over > bound {
			w.violated("I2: %.0f tokens more than fell due were taken in some window; the bound is %.0f", over, bound)
		}
		w.mu.Lock()
		w.worst, w.used = max(w.worst, sum/rate), max(w.used, over/bound)
		w.mu.Unlock()
	}
}

// forgive allows consumption to exceed its bound by the tokens that a fault may add.
func (w *world) forgive(tokens float64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.slack += tokens
}

func (w *world) forgiven() float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.slack
}

// life is the time between two restarts of a Redis.
type life struct {
	number int64
	born   int64 // time of the first reading in this life, on the clock of Redis; 0 before it
	era    int64 // era at that reading
}

// refilled reports whether a reading found a bucket that was refilled in the life with a number.
func (l *life) refilled(number int64, p *lua.PeekReply) bool {
	if l.number != number {
		*l = life{number: number}
	}
	if p == nil {
		return false
	}
	if l.born == 0 {
		l.born, l.era = p.Now, p.Version.Era
	}
	return number == 0 || p.Last >= l.born || p.Version.Era != l.era
}

// account compares the tokens that fell due to a region with the tokens that were credited. It begins anew when a
// reading is missing or the era changes.
type account struct {
	open    bool
	first   lua.Ticket
	last    lua.Ticket
	due     float64
	highest float64 // highest rate in force
}

// book adds two consecutive readings of a region, and the ticket after them. It returns what is wrong with them, or the
// empty string. A refill may credit tokens that fell due since the refill before it, but for at most 2 s.
func (a *account) book(before, p *lua.PeekReply, ticket lua.TicketResult) (fault string) {
	now := ticket.Ticket
	if before == nil || p == nil || ticket.Err != nil || !a.open || now.Version.Era != a.last.Version.Era ||
		now.Now-a.last.Now > 500_000 || now.Now < a.last.Now {
		*a = account{open: p != nil && ticket.Err == nil, first: now, last: now}
		return ""
	}
	if now.Version.Index < a.last.Version.Index {
		return fmt.Sprintf("I4: the index falls from %v to %v", a.last.Version, now.Version)
	}
	r := max(inForce(before), inForce(p))
	a.highest = max(a.highest, r)
	a.due += r * float64(now.Now-a.last.Now) / 1e6
	a.last = now
	if credited := float64(now.Added - a.first.Added); credited > a.due+2*a.highest+1 {
		return fmt.Sprintf("I5: %.0f were credited, %.0f fell due", credited, a.due)
	}
	return ""
}

func (w *world) violated(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.violation == "" {
		w.violation = fmt.Sprintf(format, args...)
	}
}

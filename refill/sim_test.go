package refill

import (
	"context"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

var errAway = errors.New("server is unavailable")

// server is a simulated Redis. Its buckets are those of the model, and its clock is that of the synctest bubble.
type server struct {
	mu      sync.Mutex
	buckets map[string]*oracle.Bucket
	skew    time.Duration // of its clock
	away    bool
	bad     map[string]error // the error that calls for these keys return
	applied map[string][]applied
	added   map[string]int64
	clamped map[string]int64
	active  map[lua.Shard]map[string]bool
	losing  bool // takes put no names into the active sets
	polls   int  // commands on active sets

	master   string // its id
	unlisted bool   // the masters can't be read
}

// applied is one refill that wrote.
type applied struct {
	at      time.Time
	by      string
	version policy.Version
	status  policy.Status
}

func newServer() *server {
	return &server{buckets: map[string]*oracle.Bucket{}, bad: map[string]error{}, applied: map[string][]applied{},
		added: map[string]int64{}, clamped: map[string]int64{},
		active: map[lua.Shard]map[string]bool{}}
}

func (s *server) now() int64 { return time.Now().Add(s.skew).UnixMicro() }

func (s *server) bucket(key string) *oracle.Bucket {
	b := s.buckets[key]
	if b == nil {
		b = &oracle.Bucket{}
		s.buckets[key] = b
	}
	return b
}

// take takes up to n tokens.
func (s *server) take(key string, n int64) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.bucket(key)
	if b.Tokens == nil {
		return 0
	}
	n = min(n, max(0, *b.Tokens))
	b.Take(n, s.now())
	return n
}

// takeTemplate takes n tokens of a template's bucket, all or nothing.
func (s *server) takeTemplate(t *policy.CompiledTemplate, key string, n int64) policy.Taking {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.bucket(key)
	if b.Control != nil && *b.Tokens >= n && *b.Tokens < t.Terms.Capacity {
		return b.Take(n, s.now()) // as in the script, which then reads only the tokens
	}
	shard := lua.Shard{Prefix: t.Prefix, Number: lua.ActiveShard(key)}
	taking, active := oracle.TakeTemplate(&b.Bucket, t.Terms, n, s.now(), s.active[shard][key])
	if active && !s.losing {
		s.enter(shard, key)
	}
	return taking
}

func (s *server) enter(shard lua.Shard, keys ...string) {
	if s.active[shard] == nil {
		s.active[shard] = map[string]bool{}
	}
	for _, key := range keys {
		s.active[shard][key] = true
	}
}

func (s *server) leave(shard lua.Shard, key string) {
	delete(s.active[shard], key)
	if len(s.active[shard]) == 0 {
		delete(s.active, shard)
	}
}

func (s *server) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

// users returns the refills that wrote. Those of the replicas' own buckets are left out.
func (s *server) users() map[string][]applied {
	users := maps.Clone(s.applied)
	maps.DeleteFunc(users, func(key string, _ []applied) bool { return strings.HasPrefix(key, "refiller:") })
	return users
}

// gaps returns the times between refills of a bucket that wrote.
func (s *server) gaps(key string) []time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	var gaps []time.Duration
	list := s.applied[key]
	for i := 1; i < len(list); i++ {
		gaps = append(gaps, list[i].at.Sub(list[i-1].at))
	}
	return gaps
}

// link is one replica's connection to the server: a store with a latency that
// can be cut and frozen.
type link struct {
	name           string
	server         *server
	rng            *rand.Rand
	latency        time.Duration // of each direction, ± half
	mu             sync.Mutex
	cut            bool
	thaw           chan struct{} // not nil: the replica is paused until it is closed
	calls          int
	underWay, most int // refills under way, and the most of them at once
}

var _ store = (*link)(nil)

func (l *link) travel(ctx context.Context) error {
	l.mu.Lock()
	wait := l.latency/2 + time.Duration(l.rng.Int64N(int64(l.latency)+1))
	thaw := l.thaw
	l.mu.Unlock()
	if thaw != nil {
		<-thaw // a stopped process notices no deadline
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(wait):
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		return errAway
	}
	return nil
}

func (l *link) refill(ctx context.Context, calls []lua.RefillCall, _ int) []lua.RefillResult {
	return l.refillIn(ctx, nil, calls)
}

func (l *link) refillActive(ctx context.Context, s lua.Shard, calls []lua.RefillCall, _ int) []lua.RefillResult {
	for i := range calls {
		calls[i].Create = policy.CreateNever
	}
	return l.refillIn(ctx, &s, calls)
}

// refillIn refills buckets. If shard is not nil, they are those of a shard.
func (l *link) refillIn(ctx context.Context, shard *lua.Shard, calls []lua.RefillCall) []lua.RefillResult {
	results := make([]lua.RefillResult, len(calls))
	fail := func(err error) []lua.RefillResult {
		for i := range results {
			results[i] = lua.RefillResult{Err: err}
		}
		return results
	}
	l.set(func() {
		l.underWay++
		l.most = max(l.most, l.underWay)
	})
	defer l.set(func() { l.underWay-- })
	if err := l.travel(ctx); err != nil {
		return fail(err)
	}
	s := l.server
	s.mu.Lock()
	if s.away {
		s.mu.Unlock()
		return fail(errAway)
	}
	now := s.now()
	for i, c := range calls {
		results[i].Err = s.bad[c.Key]
		if results[i].Err != nil {
			continue
		}
		o := s.bucket(c.Key).Refill(c.Call, now)
		results[i].Outcome = o
		results[i].Idle = o.Status.Wrote() && o.Due == 0 && o.Tokens >= s.bucket(c.Key).Control.Terms.Capacity
		if shard != nil && (results[i].Idle || o.Status == policy.StatusUnknown) {
			results[i].Left = true
			s.leave(*shard, c.Key)
		}
		if o.Status.Wrote() {
			s.applied[c.Key] = append(s.applied[c.Key], applied{time.Now(), l.name, o.Version, o.Status})
			s.added[c.Key] += o.Added
			s.clamped[c.Key] += o.Clamped
		}
	}
	s.mu.Unlock()
	l.mu.Lock()
	l.calls += len(calls)
	l.mu.Unlock()
	if err := l.travel(ctx); err != nil {
		return fail(err)
	}
	return results
}

// onShard makes one call about active sets.
func (l *link) onShard(ctx context.Context, do func()) error {
	if err := l.travel(ctx); err != nil {
		return err
	}
	l.server.mu.Lock()
	if l.server.away {
		l.server.mu.Unlock()
		return errAway
	}
	l.server.polls++
	do()
	l.server.mu.Unlock()
	return l.travel(ctx)
}

func (l *link) occupied(ctx context.Context, shards []lua.Shard) (occupied []bool, err error) {
	return occupied, l.onShard(ctx, func() {
		for _, s := range shards {
			occupied = append(occupied, len(l.server.active[s]) > 0)
		}
	})
}

func (l *link) counts(ctx context.Context, shards []lua.Shard) []lua.CountResult {
	results := make([]lua.CountResult, len(shards))
	err := l.onShard(ctx, func() {
		for i, s := range shards {
			results[i].Count = int64(len(l.server.active[s]))
		}
	})
	for i := range results {
		results[i].Err = err
	}
	return results
}

// names returns names in order. The cursor is the number of names that were read before.
func (l *link) names(ctx context.Context, s lua.Shard, cursor uint64, most int) (names []string, next uint64,
	err error) {
	return names, next, l.onShard(ctx, func() {
		all := slices.Sorted(maps.Keys(l.server.active[s]))
		to := min(len(all), int(cursor)+most)
		names, next = all[min(int(cursor), to):to], uint64(to)
		if to == len(all) {
			next = 0
		}
	})
}

func (l *link) add(ctx context.Context, s lua.Shard, names []string) error {
	return l.onShard(ctx, func() { l.server.enter(s, names...) })
}

func (l *link) move(ctx context.Context, s lua.Shard, prefix string, names []string) error {
	return l.onShard(ctx, func() {
		l.server.enter(lua.Shard{Prefix: prefix, Number: s.Number}, names...)
		for _, name := range names {
			l.server.leave(s, name)
		}
	})
}

func (l *link) remove(ctx context.Context, s lua.Shard, names []string) error {
	return l.onShard(ctx, func() {
		for _, name := range names {
			l.server.leave(s, name)
		}
	})
}

func (l *link) peek(ctx context.Context, key string) (lua.PeekReply, error) {
	if err := l.travel(ctx); err != nil {
		return lua.PeekReply{}, err
	}
	l.server.mu.Lock()
	defer l.server.mu.Unlock()
	if l.server.away {
		return lua.PeekReply{}, errAway
	}
	if err := l.server.bad[key]; err != nil {
		return lua.PeekReply{}, err
	}
	b := l.server.bucket(key)
	if b.Control == nil {
		return lua.PeekReply{}, lua.ErrUnknownBucket
	}
	terms := b.Control.Terms
	return lua.PeekReply{Tokens: *b.Tokens, Terms: &terms, Refilled: lua.Refilled{
		Version: policy.Version{Era: b.Control.Era, Index: *b.Index}, Last: b.Control.Last, Now: l.server.now(),
	}}, nil
}

// plan reports that no bucket of the simulation has a plan.
func (l *link) plan(_ context.Context, calls []lua.PlanCall) []lua.PlanResult {
	results := make([]lua.PlanResult, len(calls))
	for i := range results {
		results[i].Stale = true
	}
	return results
}

func (l *link) sweep(ctx context.Context, keys []string, most int) []lua.SweepResult {
	results := make([]lua.SweepResult, len(keys))
	err := l.travel(ctx)
	l.server.mu.Lock()
	defer l.server.mu.Unlock()
	if l.server.away {
		err = errAway
	}
	for i, key := range keys {
		results[i].Err = err
		if err == nil {
			results[i].Swept = l.server.bucket(key).Sweep(most, l.server.now())
		}
	}
	return results
}

func (l *link) masters(context.Context) ([]master, error) {
	l.server.mu.Lock()
	defer l.server.mu.Unlock()
	if l.server.unlisted {
		return nil, errAway
	}
	return []master{{id: l.server.master}}, nil
}

func (l *link) set(change func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change()
}

// replica is a Refiller on a simulated server.
type replica struct {
	*link
	*Refiller
	stop func() // ends Run and waits for it
	lead func() (resign func())
}

// rig starts replicas inside a synctest bubble.
type rig struct {
	t      *testing.T
	server *server
	rng    *rand.Rand
	log    io.Writer
	batch  int // Config.Batch, unless 0

	observe func(name string, e Event) // nil for none
}

func newRig(t *testing.T, seed uint64) *rig {
	return &rig{t: t, server: newServer(), rng: rand.New(rand.NewPCG(seed, 0)), log: io.Discard}
}

func (r *rig) start(name string, elected bool, version int64, buckets ...Bucket) *replica {
	return r.startWith(name, elected, version, nil, buckets...)
}

func (r *rig) startWith(name string, elected bool, version int64, templates *policy.Templates,
	buckets ...Bucket) *replica {
	l := &link{name: name, server: r.server, rng: rand.New(rand.NewPCG(r.rng.Uint64(), 0)),
		latency: 200 * time.Microsecond}
	cfg := Config{Buckets: buckets, Templates: templates, Version: version, Elected: elected, Batch: r.batch,
		Seed:   r.rng.Uint64() | 1,
		Logger: hclog.New(&hclog.LoggerOptions{Name: name, Output: r.log, Level: hclog.Debug, DisableTime: true})}
	cfg.setDefaults()
	if r.observe != nil {
		cfg.Observe = func(e Event) { r.observe(name, e) }
	}
	rf := newRefiller(cfg, l)
	ctx, cancel := context.WithCancel(r.t.Context())
	done := make(chan error, 1)
	go func() { done <- rf.Run(ctx) }()
	rep := &replica{link: l, Refiller: rf}
	rep.stop = func() {
		cancel()
		require.NoError(r.t, <-done)
	}
	epoch := int64(0)
	rep.lead = func() func() {
		epoch++
		ctx, resign := context.WithCancel(r.t.Context())
		led := make(chan error, 1)
		go func() { led <- rf.Lead(ctx, epoch) }()
		return func() {
			resign()
			require.ErrorIs(r.t, <-led, context.Canceled)
		}
	}
	return rep
}

const interval = 100 * time.Millisecond

func checkout(capacity int64) Bucket {
	return Bucket{Key: "checkout", Policy: policy.Policy{Capacity: capacity, Rate: policy.PerSecond(500),
		Interval: interval}}
}

// testSeed returns REFILLER_SEED or a new one, printed so that a run can be repeated.
func testSeed(t testing.TB) uint64 {
	s := uint64(time.Now().UnixNano())
	if v := os.Getenv("REFILLER_SEED"); v != "" {
		n, err := strconv.ParseUint(v, 10, 64)
		require.NoError(t, err)
		s = n
	}
	t.Logf("REFILLER_SEED=%d repeats this run", s)
	return s
}

// simulate runs a test in a bubble of simulated time.
func simulate(t *testing.T, test func(t *testing.T, r *rig)) {
	t.Helper()
	seed := testSeed(t)
	synctest.Test(t, func(t *testing.T) { test(t, newRig(t, seed)) })
}

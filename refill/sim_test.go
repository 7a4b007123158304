package refill

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

var errAway = errors.New("server is away")

// server is a simulated Redis: the model's buckets on the bubble's clock.
type server struct {
	mu      sync.Mutex
	buckets map[string]*policy.Bucket
	skew    time.Duration // of its clock
	away    bool
	bad     map[string]bool // keys that hold something else
	applied map[string][]applied
	added   map[string]int64
	clamped map[string]int64
}

// applied is one refill that wrote.
type applied struct {
	at      time.Time
	by      string
	version policy.Version
	status  policy.Status
}

func newServer() *server {
	return &server{buckets: map[string]*policy.Bucket{}, bad: map[string]bool{}, applied: map[string][]applied{}, added: map[string]int64{}, clamped: map[string]int64{}}
}

func (s *server) now() int64 { return time.Now().Add(s.skew).UnixMicro() }

func (s *server) bucket(key string) *policy.Bucket {
	b := s.buckets[key]
	if b == nil {
		b = &policy.Bucket{}
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

func (s *server) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

// gaps are the times between refills of a bucket that wrote.
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
	name    string
	server  *server
	rng     *rand.Rand
	latency time.Duration // of each direction, ± half
	mu      sync.Mutex
	cut     bool
	thaw    chan struct{} // not nil: the replica is paused until it is closed
	calls   int
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
	results := make([]lua.RefillResult, len(calls))
	fail := func(err error) []lua.RefillResult {
		for i := range results {
			results[i] = lua.RefillResult{Err: err}
		}
		return results
	}
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
		if s.bad[c.Key] {
			results[i].Err = lua.ErrMalformedBucket
			continue
		}
		o := s.bucket(c.Key).Refill(c.Call, now)
		results[i].Outcome = o
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

func (l *link) peek(ctx context.Context, key string) (lua.PeekReply, error) {
	if err := l.travel(ctx); err != nil {
		return lua.PeekReply{}, err
	}
	l.server.mu.Lock()
	defer l.server.mu.Unlock()
	if l.server.away {
		return lua.PeekReply{}, errAway
	}
	b := l.server.bucket(key)
	if b.Control == nil {
		return lua.PeekReply{}, lua.ErrUnknownBucket
	}
	return lua.PeekReply{Tokens: *b.Tokens, Refilled: lua.Refilled{
		Version: policy.Version{Era: b.Control.Era, Index: *b.Index}, Last: b.Control.Last, Now: l.server.now(),
	}}, nil
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
		if results[i].Err = err; err == nil {
			results[i].Swept = l.server.bucket(key).Sweep(most, l.server.now())
		}
	}
	return results
}

func (l *link) masters(context.Context) ([]master, error) { return []master{{}}, nil }

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
}

func newRig(t *testing.T, seed uint64) *rig {
	return &rig{t: t, server: newServer(), rng: rand.New(rand.NewPCG(seed, 0)), log: io.Discard}
}

func (r *rig) start(name string, elected bool, version int64, buckets ...Bucket) *replica {
	l := &link{name: name, server: r.server, rng: rand.New(rand.NewPCG(r.rng.Uint64(), 0)), latency: 200 * time.Microsecond}
	cfg := Config{Buckets: buckets, Version: version, Elected: elected, Seed: r.rng.Uint64() | 1,
		Logger: hclog.New(&hclog.LoggerOptions{Name: name, Output: r.log, Level: hclog.Debug, DisableTime: true})}
	cfg.setDefaults()
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
	return Bucket{Key: "checkout", Policy: policy.Policy{Capacity: capacity, Rate: policy.PerSecond(500), Interval: interval}}
}

// testSeed is REFILLER_SEED or a new one, printed so that a run can be repeated.
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

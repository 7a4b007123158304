package fetch

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

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// This file is TestEverythingAtOnceConservesTokens. In each of its schedules four consumers of different kinds take
// from three buckets in every possible way. Each consumer has a proxy of its own, and refillers run only at times.

// weather has the conditions of a schedule.
type weather struct {
	name   string
	policy policy.Policy
	storm  bool // faults
	// lone callers make their calls themselves. If such a caller is cancelled, its reply is lost. Without alone and storm,
	// no token may be lost.
	alone bool
}

// weathers returns the schedules. In a schedule with faults, the buckets have room for all refills. Otherwise a full
// bucket could drop tokens and the reply that counts them could be lost. In the other schedules, one of the buckets is
// often full.
func weathers(rng *rand.Rand) []weather {
	const interval = 20 * time.Millisecond
	few := int64(100)
	scarce := policy.Policy{Capacity: 1_000_000, Rate: policy.PerSecond(500), Interval: interval, Initial: &few}
	tight := policy.Policy{Capacity: 100 + rng.Int64N(200), Rate: policy.PerSecond(1000), Interval: interval,
		Strict: rng.IntN(2) == 0}
	return []weather{
		{name: "calm and scarce", policy: scarce}, {name: "calm and tight", policy: tight},
		{name: "calm and alone", policy: scarce, alone: true}, {name: "storm", policy: scarce, storm: true, alone: true},
	}
}

const (
	goroutines = 6   // of a consumer
	steps      = 60  // of a goroutine
	stormSteps = 150 // more, since many of them fail at once
)

// admission has tokens that a caller got, at some time between two instants in Unix µs.
type admission struct {
	key      string
	n        int64
	from, to int64
}

// scene is the run of a schedule.
type scene struct {
	t       *testing.T
	weather weather
	keys    []string
	direct  *redis.Client
	players []*player

	mu         sync.Mutex
	admitted   []admission
	returned   map[string]int64 // by callers
	unsure     map[string]int64 // perhaps returned by callers
	requests   []*request
	unsettled  []*unsettled
	did        map[string]int
	settlement policy.Settlement // of all
	stopped    time.Duration     // the longest time without an answer
}

// player is a consumer.
type player struct {
	*Client
	proxy *faultproxy.Proxy
}

// request is a request id with the takes that have it.
type request struct {
	mu       sync.Mutex
	id, key  string
	n, from  int64
	answered bool // and charged
	unknown  bool // an attempt had no answer
}

// unsettled is a settlement that had no answer.
type unsettled struct {
	key, id    string
	used, from int64
}

func unixMicro() int64 { return time.Now().UnixMicro() }

// play plays a schedule.
func play(t *testing.T, w weather, rng *rand.Rand) {
	server := testenv.Redis(t, testenv.WithArgs("--busy-reply-threshold", "1"))
	s := &scene{
		t: t, weather: w, keys: []string{"team", "user", "model"}, direct: server.Client(),
		returned: make(map[string]int64), unsure: make(map[string]int64), did: make(map[string]int),
	}
	for _, key := range s.keys {
		createBucket(t, s.direct, key, w.policy)
	}
	l := openLedger(t, server, s.keys...)
	for i := range 4 {
		s.players = append(s.players, newPlayer(t, server, i, w, rng.Uint64()))
	}

	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	steps := steps
	if w.storm {
		steps = stormSteps
	}
	var others, players, pulse sync.WaitGroup
	living, end := context.WithCancel(context.Background())
	defer end()
	pulse.Go(func() { s.pulse(living) })
	for _, key := range s.keys {
		rng := rand.New(rand.NewPCG(rng.Uint64(), 0))
		others.Go(func() { s.refillNowAndThen(ctx, key, rng) })
	}
	if w.storm {
		rng := rand.New(rand.NewPCG(rng.Uint64(), 1))
		others.Go(func() { s.trouble(ctx, server, rng) })
	}
	for i := range len(s.players) * goroutines {
		rng := rand.New(rand.NewPCG(rng.Uint64(), uint64(i)))
		players.Go(func() {
			for range steps {
				s.step(s.players[i%len(s.players)], rng)
			}
		})
	}
	players.Wait()
	cancel()
	others.Wait()
	s.resolve()
	stats := s.close()
	end()
	pulse.Wait()
	s.sweep()
	l.close(t)
	s.judge(l, stats)
}

// newPlayer makes the i-th consumer.
func newPlayer(t *testing.T, server *testenv.RedisServer, i int, w weather, seed uint64) *player {
	p := &player{proxy: testenv.Proxy(t, server.Addr(), seed)}
	limit := patience // calm: no deadline cuts a connection off
	if w.storm {
		limit = DefaultTimeout
	}
	o := &redis.Options{Addr: p.proxy.Addr(), ClientName: "player", ContextTimeoutEnabled: i == 0, ReadTimeout: limit,
		DialerRetries: 1}
	var rdb redis.UniversalClient = redis.NewClient(o)
	opts := []Option{WithTimeout(limit)}
	switch i {
	case 0: // callers make the calls
		opts = append(opts, WithLease(100, 200*time.Millisecond))
	case 1: // workers do
		opts = append(opts, WithLease(20, 50*time.Millisecond).ForKeys("user"))
	case 2:
		opts = append(opts, WithDenyCache(false), WithConcurrency(goroutines))
	case 3: // takes of several buckets have two phases
		_ = rdb.Close()
		rdb = redis.NewRing(&redis.RingOptions{
			Addrs: map[string]string{"only": p.proxy.Addr()}, ClientName: "player", HeartbeatFrequency: time.Hour,
			ReadTimeout: limit, DialerRetries: 1,
		})
	}
	t.Cleanup(func() { _ = rdb.Close() })
	if !w.alone && i != 3 {
		rdb = struct{ redis.UniversalClient }{rdb} // used as it is, by workers
	}
	var err error
	p.Client, err = New(rdb, opts...)
	require.NoError(t, err)
	return p
}

// refillNowAndThen refills a bucket, with pauses in which the consumers have to make the refills.
func (s *scene) refillNowAndThen(ctx context.Context, key string, rng *rand.Rand) {
	interval := s.weather.policy.Interval
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	var version policy.Version
	for pause := 0; ; pause-- {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if pause < -rng.IntN(20) {
			pause = rng.IntN(10)
		}
		if pause > 0 {
			continue
		}
		if out, err := lua.Refill(context.WithoutCancel(ctx), s.direct, key, policy.Call{Version: version}); err == nil {
			version = out.Version
		} else if !redis.HasErrorPrefix(errors.Unwrap(err), "BUSY") {
			s.t.Error(err)
			return
		}
	}
}

// pulse measures the longest time in which the server or this process was stopped.
func (s *scene) pulse(ctx context.Context) {
	for last := time.Now(); ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
		if s.direct.Ping(ctx).Err() == nil {
			s.stopped, last = max(s.stopped, time.Since(last)), time.Now()
		}
	}
}

// trouble causes faults, one after the other.
func (s *scene) trouble(ctx context.Context, server *testenv.RedisServer, rng *rand.Rand) {
	must := func(err error) {
		if err != nil {
			s.t.Error(err)
		}
	}
	admin := context.WithoutCancel(ctx)
	rest := func(most time.Duration) { time.Sleep(time.Duration(rng.Int64N(int64(most)))) }
	for ctx.Err() == nil {
		rest(60 * time.Millisecond)
		p := s.players[rng.IntN(len(s.players))].proxy
		way := faultproxy.Direction(1 + rng.IntN(3))
		switch rng.IntN(10) {
		case 0:
			p.Reset()
		case 1:
			p.Cut()
		case 2:
			must(p.Stall(way))
		case 3:
			must(p.BlackHole(way))
		case 4:
			must(p.Delay(way, 20*time.Millisecond, 20*time.Millisecond))
		case 5:
			must(p.Loss(way, 0.2, 80*time.Millisecond))
		case 6:
			must(p.CutAfterReply(1+rng.IntN(8), isScript))
		case 7:
			must(s.direct.ScriptFlush(admin).Err())
		case 8:
			must(killPlayers(admin, s.direct))
		case 9:
			must(spin(admin, server, func() { rest(30 * time.Millisecond) }))
		}
		rest(120 * time.Millisecond)
		must(p.Heal())
	}
}

// killPlayers makes the server close the connections of the consumers.
func killPlayers(ctx context.Context, admin *redis.Client) error {
	list, err := admin.ClientList(ctx).Result()
	if err != nil {
		return err
	}
	for _, client := range strings.Split(list, "\n") {
		if id, _, ok := strings.Cut(strings.TrimPrefix(client, "id="), " "); ok && strings.Contains(client, " name=player ") {
			if err := admin.ClientKillByFilter(ctx, "ID", id).Err(); err != nil {
				return err
			}
		}
	}
	return nil
}

// spin keeps the server busy with a script while meanwhile runs.
func spin(ctx context.Context, server *testenv.RedisServer, meanwhile func()) error {
	o := server.ClientOptions()
	o.ReadTimeout = patience
	busy, admin := redis.NewClient(o), redis.NewClient(o)
	defer func() { _, _ = busy.Close(), admin.Close() }()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = busy.Eval(ctx, "while true do end", nil).Err() // killed
	}()
	meanwhile()
	for {
		select {
		case <-ended:
			return nil
		default:
		}
		if err := admin.ScriptKill(ctx).Err(); err != nil && !redis.HasErrorPrefix(err, "NOTBUSY") {
			return err
		}
	}
}

// record records an operation and the tokens that it gave.
func (s *scene) record(what, key string, n, from int64) {
	to := unixMicro()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.did[what]++
	if n > 0 {
		s.admitted = append(s.admitted, admission{key, n, from, to})
	}
}

// failed handles an error. In a schedule without faults, the only errors are those that callers cause.
func (s *scene) failed(what string, err error) {
	time.Sleep(time.Millisecond) // otherwise an open breaker would refuse very many calls
	if errors.Is(err, context.Canceled) || errors.Is(err, ErrExceedsCapacity) || s.weather.storm &&
		errors.Is(err, ErrUnavailable) {
		return
	}
	s.t.Errorf("%s: %v", what, err)
}

// impatient is a context that sometimes ends early.
func impatient(rng *rand.Rand) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	if rng.IntN(4) > 0 {
		return ctx, cancel
	}
	timer := time.AfterFunc(time.Duration(rng.IntN(3000))*time.Microsecond, cancel)
	return ctx, func() {
		timer.Stop()
		cancel()
	}
}

// step makes one random operation of a consumer.
func (s *scene) step(p *player, rng *rand.Rand) {
	ctx, cancel := impatient(rng)
	defer cancel()
	key := s.keys[rng.IntN(len(s.keys))]
	n := 1 + rng.Int64N(5)
	from := unixMicro()
	switch rng.IntN(13) {
	default:
		r, err := p.Take(ctx, key, n)
		s.took("take", key, r, from, err)
		if r.OK && rng.IntN(4) == 0 {
			s.giveBack(p, key, 1+rng.Int64N(r.Taken))
		}
	case 0:
		r, err := p.TakeUpTo(ctx, key, 4*n)
		s.took("take up to", key, r, from, err)
	case 1:
		reqs := []Request{{Key: s.keys[rng.IntN(3)], N: n}, {Key: s.keys[rng.IntN(3)], N: 1 + rng.Int64N(5)}}
		all, err := p.TakeAll(ctx, reqs)
		if err != nil {
			s.failed("take all", err)
			return
		}
		s.record("take all", key, 0, from)
		if all.OK {
			for _, r := range reqs {
				s.record("all taken", r.Key, r.N, from)
			}
		}
	case 2:
		stop := time.AfterFunc(time.Duration(rng.IntN(30))*time.Millisecond, cancel)
		defer stop.Stop()
		if _, err := p.Wait(ctx, key, n); err != nil {
			s.failed("wait", err)
			return
		}
		s.record("wait", key, n, from)
	case 3:
		s.askOften(p, rng)
	case 4:
		s.reserve(p, rng)
	case 5:
		if _, err := p.Peek(ctx, key); err != nil {
			s.failed("peek", err)
		}
	case 6: // a burst, for blocks
		for range 20 {
			from := unixMicro()
			r, err := p.Take(ctx, key, 1)
			s.took("take", key, r, from, err)
			if err != nil {
				return
			}
		}
	}
}

func (s *scene) took(what, key string, r Result, from int64, err error) {
	if err != nil {
		s.failed(what, err)
		return
	}
	if r.OK {
		what += " " + r.Source.Kind.String()
	}
	s.record(what, key, r.Taken, from)
}

func (s *scene) giveBack(p *player, key string, n int64) {
	err := p.Return(context.Background(), key, n)
	if err != nil {
		s.failed("return", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.unsure[key] += n
		return
	}
	s.returned[key] += n
	s.did["return"]++
}

// askOften makes a take with a request id several times, also through other consumers.
func (s *scene) askOften(p *player, rng *rand.Rand) {
	q := &request{id: strconv.FormatUint(rng.Uint64(), 36), key: s.keys[rng.IntN(len(s.keys))], n: 1 + rng.Int64N(5),
		from: unixMicro()}
	s.mu.Lock()
	s.requests = append(s.requests, q)
	s.mu.Unlock()
	var wg sync.WaitGroup
	for _, p := range []*player{p, p, s.players[rng.IntN(len(s.players))]} {
		ctx, cancel := impatient(rng)
		wg.Go(func() {
			defer cancel()
			s.ask(ctx, p, q)
		})
	}
	wg.Wait()
}

// ask makes the take of a request.
func (s *scene) ask(ctx context.Context, p *player, q *request) {
	r, err := p.Take(ctx, q.key, q.n, WithRequestID(q.id))
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case err != nil:
		q.unknown = true
		s.failed("request", err)
	case r.OK && !q.answered:
		q.answered = true
		s.record("request", q.key, q.n, q.from)
	case r.OK:
		s.record("request again", q.key, 0, q.from)
	}
}

// reserve makes a reservation. It then settles it, cancels it, lets it expire or settles it too late.
func (s *scene) reserve(p *player, rng *rand.Rand) {
	key := s.keys[rng.IntN(len(s.keys))]
	n := 1 + rng.Int64N(8)
	ttl := time.Duration(20+rng.IntN(200)) * time.Millisecond
	ctx, cancel := impatient(rng)
	defer cancel()
	r, err := p.Reserve(ctx, key, n, ttl, WithOverrun(policy.Overrun(rng.IntN(2))))
	if err != nil {
		s.failed("reserve", err)
		return
	}
	s.record("reserve", key, 0, 0)
	if !r.OK {
		return
	}
	what, used := "settle", rng.Int64N(n+4)
	switch rng.IntN(5) {
	case 0:
		s.record("run out", key, 0, 0)
		return
	case 1:
		what, used = "cancel", 0
	case 2:
		what = "settle late"
		time.Sleep(ttl)
	}
	from := unixMicro()
	for _, p := range []*player{p, s.players[rng.IntN(len(s.players))]} { // the second settlement changes nothing
		settled, err := p.Settle(context.Background(), key, r.ID, used)
		if err != nil {
			s.failed(what, err)
			continue
		}
		s.settled(what, key, settled, used, from)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unsettled = append(s.unsettled, &unsettled{key, r.ID, used, from})
}

// settled records the used tokens of a reservation that the bucket paid.
func (s *scene) settled(what, key string, settled Settlement, used, from int64) {
	s.record(what, key, used-settled.Owed-settled.Forgiven, from)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settlement.Owed += settled.Owed
	s.settlement.Charged += settled.Charged
}

// resolve runs after the last fault. The consumers repeat each request and each settlement until it is answered.
func (s *scene) resolve() {
	for _, p := range s.players {
		require.NoError(s.t, p.proxy.Heal())
	}
	for i, p := range s.players {
		eventually(s.t, func() bool {
			_, err := p.Peek(context.Background(), s.keys[0])
			return err == nil
		}, fmt.Sprintf("consumer %d gets replies again", i))
	}
	c := newClient(s.t, s.direct, slow())
	for _, q := range s.requests {
		if q.unknown && !q.answered {
			s.ask(context.Background(), &player{Client: c}, q)
		}
	}
	for _, u := range s.unsettled {
		settled, err := c.Settle(context.Background(), u.key, u.id, u.used)
		require.NoError(s.t, err)
		s.settled("settle", u.key, settled, u.used, u.from)
	}
}

// close closes the consumers and adds up their stats.
func (s *scene) close() (sum Stats) {
	for _, p := range s.players {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		require.NoError(s.t, p.Close(ctx))
		cancel()
		stats := p.Stats()
		require.Zero(s.t, stats.Leased)
		sum.Lost += stats.Lost
		sum.Abandoned += stats.Abandoned
		sum.Returned += stats.Returned
		sum.Clamped += stats.Clamped
		sum.Rescues += stats.Rescues
	}
	return sum
}

// sweep waits until the reservations that were not settled have expired.
func (s *scene) sweep() {
	eventually(s.t, func() bool {
		for _, r := range lua.Sweep(context.Background(), s.direct, s.keys, 1000) {
			require.NoError(s.t, r.Err)
			if r.Outstanding > 0 {
				return false
			}
		}
		return true
	}, "no tokens are outstanding")
}

// judge compares the results that callers got with what the server did.
func (s *scene) judge(l *ledger, stats Stats) {
	missing := int64(0)
	slack := stats.Lost
	clamped := int64(0)
	ranOut := int64(0)
	// The tokens of a block are lost if its consumer can't give them back in time.
	lossless := !s.weather.storm && !s.weather.alone && s.stopped < leaseMargin/2
	for _, key := range s.keys {
		b := l.books[key]
		slack += s.unsure[key]
		clamped += b.clamped
		ranOut += b.ranOut
		admitted := int64(0)
		for _, a := range s.admitted {
			if a.key == key {
				admitted += a.n
			}
		}
		lacks := b.taken() - b.clamped - admitted + s.returned[key] // taken = admitted + returned + clamped + lost
		require.GreaterOrEqual(s.t, lacks, -s.unsure[key], "%s: %d tokens were admitted but not taken", key, -lacks)
		if lossless {
			require.Zero(s.t, lacks, "%s: tokens are missing, %+v", key, stats)
		}
		missing += max(0, lacks)
		for _, err := range []error{b.inRange(s.weather.policy.Capacity), b.inBound(s.weather.policy.Rate, s.of(key)),
			b.backed(s.of(key))} {
			require.NoError(s.t, err, key)
		}
	}
	require.LessOrEqual(s.t, missing, slack, "the SDK counts all tokens that may be lost")
	if lossless {
		require.Zero(s.t, stats.Lost)
	}
	if !s.weather.storm {
		require.LessOrEqual(s.t, stats.Clamped, clamped)
		require.LessOrEqual(s.t, clamped, stats.Clamped+ranOut,
			"expired blocks and reservations may also return tokens to a full bucket")
	}
	s.t.Logf("%s: %d admissions, %v, charged %d, owed %d, %d clamped, %d missing of at most %d, %d abandoned, "+
		"%d rescues, no answer for %s", s.weather.name, len(s.admitted), s.did,
		s.settlement.Charged, s.settlement.Owed, clamped, missing, slack, stats.Abandoned, stats.Rescues, s.stopped)
}

// of returns the admissions of a bucket, in the order of their ends.
func (s *scene) of(key string) (all []admission) {
	for _, a := range s.admitted {
		if a.key == key {
			all = append(all, a)
		}
	}
	slices.SortFunc(all, func(a, b admission) int { return int(a.to - b.to) })
	return all
}

// taken returns the number of tokens that all scripts except refills have taken.
func (b *book) taken() (n int64) {
	for _, e := range b.entries {
		if e.script != "refill" {
			n -= e.change
		}
	}
	return n
}

// inRange returns an error if the bucket ever held less than zero tokens or more than the capacity.
func (b *book) inRange(capacity int64) error {
	for _, e := range b.entries {
		if e.tokens < 0 || e.tokens > capacity {
			return fmt.Errorf("%s left %d tokens of %d", e.script, e.tokens, capacity)
		}
	}
	return nil
}

// inBound checks the bound for every time from s to t. The tokens that were certainly admitted in that time are at most
// the sum of these: the tokens in the bucket at s, the tokens held at s, the tokens returned, and the credit since the
// last refill before s. This sum is at most the bound in docs/failure-modes.md, which assumes a full bucket at s.
func (b *book) inBound(rate policy.Rate, admitted []admission) error {
	for i := 0; i < len(b.entries); i += 1 + len(b.entries)/100 {
		start := b.entries[i]
		returned := int64(0)
		sum := int64(0)
		next := i + 1
		for _, a := range admitted {
			if a.from <= start.at {
				continue
			}
			sum += a.n
			for ; next < len(b.entries) && b.entries[next].at <= a.to; next++ {
				if b.entries[next].script == "return" {
					returned += b.entries[next].change
				}
			}
			due := rate.Over(time.Duration(a.to-start.refilled)*time.Microsecond) + 1
			if most := start.tokens + start.outstanding + returned + due; sum > most {
				return fmt.Errorf("%d tokens were admitted in %d µs, %d beyond the bound", sum, a.to-start.at, sum-most)
			}
		}
	}
	return nil
}

// backed checks that no token was admitted before it was taken from the bucket.
func (b *book) backed(admitted []admission) error {
	sum := int64(0)
	taken := int64(0)
	next := 0
	for _, a := range admitted {
		sum += a.n
		for ; next < len(b.entries) && b.entries[next].at <= a.to; next++ {
			if e := b.entries[next]; e.script != "refill" && e.script != "return" {
				taken -= e.change
			}
		}
		if sum > taken {
			return fmt.Errorf("%d tokens were admitted when %d were taken", sum, taken)
		}
	}
	return nil
}

// TestEverythingAtOnceConservesTokens plays random schedules, with and without faults, in which consumers do everything
// at once. Every single token that was taken from a bucket was admitted, was returned or is counted as lost. The
// admitted tokens never exceed the bound. REFILLER_SCHEDULES sets the number of schedules, and REFILLER_SEED the first
// one.
func TestEverythingAtOnceConservesTokens(t *testing.T) {
	seed, n := uint64(time.Now().UnixNano()), 1
	for name, set := range map[string]func(v uint64){"REFILLER_SEED": func(v uint64) { seed = v },
		"REFILLER_SCHEDULES": func(v uint64) { n = int(v) }} {
		if v := os.Getenv(name); v != "" {
			number, err := strconv.ParseUint(v, 10, 64)
			require.NoError(t, err, name)
			set(number)
		}
	}
	for range n {
		for i, w := range weathers(rand.New(rand.NewPCG(seed, 0))) {
			t.Run(w.name, func(t *testing.T) {
				t.Logf("REFILLER_SEED=%d REFILLER_SCHEDULES=1 repeats this schedule", seed)
				play(t, w, rand.New(rand.NewPCG(seed, uint64(i))))
			})
		}
		seed++
	}
}

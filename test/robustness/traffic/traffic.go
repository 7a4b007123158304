// Package traffic makes calls to the buckets as consumers do, and records every call and answer. It doesn't judge the
// answers: see package verify.
package traffic

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/operate/history"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// Config describes the traffic.
type Config struct {
	Dir     string                       // directory of the run's record
	Dial    func() redis.UniversalClient // returns a client whose connections the faults affect
	Direct  redis.UniversalClient        // a client whose connections bypass the faults, for the samples
	Buckets []record.Bucket
	Callers int // per bucket
	Seed    uint64
	Pace    time.Duration // mean pause between two calls of one caller

	Distance time.Duration // round-trip time to Redis; the deadline of a call is longer by some of these
	Sidecar  string        // URL of the sidecar that consumers use; empty: they use the SDK
}

// deadline is how long a call to a Redis without a distance may last. It is longer than a busy script, and shorter than
// an outage.
const deadline = 400 * time.Millisecond

// roundTrips is the number of round trips that a call may need.
const roundTrips = 4

// deadline returns how long a call may last.
func (t *Traffic) deadline() time.Duration { return deadline + roundTrips*t.cfg.Distance }

// Traffic runs until Stop.
type Traffic struct {
	cfg     Config
	ops     *history.Writer
	samples *history.Writer
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	mu      sync.Mutex
	clients []*fetch.Client // guarded by mu
	sidecar *sidecar        // nil if consumers use the SDK
	enough  chan struct{}   // closed once every sampled bucket was refilled often enough: see AwaitEnough
}

// Start starts the callers and the sampling.
func Start(ctx context.Context, cfg Config) (*Traffic, error) {
	ops, err := history.Open(filepath.Join(cfg.Dir, record.OpsFile))
	if err != nil {
		return nil, err
	}
	samples, err := history.Open(filepath.Join(cfg.Dir, record.SamplesFile))
	if err != nil {
		return nil, errors.Join(err, ops.Close())
	}
	ctx, cancel := context.WithCancel(ctx)
	t := &Traffic{cfg: cfg, ops: ops, samples: samples, cancel: cancel, enough: make(chan struct{})}
	rng := rand.New(rand.NewPCG(cfg.Seed, 2))
	rdb := cfg.Dial()
	if cfg.Sidecar != "" {
		t.sidecar = newSidecar(cfg.Sidecar)
	}
	for _, b := range cfg.Buckets {
		for i := range cfg.Callers {
			c := &caller{
				t: t, name: b.Key + "/" + strconv.Itoa(i), key: b.Key, rdb: rdb, rng: rand.New(rand.NewPCG(rng.Uint64(),
					0)),
				most: min(1+rng.Int64N(20), fitting(b)), pace: cfg.Pace,
			}
			if err := t.start(ctx, b, c, i); err != nil {
				return nil, errors.Join(err, t.Stop())
			}
		}
	}
	t.wg.Go(func() { t.sample(ctx) })
	return t, nil
}

// loudness is the number of callers of a bucket's loud flow, and how often each calls while another flow calls once.
const loudness = 4

// quietTokens is the number of tokens of a take of another flow.
const quietTokens = 10

// fitting returns the largest size of a take: half of the smallest capacity of the bucket's policies.
func fitting(b record.Bucket) int64 {
	most := int64(math.MaxInt64)
	for _, text := range b.Terms {
		if t, err := policy.DecodeTerms(text); err == nil {
			most = min(most, t.Capacity/2)
		}
	}
	return max(1, most)
}

// start starts the i-th caller of a bucket. The first caller of some buckets is a program without the SDK. For other
// buckets, start also starts an operator, or a caller that invents keys, when it starts the first caller.
func (t *Traffic) start(ctx context.Context, b record.Bucket, c *caller, i int) error {
	if b.Linear {
		t.wg.Go(func() { c.mix(ctx) })
		return nil
	}
	if b.Kind == record.Foreign && i == 0 { // the other callers use the SDK or the sidecar
		terms, err := policy.DecodeTerms(b.Terms[0])
		if err != nil {
			return err
		}
		t.wg.Go(func() { c.addPlain(ctx, terms) })
		other := c.other()
		t.wg.Go(func() { other.takePlain(ctx) })
		return nil
	}
	if b.Plain && i == 0 {
		t.wg.Go(func() { c.takePlain(ctx) })
		return nil
	}
	if b.Operated && i == 0 {
		operator := c.other()
		t.wg.Go(func() { operator.operate(ctx) })
	}
	if b.Overridden && i == 0 {
		operator := c.other()
		t.wg.Go(func() { operator.override(ctx) })
	}
	if b.MaxKeys > 0 && i == 0 {
		stranger := c.other()
		t.wg.Go(func() { stranger.invent(ctx, b) })
	}
	all := []*caller{c}
	if b.Divided() {
		all = c.divide(i)
	}
	by, err := t.consumer(b, c)
	if err != nil {
		return err
	}
	for _, one := range all {
		t.wg.Go(func() { one.use(ctx, by, b) })
	}
	return nil
}

// divide gives the i-th caller of a bucket a flow, and returns all callers of that flow. Each caller has a different
// flow. The first flow is loud: it takes single tokens so often that, without a division, too few would be left for the
// others.
func (c *caller) divide(i int) []*caller {
	c.flow = "quiet-" + strconv.Itoa(i)
	c.most = quietTokens
	all := []*caller{c}
	if i > 0 {
		return all
	}
	c.flow = "loud"
	c.most = 1
	c.pace /= loudness
	for range loudness - 1 {
		all = append(all, c.other())
	}
	return all
}

// consumer returns the consumer through which a caller of a bucket takes.
func (t *Traffic) consumer(b record.Bucket, c *caller) (consumer, error) {
	if t.sidecar != nil {
		return t.sidecar.forFlow(c.flow), nil
	}
	// Only the replicas refill: the rescue is off.
	opts := []fetch.Option{fetch.WithTimeout(t.deadline()), fetch.WithRescue(false)}
	if b.Blocks > 0 {
		opts = append(opts, fetch.WithLease(Block, 300*time.Millisecond))
	}
	client, err := fetch.New(c.rdb, opts...)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	t.clients = append(t.clients, client)
	t.mu.Unlock()
	return sdk{client, c.flow}, nil
}

// other returns another caller of the same bucket.
func (c *caller) other() *caller {
	other := *c
	other.rng = rand.New(rand.NewPCG(c.rng.Uint64(), 0))
	return &other
}

// patience is how much longer a run may last if a busy machine refills the buckets too seldom to judge them.
const patience = 15 * time.Second

// AwaitEnough waits until every sampled bucket was refilled often enough for the verifier to judge it. If the patience
// is over before, the verifier reports what is missing.
func (t *Traffic) AwaitEnough(ctx context.Context) {
	select {
	case <-t.enough:
	case <-time.After(patience):
	case <-ctx.Done():
	}
}

// Stop ends the traffic, waits for the calls under way, and completes the files.
func (t *Traffic) Stop() error {
	t.cancel()
	t.wg.Wait()
	errs := []error{}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for _, c := range t.clients {
		errs = append(errs, c.Close(ctx))
	}
	return errors.Join(append(errs, t.ops.Close(), t.samples.Close())...)
}

// caller is one consumer of one bucket.
type caller struct {
	t    *Traffic
	name string
	key  string
	rdb  redis.UniversalClient
	rng  *rand.Rand
	most int64         // largest number of tokens of a take
	flow string        // the flow that it takes for; may be empty
	pace time.Duration // mean pause between two calls
	held int64         // number of tokens taken and not returned
}

// mix takes and returns tokens through the scripts themselves, so that each call is one operation on the bucket.
func (c *caller) mix(ctx context.Context) {
	for c.pause(ctx, c.t.cfg.Pace) {
		op := record.Op{Client: c.name, Key: c.key, N: 1 + c.rng.Int64N(c.most)}
		callCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.t.deadline())
		op.Call = time.Now().UnixNano()
		switch what := c.rng.IntN(10); {
		case what == 0 && c.held > 0:
			op.Kind, op.N = record.Return, 1+c.rng.Int64N(c.held)
			reply, err := lua.Return(callCtx, c.rdb, c.key, op.N, 0)
			op.Left, op.Clamped = reply.Remaining, reply.Clamped
			c.finish(&op, true, err)
		case what == 1:
			op.Kind = record.UpTo
			reply, err := lua.TakeUpTo(callCtx, c.rdb, c.key, op.N)
			c.took(&op, reply, err)
		default:
			op.Kind = record.Take
			reply, err := lua.Take(callCtx, c.rdb, c.key, op.N, what == 2)
			c.took(&op, reply, err)
		}
		cancel()
		c.t.ops.Add(op)
		switch op.Result {
		case record.Done:
			if op.Kind == record.Return {
				c.held -= op.N
			}
			c.held += op.Taken
		case record.Unknown:
			if op.Kind == record.Return {
				c.held -= op.N
			}
			c.await(ctx)
		case record.Failed, record.Missing:
			c.pause(ctx, 50*time.Millisecond)
		}
	}
}

func (c *caller) took(op *record.Op, reply lua.TakeReply, err error) {
	op.Taken, op.Left = reply.Taken, reply.Remaining
	op.Era = reply.Version.Era
	op.Index = reply.Version.Index
	op.Last = reply.Last
	c.finish(op, reply.OK, err)
}

// await reads the bucket until there is a reply. So during an outage only one call of each caller has no reply.
func (c *caller) await(ctx context.Context) {
	for c.pause(ctx, 50*time.Millisecond) {
		readCtx, cancel := context.WithTimeout(ctx, c.t.deadline())
		_, err := lua.Peek(readCtx, c.rdb, c.key, 1)
		cancel()
		if err == nil || errors.Is(err, lua.ErrUnknownBucket) {
			return
		}
	}
}

// pause waits for mean, give or take half of it. It reports false if ctx ended meanwhile.
func (c *caller) pause(ctx context.Context, mean time.Duration) bool {
	return timing.Sleep(ctx.Done(), mean/2+time.Duration(c.rng.Int64N(int64(mean)+1)))
}

// finish sets the result of an operation. done reports whether it was carried out and not denied.
func (c *caller) finish(op *record.Op, done bool, err error) {
	op.Return = time.Now().UnixNano()
	switch {
	case err == nil && done:
		op.Result = record.Done
	case err == nil:
		op.Result = record.Denied
	case errors.Is(err, lua.ErrUnknownBucket), errors.Is(err, fetch.ErrTooManyBuckets):
		op.Result = record.Missing
	default:
		op.Result, op.Error = record.Unknown, err.Error()
		if neverRan(err) {
			op.Result = record.Failed
		}
	}
}

// refusals are the beginnings of replies that mean that the script was not run.
var refusals = []string{"BUSY ", "OOM ", "READONLY ", "LOADING ", "MOVED ", "ASK ", "TRYAGAIN ", "CLUSTERDOWN ",
	"MASTERDOWN ", "NOSCRIPT ", "NOPERM "}

// neverRan reports whether an error proves that the call had no effect.
func neverRan(err error) bool {
	var refused redis.Error
	if errors.As(err, &refused) {
		for _, prefix := range refusals {
			if strings.HasPrefix(refused.Error(), prefix) {
				return true
			}
		}
	}
	if errors.Is(err, fetch.ErrExceedsCapacity) { // nothing was taken
		return true
	}
	var netErr *net.OpError
	return errors.As(err, &netErr) && netErr.Op == "dial"
}

// sampleEvery is the time between two samples of every bucket.
const sampleEvery = 40 * time.Millisecond

// enough is how many refills and samples of each bucket AwaitEnough waits for. The verifier needs half as many, but
// some of them may not count.
const enough = 20

// sample reads the state of all buckets from Redis, again and again.
func (t *Traffic) sample(ctx context.Context) {
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	seen := make([]activity, len(t.cfg.Buckets))
	for open := true; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		waiting := false
		for i, b := range t.cfg.Buckets {
			if b.Kind == record.Lazy { // only the replies to its takes are recorded
				continue
			}
			if s, err := Sample(ctx, t.cfg.Direct, b.Key); err == nil {
				t.samples.Add(s)
				seen[i].add(s)
			}
			waiting = waiting || seen[i].samples < enough || seen[i].refills < enough
		}
		if open && !waiting {
			close(t.enough)
			open = false
		}
	}
}

// activity counts the refills between successive samples of a bucket.
type activity struct {
	samples, refills int64
	version          policy.Version
}

func (a *activity) add(s record.Sample) {
	a.samples++
	if s.Era == a.version.Era {
		a.refills += max(0, s.Index-a.version.Index)
	}
	a.version = policy.Version{Era: s.Era, Index: s.Index}
}

var errGone = errors.New("traffic: the tokens were lost")

// Sample reads the state of one bucket.
func Sample(ctx context.Context, rdb redis.UniversalClient, key string) (record.Sample, error) {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	s := record.Sample{Key: key, Sent: time.Now().UnixNano()}
	reply, err := lua.Peek(ctx, rdb, key, 1)
	s.Got = time.Now().UnixNano()
	if errors.Is(err, lua.ErrUnknownBucket) {
		s.Missing = true
		return s, nil
	}
	if err != nil {
		return s, err
	}
	s.Tokens = reply.Tokens
	s.Held = reply.Outstanding
	s.Era = reply.Version.Era
	s.Index = reply.Version.Index
	s.Last = reply.Last
	s.Carry = reply.Carry
	ttl, err := rdb.PTTL(ctx, lua.TokensKey(key)).Result()
	if err == nil && ttl == -2 {
		err = errGone
	}
	s.Expires = ttl >= 0
	if reply.Terms != nil {
		s.Policy = reply.Terms.Encode()
	}
	return s, err
}

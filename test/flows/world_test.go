package flows

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// patience is how long a test waits for a condition. On a machine that isn't busy it comes within moments.
const patience = time.Minute

const key = "acme"

// deployment is the kind of servers and replicas of a test. The zero value means a single Redis server, and replicas in
// race mode.
type deployment struct{ cluster, elected bool }

func (d deployment) String() string {
	mode, servers := "raced", "single Redis"
	if d.elected {
		mode = "elected"
	}
	if d.cluster {
		servers = "Cluster"
	}
	return mode + ", " + servers
}

// world has a Redis, and the replicas that refill its bucket.
type world struct {
	t        *testing.T
	url      string                       // URL of Redis
	dial     func() redis.UniversalClient // returns a new client of Redis
	election string                       // lines of the configuration; empty: race mode
	config   string                       // path of the replicas' configuration file
	mu       sync.Mutex
	replicas []*testenv.Process // the replicas that run, by their start
	started  int
}

// newWorld starts a Redis server. bucket has the lines of the bucket's configuration after its key.
func newWorld(t *testing.T, bucket string) *world {
	t.Helper()
	return newWorldOf(t, deployment{}, bucket)
}

// newWorldOf is like newWorld, but starts the servers of a deployment.
func newWorldOf(t *testing.T, d deployment, bucket string) *world {
	t.Helper()
	w := &world{t: t, config: filepath.Join(t.TempDir(), "config.yaml")}
	if d.cluster {
		cluster := testenv.Cluster(t)
		w.url = cluster.URL()
		w.dial = func() redis.UniversalClient { return cluster.Client() }
	} else {
		server := testenv.Redis(t)
		w.url = server.URL()
		w.dial = func() redis.UniversalClient { return server.Client() }
	}
	if d.elected {
		w.election = fmt.Sprintf("election: {mode: etcd, endpoints: [%q], ttl: 1s}\n", testenv.Etcd(t, 1).Endpoints()[0])
	}
	w.configure(1, bucket)
	return w
}

// configure writes the replicas' configuration.
func (w *world) configure(version int, bucket string) {
	w.t.Helper()
	const format = "version: %d\nbuckets:\n  - key: %s\n    %s\n"
	w.write(fmt.Sprintf(format, version, key, strings.Join(strings.Split(bucket, "\n"), "\n    ")))
}

// write writes the replicas' configuration. It adds the address of Redis and the election to the text.
func (w *world) write(text string) {
	w.t.Helper()
	text += fmt.Sprintf("listen: \"127.0.0.1:0\"\nredis: {url: %q}\n", w.url) + w.election
	require.NoError(w.t, os.WriteFile(w.config, []byte(text), 0o600))
}

// refill starts a replica.
func (w *world) refill() *testenv.Process {
	w.t.Helper()
	w.mu.Lock()
	w.started++
	name := fmt.Sprintf("replica-%d", w.started)
	w.mu.Unlock()
	p := testenv.StartCommand(w.t, testenv.Command{
		Name: name, Path: testenv.Build(w.t, "./cmd/refiller"),
		Args: []string{"run", "--config", w.config, "--identity", name},
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	w.replicas = append(w.replicas, p)
	return p
}

// kill kills the replica that started first.
func (w *world) kill() {
	w.mu.Lock()
	first := w.replicas[0]
	w.replicas = w.replicas[1:]
	w.mu.Unlock()
	first.Kill()
}

// reload makes a replica read its configuration again.
func (w *world) reload(p *testenv.Process) { p.Signal(syscall.SIGHUP) }

// ready waits until the bucket exists.
func (w *world) ready() {
	w.t.Helper()
	rdb := w.dial()
	require.Eventually(w.t, func() bool { return rdb.Get(w.t.Context(), key).Err() == nil }, patience, 10*time.Millisecond)
}

// client returns a new client of the SDK, as each process has one.
func (w *world) client(opts ...fetch.Option) *fetch.Client {
	w.t.Helper()
	opts = append(opts, fetch.WithTimeout(time.Second)) // a busy machine is slow
	c, err := fetch.New(w.dial(), opts...)
	require.NoError(w.t, err)
	w.t.Cleanup(func() { _ = c.Close(context.WithoutCancel(w.t.Context())) })
	require.NoError(w.t, c.Ready(w.t.Context()))
	return c
}

// asker is a flow that takes tokens.
type asker struct {
	flow   string        // name of the flow; empty: takes without a flow
	fresh  bool          // each take is for a new flow, whose name begins with flow
	rate   atomic.Uint64 // tokens per second, in millionths
	bursts bool          // it asks only in one second of five, for five times as many tokens
	phase  time.Duration // shifts the bursts in time
	n      int64         // tokens of a take
	client *fetch.Client

	counts
}

// counts has the counters of an asker.
type counts struct {
	asked, got, failed atomic.Int64 // tokens, tokens, and takes
	begun, denied      atomic.Bool  // its first take was answered; its first take was denied
}

// newAsker returns a flow that asks for tokens at a rate.
func newAsker(c *fetch.Client, flow string, perSecond float64, n int64) *asker {
	a := &asker{flow: flow, n: n, client: c}
	a.ask(perSecond)
	return a
}

// ask changes how many tokens per second the flow asks for.
func (a *asker) ask(perSecond float64) { a.rate.Store(uint64(perSecond * 1e6)) }

// perSecond returns the number of tokens per second that the flow asks for now.
func (a *asker) perSecond() float64 {
	perSecond := float64(a.rate.Load()) / 1e6
	if !a.bursts {
		return perSecond
	}
	const period = 5 * time.Second
	if (time.Duration(time.Now().UnixNano())+a.phase)%period < period/5 {
		return 5 * perSecond
	}
	return 0
}

// run takes tokens at random moments until ctx ends. It uses as many goroutines as the rate needs.
func (a *asker) run(ctx context.Context) {
	const perGoroutine = 200
	goroutines := 1 + int(a.perSecond()/float64(a.n)/perGoroutine)
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() { a.takes(ctx, float64(goroutines)) })
	}
	wg.Wait()
}

func (a *asker) takes(ctx context.Context, parts float64) {
	pause := func() time.Duration {
		perSecond := a.perSecond() / float64(a.n) / parts
		if perSecond == 0 {
			return 100 * time.Millisecond
		}
		return time.Duration(rand.ExpFloat64() / perSecond * float64(time.Second))
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	<-timer.C
	for next := time.Now().Add(pause()); ; next = next.Add(pause()) {
		timer.Reset(time.Until(next))
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if a.perSecond() > 0 {
			a.take(ctx)
		}
	}
}

func (a *asker) take(ctx context.Context) {
	flow := a.flow
	if a.fresh {
		flow += fmt.Sprint(rand.Uint64())
	}
	var opts []fetch.CallOption
	if flow != "" {
		opts = append(opts, fetch.WithFlow(flow))
	}
	r, err := a.client.Take(ctx, key, a.n, opts...)
	if ctx.Err() != nil {
		return
	}
	a.asked.Add(a.n)
	if err != nil {
		a.failed.Add(1)
		return
	}
	a.got.Add(r.Taken)
	if !a.begun.Swap(true) {
		a.denied.Store(!r.OK)
	}
}

// sum is how much a group of flows asked for and got, all together.
type sum struct {
	asked, got float64 // tokens per second
	failed     int64
	flows      int
	denied     int // flows whose first take was denied
}

// measure returns what groups of askers ask for and get during d.
func measure(d time.Duration, groups ...[]*asker) []sum {
	type count struct{ asked, got, failed int64 }
	before := map[*asker]count{}
	for _, group := range groups {
		for _, a := range group {
			before[a] = count{a.asked.Load(), a.got.Load(), a.failed.Load()}
		}
	}
	began := time.Now()
	time.Sleep(d)
	took := time.Since(began).Seconds()
	sums := make([]sum, len(groups))
	for i, group := range groups {
		for _, a := range group {
			b := before[a]
			sums[i].asked += float64(a.asked.Load()-b.asked) / took
			sums[i].got += float64(a.got.Load()-b.got) / took
			sums[i].failed += a.failed.Load() - b.failed
			if a.denied.Load() {
				sums[i].denied++
			}
		}
		sums[i].flows = len(group)
	}
	return sums
}

// start starts groups of askers, which take tokens until the test ends or stop is called. stop waits until they have
// ended.
func (w *world) start(groups ...[]*asker) (stop func()) {
	ctx, cancel := context.WithCancel(w.t.Context())
	var wg sync.WaitGroup
	for _, group := range groups {
		for _, a := range group {
			wg.Go(func() { a.run(ctx) })
		}
	}
	stop = func() {
		cancel()
		wg.Wait()
	}
	w.t.Cleanup(stop)
	return stop
}

// loud returns a group of one flow. The flow has its own client, and takes single tokens.
func (w *world) loud(perSecond float64) []*asker {
	return []*asker{newAsker(w.client(), "loud", perSecond, 1)}
}

// many returns a group of n flows, which share a few clients. Their names begin with prefix.
func (w *world) many(n int, prefix string, perSecond float64, size int64, clients ...*fetch.Client) []*asker {
	if len(clients) == 0 {
		for range min(n, 5) {
			clients = append(clients, w.client())
		}
	}
	all := make([]*asker, n)
	for i := range all {
		all[i] = newAsker(clients[i%len(clients)], fmt.Sprintf("%s%d", prefix, i), perSecond, size)
	}
	return all
}

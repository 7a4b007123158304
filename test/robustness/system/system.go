// Package system runs the system under test: real Redis and etcd servers, replicas of the real program, and fault
// proxies between them.
//
// Each replica reaches Redis (a single server) and each member of etcd through proxies of its own, and the clients
// reach Redis through another one, so that each process can be cut off from each server. Each server of Sentinel and
// Cluster has one proxy for all clients, whose address they get; there faults strike the servers. The proxies also put
// Redis at a distance.
package system

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/operate/history"
	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/test/robustness/deck"
	"github.com/tokenrefill/refiller/test/robustness/record"
	"github.com/tokenrefill/refiller/test/robustness/traffic"
)

// Kinds of Redis.
const (
	Single   = "single"
	Sentinel = "sentinel"
	Cluster  = "cluster"
	// a Cluster whose masters have replicas, which take over
	Replicated = "replicated cluster"
)

// Bucket is a bucket under test. What the configuration says of it is by config version, the last line for all later
// versions too.
type Bucket struct {
	Key    string
	Kind   string // as in package record
	Prefix string // Refilled, Lazy: the template, whose policy Lines are
	Linear bool
	Lines  []string // such as "capacity: 1000, rate: 500/s"

	// What else is done to the bucket, as in package record.
	Leased, Operated, Overridden bool
	MaxKeys                      int
}

func (b Bucket) lines(version int) string { return b.Lines[min(version, len(b.Lines))-1] }

// templated reports whether the bucket exists only after its first take.
func (b Bucket) templated() bool { return b.Kind == record.Refilled || b.Kind == record.Lazy }

// Spec says what to run.
type Spec struct {
	Servers  string        // Single, Sentinel, Cluster or Replicated
	Etcd     int           // members: 0 is race mode
	TTL      time.Duration // of the election's lease; default 2 s
	Replicas int
	Versions []int // config version of each replica; default 1
	Later    int   // if not 0, a version that a replica gets while all run: see Reload
	InOrder  bool  // the first replica leads, or refills, before the others start
	// of everybody from Redis: a round trip, give or take a fifth
	Distance  time.Duration
	Consumers string // as in package deck; default deck.SDK
	Callers   int    // of each bucket; default 2, and more of them where each waits longer for its answers
	Interval  time.Duration
	Buckets   []Bucket
	Durable   bool   // Redis writes every command to disk before it answers
	Slow      bool   // Redis takes a while to load its data, and says LOADING
	Clock     bool   // Redis' clock can be stepped
	Embedded  bool   // the embedded store takes the place of a single Redis
	Program   string // the replicas' binary; default the program as it is
	// Front, if set, is given the address of the single Redis and returns the one that everybody uses instead.
	Front func(addr string) string
}

// System is what runs.
type System struct {
	Spec
	Dir      string // of the record
	T        testing.TB
	Redis    *testenv.RedisServer
	Sentinel *testenv.RedisSentinel
	Cluster  *testenv.RedisCluster
	Etcd     *testenv.EtcdCluster
	Clients  *faultproxy.Proxy // between the clients and a single Redis; nil otherwise
	Direct   redis.UniversalClient
	Replicas []*Replica
	Offset   time.Duration // of the single Redis' clock
	addr     string        // of the single Redis
	recorded []record.Bucket
	sidecar  string // its URL; empty unless consumers take through it

	faults *history.Writer
	health *history.Writer
	end    sync.Once
}

// Replica is one refiller process and its connections.
type Replica struct {
	*testenv.Process
	Name    string
	Version int
	Redis   *faultproxy.Proxy // nil unless a single Redis
	Etcd    []*faultproxy.Proxy
	refills string // file
	file    string // of its configuration

	url       string // of Redis
	endpoints []string
}

// Start runs the servers and the replicas, writes what they are to dir, and waits until every bucket is refilled.
func Start(t testing.TB, dir string, meta record.Meta, spec Spec) *System {
	t.Helper()
	if spec.TTL == 0 {
		spec.TTL = 2 * time.Second
	}
	if spec.Interval == 0 {
		spec.Interval = 100 * time.Millisecond
	}
	if spec.Callers == 0 {
		spec.Callers = 2 + int(spec.Distance/(40*time.Millisecond))
	}
	if spec.Consumers == "" {
		spec.Consumers = deck.SDK
	}
	s := &System{Spec: spec, Dir: dir, T: t}
	var err error
	s.faults, err = history.Open(filepath.Join(dir, record.FaultsFile))
	if err != nil {
		t.Fatal(err)
	}
	s.health, err = history.Open(filepath.Join(dir, record.HealthFile))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Finish() })
	s.startRedis()
	if spec.Etcd > 0 {
		s.Etcd = testenv.Etcd(t, spec.Etcd)
	}
	binary := spec.Program
	if binary == "" {
		binary = testenv.Build(t, "./cmd/refiller")
	}
	for i := range spec.Replicas {
		s.addReplica(binary, i)
		if i == 0 && spec.InOrder {
			s.awaitFirst()
		}
	}
	if spec.Consumers == deck.Sidecar {
		s.startSidecar()
	}
	s.moveAway()
	meta.Servers = spec.Servers
	meta.Replicas = spec.Replicas
	meta.Distance = spec.Distance
	meta.Later = spec.Later
	meta.Election = "race"
	if spec.Etcd > 0 {
		meta.Election = fmt.Sprintf("etcd%d", spec.Etcd)
	}
	s.recorded = s.buckets()
	meta.Buckets = s.recorded
	if meta.Resume == 0 {
		meta.Resume = s.ResumeWithin()
	}
	if err := record.WriteMeta(dir, meta); err != nil {
		t.Fatal(err)
	}
	s.Check("at the start")
	return s
}

// ResumeWithin is how soon refills continue after a fault has ended. A refiller that met a fault may wait for a second
// before it tries again, two seconds for the reply to a call, and two intervals for its turn. A second more is for the
// machine, which runs many such systems at once. A call at a distance takes a round trip, and a connection several. A
// client of Sentinel or Cluster first has to find out which server serves.
func (s *System) ResumeWithin() time.Duration {
	within := time.Second + 2*time.Second + 2*s.Interval + time.Second + 8*s.Distance
	if s.Servers != Single {
		within += 5 * time.Second
	}
	return within
}

func (s *System) startRedis() {
	var opts []testenv.Option
	if s.Durable {
		opts = append(opts, testenv.WithAppendOnly())
	}
	// A script that spins is busy soon.
	opts = append(opts, testenv.WithArgs("--busy-reply-threshold", "50"))
	if s.Slow {
		opts = append(opts, testenv.WithArgs("--key-load-delay", "300", "--loading-process-events-interval-bytes",
			"1024"))
	}
	if s.Clock {
		opts = append(opts, testenv.WithClock())
	}
	if s.Embedded {
		opts = append(opts, testenv.WithProgram(testenv.Build(s.T, "./test/robustness/store")))
	}
	switch s.Servers {
	case Sentinel:
		s.Sentinel = testenv.Sentinel(s.T, append(opts, testenv.WithProxies())...)
		s.Direct = s.Sentinel.Direct()
	case Cluster, Replicated:
		s.Cluster = testenv.Cluster(s.T, append(opts, testenv.WithProxies())...)
		if s.Servers == Replicated {
			s.Cluster.Replicate()
		}
		s.Direct = s.Cluster.Direct()
	default:
		s.Redis = testenv.Redis(s.T, opts...)
		s.Direct = s.Redis.Client()
		s.addr = s.Redis.Addr()
		if s.Front != nil {
			s.addr = s.Front(s.addr)
		}
		s.Clients = testenv.Proxy(s.T, s.addr, 0)
	}
}

func (s *System) addReplica(binary string, i int) {
	r := &Replica{Name: fmt.Sprintf("r%d", i), Version: 1}
	if i < len(s.Versions) {
		r.Version = s.Versions[i]
	}
	r.refills = filepath.Join(s.Dir, record.RefillsFile(r.Name))
	if s.Servers == Single {
		r.Redis = testenv.Proxy(s.T, s.addr, 0)
	}
	r.url = s.url(r.Redis)
	if s.Etcd != nil {
		for _, m := range s.Etcd.Members() {
			p := testenv.Proxy(s.T, m.Addr(), 0)
			r.Etcd = append(r.Etcd, p)
			r.endpoints = append(r.endpoints, p.Addr())
		}
	}
	r.file = filepath.Join(s.T.TempDir(), r.Name+".yaml")
	s.writeConfig(r)
	r.Process = testenv.StartCommand(s.T, testenv.Command{
		Name: r.Name, Path: binary, Args: []string{"run", "--config", r.file, "--identity", r.Name, "--history",
			r.refills},
	})
	s.Replicas = append(s.Replicas, r)
}

// url is where a process finds Redis: a single one through its proxy.
func (s *System) url(proxy *faultproxy.Proxy) string {
	switch s.Servers {
	case Sentinel:
		return "redis-sentinel://" + s.Sentinel.Addr() + "/" + testenv.SentinelMaster
	case Cluster, Replicated:
		return s.Cluster.URL()
	}
	return "redis://" + proxy.Addr() + "/0"
}

// writeConfig puts the configuration of a replica's version in the place of the former one at once.
func (s *System) writeConfig(r *Replica) {
	next := r.file + ".next"
	err := os.WriteFile(next, []byte(s.config(r.url, r.endpoints, r.Version)), 0o600)
	if err == nil {
		err = os.Rename(next, r.file)
	}
	if err != nil {
		s.T.Fatal(err)
	}
}

// Reload gives a replica the later version and waits until it has read it.
func (s *System) Reload(r *Replica) {
	s.T.Helper()
	r.Version = s.Later
	s.writeConfig(r)
	s.await(r.Name+" reads its file", func() bool {
		return strings.Contains(r.Log(), `"@message":"config reloaded"`)
	})
}

// awaitFirst waits until the first replica refills, as the leader if one is elected.
func (s *System) awaitFirst() {
	s.T.Helper()
	r := s.Replicas[0]
	s.await("the first replica refills", func() bool {
		if s.Spec.Etcd > 0 && !strings.Contains(r.Log(), `"@message":"leading"`) {
			return false
		}
		list, err := record.ReadLines[history.Refill](r.refills)
		return err == nil && slices.ContainsFunc(list, func(f history.Refill) bool {
			return f.Outcome != nil && f.Outcome.Status.Wrote()
		})
	})
}

// await waits until something that gives no signal is so.
func (s *System) await(what string, so func() bool) {
	s.T.Helper()
	for end := time.Now().Add(30 * time.Second); !so(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			s.T.Errorf("system: %s: not within 30 s", what)
			return
		}
	}
}

// AwaitReplica waits until a server of a Cluster is in sync with its master, and so could take over.
func (s *System) AwaitReplica(server *testenv.RedisServer) {
	s.T.Helper()
	rdb := server.Client()
	s.await("the former master is a replica in sync", func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		info := rdb.Info(ctx, "replication").Val()
		return strings.Contains(info, "role:slave") && strings.Contains(info, "master_link_status:up")
	})
}

// startSidecar runs the program that consumers without the SDK call.
func (s *System) startSidecar() {
	s.T.Helper()
	p := testenv.StartCommand(s.T, testenv.Command{
		Name: "sidecar", Path: testenv.Build(s.T, "./cmd/consumer"), Args: []string{"serve", "--redis", s.url(s.Clients),
			"--http", "127.0.0.1:0", "--grpc", "none", "--log-format", "json"},
	})
	address := regexp.MustCompile(`"address":"(127\.0\.0\.1:\d+)"`)
	s.await("the sidecar listens", func() bool {
		found := address.FindStringSubmatch(p.Log())
		if found != nil {
			s.sidecar = "http://" + found[1]
		}
		return found != nil
	})
}

// moveAway puts Redis at its distance.
func (s *System) moveAway() {
	var proxies []*faultproxy.Proxy
	for _, r := range s.Replicas {
		proxies = append(proxies, r.Redis)
	}
	proxies = append(proxies, s.Clients)
	var servers []*testenv.RedisServer
	switch s.Servers {
	case Sentinel:
		servers = s.Sentinel.Servers()
	case Cluster, Replicated:
		servers = s.Cluster.Servers()
	}
	for _, server := range servers {
		proxies = append(proxies, server.Proxy())
	}
	for _, p := range proxies {
		if p == nil { // of a single server
			continue
		}
		if err := p.Distance(s.Distance, s.Distance/5); err != nil {
			s.T.Fatal(err)
		}
	}
}

// Sidecar is the URL of the sidecar, empty if there is none.
func (s *System) Sidecar() string { return s.sidecar }

// Record is what the record says of the buckets.
func (s *System) Record() []record.Bucket { return s.recorded }

// Dial is a client as consumers have it.
func (s *System) Dial() redis.UniversalClient {
	switch s.Servers {
	case Sentinel:
		return s.Sentinel.Client()
	case Cluster, Replicated:
		return s.Cluster.Client()
	}
	o := s.Redis.ClientOptions()
	o.Addr = s.Clients.Addr()
	c := redis.NewClient(o)
	s.T.Cleanup(func() { _ = c.Close() })
	return c
}

// Masters are clients of the servers that hold buckets.
func (s *System) Masters() []*redis.Client {
	switch s.Servers {
	case Sentinel:
		return []*redis.Client{s.Sentinel.Master().Client()}
	case Cluster, Replicated:
		var all []*redis.Client
		for _, n := range s.Cluster.Masters() {
			all = append(all, n.Client())
		}
		return all
	}
	return []*redis.Client{s.Direct.(*redis.Client)}
}

// Active returns the replica whose refill wrote last, according to the replicas' files.
func (s *System) Active() *Replica {
	best, latest := s.Replicas[0], int64(0)
	for _, r := range s.Replicas {
		list, err := record.ReadLines[history.Refill](r.refills)
		if err != nil {
			continue // it has made no call yet
		}
		for i := len(list) - 1; i >= 0; i-- {
			if o := list[i].Outcome; o != nil && o.Status.Wrote() {
				if o.Now > latest {
					best, latest = r, o.Now
				}
				break
			}
		}
	}
	return best
}

// Check waits until every bucket has been refilled twice from now on, and records whether it was.
func (s *System) Check(when string) bool {
	s.T.Helper()
	const limit = 20 * time.Second
	start := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	first := map[string]record.Sample{}
	missing := len(s.Buckets)
	problem := ""
	for missing > 0 && ctx.Err() == nil {
		missing = 0
		for _, b := range s.Buckets {
			if b.templated() { // it may be full, and then no replica refills it
				continue
			}
			sample, err := traffic.Sample(ctx, s.Direct, b.Key)
			if err != nil || sample.Era == 0 {
				missing++
				problem = fmt.Sprintf("%s can't be read: %v", b.Key, err)
				delete(first, b.Key)
				continue
			}
			f, ok := first[b.Key]
			if !ok || sample.Era != f.Era {
				first[b.Key] = sample
				missing++
				problem = b.Key + " is new"
				continue
			}
			if sample.Index < f.Index+2 {
				missing++
				problem = b.Key + " is not refilled"
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
	h := record.Health{When: when, At: start.UnixNano(), OK: missing == 0, Took: time.Since(start)}
	if !h.OK {
		h.Note = fmt.Sprintf("not within %s: %s", limit, problem)
	}
	s.health.Add(h)
	return h.OK
}

// AddFault records a fault that has ended.
func (s *System) AddFault(f record.Fault) { s.faults.Add(f) }

// Finish stops the replicas and completes the record.
func (s *System) Finish() {
	s.end.Do(func() {
		for _, r := range s.Replicas {
			r.Resume()
			r.Stop()
			if err := os.WriteFile(filepath.Join(s.Dir, record.LogFile(r.Name)), []byte(r.Log()), 0o600); err != nil {
				s.T.Error(err)
			}
		}
		for _, w := range []*history.Writer{s.faults, s.health} {
			if err := w.Close(); err != nil {
				s.T.Error(err)
			}
		}
	})
}

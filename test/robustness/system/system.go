// Package system runs the system under test: real Redis and etcd servers, replicas of the real program, and fault
// proxies between them.
//
// Each replica has its own proxies: one to a single Redis server, and one to each member of etcd. The clients have
// another proxy to Redis. So each process can be cut off from each server. With a Sentinel or a Cluster, each server
// has one proxy for all clients, and faults strike the servers instead. The proxies also put Redis at a distance.
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
	// Replicated is a Cluster whose masters have replicas. A replica becomes the master when its master fails.
	Replicated = "replicated cluster"
)

// Bucket is a bucket under test.
type Bucket struct {
	Key    string
	Kind   string // as in package record
	Prefix string // prefix of the template of a Refilled or Lazy bucket
	Linear bool
	// Lines has the policy for each version of the configuration, such as "capacity: 1000, rate: 500/s". The last one is
	// also the policy of all later versions.
	Lines []string

	// Whether consumers lease tokens, an operator uses the bucket, or it has an override. See package record.
	Leased, Operated, Overridden bool
	MaxKeys                      int
}

func (b Bucket) lines(version int) string { return b.Lines[min(version, len(b.Lines))-1] }

// templated reports whether the bucket is of a template. Such a bucket exists only after its first take.
func (b Bucket) templated() bool { return b.Kind == record.Refilled || b.Kind == record.Lazy }

// Spec says what to run.
type Spec struct {
	Servers  string        // Single, Sentinel, Cluster or Replicated
	Etcd     int           // number of members; 0 is race mode
	TTL      time.Duration // of the election's lease; default 2 s
	Replicas int
	Versions []int // config version of each replica; default 1
	Later    int   // if not 0, a version that a replica gets while all replicas run: see Reload
	InOrder  bool  // the first replica leads, or refills, before the others start
	// Distance is the round-trip time from all processes to Redis, give or take a fifth.
	Distance  time.Duration
	Consumers string        // as in package deck; default deck.SDK
	Callers   int           // callers of each bucket; default 2, and more at a distance
	Interval  time.Duration // refill interval; default 100 ms
	Buckets   []Bucket
	Durable   bool   // Redis writes every command to disk before it answers
	Slow      bool   // Redis takes a while to load its data, and replies LOADING meanwhile
	Clock     bool   // the clock of Redis can be stepped
	Embedded  bool   // the embedded store is used in place of a single Redis
	Program   string // the replicas' binary; default is the program without changes
	// Front, if set, gets the address of the single Redis. All processes use the address that Front returns instead.
	Front func(addr string) string
}

// System is a running system.
type System struct {
	Spec
	Dir      string // directory of the record
	T        testing.TB
	Redis    *testenv.RedisServer
	Sentinel *testenv.RedisSentinel
	Cluster  *testenv.RedisCluster
	Etcd     *testenv.EtcdCluster
	Clients  *faultproxy.Proxy // between the clients and a single Redis; nil otherwise
	Direct   redis.UniversalClient
	Replicas []*Replica
	Offset   time.Duration // how far the clock of the single Redis is ahead
	addr     string        // address of the single Redis
	recorded []record.Bucket
	sidecar  string // URL of the sidecar; empty if consumers don't use it

	faults *history.Writer
	health *history.Writer
	end    sync.Once
}

// Replica is one refiller process and its connections.
type Replica struct {
	*testenv.Process
	Name    string
	Version int
	Redis   *faultproxy.Proxy // the proxy to a single Redis; nil with a Sentinel or a Cluster
	Etcd    []*faultproxy.Proxy
	refills string // the file that the replica writes its refills to
	file    string // the configuration file

	url       string   // URL of Redis
	endpoints []string // of etcd
}

// Start starts the servers and the replicas, writes the Meta of the record to dir, and waits until every bucket is
// refilled.
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

// ResumeWithin returns the time within which refills must go on after a fault has ended. After a fault, a refiller may
// wait for a second before it tries again, two seconds for the reply to a call, and two intervals for its turn. One
// more second is added because the machine runs many such systems at once. At a distance, a call needs a round trip,
// and a new connection needs several. A client of a Sentinel or a Cluster first has to find the server that serves.
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
	// Redis soon replies BUSY while a long script runs.
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

// url returns the URL of Redis for a process. proxy is the proxy of the process, if there is a single Redis.
func (s *System) url(proxy *faultproxy.Proxy) string {
	switch s.Servers {
	case Sentinel:
		return "redis-sentinel://" + s.Sentinel.Addr() + "/" + testenv.SentinelMaster
	case Cluster, Replicated:
		return s.Cluster.URL()
	}
	return "redis://" + proxy.Addr() + "/0"
}

// writeConfig replaces the configuration file of a replica by the one for the replica's version, in one step.
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

// await polls done until it returns true. what describes the condition.
func (s *System) await(what string, done func() bool) {
	s.T.Helper()
	for end := time.Now().Add(30 * time.Second); !done(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			s.T.Errorf("system: %s: not within 30 s", what)
			return
		}
	}
}

// AwaitReplica waits until a server of a Cluster is a replica that is in sync with its master.
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

// startSidecar starts the sidecar, which consumers without the SDK call.
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

// moveAway sets the distance to Redis in all proxies.
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
		if p == nil { // the processes have no proxies of their own with a Sentinel or a Cluster
			continue
		}
		if err := p.Distance(s.Distance, s.Distance/5); err != nil {
			s.T.Fatal(err)
		}
	}
}

// Sidecar returns the URL of the sidecar, or the empty string if there is none.
func (s *System) Sidecar() string { return s.sidecar }

// Record returns the buckets as the record describes them.
func (s *System) Record() []record.Bucket { return s.recorded }

// Dial returns a new client that uses the proxies, as a consumer's client does.
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

// Masters returns clients of the servers that hold buckets.
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

// Check waits until every bucket has been refilled twice from now on. It reports and records whether that was so within
// its time limit. It skips the buckets of templates.
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
			if b.templated() { // replicas don't refill such a bucket while it is full
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

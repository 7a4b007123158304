package testenv

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// SentinelMaster is the name under which the sentinel knows the master.
const SentinelMaster = "mymaster"

// RedisSentinel is a master with one replica and one sentinel. There is only one sentinel, with quorum 1, because the
// vote among sentinels is not tested here. A single sentinel decides alone, so there is no vote that could be split.
//
// The sentinel may promote the replica only between a call of [RedisSentinel.KillMaster] or
// [RedisSentinel.FreezeMaster] and the end of [RedisSentinel.WaitMaster]. Otherwise it could promote the replica
// whenever a busy machine makes the master silent for some seconds.
type RedisSentinel struct {
	t        testing.TB
	servers  [2]*RedisServer
	sentinel *RedisServer
	control  *redis.SentinelClient
	master   atomic.Pointer[RedisServer] // last known
}

// Sentinel starts the servers and waits until the sentinel could promote the replica. Master and replica get the
// options. [WithTLS] and [WithDataDir] are not supported.
func Sentinel(t testing.TB, opts ...Option) *RedisSentinel {
	t.Helper()
	o := newOptions(opts)
	if o.certs != nil || o.dataDir != "" {
		t.Fatalf("testenv: WithTLS and WithDataDir are not options of Sentinel")
	}
	s := &RedisSentinel{t: t}
	start := func(name string, o options, extra ...string) *RedisServer {
		var server *RedisServer
		onFreePorts(t, 1, func(ports []int) (err error) {
			proxy, announced := frontOf(t, o, ports[0])
			server, err = startRedis(t, name, ports[0], o, append(extra, "--replica-announce-ip", "127.0.0.1",
				"--replica-announce-port", announced)...)
			if err == nil {
				server.proxy = proxy
			}
			return err
		})
		return server
	}
	s.servers[0] = start("master", o, "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
	s.servers[1] = start("replica", o, "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1",
		"--replicaof", strings.Replace(s.servers[0].announced(), ":", " ", 1))
	s.master.Store(s.servers[0])
	// Wait until the replica is in sync before the sentinel is started. Otherwise the sentinel's first check could come
	// too early, and the next one is ten seconds later.
	replica := s.servers[1].Client()
	s.must("replica in sync", func(ctx context.Context) error {
		link, err := s.servers[1].info(ctx, replica, "replication", "master_link_status")
		if err == nil && link != "up" {
			err = fmt.Errorf("replica's link is %s", link)
		}
		return err
	})

	s.sentinel = s.startSentinel(o.password)
	s.control = redis.NewSentinelClient(s.sentinel.ClientOptions())
	t.Cleanup(func() { _ = s.control.Close() })
	s.must("sentinel knows the replica", func(ctx context.Context) error {
		replicas, err := s.control.Replicas(ctx, SentinelMaster).Result()
		if err == nil && (len(replicas) != 1 || replicas[0]["master-link-status"] != "ok") {
			err = fmt.Errorf("replicas known: %v", replicas)
		}
		return err
	})
	return s
}

// startSentinel starts a redis-server in sentinel mode. A sentinel rewrites its configuration file, so startSentinel
// makes a file for it.
func (s *RedisSentinel) startSentinel(password string) *RedisServer {
	s.t.Helper()
	var sentinel *RedisServer
	onFreePorts(s.t, 1, func(ports []int) error {
		config := []string{
			"port " + strconv.Itoa(ports[0]),
			"bind 127.0.0.1",
			fmt.Sprintf("sentinel monitor %s %s 1", SentinelMaster, strings.Replace(s.servers[0].announced(), ":", " ", 1)),
			"sentinel down-after-milliseconds " + SentinelMaster + " " + strconv.FormatInt(never.Milliseconds(), 10),
			"sentinel failover-timeout " + SentinelMaster + " 5000",
		}
		if password != "" {
			config = append(config, "sentinel auth-pass "+SentinelMaster+" "+strconv.Quote(password))
		}
		file := filepath.Join(s.t.TempDir(), "sentinel.conf")
		if err := os.WriteFile(file, []byte(strings.Join(config, "\n")+"\n"), 0o600); err != nil {
			return err
		}
		p, err := startProcess(s.t, Command{Name: "sentinel", Path: RedisProgram(s.t), Args: []string{file, "--sentinel"}})
		if err != nil {
			return err
		}
		sentinel = &RedisServer{Process: p, port: ports[0]}
		return sentinel.waitReady()
	})
	return sentinel
}

// must waits until done returns nil. It ends the test if that takes too long.
func (s *RedisSentinel) must(what string, done func(context.Context) error) {
	s.t.Helper()
	if err := pollUntil(done); err != nil {
		s.t.Fatalf("testenv: wait until %s: %v", what, err)
	}
}

// Addr returns the address of the sentinel.
func (s *RedisSentinel) Addr() string { return s.sentinel.Addr() }

// Sentinel returns the process of the sentinel.
func (s *RedisSentinel) Sentinel() *RedisServer { return s.sentinel }

// Client returns a new client that asks the sentinel for the master. It is closed when the test ends.
func (s *RedisSentinel) Client() *redis.Client { return s.client(nil) }

// Direct is like Client, but the connections to master and replica bypass the proxies.
func (s *RedisSentinel) Direct() *redis.Client { return s.client(pastProxies(s.Servers)) }

// Servers returns master and replica.
func (s *RedisSentinel) Servers() []*RedisServer { return s.servers[:] }

func (s *RedisSentinel) client(dial dialer) *redis.Client {
	c := redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName:            SentinelMaster,
		SentinelAddrs:         []string{s.Addr()},
		Password:              s.servers[0].options.password,
		Dialer:                dial,
		MaxRetries:            -1,
		DialerRetries:         1,
		ContextTimeoutEnabled: true,
	})
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

// Master returns the server that the sentinel names as the master. If the sentinel doesn't answer, Master returns the
// server that it named last.
func (s *RedisSentinel) Master() *RedisServer {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	addr, err := s.control.GetMasterAddrByName(ctx, SentinelMaster).Result()
	if err == nil && len(addr) == 2 {
		for _, server := range s.servers {
			if server.announced() == net.JoinHostPort(addr[0], addr[1]) {
				s.master.Store(server)
			}
		}
	}
	return s.master.Load()
}

// Replica returns the server that is not the master.
func (s *RedisSentinel) Replica() *RedisServer {
	if s.Master() == s.servers[0] {
		return s.servers[1]
	}
	return s.servers[0]
}

const (
	// never is how long the master may be silent while no failover is wanted.
	never = time.Hour
	// downAfter is how long the master may be silent while a failover is wanted. A sentinel doesn't promote a replica that
	// lost its master more than ten times downAfter ago. Ten times downAfter must be longer than 30 s: for that time a
	// sentinel does nothing after it got no processor time.
	downAfter = 4 * time.Second
)

// setDownAfter sets how long the master may be silent before the sentinel promotes the replica.
func (s *RedisSentinel) setDownAfter(d time.Duration) {
	s.t.Helper()
	s.must("sentinel knows its patience", func(ctx context.Context) error {
		return s.control.Set(ctx, SentinelMaster, "down-after-milliseconds", strconv.FormatInt(d.Milliseconds(), 10)).Err()
	})
}

// KillMaster kills the master and returns it. The sentinel promotes the replica some seconds later; see
// [RedisSentinel.WaitMaster]. A killed master that is restarted becomes the replica.
func (s *RedisSentinel) KillMaster() *RedisServer {
	s.t.Helper()
	m := s.Master()
	m.Kill()
	s.setDownAfter(downAfter)
	return m
}

// FreezeMaster pauses the master and returns it. The sentinel promotes the replica as after [RedisSentinel.KillMaster].
// When the former master is resumed, it becomes the replica.
func (s *RedisSentinel) FreezeMaster() *RedisServer {
	s.t.Helper()
	m := s.Master()
	m.Pause()
	s.setDownAfter(downAfter)
	return m
}

// WaitMaster waits until the sentinel names server as the master and server says so too. From then on the sentinel
// doesn't replace it.
func (s *RedisSentinel) WaitMaster(ctx context.Context, server *RedisServer) error {
	c := redis.NewClient(server.ClientOptions())
	defer func() { _ = c.Close() }()
	defer s.setDownAfter(never)
	return server.await(ctx, func(ctx context.Context) error {
		role, err := server.info(ctx, c, "replication", "role")
		if err == nil && (role != "master" || s.Master() != server) {
			err = fmt.Errorf("role is %s", role)
		}
		return err
	})
}

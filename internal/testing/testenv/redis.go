package testenv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
)

// RedisServer is one redis-server process. It also has the methods of [Process]. All are safe for concurrent use.
type RedisServer struct {
	*Process
	port    int
	options options
	proxy   *faultproxy.Proxy // nil unless WithProxies
}

// Redis starts a redis-server that keeps nothing on disk, and waits until it answers.
func Redis(t testing.TB, opts ...Option) *RedisServer {
	t.Helper()
	o := newOptions(opts)
	if o.clock {
		o.clockFile = filepath.Join(t.TempDir(), "clock")
		if err := writeClock(o.clockFile, 0); err != nil {
			t.Fatal(err)
		}
		o.env = append(o.env, clockEnv(t, o.clockFile)...)
	}
	var s *RedisServer
	onFreePorts(t, 1, func(ports []int) (err error) {
		s, err = startRedis(t, "redis", ports[0], o)
		return err
	})
	return s
}

// RedisProgram returns the path of the redis-server under test.
func RedisProgram(t testing.TB) string {
	t.Helper()
	name := os.Getenv("REDIS_SERVER")
	if name == "" {
		name = "redis-server"
	}
	return findServer(t, name, "install redis-server 7.0 or later (apt install redis-server, apk add redis, "+
		"brew install redis), or set REDIS_SERVER to the path of a redis-server or valkey-server")
}

// startRedis starts a server on the port and waits until it answers. The arguments in extra come before those in
// o.args.
func startRedis(t testing.TB, name string, port int, o options, extra ...string) (*RedisServer, error) {
	t.Helper()
	number := strconv.Itoa(port)
	args := []string{"--bind", "127.0.0.1", "--save", "", "--enable-debug-command", "local", "--daemonize", "no"}
	if o.certs == nil {
		args = append(args, "--port", number)
	} else {
		args = append(args, "--port", "0", "--tls-port", number, "--tls-replication", "yes", "--tls-auth-clients", "yes",
			"--tls-cert-file", o.certs.CertFile, "--tls-key-file", o.certs.KeyFile, "--tls-ca-cert-file", o.certs.CAFile)
	}
	if o.append {
		args = append(args, "--appendonly", "yes", "--appendfsync", "always")
	}
	if o.dataDir != "" {
		args = append(args, "--dir", o.dataDir)
	}
	if o.password != "" {
		args = append(args, "--requirepass", o.password, "--masterauth", o.password)
	}
	args = append(append(args, extra...), o.args...)
	program := o.program
	if program == "" {
		program = RedisProgram(t)
	}
	p, err := startProcess(t, Command{Name: name, Path: program, Args: args, Env: o.env})
	if err != nil {
		return nil, err
	}
	s := &RedisServer{Process: p, port: port, options: o}
	return s, s.waitReady()
}

// Addr returns the server's host and port.
func (s *RedisServer) Addr() string { return loopback(s.port) }

// Proxy returns the proxy in front of the server. It is nil if the server was not started [WithProxies].
func (s *RedisServer) Proxy() *faultproxy.Proxy { return s.proxy }

// announced returns the address that clients of a Sentinel or Cluster get.
func (s *RedisServer) announced() string {
	if s.proxy != nil {
		return s.proxy.Addr()
	}
	return s.Addr()
}

type dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

// pastProxies returns a dialer that connects to a server itself when a client dials the server's proxy.
func pastProxies(servers func() []*RedisServer) dialer {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		for _, s := range servers() {
			if s.announced() == addr {
				addr = s.Addr()
			}
		}
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}
}

// Port returns the port that the server listens on. It accepts only TLS there if it was started [WithTLS].
func (s *RedisServer) Port() int { return s.port }

// URL returns the address in the form that redis.ParseURL reads, with the password if there is one.
func (s *RedisServer) URL() string {
	u := url.URL{Scheme: "redis", Host: s.Addr(), Path: "/0"}
	if s.options.certs != nil {
		u.Scheme = "rediss"
	}
	if s.options.password != "" {
		u.User = url.UserPassword("", s.options.password)
	}
	return u.String()
}

// DataDir returns the directory of the server's data files.
func (s *RedisServer) DataDir() string {
	if s.options.dataDir != "" {
		return s.options.dataDir
	}
	return s.Dir()
}

// ClientOptions returns options for a client of the server. The client tries every call once, and honours the deadline
// of a call's context.
func (s *RedisServer) ClientOptions() *redis.Options {
	o := &redis.Options{
		Addr:                  s.Addr(),
		Password:              s.options.password,
		MaxRetries:            -1,
		DialerRetries:         1,
		ContextTimeoutEnabled: true,
	}
	if s.options.certs != nil {
		o.TLSConfig = s.options.certs.ClientConfig()
	}
	return o
}

// Client returns a new client with the options of [RedisServer.ClientOptions]. It is closed when the test ends.
func (s *RedisServer) Client() *redis.Client {
	c := redis.NewClient(s.ClientOptions())
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

// Restart stops the server if it is running, starts it again on the same port and data directory, and waits until it
// answers. The data is lost unless the server was started [WithAppendOnly].
func (s *RedisServer) Restart() {
	s.t.Helper()
	s.Process.Restart()
	if err := s.waitReady(); err != nil {
		s.t.Errorf("%v", err)
	}
}

func (s *RedisServer) waitReady() error {
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
	defer cancel()
	if err := s.awaitListening(ctx, s.Addr()); err != nil { // otherwise the client would log failed dials
		return err
	}
	c := redis.NewClient(s.ClientOptions())
	defer func() { _ = c.Close() }()
	return s.await(ctx, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		return c.Ping(ctx).Err()
	})
}

// info returns one field of INFO.
func (s *RedisServer) info(ctx context.Context, c *redis.Client, section, field string) (string, error) {
	m, err := c.InfoMap(ctx, section).Result()
	if err != nil {
		return "", fmt.Errorf("testenv: info of %s: %w", s.command.Name, err)
	}
	for _, fields := range m {
		if v, ok := fields[field]; ok {
			return v, nil
		}
	}
	return "", errors.New("testenv: no " + field + " in info")
}

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
)

// startPatience is how long a server may take to answer after its start.
const startPatience = 30 * time.Second

// server is a Redis that the benchmark has started. It stores nothing on disk.
type server struct {
	addr string
	cmd  *exec.Cmd
	rdb  *redis.Client // for calls that aren't measured
}

// startServer starts redis-server from the PATH, or the program that REDIS_SERVER names.
func startServer(ctx context.Context) (*server, error) {
	name := os.Getenv("REDIS_SERVER")
	if name == "" {
		name = "redis-server"
	}
	addr, err := freeAddr(ctx)
	if err != nil {
		return nil, err
	}
	_, port, _ := net.SplitHostPort(addr)
	var log bytes.Buffer
	cmd := exec.Command(name, "--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no", "--dir",
		os.TempDir())
	cmd.Stdout, cmd.Stderr = &log, &log
	// The server gets its own process group, so that an interrupt from the terminal doesn't reach it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start redis: %w (install redis-server 7.0 or later, or set REDIS_SERVER)", err)
	}
	s := &server{addr: addr, cmd: cmd}
	s.connect()
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	for err = s.rdb.Ping(ctx).Err(); err != nil; err = s.rdb.Ping(ctx).Err() {
		select {
		case <-ctx.Done():
			s.stop()
			return nil, fmt.Errorf("redis at %s doesn't answer: %w\n%s", addr, err, log.Bytes())
		case <-time.After(10 * time.Millisecond):
		}
	}
	return s, nil
}

// freeAddr returns a loopback address without a listener.
func freeAddr(ctx context.Context) (string, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	return l.Addr().String(), l.Close()
}

// clientOptions returns the options of every go-redis client of the benchmark.
func (s *server) clientOptions() *redis.Options {
	return &redis.Options{Addr: s.addr, ContextTimeoutEnabled: true}
}

func (s *server) connect() { s.rdb = redis.NewClient(s.clientOptions()) }

// behind returns a copy of the server whose clients have a longer round trip. stop stops the proxy between them.
func (s *server) behind(trip time.Duration) (far *server, stop func() error, err error) {
	proxy, err := faultproxy.New(s.addr, faultproxy.Options{})
	if err != nil {
		return nil, nil, err
	}
	copied := *s
	copied.addr = proxy.Addr()
	return &copied, proxy.Close, proxy.Delay(faultproxy.ToClient, trip, 0)
}

func (s *server) stop() {
	_ = s.rdb.Close()
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

// info returns a field of INFO.
func (s *server) info(ctx context.Context, section, field string) (string, error) {
	m, err := s.rdb.InfoMap(ctx, section).Result()
	if err != nil {
		return "", fmt.Errorf("info %s: %w", section, err)
	}
	for _, fields := range m {
		if v, ok := fields[field]; ok {
			return v, nil
		}
	}
	return "", fmt.Errorf("info %s has no %s", section, field)
}

func (s *server) number(ctx context.Context, section, field string) (float64, error) {
	v, err := s.info(ctx, section, field)
	if err != nil {
		return 0, err
	}
	return strconv.ParseFloat(v, 64)
}

// usage has the resources that the server and this process have used.
type usage struct {
	clientCPU, redisCPU float64 // seconds
	commands, reads     float64 // of the server
}

func (s *server) usage(ctx context.Context) (usage, error) {
	var (
		u    usage
		errs [4]error
		user float64
		self syscall.Rusage
	)
	user, errs[0] = s.number(ctx, "cpu", "used_cpu_user")
	u.redisCPU, errs[1] = s.number(ctx, "cpu", "used_cpu_sys")
	u.redisCPU += user
	u.commands, errs[2] = s.number(ctx, "stats", "total_commands_processed")
	u.reads, errs[3] = s.number(ctx, "stats", "total_reads_processed")
	if err := errors.Join(errs[:]...); err != nil {
		return u, err
	}
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &self); err != nil {
		return u, fmt.Errorf("getrusage: %w", err)
	}
	u.clientCPU = float64(self.Utime.Nano()+self.Stime.Nano()) / 1e9
	return u, nil
}

func (u usage) since(v usage) usage {
	return usage{u.clientCPU - v.clientCPU, u.redisCPU - v.redisCPU, u.commands - v.commands, u.reads - v.reads}
}

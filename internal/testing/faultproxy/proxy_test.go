package faultproxy_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// patience is how long a test waits for an event that must happen. soon is how long a test waits to see that an event
// doesn't happen.
const (
	patience = 20 * time.Second
	soon     = 50 * time.Millisecond
)

// peer is a server that shows the test both ends of the proxied connection.
type peer struct {
	t        *testing.T
	proxy    *faultproxy.Proxy
	accepted chan net.Conn
}

func newPeer(t *testing.T) *peer {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &peer{t: t, accepted: make(chan net.Conn, 16)}
	var accepting sync.WaitGroup
	accepting.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			p.accepted <- conn
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		accepting.Wait()
		close(p.accepted)
		for conn := range p.accepted {
			_ = conn.Close()
		}
	})
	p.proxy = newProxy(t, ln.Addr().String())
	return p
}

func newProxy(t *testing.T, target string) *faultproxy.Proxy {
	t.Helper()
	const seed = 7
	t.Logf("seed %d", seed)
	p, err := faultproxy.New(target, faultproxy.Options{Seed: seed})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

// dial returns a client of the proxy. No read or write of it blocks for longer than patience.
func dial(t *testing.T, p *faultproxy.Proxy) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr())
	require.NoError(t, err)
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// connect returns both ends of a new connection.
func (p *peer) connect() (client, server net.Conn) {
	p.t.Helper()
	client = dial(p.t, p.proxy)
	select {
	case server = <-p.accepted:
	case <-time.After(patience):
		require.Fail(p.t, "the proxy did not connect to the server")
	}
	require.NoError(p.t, server.SetDeadline(time.Now().Add(patience)))
	p.t.Cleanup(func() { _ = server.Close() })
	return client, server
}

func send(t *testing.T, conn net.Conn, s string) {
	t.Helper()
	_, err := io.WriteString(conn, s)
	require.NoError(t, err)
}

func receive(t *testing.T, conn net.Conn, want string) {
	t.Helper()
	buf := make([]byte, len(want))
	_, err := io.ReadFull(conn, buf)
	require.NoError(t, err)
	require.Equal(t, want, string(buf))
}

// silent asserts that nothing arrives, neither bytes nor an end.
func silent(t *testing.T, conn net.Conn) {
	t.Helper()
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(soon)))
	n, err := conn.Read(make([]byte, 1))
	require.Zero(t, n)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(patience)))
}

// ended waits until the connection is over. It returns the error of the last read, nil after an orderly end.
func ended(t *testing.T, conn net.Conn) error {
	t.Helper()
	_, err := io.Copy(io.Discard, conn)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	return err
}

func TestProxyForwardsBothStreamsAndTheirEnds(t *testing.T) {
	t.Parallel()
	p := newPeer(t)
	client, server := p.connect()
	send(t, client, "question")
	receive(t, server, "question")
	require.NoError(t, client.(*net.TCPConn).CloseWrite())
	require.NoError(t, ended(t, server))
	send(t, server, "answer after the end of the question") // a half-closed connection still works in this direction
	require.NoError(t, server.Close())
	answer, err := io.ReadAll(client)
	require.NoError(t, err)
	require.Equal(t, "answer after the end of the question", string(answer))
	require.Eventually(t, func() bool { return p.proxy.Connections() == 0 }, patience, time.Millisecond)
}

func TestProxyKeepsLargeStreamsIntact(t *testing.T) {
	t.Parallel()
	p := newPeer(t)
	require.NoError(t, p.proxy.Delay(faultproxy.Both, time.Millisecond, time.Millisecond))
	require.NoError(t, p.proxy.Loss(faultproxy.Both, 0.05, 2*time.Millisecond))
	client, server := p.connect()
	var want strings.Builder
	for i := range 200_000 {
		fmt.Fprintf(&want, "%d,", i)
	}
	var sender sync.WaitGroup
	defer sender.Wait()
	sender.Go(func() {
		_, _ = io.WriteString(client, want.String())
		_ = client.(*net.TCPConn).CloseWrite()
	})
	got, err := io.ReadAll(server)
	require.NoError(t, err)
	require.True(t, want.String() == string(got), "the stream was altered")
}

func TestProxyResetsClientsOfAServerThatIsDown(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, ln.Close())
	p := newProxy(t, ln.Addr().String())
	require.ErrorIs(t, echo(t.Context(), p.Addr()), syscall.ECONNRESET) // a write or a read returns it
}

func TestCutClosesConnectionsAndRefusesNewOnes(t *testing.T) {
	t.Parallel()
	p := newPeer(t)
	client, server := p.connect()
	p.proxy.Cut()
	_ = ended(t, client)
	_ = ended(t, server)
	_, err := net.Dial("tcp", p.proxy.Addr())
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	p.proxy.Cut() // a second Cut is harmless

	require.NoError(t, p.proxy.Heal())
	client, server = p.connect()
	send(t, client, "again")
	receive(t, server, "again")
}

func TestHealReportsAPortTakenMeanwhile(t *testing.T) {
	t.Parallel()
	p := newPeer(t)
	p.proxy.Cut()
	ln, err := net.Listen("tcp", p.proxy.Addr())
	require.NoError(t, err)
	require.ErrorIs(t, p.proxy.Heal(), syscall.EADDRINUSE)
	require.NoError(t, ln.Close())
	require.NoError(t, p.proxy.Heal())
	p.connect()
}

func TestResetEndsConnectionsWithRSTAndAcceptsNewOnes(t *testing.T) {
	t.Parallel()
	p := newPeer(t)
	client, server := p.connect()
	p.proxy.Reset()
	require.ErrorIs(t, ended(t, client), syscall.ECONNRESET)
	require.ErrorIs(t, ended(t, server), syscall.ECONNRESET)
	client, server = p.connect()
	send(t, client, "again")
	receive(t, server, "again")
}

func TestDelayHoldsBackOneDirectionOnly(t *testing.T) {
	t.Parallel()
	const delay = 40 * soon
	p := newPeer(t)
	require.NoError(t, p.proxy.Delay(faultproxy.ToServer, delay, 0))
	client, server := p.connect()

	start := time.Now()
	send(t, client, "late")
	send(t, server, "early")
	receive(t, client, "early")
	silent(t, server)
	receive(t, server, "late")
	require.GreaterOrEqual(t, time.Since(start), delay)
}

func TestDelayAddsLatencyAndNotItsSumOverPieces(t *testing.T) {
	t.Parallel()
	const pieces, delay = 200, 500 * time.Millisecond
	p := newPeer(t)
	require.NoError(t, p.proxy.Delay(faultproxy.ToServer, delay, 0))
	client, server := p.connect()
	start := time.Now()
	for range pieces {
		send(t, client, "x")
		time.Sleep(100 * time.Microsecond) // lets the proxy read most pieces one by one
	}
	receive(t, server, strings.Repeat("x", pieces))
	require.GreaterOrEqual(t, time.Since(start), delay)
	require.Less(t, time.Since(start), pieces*delay/5)
}

func TestHealDeliversWhatIsDelayed(t *testing.T) {
	t.Parallel()
	p := newPeer(t)
	require.NoError(t, p.proxy.Delay(faultproxy.Both, time.Hour, time.Minute))
	client, server := p.connect()
	send(t, client, "held")
	silent(t, server)
	require.NoError(t, p.proxy.Heal())
	receive(t, server, "held")
	send(t, server, "reply")
	receive(t, client, "reply")
}

func TestHealLeavesTheServerWhereItIs(t *testing.T) {
	t.Parallel()
	const trip = 40 * soon
	p := newPeer(t)
	require.NoError(t, p.proxy.Distance(trip, 0))
	require.NoError(t, p.proxy.Delay(faultproxy.Both, time.Hour, 0))
	client, server := p.connect()
	start := time.Now()
	send(t, client, "there")
	silent(t, server)
	require.NoError(t, p.proxy.Heal())
	receive(t, server, "there")
	require.GreaterOrEqual(t, time.Since(start), trip/2)
	start = time.Now()
	send(t, client, "there again")
	receive(t, server, "there again")
	send(t, server, "and back")
	receive(t, client, "and back")
	require.GreaterOrEqual(t, time.Since(start), trip)
}

func TestLossStallsPiecesWithItsProbability(t *testing.T) {
	t.Parallel()
	p := newPeer(t)
	client, server := p.connect()
	require.NoError(t, p.proxy.Loss(faultproxy.ToClient, 1, time.Hour))
	send(t, client, "not lost")
	receive(t, server, "not lost")
	send(t, server, "lost")
	silent(t, client)
	require.NoError(t, p.proxy.Heal())
	receive(t, client, "lost")

	require.NoError(t, p.proxy.Loss(faultproxy.ToClient, 0, time.Hour))
	send(t, server, "not lost either")
	receive(t, client, "not lost either")

	// With probability one half, some round trips are late and some are not.
	require.NoError(t, p.proxy.Loss(faultproxy.ToClient, 0.5, 50*time.Millisecond))
	late := 0
	for range 40 {
		start := time.Now()
		send(t, server, "x")
		receive(t, client, "x")
		if time.Since(start) >= 50*time.Millisecond {
			late++
		}
	}
	require.Greater(t, late, 5)
	require.Less(t, late, 40)
}

func TestStallDeliversAtHealWhatWasSentMeanwhile(t *testing.T) {
	t.Parallel()
	p := newPeer(t)
	client, server := p.connect()
	require.NoError(t, p.proxy.Stall(faultproxy.ToServer))
	send(t, client, "sent in the partition")
	silent(t, server)
	send(t, server, "other direction")
	receive(t, client, "other direction")
	require.NoError(t, p.proxy.Heal())
	receive(t, server, "sent in the partition")
}

func TestBlackHoleSwallowsOneDirectionAndKeepsConnectionsOpen(t *testing.T) {
	t.Parallel()
	p := newPeer(t)
	client, server := p.connect()
	idle, idleServer := p.connect()
	require.NoError(t, p.proxy.BlackHole(faultproxy.ToServer))
	send(t, client, "swallowed")
	silent(t, server)
	send(t, server, "other direction")
	receive(t, client, "other direction")
	silent(t, client)
	late, lateServer := p.connect() // new connections are accepted
	send(t, late, "swallowed too")
	silent(t, lateServer)
	require.NoError(t, late.Close())
	silent(t, lateServer) // the end of the stream is swallowed too

	require.NoError(t, p.proxy.Heal())
	require.ErrorIs(t, ended(t, client), syscall.ECONNRESET) // a stream that has lost bytes is reset
	require.ErrorIs(t, ended(t, lateServer), syscall.ECONNRESET)
	send(t, idle, "whole")
	receive(t, idleServer, "whole")
}

func TestSwallowForgetsTheConnectionsThatThereAre(t *testing.T) {
	t.Parallel()
	p := newPeer(t)
	client, server := p.connect()
	p.proxy.Swallow()
	send(t, client, "swallowed")
	silent(t, server)
	send(t, server, "swallowed too")
	silent(t, client)
	late, lateServer := p.connect()
	send(t, late, "new connections work")
	receive(t, lateServer, "new connections work")
	require.NoError(t, p.proxy.Heal())
	require.ErrorIs(t, ended(t, client), syscall.ECONNRESET)
	send(t, late, "still")
	receive(t, lateServer, "still")
}

func TestHalfOpenTakesTheServerAwaySilently(t *testing.T) {
	t.Parallel()
	p := newPeer(t)
	client, server := p.connect()
	p.proxy.HalfOpen()
	_ = ended(t, server)
	silent(t, client)
	send(t, client, "into the void")
	send(t, client, "and again")
	silent(t, client)
	fresh := dial(t, p.proxy)
	send(t, fresh, "into the void")
	silent(t, fresh)
	require.Empty(t, p.accepted, "new clients don't reach the server either")

	require.NoError(t, p.proxy.Heal())
	require.ErrorIs(t, ended(t, client), syscall.ECONNRESET)
	require.ErrorIs(t, ended(t, fresh), syscall.ECONNRESET)
	client, server = p.connect()
	send(t, client, "again")
	receive(t, server, "again")
}

func TestCutAfterReplyLetsTheRequestThroughAndLosesItsReply(t *testing.T) {
	t.Parallel()
	p := newPeer(t)
	require.NoError(t, p.proxy.CutAfterReply(1, func(b []byte) bool { return strings.HasPrefix(string(b), "set") }))
	client, server := p.connect()
	other, otherServer := p.connect()

	send(t, client, "get")
	receive(t, server, "get")
	send(t, server, "got")
	receive(t, client, "got")
	send(t, client, "set")
	receive(t, server, "set")
	silent(t, client)
	require.Zero(t, p.proxy.LostReplies())
	send(t, server, "done")
	got, _ := io.ReadAll(client)
	require.Empty(t, got)
	require.Equal(t, 1, p.proxy.LostReplies())

	send(t, other, "set") // only one reply was to be lost
	receive(t, otherServer, "set")
	send(t, otherServer, "done")
	receive(t, other, "done")
}

func TestCloseEndsConnectionsInEveryFault(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(*faultproxy.Proxy) error{
		"none": func(*faultproxy.Proxy) error { return nil },
		"cut": func(p *faultproxy.Proxy) error {
			p.Cut()
			return nil
		},
		"delay":     func(p *faultproxy.Proxy) error { return p.Delay(faultproxy.Both, time.Hour, 0) },
		"stall":     func(p *faultproxy.Proxy) error { return p.Stall(faultproxy.Both) },
		"blackhole": func(p *faultproxy.Proxy) error { return p.BlackHole(faultproxy.Both) },
		"half-open": func(p *faultproxy.Proxy) error {
			p.HalfOpen()
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPeer(t)
			client, server := p.connect()
			require.NoError(t, fault(p.proxy))
			_, _ = io.WriteString(client, "x")
			_, _ = io.WriteString(server, "x")
			require.NoError(t, p.proxy.Close())
			_ = ended(t, client)
			_ = ended(t, server)
			require.Zero(t, p.proxy.Connections())
			require.ErrorIs(t, p.proxy.Heal(), faultproxy.ErrClosed)
			require.NoError(t, p.proxy.Close())
		})
	}
}

func TestBadArgumentsAreRefused(t *testing.T) {
	t.Parallel()
	_, err := faultproxy.New("no port", faultproxy.Options{})
	require.ErrorContains(t, err, "host:port")
	p := newPeer(t).proxy
	require.ErrorContains(t, p.Delay(faultproxy.Both, time.Second, 2*time.Second), "jitter 2s from 0 to mean")
	require.ErrorContains(t, p.Delay(faultproxy.Both, -1, 0), "at least 0")
	require.ErrorContains(t, p.Loss(faultproxy.Both, 1.5, 0), "from 0 to 1")
	require.ErrorContains(t, p.Distance(time.Second, 2*time.Second), "jitter 2s from 0 to trip")
	require.ErrorContains(t, p.Distance(-1, 0), "at least 0")
	require.ErrorContains(t, p.Stall(0), "direction")
	require.ErrorContains(t, p.BlackHole(4), "direction")
	require.ErrorContains(t, p.CutAfterReply(-1, nil), "at least 0")
}

func TestFaultsSwitchWhileTrafficFlows(t *testing.T) {
	t.Parallel()
	s := testenv.Redis(t)
	p := newProxy(t, s.Addr())
	ctx, cancel := context.WithCancel(t.Context())
	var traffic sync.WaitGroup
	for range 4 {
		traffic.Go(func() {
			for ctx.Err() == nil {
				_ = echo(ctx, p.Addr()) // may fail because of the faults
			}
		})
	}
	for range 20 {
		for _, fault := range []func(){
			func() { _ = p.Delay(faultproxy.Both, time.Millisecond, time.Millisecond) },
			func() { _ = p.Loss(faultproxy.ToClient, 0.5, time.Millisecond) },
			func() { _ = p.CutAfterReply(2, nil) },
			func() { _ = p.Stall(faultproxy.ToServer) },
			func() { _ = p.BlackHole(faultproxy.ToClient) },
			p.HalfOpen, p.Reset, p.Cut,
		} {
			fault()
			time.Sleep(time.Millisecond) // lets some traffic run under the fault
			require.NoError(t, p.Heal())
		}
	}
	cancel()
	traffic.Wait()
	require.NoError(t, echo(t.Context(), p.Addr()), "a healed proxy forwards")
}

// echo makes ten round trips on a new connection.
func echo(ctx context.Context, addr string) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	for range 10 {
		if _, err := io.WriteString(conn, "PING\r\n"); err != nil {
			return err
		}
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil {
			return err
		}
		if line != "+PONG\r\n" {
			return errors.New("unexpected " + line)
		}
	}
	return nil
}

func TestRedisScriptRunsOnceWhenItsReplyIsLost(t *testing.T) {
	t.Parallel()
	s := testenv.Redis(t)
	p := newProxy(t, s.Addr())
	o := s.ClientOptions()
	o.Addr = p.Addr()
	c := redis.NewClient(o)
	defer func() { _ = c.Close() }()
	isScript := func(request []byte) bool { return strings.Contains(strings.ToLower(string(request)), "eval") }
	require.NoError(t, p.CutAfterReply(3, isScript))
	for range 3 {
		require.Error(t, c.Eval(t.Context(), "return redis.call('INCR', KEYS[1])", []string{"k"}).Err())
	}
	require.NoError(t, c.Eval(t.Context(), "return redis.call('INCR', KEYS[1])", []string{"k"}).Err())
	require.Equal(t, 3, p.LostReplies())
	require.Equal(t, "4", s.Client().Get(t.Context(), "k").Val(), "every script ran, even without a reply")
}

func TestRedisCallTimesOutInABlackHole(t *testing.T) {
	t.Parallel()
	s := testenv.Redis(t)
	p := newProxy(t, s.Addr())
	o := s.ClientOptions()
	o.Addr = p.Addr()
	c := redis.NewClient(o)
	defer func() { _ = c.Close() }()
	require.NoError(t, c.Ping(t.Context()).Err())
	require.NoError(t, p.BlackHole(faultproxy.ToClient))
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	var timeout net.Error
	require.ErrorAs(t, c.Incr(ctx, "k").Err(), &timeout)
	require.True(t, timeout.Timeout())
	require.Eventually(t, func() bool { return s.Client().Get(t.Context(), "k").Val() == "1" }, patience, soon)
	require.NoError(t, p.Heal())
	require.Eventually(t, func() bool { return c.Ping(t.Context()).Err() == nil }, patience, time.Millisecond)
}

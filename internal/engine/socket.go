package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Dial makes a connection.
type Dial = func(ctx context.Context, network, addr string) (net.Conn, error)

// Sockets makes the connections to a server. The zero value is ready. Its methods are safe for concurrent use.
//
// A read whose deadline has passed is tried once more. Otherwise a reply that arrived while this process did not run
// would count as missing. A read without a deadline gets one; go-redis makes such reads for the slots of a Cluster.
//
// If a connection can't be made, the dial returns a connection whose writes fail. If it returned an error, go-redis
// would write a line to stderr. After as many failures as its pool has connections, go-redis would also dial only once
// a second.
type Sockets struct {
	dials atomic.Int32              // under way
	ended atomic.Pointer[time.Time] // when the last dial ended; nil: there was none

	mu    sync.Mutex
	conns map[*socket]struct{}
}

// Dialer returns a function that makes connections with dial and gives them the behaviour that Sockets describes.
func (s *Sockets) Dialer(dial Dial) Dial {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		s.dials.Add(1)
		inner, err := dial(ctx, network, addr)
		ended := time.Now()
		s.ended.Store(&ended) // before s.dials, so that opened finds it once no dial is under way
		s.dials.Add(-1)
		if err != nil {
			inner, _ = net.Pipe()                        // nothing reads or writes the other end
			err = fmt.Errorf("engine: connect: %w", err) // go-redis unwraps it once
		}
		conn := &socket{Conn: inner, of: s, failed: err, raw: rawOf(inner)}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.conns == nil {
			s.conns = make(map[*socket]struct{})
		}
		s.conns[conn] = struct{}{}
		return conn, nil
	}
}

// Dialing reports whether connections are being made.
func (s *Sockets) Dialing() bool { return s.dials.Load() > 0 }

// opened returns when the last dial ended, even if it failed; zero if there was none. While a dial is under way, it
// returns the present time.
func (s *Sockets) opened() time.Time {
	if s.Dialing() {
		return time.Now()
	}
	if ended := s.ended.Load(); ended != nil {
		return *ended
	}
	return time.Time{}
}

// Alive reports whether there is a connection that the next call may use. That call does not check it again.
func (s *Sockets) Alive() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		alive := c.failed == nil && !c.retired.Load() && !hungUp(c.raw)
		c.checked.Store(alive)
		if alive {
			return true
		}
	}
	return false
}

// Distrust retires the connections that exist: no further call uses them. Calls under way still get their answers.
func (s *Sockets) Distrust() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.retired.Store(true)
	}
}

// Drop closes the existing connections, even those in use.
func (s *Sockets) Drop() {
	s.Distrust()
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		_ = c.Conn.Close()
	}
}

// socket is a connection of Sockets.
type socket struct {
	net.Conn
	of       *Sockets
	failed   error           // why there is no connection; nil: there is one
	raw      syscall.RawConn // nil: Conn hides it
	deadline time.Time       // of reads
	retired  atomic.Bool
	checked  atomic.Bool // Alive has found it alive, and it was not used since
}

// mostLayers is the largest number of connections below one another, as TCP is below TLS.
const mostLayers = 8

// rawOf returns the system's connection below conn, nil if there is none or conn hides it.
func rawOf(conn net.Conn) syscall.RawConn {
	for range mostLayers {
		if system, ok := conn.(syscall.Conn); ok {
			raw, err := system.SyscallConn()
			if err != nil {
				return nil
			}
			return raw
		}
		upper, ok := conn.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		conn = upper.NetConn()
	}
	return nil
}

// SyscallConn implements syscall.Conn, through which go-redis checks that an idle connection is alive.
func (c *socket) SyscallConn() (syscall.RawConn, error) {
	if c.retired.Load() {
		return nil, net.ErrClosed
	}
	if c.checked.Swap(false) {
		return opaque{}, nil
	}
	if _, direct := c.Conn.(syscall.Conn); direct && c.raw != nil {
		return c.raw, nil
	}
	if hungUp(c.raw) {
		return nil, net.ErrClosed
	}
	return opaque{}, nil
}

// opaque is the syscall.RawConn of a connection that go-redis must not check, because a check by reading shows nothing
// about it, such as one with TLS, or because it was checked. It counts as alive.
type opaque struct{ syscall.RawConn }

// Read implements syscall.RawConn.
func (opaque) Read(func(uintptr) bool) error { return nil }

// Close implements net.Conn.
func (c *socket) Close() error {
	c.of.mu.Lock()
	delete(c.of.conns, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// Write implements net.Conn.
func (c *socket) Write(p []byte) (int, error) {
	if c.failed != nil {
		return 0, c.failed
	}
	return c.Conn.Write(p)
}

// SetDeadline implements net.Conn.
func (c *socket) SetDeadline(t time.Time) error {
	c.deadline = t
	return c.Conn.SetDeadline(t)
}

// SetReadDeadline implements net.Conn.
func (c *socket) SetReadDeadline(t time.Time) error {
	if t.IsZero() {
		t = time.Now().Add(probeTime)
	}
	c.deadline = t
	return c.Conn.SetReadDeadline(t)
}

// Read implements net.Conn. It reads once more after the deadline. Without that, three times as many takes failed in a
// process that was stopped for 1.5 s or 3 s at a time. These times are longer than the Grace of its calls.
func (c *socket) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 || c.deadline.IsZero() || !errors.Is(err, os.ErrDeadlineExceeded) {
		return n, err
	}
	now := time.Now()
	stalled := min(now.Sub(c.deadline), Grace)
	c.deadline = time.Time{} // it isn't put off again
	if err := c.Conn.SetReadDeadline(now.Add(graceRead + stalled)); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

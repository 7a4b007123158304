package engine

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// Dial makes a connection.
type Dial = func(ctx context.Context, network, addr string) (net.Conn, error)

// Sockets makes a client's connections: they look once more when a read's deadline has passed, so that what arrived
// while this process did not run is read before anybody says that the server didn't answer. The zero value is ready.
// Its methods are safe for concurrent use.
type Sockets struct {
	mu    sync.Mutex
	dials int // under way
	last  net.Conn
}

// Dialer is dial with such connections.
func (s *Sockets) Dialer(dial Dial) Dial {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		s.mu.Lock()
		s.dials++
		s.mu.Unlock()
		inner, err := dial(ctx, network, addr)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.dials--
		if err != nil {
			return nil, err
		}
		s.last = inner
		conn := &patient{Conn: inner}
		if raw, ok := inner.(syscall.Conn); ok { // go-redis looks through it whether the connection is alive
			return struct {
				*patient
				syscall.Conn
			}{conn, raw}, nil
		}
		return conn, nil
	}
}

// Dialing reports whether connections are being made.
func (s *Sockets) Dialing() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dials > 0
}

// Interrupt closes the last connection, whoever waits for it.
func (s *Sockets) Interrupt() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last != nil {
		_ = s.last.Close()
	}
}

type patient struct {
	net.Conn
	deadline time.Time // of reads; zero: none
}

// SetDeadline implements net.Conn.
func (c *patient) SetDeadline(t time.Time) error {
	c.deadline = t
	return c.Conn.SetDeadline(t)
}

// SetReadDeadline implements net.Conn.
func (c *patient) SetReadDeadline(t time.Time) error {
	c.deadline = t
	return c.Conn.SetReadDeadline(t)
}

// Read implements net.Conn.
func (c *patient) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 || c.deadline.IsZero() || !errors.Is(err, os.ErrDeadlineExceeded) {
		return n, err
	}
	now := time.Now()
	stalled := min(now.Sub(c.deadline), Grace)
	c.deadline = time.Time{} // it isn't put off again
	if err := c.Conn.SetReadDeadline(now.Add(secondLook + stalled)); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

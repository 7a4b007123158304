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

// Patient is dial with connections that look once more when a read's deadline has passed: what arrived while this
// process did not run is read before anybody says that the server didn't answer.
func Patient(dial Dial) Dial {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		inner, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
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
	late := min(now.Sub(c.deadline), Grace)
	c.deadline = time.Time{} // it isn't put off again
	if err := c.Conn.SetReadDeadline(now.Add(secondLook + late)); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

// Socket is the last connection of a client that has no more than one at a time.
type Socket struct {
	mu   sync.Mutex
	conn net.Conn
}

// Dialer is dial, and keeps hold of the connection.
func (s *Socket) Dialer(dial Dial) Dial {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err == nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.conn = conn
		}
		return conn, err
	}
}

// Interrupt closes the connection, whoever waits for it.
func (s *Socket) Interrupt() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn != nil {
		_ = s.conn.Close()
	}
}

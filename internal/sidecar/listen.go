package sidecar

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/sidecar/metrics"
)

const unixPrefix = "unix:"

// listen opens an address of the form host:port or unix:/path. Its connections count towards the bounds of their
// clients.
func listen(address string, conns *clients, r *refusals) (*listener, error) {
	ln, err := open(address)
	if err != nil {
		return nil, fmt.Errorf("sidecar: listen on %s: %w", address, err)
	}
	return &listener{Listener: ln, conns: conns, refusals: r, open: make(map[*conn]bool)}, nil
}

// isAddress reports whether text is an address to listen on.
func isAddress(text string) bool {
	if path, isUnix := strings.CutPrefix(text, unixPrefix); isUnix {
		return path != ""
	}
	host, port, err := net.SplitHostPort(text)
	_, badPort := strconv.ParseUint(port, 10, 16)
	return err == nil && badPort == nil && (host == "" || fields.IsHost(host))
}

func open(address string) (net.Listener, error) {
	path, isUnix := strings.CutPrefix(address, unixPrefix)
	if !isUnix {
		return net.Listen("tcp", address)
	}
	ln, err := net.Listen("unix", path)
	if errors.Is(err, syscall.EADDRINUSE) && stale(path) {
		if err := os.Remove(path); err != nil {
			return nil, err
		}
		ln, err = net.Listen("unix", path)
	}
	return ln, err
}

// stale reports whether path is the socket of a process that has ended.
func stale(path string) bool {
	info, err := os.Lstat(path)
	if err != nil || info.Mode().Type() != fs.ModeSocket {
		return false
	}
	c, err := net.Dial("unix", path)
	if err == nil {
		_ = c.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}

// listener accepts connections. It closes a connection at once if the client has too many.
type listener struct {
	net.Listener
	conns    *clients
	refusals *refusals

	mu   sync.Mutex
	open map[*conn]bool
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		client := origin(c)
		if !l.conns.enter(client) {
			l.refusals.add(metrics.Connections, client)
			_ = c.Close()
			continue
		}
		served := &conn{Conn: c, addr: clientAddr{c.RemoteAddr(), client}}
		served.leave = sync.OnceFunc(func() {
			l.conns.leave(client)
			l.mu.Lock()
			defer l.mu.Unlock()
			delete(l.open, served)
		})
		l.mu.Lock()
		defer l.mu.Unlock()
		l.open[served] = true
		return served, nil
	}
}

// hangUp closes the connections.
func (l *listener) hangUp() {
	l.mu.Lock()
	open := slices.Collect(maps.Keys(l.open))
	l.mu.Unlock()
	for _, c := range open {
		_ = c.Close() // it may be closed already
	}
}

// conn is a connection. It counts for its client until it is closed.
type conn struct {
	net.Conn
	addr  clientAddr
	leave func()
}

func (c *conn) RemoteAddr() net.Addr { return c.addr }

func (c *conn) Close() error {
	defer c.leave()
	return c.Conn.Close()
}

// origin returns the name of the other end.
func origin(c net.Conn) string {
	switch c := c.(type) {
	case *net.TCPConn:
		if a, ok := c.RemoteAddr().(*net.TCPAddr); ok {
			name := "address " + a.IP.String()
			if a.IP.IsLoopback() {
				return localOrigin + name
			}
			return name
		}
	case *net.UnixConn:
		return localOrigin + peerProcess(c)
	}
	return "unknown"
}

package faultproxy

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"time"
)

// ErrClosed is returned by methods of a proxy that is closed.
var ErrClosed = errors.New("faultproxy: closed")

const (
	// The proxy listens on a port in [minPort, maxPort), below the usual ephemeral ranges. So the kernel doesn't give
	// the port to an outgoing connection while the proxy is cut, and a client that dials the port never reaches itself.
	minPort      = 10000
	maxPort      = 32000
	portAttempts = 200
)

// Direction names one or both of the streams of a connection.
type Direction uint8

// The directions.
const (
	ToServer Direction = 1 << iota // what the client sends
	ToClient                       // what the server sends
	Both     = ToServer | ToClient
)

// Options changes a proxy. The zero value is usable.
type Options struct {
	// Listen is the address at which the proxy accepts clients. The default is a free port of 127.0.0.1.
	Listen string
	// Seed starts the random choices of Delay, Loss and Distance. The same seed gives the same sequence of choices. But
	// scheduling decides which bytes each choice applies to.
	Seed uint64
}

// Proxy forwards TCP connections to one server. Its methods are safe for concurrent use.
type Proxy struct {
	target string
	addr   string
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // every goroutine of the proxy

	mu       sync.Mutex
	closed   bool
	listener net.Listener // nil while cut
	links    map[*link]struct{}
	faults   [2]fault // to server, to client
	oneWay   distance
	halfOpen bool
	changed  chan struct{} // closed and replaced when faults change; wakes the goroutines that hold back bytes
	rand     *rand.Rand

	cutAfter int               // number of requests whose replies are still to be lost
	match    func([]byte) bool // which requests count for cutAfter; nil: all
	lost     int               // replies lost so far
}

// fault has the lasting faults of one direction.
type fault struct {
	mean, jitter time.Duration
	loss         float64
	retransmit   time.Duration
	stall        bool
	blackHole    bool
}

// distance is the time from the proxy to the server: half of a round trip, give or take the jitter.
type distance struct{ mean, jitter time.Duration }

// New starts a proxy for the server at target, a host and port. The server need not run yet.
func New(target string, opts Options) (*Proxy, error) {
	if _, _, err := net.SplitHostPort(target); err != nil {
		return nil, fmt.Errorf("faultproxy: target must be host:port: %w", err)
	}
	ln, err := listen(opts.Listen)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &Proxy{
		target:  target,
		addr:    ln.Addr().String(),
		ctx:     ctx,
		cancel:  cancel,
		links:   make(map[*link]struct{}),
		changed: make(chan struct{}),
		rand:    rand.New(rand.NewPCG(opts.Seed, 0)),
	}
	p.accept(ln)
	return p, nil
}

// listen opens addr, or a free port if addr is empty.
func listen(addr string) (net.Listener, error) {
	if addr != "" {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			return nil, fmt.Errorf("faultproxy: %w", err)
		}
		return ln, nil
	}
	var last error
	for range portAttempts {
		port := minPort + rand.IntN(maxPort-minPort)
		ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err == nil {
			return ln, nil
		}
		last = err
	}
	return nil, fmt.Errorf("faultproxy: no free port: %w", last)
}

// accept makes ln the listener and serves its connections until it is closed. It is called with the lock held, or
// before the proxy is shared.
func (p *Proxy) accept(ln net.Listener) {
	p.listener = ln
	p.wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil { // a passing error: no file descriptor is free, or the client has left
				select {
				case <-p.ctx.Done():
					return
				case <-time.After(10 * time.Millisecond):
				}
				continue
			}
			p.wg.Go(func() { p.serve(ln, conn.(*net.TCPConn)) })
		}
	})
}

// serve carries one client's connection from start to end.
func (p *Proxy) serve(ln net.Listener, client *net.TCPConn) {
	l := &link{p: p, client: client, done: make(chan struct{})}
	if !p.add(ln, l) {
		reset(client)
		return
	}
	defer p.remove(l)
	l.run(p.ctx)
}

// add registers l, so that faults affect it. It reports false if the proxy or the listener of l is closed.
func (p *Proxy) add(ln net.Listener, l *link) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.listener != ln {
		return false
	}
	l.severed = p.halfOpen
	p.links[l] = struct{}{}
	return true
}

func (p *Proxy) remove(l *link) {
	l.close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.links, l)
}

// Addr returns the host and port that clients connect to. It stays the same as long as the proxy lives.
func (p *Proxy) Addr() string { return p.addr }

// Connections returns the number of clients connected.
func (p *Proxy) Connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// Close closes all connections, stops listening and waits for the proxy's goroutines. Closing twice is harmless.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.closed = true
	p.dropAll()
	p.mu.Unlock()
	p.cancel()
	p.wg.Wait()
	return nil
}

// dropAll closes the listener and all links. The lock is held.
func (p *Proxy) dropAll() {
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
	for l := range p.links {
		l.close()
	}
}

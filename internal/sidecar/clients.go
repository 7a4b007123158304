package sidecar

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"net"
	"sync"

	"github.com/tokenrefill/refiller/internal/sidecar/call"
)

// clients counts what each client has under way, connections or calls.
type clients struct {
	most int // of one client

	mu     sync.Mutex
	counts map[string]int // without zeros
	total  int
	closed bool
	idle   chan struct{} // closed: closed is set and total is 0
}

func newClients(most int) *clients {
	return &clients{most: most, counts: make(map[string]int), idle: make(chan struct{})}
}

// enter reports whether the client may have one more, and counts it.
func (c *clients) enter(client string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return call.ErrDraining
	}
	if c.counts[client] >= c.most {
		return call.ErrBusy
	}
	c.counts[client]++
	c.total++
	return nil
}

func (c *clients) leave(client string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts[client]--
	if c.counts[client] == 0 {
		delete(c.counts, client)
	}
	c.total--
	c.checkIdle()
}

// checkIdle is called with the lock held. Nothing enters once closed is set, so
// total reaches 0 once.
func (c *clients) checkIdle() {
	if c.closed && c.total == 0 {
		close(c.idle)
	}
}

// close refuses what comes and waits for what is there to leave.
func (c *clients) close() {
	c.mu.Lock()
	if !c.closed {
		c.closed = true
		c.checkIdle()
	}
	c.mu.Unlock()
	<-c.idle
}

// clientAddr is the remote address of a connection, with the client it counts
// for as long as no certificate tells better.
type clientAddr struct {
	net.Addr
	client string
}

// clientOf names the client of a connection. Two clients never share a name: what
// a certificate says can't look like an address.
func clientOf(addr net.Addr, state *tls.ConnectionState) string {
	if state != nil && len(state.VerifiedChains) > 0 {
		sum := sha256.Sum256(state.VerifiedChains[0][0].Raw)
		return "certificate " + hex.EncodeToString(sum[:])
	}
	if a, ok := addr.(clientAddr); ok {
		return a.client
	}
	return "unknown"
}

type addrKey struct{}

// withAddr keeps the connection's address for calls over HTTP.
func withAddr(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, addrKey{}, c.RemoteAddr())
}

func addrOf(ctx context.Context) net.Addr {
	addr, _ := ctx.Value(addrKey{}).(net.Addr)
	return addr
}

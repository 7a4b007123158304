package sidecar

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/internal/sidecar/call"
)

// clients counts the connections of each client.
type clients struct {
	most int // the largest number of connections of one client

	mu     sync.Mutex
	counts map[string]int // by client, without zeros
}

func newClients(most int) *clients {
	return &clients{most: most, counts: make(map[string]int)}
}

// enter counts a connection of the client and returns true. If the client already has the largest number of
// connections, enter returns false and doesn't count this one.
func (c *clients) enter(client string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.counts[client] >= c.most {
		return false
	}
	c.counts[client]++
	return true
}

func (c *clients) leave(client string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts[client]--
	if c.counts[client] == 0 {
		delete(c.counts, client)
	}
}

// clientAddr is the remote address of a connection, with its origin.
type clientAddr struct {
	net.Addr
	origin string
}

// localOrigin is the prefix of the names of origins on this host. Many programs may have the same origin there, and a
// proxy has one origin for all its clients.
const localOrigin = "local "

// originOf returns a name of the other end of a connection. The name is from its certificate or, without one, from its
// address or process. Names from certificates have another form than other names, so an address can't have the name
// of a certificate.
func originOf(addr net.Addr, state *tls.ConnectionState) string {
	if state != nil && len(state.VerifiedChains) > 0 {
		sum := sha256.Sum256(state.VerifiedChains[0][0].Raw)
		return "certificate " + hex.EncodeToString(sum[:])
	}
	if a, ok := addr.(clientAddr); ok {
		return a.origin
	}
	return "unknown"
}

// clientOf returns the name of the client of a call. For calls from this host, each key and each flow of a key counts
// as a client. There the origin only names the proxy or program that has called.
func clientOf(origin string, a call.Asks) string {
	if !strings.HasPrefix(origin, localOrigin) {
		return origin
	}
	client := origin + " key " + a.Key
	if a.Flow != "" {
		client += " flow " + a.Flow
	}
	return client
}

type connKey struct{}

// connection is the connection of a call over HTTP.
type connection struct {
	addr  net.Addr
	begun time.Time
}

// withConn stores the connection in the context of calls over HTTP.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, connection{c.RemoteAddr(), time.Now()})
}

func connOf(ctx context.Context) connection {
	c, _ := ctx.Value(connKey{}).(connection)
	return c
}

package faultproxy

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

const (
	readSize   = 32 << 10
	queueDepth = 1024 // pieces under way in one direction; a full queue holds the sender back as TCP does
)

// Indices of the directions in Proxy.faults.
const (
	toServer = iota
	toClient
)

// link is a client's connection together with the proxy's connection to the server for that client.
type link struct {
	p      *Proxy
	client *net.TCPConn
	done   chan struct{} // closed when the link is over

	mu     sync.Mutex         // innermost: held for moments, also under Proxy.mu
	server *net.TCPConn       // nil until dialled
	ending func(*net.TCPConn) // how the connections ended; nil while the link lives

	// Guarded by Proxy.mu.
	severed bool    // the server's side is closed, and the client must not notice
	lossy   [2]bool // by direction: bytes were swallowed, so nothing more can be forwarded
	doomed  bool    // the next reply will be lost, and the link will be closed
}

// piece is a part of a stream, or its end.
type piece struct {
	data []byte
	err  error     // why the stream ended: io.EOF after an orderly end, nil if it goes on
	near time.Time // when the piece is forwarded if there is no fault
	due  time.Time // when it is forwarded with the delays of the faults
}

// run connects to the server and carries both streams until the link is over.
func (l *link) run(ctx context.Context) {
	server, severed := l.dial(ctx)
	if server == nil && !severed {
		l.reset()
		return
	}
	var streams sync.WaitGroup
	streams.Go(func() { l.carry(toServer, l.client, server) })
	if server != nil {
		streams.Go(func() { l.carry(toClient, server, l.client) })
	}
	streams.Wait()
}

// dial connects to the server, unless the link is severed or the server does not accept.
func (l *link) dial(ctx context.Context) (server *net.TCPConn, severed bool) {
	if l.isSevered() {
		return nil, true
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.p.target)
	if err != nil {
		return nil, l.isSevered()
	}
	server = conn.(*net.TCPConn)
	l.mu.Lock()
	l.server = server
	ending := l.ending
	l.mu.Unlock()
	switch { // a fault during the dial found no connection that it could end
	case ending != nil:
		ending(server)
	case l.isSevered():
		_ = server.Close()
	}
	return server, false
}

// carry forwards one stream. It reads src itself and writes dst in a second goroutine. So a delay adds latency, but
// doesn't limit how many bytes are under way. carry returns when the end of the stream was forwarded. If the end is
// held back or swallowed, carry returns when the link is over.
func (l *link) carry(dir int, src, dst *net.TCPConn) {
	queue := make(chan piece, queueDepth)
	var writer sync.WaitGroup
	writer.Go(func() { l.write(dir, dst, queue) })
	defer writer.Wait()
	buf := make([]byte, readSize)
	for {
		n, err := src.Read(buf)
		if n > 0 && !l.arrived(dir, buf[:n]) {
			l.close()
			return
		}
		pieces := make([]piece, 0, 2)
		if n > 0 {
			pieces = append(pieces, l.p.timed(dir, piece{data: append([]byte(nil), buf[:n]...)}))
		}
		if err != nil {
			pieces = append(pieces, l.p.timed(dir, piece{err: err}))
		}
		for _, c := range pieces {
			select {
			case queue <- c:
			case <-l.done:
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// arrived records that data was read, and reports whether the link goes on. It is called before the data is forwarded.
// Otherwise the reply to a request could come before the request was recorded.
func (l *link) arrived(dir int, data []byte) bool {
	p := l.p
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case dir == toClient && l.doomed:
		l.doomed = false
		p.lost++
		return false
	case dir == toServer && !l.doomed && p.cutAfter > 0 && (p.match == nil || p.match(data)):
		p.cutAfter--
		l.doomed = true
	}
	return true
}

// timed returns a piece that has just been read with the random times at which it is forwarded.
func (p *Proxy) timed(dir int, c piece) piece {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.faults[dir]
	delay := p.vary(f.mean, f.jitter)
	if f.loss > 0 && p.rand.Float64() < f.loss {
		delay += f.retransmit
	}
	c.near = time.Now().Add(p.vary(p.oneWay.mean, p.oneWay.jitter))
	c.due = c.near.Add(delay)
	return c
}

// vary returns a random time from mean-jitter to mean+jitter. The lock is held.
func (p *Proxy) vary(mean, jitter time.Duration) time.Duration {
	if jitter > 0 {
		mean += time.Duration(p.rand.Int64N(int64(2*jitter)+1)) - jitter
	}
	return mean
}

// write forwards the pieces of a stream until the stream or the link ends.
func (l *link) write(dir int, dst *net.TCPConn, queue <-chan piece) {
	for {
		var c piece
		select {
		case c = <-queue:
		case <-l.done:
			return
		}
		forward, over := l.hold(dir, c)
		switch {
		case over:
			return
		case !forward && c.err != nil: // the end is swallowed, so the other side must not notice it
			<-l.done
			return
		case !forward:
		case errors.Is(c.err, io.EOF):
			if err := dst.CloseWrite(); err != nil {
				l.close()
			}
			return
		case c.err != nil:
			l.reset()
			return
		default:
			if _, err := dst.Write(c.data); err != nil && !l.isSevered() {
				l.reset()
				return
			}
		}
	}
}

// hold waits until the faults let a piece go on or swallow it. forward reports whether the piece is to be forwarded.
// over reports whether the link ended during the wait.
func (l *link) hold(dir int, c piece) (forward, over bool) {
	p := l.p
	for {
		p.mu.Lock()
		f, changed := p.faults[dir], p.changed
		swallow := l.severed || l.lossy[dir] || f.blackHole
		if swallow {
			l.lossy[dir] = true
		}
		p.mu.Unlock()
		if swallow {
			return false, false
		}
		wait := time.Until(c.due)
		if f.mean == 0 && f.loss == 0 { // healed
			wait = time.Until(c.near)
		}
		if wait <= 0 && !f.stall {
			return true, false
		}
		var elapsed <-chan time.Time
		if !f.stall {
			elapsed = time.After(wait)
		}
		select {
		case <-elapsed:
		case <-changed:
		case <-l.done:
			return false, true
		}
	}
}

func (l *link) isSevered() bool {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	return l.severed
}

// sever closes the server's side only. The proxy's lock is held.
func (l *link) sever() {
	l.severed = true
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.server != nil {
		_ = l.server.Close()
	}
}

// close ends the link in an orderly way.
func (l *link) close() { l.finish(func(c *net.TCPConn) { _ = c.Close() }) }

// reset ends the link with RST on both sides.
func (l *link) reset() { l.finish(reset) }

// finish ends the link once.
func (l *link) finish(end func(*net.TCPConn)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ending != nil {
		return
	}
	l.ending = end
	close(l.done)
	end(l.client)
	if l.server != nil {
		end(l.server)
	}
}

// reset closes a connection with RST instead of FIN.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

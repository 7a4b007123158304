package faultproxy

import (
	"fmt"
	"net"
	"time"
)

// Cut closes all connections and refuses new ones until [Proxy.Heal].
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropAll()
}

// Reset ends all connections with RST on both sides. New connections are accepted.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.reset()
	}
}

// HalfOpen disconnects the server from its clients, without their notice, until [Proxy.Heal]. It closes the connections
// to the server. The connections to clients stay open: the proxy swallows what the clients send, and sends nothing. The
// same happens to new clients.
func (p *Proxy) HalfOpen() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.halfOpen = true
	for l := range p.links {
		l.sever()
	}
	p.wake()
}

// Swallow acts as a firewall does that forgets idle connections. All connections that exist stay open, but all bytes
// that are sent on them in either direction are lost. [Proxy.Heal] resets these connections. New connections work.
func (p *Proxy) Swallow() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.lossy = [2]bool{true, true}
	}
	p.wake()
}

// Delay holds back all bytes in direction d for mean, give or take a uniformly random time up to jitter. Jitter must be
// from 0 to mean. Bytes keep their order, so a long delay also holds back the bytes that follow. Delay replaces an
// earlier Delay of the same direction.
func (p *Proxy) Delay(d Direction, mean, jitter time.Duration) error {
	if mean < 0 || jitter < 0 || jitter > mean {
		return fmt.Errorf("faultproxy: delay: mean %v must be at least 0 and jitter %v from 0 to mean", mean, jitter)
	}
	return p.change(d, func(f *fault) { f.mean, f.jitter = mean, jitter })
}

// Distance sets the round-trip time to the server to trip, give or take a uniformly random time up to jitter. Jitter
// must be from 0 to trip. This is not a fault: [Proxy.Heal] doesn't change it, and the delays of faults are added to
// it. Distance replaces an earlier Distance, and applies to bytes that are sent from then on.
func (p *Proxy) Distance(trip, jitter time.Duration) error {
	if trip < 0 || jitter < 0 || jitter > trip {
		return fmt.Errorf("faultproxy: distance: trip %v must be at least 0 and jitter %v from 0 to trip", trip, jitter)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.oneWay = distance{trip / 2, jitter / 2}
	return nil
}

// Loss acts as packet loss does on TCP. With the given probability, from 0 to 1, a piece of the stream and all that
// follows it are late by retransmit. Loss replaces an earlier Loss of the same direction.
func (p *Proxy) Loss(d Direction, probability float64, retransmit time.Duration) error {
	if !(probability >= 0 && probability <= 1) || retransmit < 0 {
		return fmt.Errorf("faultproxy: loss: probability %v must be from 0 to 1 and retransmit %v at least 0", probability,
			retransmit)
	}
	return p.change(d, func(f *fault) { f.loss, f.retransmit = probability, retransmit })
}

// Stall holds back all that is sent in direction d until [Proxy.Heal] delivers it. It acts as a network partition that
// ends before TCP gives up.
func (p *Proxy) Stall(d Direction) error {
	return p.change(d, func(f *fault) { f.stall = true })
}

// BlackHole swallows all that is sent in direction d, the end of the stream included, until [Proxy.Heal]. Connections
// stay open and new ones are accepted.
func (p *Proxy) BlackHole(d Direction) error {
	return p.change(d, func(f *fault) { f.blackHole = true })
}

// change applies set to the faults of the directions in d.
func (p *Proxy) change(d Direction, set func(*fault)) error {
	if d == 0 || d > Both {
		return fmt.Errorf("faultproxy: direction %d must be ToServer, ToClient or Both", d)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.faults {
		if d&(1<<i) != 0 {
			set(&p.faults[i])
		}
	}
	p.wake()
	return nil
}

// CutAfterReply loses the replies to the next n requests for which match returns true. A nil match accepts every
// request. The server gets such a request and replies. The proxy reads the reply and closes the connection instead of
// forwarding the reply. So the request has had its effect, but its sender doesn't know that.
//
// The bytes that one read from the client's connection returns are a request. The first bytes that the server sends
// after them are its reply. This fits a protocol if its requests have at most 32 KiB, and a client sends the next
// request only after the reply. So it fits Redis commands and pipelines, but not HTTP/2. Clients of Redis also send
// commands of their own when they connect: match can exclude these. match is called with the proxy locked, so it must
// not call the proxy.
//
// A new call replaces the former one. n = 0 and [Proxy.Heal] switch the fault off.
func (p *Proxy) CutAfterReply(n int, match func(request []byte) bool) error {
	if n < 0 {
		return fmt.Errorf("faultproxy: cut after reply: n %d must be at least 0", n)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cutAfter, p.match = n, match
	return nil
}

// LostReplies returns the number of replies that [Proxy.CutAfterReply] has lost since the proxy started.
func (p *Proxy) LostReplies() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lost
}

// Heal ends all faults. Bytes that were delayed or stalled are delivered at once, and connections that have lost bytes
// are reset. Heal fails if the proxy was cut and another program has its port now. A closed proxy returns [ErrClosed].
func (p *Proxy) Heal() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = [2]fault{}
	p.halfOpen = false
	p.cutAfter, p.match = 0, nil
	for l := range p.links {
		if l.severed || l.lossy[toServer] || l.lossy[toClient] {
			l.reset()
		}
	}
	p.wake()
	if p.closed {
		return ErrClosed
	}
	if p.listener != nil {
		return nil
	}
	ln, err := net.Listen("tcp", p.addr)
	if err != nil {
		return fmt.Errorf("faultproxy: heal: %w", err)
	}
	p.accept(ln)
	return nil
}

// wake makes the goroutines that hold back bytes check the faults again. The lock is held.
func (p *Proxy) wake() {
	close(p.changed)
	p.changed = make(chan struct{})
}

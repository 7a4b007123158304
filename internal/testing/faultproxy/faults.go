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

// HalfOpen takes the server away from under its clients until [Proxy.Heal]: connections to the server are closed,
// those to clients stay open, swallow what is sent and never answer. New clients get the same.
func (p *Proxy) HalfOpen() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.halfOpen = true
	for l := range p.links {
		l.sever()
	}
	p.wake()
}

// Swallow makes the network forget the connections that exist, as a firewall does that drops idle ones. They stay open
// and swallow what is sent in both directions; [Proxy.Heal] resets them. New connections work.
func (p *Proxy) Swallow() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.lossy = [2]bool{true, true}
	}
	p.wake()
}

// Delay holds back what is sent in direction d by mean, give or take a uniformly random time up to jitter. Bytes on
// their way in the proxy keep their order, so a long delay also holds what comes after it. Jitter must be from 0 to
// mean. It replaces an earlier Delay of the same direction.
func (p *Proxy) Delay(d Direction, mean, jitter time.Duration) error {
	if mean < 0 || jitter < 0 || jitter > mean {
		return fmt.Errorf("faultproxy: delay: mean %v must be at least 0 and jitter %v from 0 to mean", mean, jitter)
	}
	return p.change(d, func(f *fault) { f.mean, f.jitter = mean, jitter })
}

// Distance puts the server a round trip away, give or take a uniformly random time up to jitter, which must be from 0
// to trip. It is no fault: what is sent takes that time beside the delays of faults, and [Proxy.Heal] leaves it. It
// replaces an earlier Distance, and counts for what is sent from then on.
func (p *Proxy) Distance(trip, jitter time.Duration) error {
	if trip < 0 || jitter < 0 || jitter > trip {
		return fmt.Errorf("faultproxy: distance: trip %v must be at least 0 and jitter %v from 0 to trip", trip, jitter)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.away = distance{trip / 2, jitter / 2}
	return nil
}

// Loss acts as packet loss does on TCP: with the given probability, from 0 to 1, a piece of the stream is late by
// retransmit, and so is all that follows it. It replaces an earlier Loss of the same direction.
func (p *Proxy) Loss(d Direction, probability float64, retransmit time.Duration) error {
	if !(probability >= 0 && probability <= 1) || retransmit < 0 {
		return fmt.Errorf("faultproxy: loss: probability %v must be from 0 to 1 and retransmit %v at least 0", probability,
			retransmit)
	}
	return p.change(d, func(f *fault) { f.loss, f.retransmit = probability, retransmit })
}

// Stall holds back all that is sent in direction d until [Proxy.Heal] delivers it: a partition that ends before TCP
// gives up.
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

// CutAfterReply loses the replies to the next n requests for which match answers true; a nil match accepts every
// request, and n = 0 disarms. The server gets the request and answers it; the proxy reads the reply and closes the
// connection instead of forwarding it. So the request has had its effect and its sender doesn't know.
//
// A request is what one read from the client's connection returns, and the first thing the server sends after it counts
// as its reply. That fits protocols in which a client waits for the reply before it sends again, with requests up to 32
// KiB: a Redis command or pipeline does, HTTP/2 does not. Clients of Redis also send commands of their own when they
// connect; match distinguishes them. It is called with the proxy locked, so it must not call the proxy.
//
// A new call replaces the former one. [Proxy.Heal] disarms.
func (p *Proxy) CutAfterReply(n int, match func(request []byte) bool) error {
	if n < 0 {
		return fmt.Errorf("faultproxy: cut after reply: n %d must be at least 0", n)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cutAfter, p.match = n, match
	return nil
}

// LostReplies returns how many replies [Proxy.CutAfterReply] has lost since the proxy started.
func (p *Proxy) LostReplies() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lost
}

// Heal ends all faults. What was delayed or stalled is delivered at once; connections that have lost bytes are reset.
// It fails if the proxy was cut and its port can't be had again, and with [ErrClosed].
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

// wake checks the faults again for bytes that are held. The lock is held.
func (p *Proxy) wake() {
	close(p.changed)
	p.changed = make(chan struct{})
}

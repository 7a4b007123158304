// Package faultproxy is a TCP proxy on loopback that misbehaves on command. A test puts it between a client and a
// server and switches faults on and off while both run.
//
// Two kinds of faults exist. Lasting ones stay until [Proxy.Heal] and hold for connections old and new: [Proxy.Cut],
// [Proxy.HalfOpen] and, for each direction on its own, [Proxy.Delay], [Proxy.Loss], [Proxy.Stall] and
// [Proxy.BlackHole]. The others strike connections that exist: [Proxy.Reset] and [Proxy.Swallow] all of them at once,
// and [Proxy.CutAfterReply] each one that carries a chosen request, once the server has answered it.
//
// [Proxy.Distance] is no fault: it is how far the server is.
//
// The proxy never alters a stream: bytes arrive in order and without gaps, late, or not at all. A connection that has
// lost bytes therefore carries nothing more and is reset by Heal, as a real one is when its peer has forgotten it.
package faultproxy

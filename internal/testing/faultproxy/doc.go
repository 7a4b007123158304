// Package faultproxy is a TCP proxy on loopback that misbehaves on command. A test puts it between a client and a
// server and switches faults on and off while both run. It is not for production, and knows no protocol.
//
// There are two kinds of faults. Lasting faults affect old and new connections until [Proxy.Heal]. They are
// [Proxy.Cut], [Proxy.HalfOpen] and, for each direction separately, [Proxy.Delay], [Proxy.Loss], [Proxy.Stall] and
// [Proxy.BlackHole]. The other faults affect connections that exist: [Proxy.Reset] and [Proxy.Swallow] all of them at
// once, and [Proxy.CutAfterReply] each connection with a chosen request, once the server has answered that.
//
// [Proxy.Distance] is no fault. It is the length of the way to the server.
//
// The proxy never changes a stream. Bytes arrive in order and without gaps, perhaps late, or not at all. So a
// connection that has lost bytes transports nothing more. Heal resets it, as a real connection is reset if its peer no
// longer has it.
package faultproxy

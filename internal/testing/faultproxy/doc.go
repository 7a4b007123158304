// Package faultproxy is a TCP proxy on loopback that misbehaves on command. A test puts it between a client and a
// server and switches faults on and off while both run. It is not for production, and knows no protocol.
//
// There are three kinds of faults:
//   - Lasting faults affect old and new connections until [Proxy.Heal]. [Proxy.Cut] and [Proxy.HalfOpen] affect both
//     directions. [Proxy.Delay], [Proxy.Loss], [Proxy.Stall] and [Proxy.BlackHole] are set for each direction.
//   - [Proxy.Reset] and [Proxy.Swallow] affect all connections that exist, and no later ones.
//   - [Proxy.CutAfterReply] closes a connection once the server has replied to a chosen request.
//
// [Proxy.Distance] is not a fault: it sets the round-trip time to the server.
//
// The proxy never changes a stream. Bytes arrive in order and without gaps, perhaps late. Once a connection has lost
// bytes in one direction, no more bytes arrive in that direction. Heal resets such a connection, as a host resets a
// connection that it doesn't know.
package faultproxy

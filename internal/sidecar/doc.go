// Package sidecar serves buckets to programs that have no Go SDK: over HTTP with
// JSON, over gRPC, and to Envoy as its rate limit service.
//
// # Shape
//
// A [Server] owns listeners, connections and calls. Handlers translate: HTTP
// (http.go, json.go) and gRPC (grpc.go) to calls of a [fetch.Client], Envoy's
// descriptors (envoy.go) to buckets or windows by way of [RateLimits]
// (descriptors.go). How an error looks to a caller is in one table (failure.go).
//
// # Clients
//
// A client is whoever showed a verified certificate; without one, the process at
// the other end of a Unix socket (where the system tells, on Linux) or the IP
// address. Each has a bounded number of connections and of calls under way, is
// refused what exceeds it, and has a bounded time to send a request and to read
// the answer. So a client that hangs, floods or trickles uses up its own share
// and nobody else's. All that comes from one IP address counts as one client:
// behind a proxy or on loopback, certificates or a Unix socket tell clients apart.
//
// # The end
//
// When the context of [Server.Run] ends, health turns NOT_SERVING (HTTP:
// /readyz answers 503) while calls are still served, for Drain.Delay. Then no
// connection is accepted any more and calls under way finish, for Drain.Timeout;
// what is still under way then is cancelled. Run returns when nothing runs.
package sidecar

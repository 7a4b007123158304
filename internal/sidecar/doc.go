// Package sidecar serves buckets and limits to programs that have no Go SDK: over HTTP with JSON, over gRPC, and to
// Envoy as its rate limit service.
//
// # Shape
//
// A [Server] owns listeners, connections and calls. Three doors translate: httpapi and grpcapi to calls of a
// [fetch.Client] and to limits by name, which package limits reads from a file; envoy from descriptors to buckets and
// windows. How an error looks to a caller is in one table, in package call.
//
// Each client has bounded connections, calls under way and times, so that it uses up its own share and nobody else's;
// docs/sidecar.md says who a client is, and what happens at the end. [Server.Run] returns when nothing runs.
package sidecar

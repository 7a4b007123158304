// Package sidecar serves buckets and limits to programs that have no Go SDK: over HTTP with JSON, over gRPC, and to
// Envoy as its rate limit service.
//
// # Shape
//
// A [Server] owns listeners, connections and calls. Three packages translate requests. httpapi and grpcapi translate to
// calls of a [fetch.Client] and to limits by name, which package limits reads from a file. envoy translates descriptors
// to buckets and windows. Package call has one table with the form of each error for callers.
//
// Each client has bounded connections, calls under way and times, so that it uses up its own share and not that of
// others. docs/sidecar.md describes how clients are identified, and what happens at the end. [Server.Run] returns when
// nothing runs.
package sidecar

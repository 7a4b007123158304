// Package sidecar serves buckets and limits to programs that have no Go SDK: over HTTP with JSON, over gRPC, and to
// Envoy as its rate limit service.
//
// # Shape
//
// A [Server] owns listeners, connections and calls. Three packages translate requests. Packages httpapi and grpcapi
// translate them to calls of a [fetch.Client], and to limits by name, which package limits reads from a file. Package
// envoy translates descriptors to buckets and windows. Package call has one table with the form in which callers get
// each error.
//
// The connections of each client, its calls under way and their times are bounded. So a client can use up only its own
// share. docs/sidecar.md describes how clients are identified, and how a server ends. When [Server.Run] returns,
// nothing runs any more.
package sidecar

// Package refillerv1 is the gRPC interface of the sidecar ("consumer serve"):
// messages, client and server, generated from buckets.proto.
//
// Go programs that can reach Redis use package fetch instead.
package refillerv1

// Package refillerv1 is the gRPC interface of the sidecar ("consumer serve"). Its messages, client and server are
// generated from buckets.proto and limits.proto.
//
// Go programs that can reach Redis use package fetch instead.
package refillerv1

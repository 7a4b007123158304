// Package oracle is a model of the Redis scripts, written in Go. It models reservations, leases, sweeps, takes from
// several buckets, takes that are charged once, takes from a template's bucket, and buckets with flows. No program
// needs these rules in Go. Package policy has the rules that programs need too: credit, takes and returns of one
// bucket, and waits.
//
// Tests run the same cases and random histories with the scripts and with both packages. The package is for tests only.
package oracle

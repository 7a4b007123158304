// Package oracle states in Go the rules of the scripts that no program needs in Go: reservations, leases, sweeps, takes
// of several buckets, takes that are charged once, and takes of a template's bucket. Package policy has the others:
// credit, takes and returns of one bucket, and waits.
//
// The scripts are tested against both, with the same cases and random histories. The package is for tests only.
package oracle

// Package policy holds the rules of a bucket as pure values and functions. The rules are how fast tokens are due, when
// scheduled tokens fall due, and what each operation does to a bucket's state. It doesn't take tokens from Redis: use
// package fetch for that.
//
// There are three main types:
//
//   - [Policy] is what a person writes: capacity, a rate or a schedule, what to do after a loss.
//   - [Terms] is the same policy in the integers that the Redis scripts compute with: microseconds and whole tokens.
//   - [Bucket] is a bucket's state. Its methods state the rules of the scripts in package lua for refills, takes,
//     returns and waits. Consumers use a Bucket for their share during an outage, and replays of logs use it, too.
//
// The rules that no program needs in Go, such as those of reservations, are in internal/testing/oracle. The scripts are
// tested against this package and against that one.
//
// [Allocate] divides a rate by weighted max-min, for pools.
//
// Nothing here reads a clock, starts a goroutine or does I/O. Values may be shared while no goroutine writes to them. A
// Bucket belongs to one goroutine.
package policy

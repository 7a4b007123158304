// Package policy holds the rules of a bucket as pure values and functions: how
// fast tokens are due, when scheduled ones fall due, and what each operation
// does to a bucket's state.
//
// The model: a [Policy] is what a person writes (capacity, a rate or a
// schedule, what to do after a loss). [Terms] is the same policy in the
// integers that the Redis scripts compute with: microseconds and whole tokens.
// [Bucket] is a bucket's complete state, and its methods are the exact rules of
// the scripts in package lua. The same tables and random histories run against
// both, so Bucket serves as their oracle, as the server of simulations, and as
// the in-process bucket of a log replay.
//
// Nothing here reads a clock, starts a goroutine or does I/O. Values are safe
// to share while nobody writes to them; a Bucket belongs to one goroutine.
package policy

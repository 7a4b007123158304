// Package lua holds the Redis scripts of a bucket, its key names, and the typed Go functions that call them. It does
// not decide when to call: packages refill, fetch and pool do. Scripts of other packages, such as the rules of
// limiters, are made with [NewScript].
//
// A bucket named K is stored in three keys of one Cluster slot: K (tokens), {K} (index) and {K}:ctl (state and policy
// in force). keys.go has the others. Each script opens with its contract: KEYS, ARGV with units, every reply. Parts
// that several scripts include are in the directory shared. No other package reads raw replies of a bucket's scripts;
// decode.go does.
//
// A new script is a file here, NAME.lua, with a function that calls it; docs/development.md has all steps. The rule of
// a limiter is no script of this package: it is beside its limiter, below package limit.
//
// # Exactly once
//
// A script that isn't idempotent must not run twice because its reply was lost.
// Every script is sent as a command that go-redis does not retry, whatever the client's MaxRetries. Two answers prove
// that a script did not run and are followed by a second command: NOSCRIPT (sent again with its source) and a Cluster's
// redirection. After any other error the script may have run, and callers assume that it has.
//
// All functions are safe for concurrent use if the client is. They wait for the client, so a context's deadline has an
// effect only if the client observes it (redis.Options.ContextTimeoutEnabled).
package lua

// Package lua holds the Redis scripts of a bucket, its key names, and the typed Go functions that call them. It does
// not decide when to call: packages refill, fetch and pool do. Scripts of other packages, such as the rules of
// limiters, are made with [NewScript].
//
// A bucket named K is stored in three keys of one Cluster slot: K (tokens), {K} (index) and {K}:ctl (state and policy
// in force). keys.go has the others. Each script opens with its contract: KEYS, ARGV with units, every reply. Parts
// that several scripts include are in the directory shared. Only this package reads the raw replies of a bucket's
// scripts, in decode.go.
//
// A new script is a file NAME.lua in this directory, with a function that calls it; docs/development.md has all steps.
// The script of a limiter's rule is not in this package. It is beside the limiter, in a directory below limit.
//
// # Exactly once
//
// A script that isn't idempotent must not run twice because its reply was lost. So every script is sent as a command
// that go-redis does not retry, whatever the client's MaxRetries is. A script is sent again only after a reply that
// proves that it did not run. There are two such replies: after NOSCRIPT it is sent with its source, and after a
// Cluster's redirection it is sent to the other server. After any other error the script may have run, and callers
// assume that it has.
//
// All functions are safe for concurrent use if the client is. A context's deadline has an effect only if the client
// observes it (redis.Options.ContextTimeoutEnabled), because the functions wait for the client.
package lua

// Package lua holds the Redis scripts of a bucket, its key names, and the typed
// Go functions that call them. Scripts of other packages, such as the rules of
// limiters, are made with [NewScript].
//
// A bucket named K lives in three keys of one Cluster slot: K (tokens), {K}
// (index) and {K}:ctl (state and policy in force); keys.go has the others. Each
// script opens with its contract: KEYS, ARGV with units, every reply. What
// several scripts need is in shared. No other package sees raw replies of a
// bucket's scripts; decode.go reads them.
//
// # Exactly once
//
// A script that isn't idempotent must not run twice because its reply was lost.
// Every script is sent as a command that go-redis does not retry, whatever the
// client's MaxRetries. Two answers prove that a script did not run
// and are followed by a second command: NOSCRIPT (sent again with its source)
// and a Cluster's redirection. After any other error the script may have run;
// callers take it as run.
//
// All functions are safe for concurrent use if the client is. They wait on the
// client, so a context's deadline holds only as far as the client honours it
// (redis.Options.ContextTimeoutEnabled).
package lua

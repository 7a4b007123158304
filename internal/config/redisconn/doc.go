// Package redisconn builds the Redis client of the programs from a URL and credentials. All programs read these in the
// same way, from a configuration, from variables and from flags ([Options], [FromCommandLine]). The package is not for
// applications: they make a client of go-redis themselves.
//
// These are the forms of a URL. In all of them user:password@ may precede the host:
//
//	redis://host[:6379][/db]                         one server
//	rediss://host[:6379][/db]                        the same over TLS
//	unix:///path/to/socket[?db=N]                    one server on a Unix socket
//	redis-sentinel://h1[:26379],h2,h3/master[?db=N]  the master that the sentinels name
//	redis-cluster://h1[:6379],h2,h3                  a Redis Cluster, found through any of these nodes
//	rediss-sentinel://..., rediss-cluster://...      the same over TLS
//
// The only query parameter is db. It is an error to give it twice or for a Cluster. Characters of a password that need
// escaping are percent-encoded. The URL in a configuration file must not have a password. A URL in a flag or a variable
// may.
//
// All clients have this in common:
//
//   - A command is sent once: MaxRetries is off. A Cluster client follows MOVED and ASK, which prove that the server
//     did not run the command. It repeats other commands, unless their method NoRetry returns true, as it does for the
//     scripts of this project.
//   - A call's context bounds its time on the socket. Every dial, read and write also has a timeout.
//   - Password files, also those of sentinels, and PEM files are read for each new connection, so they can be rotated.
//   - Errors and logs show no password.
package redisconn

// Package redisconn builds the Redis client of the programs from a URL and credentials, which all of them read in the
// same way: from a configuration, from variables, and from flags ([Options], [FromCommandLine]).
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
// The only query parameter is db; it is an error to give it twice or in a Cluster. What needs escaping in a password is
// percent-encoded. A configuration file's URL holds no password; one that is typed or in the environment may.
//
// What the clients have in common: a command is sent once (MaxRetries is off; a Cluster client follows MOVED and ASK,
// which the server answers instead of executing, and sends anew only commands that don't forbid it with NoRetry, as all
// of this project's scripts do). A call's context bounds its time on the socket. Every dial, read and write has a
// timeout besides. Password files, of the sentinels too, and PEM files are read for each new connection, so all of them
// can be rotated. Errors and logs show no password.
package redisconn

// Package testenv starts real servers for tests: a single Redis, a Redis Cluster, a Redis with a Sentinel, etcd with
// one or three members, and the project's own programs. It is for tests only: package devserver has servers for the
// playground.
//
// Every server is a separate process on loopback, so a test can kill it, freeze it and start it again. The package
// kills the server when the test that started it ends. On Linux the kernel also kills it if the test binary is killed.
// Each server has a directory for its files. If the test passes, the directory is removed. If it fails, the test's
// output has the end of the server's log and the path of the directory.
//
// Servers listen on ports below the usual ephemeral range. A file lock reserves a port until the test ends, even while
// the server is down between Kill and Restart. So test packages that run at the same time never use each other's ports.
//
// If a server program is missing, the test fails with a message about what to install. No test is skipped. REDIS_SERVER
// names another redis-server (or valkey-server) to test against. ETCD_SERVER names an etcd binary; without it, etcd is
// built once from the version in go.mod and kept in the user's cache directory. A tool directive in go.mod keeps etcd
// among the module's dependencies.
//
// Functions that have a [testing.TB] parameter end the test when they fail, so they must be called from its goroutine.
// Methods that act on a running server may be called from any goroutine until the test ends. When they fail, they only
// mark the test as failed.
package testenv

// Package testenv starts real servers for tests: a single Redis, a Redis Cluster or one with Sentinels, etcd with one
// or three members, and the project's own programs. It is for tests only: package devserver has servers for the
// playground.
//
// Every server is a separate process on loopback, so a test can kill it, freeze it and start it again. A server ends
// with the test that started it. On Linux the kernel also ends it if the test binary is killed. Each server has a
// directory for its files. If the test passes, the directory is removed. If it fails, the output has the end of the
// server's log and the path of the directory.
//
// Servers listen on ports below the usual ephemeral range. A file lock reserves a port until the test ends, even while
// the server is down between Kill and Restart. So test packages that run at the same time never use each other's ports.
//
// If a server program is missing, the test fails with a message about what to install. No test is skipped. REDIS_SERVER
// names another redis-server (or valkey-server) to test against. ETCD_SERVER names an etcd binary; without it, etcd is
// built once from the version in go.mod and kept in the user's cache directory. The module keeps that program buildable
// with a tool directive in go.mod.
//
// Functions that take a [testing.TB] end the test when they fail, so they are called from its goroutine. Methods that
// act on a running server may be called from any goroutine until the test ends; they mark the test as failed when they
// fail.
package testenv

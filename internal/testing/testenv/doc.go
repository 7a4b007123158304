// Package testenv starts real servers for tests: Redis alone, as a Cluster or under Sentinel, etcd with one or three
// members, and the project's own programs.
//
// Every server is a process of its own on loopback, so a test can kill it, freeze it and start it again. A server
// belongs to the test that started it: it ends with that test, and with the test binary should that be killed (the
// kernel does it on Linux). Its files live in a directory of its own, removed when the test passes; when the test
// fails, the end of its log is printed and the directory stays, with its path in the test's output.
//
// Servers listen on ports below the usual ephemeral range, reserved by a file lock until the test ends, so test
// packages that run at the same time never take each other's ports, not even while a server is down between Kill and
// Restart.
//
// A missing server fails the test and says what to install; nothing is skipped. REDIS_SERVER names another
// redis-server (or valkey-server) to test against. ETCD_SERVER names an etcd binary; without it, etcd is built once
// from the version in go.mod and kept in the user's cache directory. The module keeps that program buildable with a
// tool directive in go.mod.
//
// Functions that take a [testing.TB] end the test when they fail, so they are called from its goroutine. Methods that
// act on a running server may be called from any goroutine until the test ends; they mark the test as failed when
// they can't do their work.
package testenv

// Package dev is the playground behind "refiller dev": a store, an etcd, three replicas as processes of their own, a few
// sample buckets and a consumer that asks for more than one of them gives. It shows what goes on and, when a replica is
// killed, for how long nobody refilled: as the store tells it, not as anybody's timer does.
//
// Everything that [Run] starts ends before it returns, and its files are gone then. Should the program itself be killed,
// the kernel kills the replicas on Linux; elsewhere they end when they next log, since nobody reads their log any more.
// The files are left behind then.
package dev

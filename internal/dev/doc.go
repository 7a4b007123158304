// Package dev is the playground behind "refiller dev". It has regions, each of which is a store with replicas, as
// processes of their own, and a consumer that asks for more than there is. A single region has a few sample buckets,
// and when the replica that refills is killed the playground shows for how long nobody refilled: as the store tells it,
// not as anybody's timer does. Several regions share a pool while demand moves from one to the next, and one of them
// may be cut off. What is to be seen is a [scene]; everything else is the same for one region and for several.
//
// Everything that [Run] starts ends before it returns, and its files are gone then. Should the program itself be
// killed, the kernel kills the replicas on Linux; elsewhere they end when they next log, since nobody reads their log
// any more. The files are left behind then.
package dev

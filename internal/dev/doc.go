// Package dev is the playground behind "refiller dev". It has regions. Each region is a store with replicas, which are
// separate processes, and a consumer that asks for more than there is. A single region has a few sample buckets. When
// the replica that refills is killed, the playground shows for how long no replica refilled, by the times in the store
// and not by a timer of its own. Several regions share a pool while demand moves from one to the next, and one of them
// may be cut off. A [scene] has what is to be seen. Everything else is the same for one region and for several.
//
// Everything that [Run] starts ends before it returns, and its files are removed by then. If the program itself is
// killed, the kernel kills the replicas on Linux. Elsewhere they end when they next log, since their log has no reader
// any more. The files are left behind then.
package dev

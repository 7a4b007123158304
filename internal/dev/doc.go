// Package dev is the playground behind "refiller dev". It is for trying things out, not for a deployment.
//
// The playground has one or more regions. Each region has a store, replicas, which are separate processes, and a
// consumer that asks for more tokens than there are. A single region has a few sample buckets. When the replica that
// refills is killed, the playground shows for how long no replica refilled. It computes that from the times in the
// store, not with a timer of its own. Several regions share a pool while demand moves from one region to the next, and
// one of them may be cut off. A [scene] defines what a run shows. Everything else is the same for one region and for
// several.
//
// Before [Run] returns, everything that it started has ended and its files are removed. If the program itself is
// killed, the files remain. On Linux the kernel then kills the replicas. On other systems they end when they next log,
// since their log has no reader any more.
package dev

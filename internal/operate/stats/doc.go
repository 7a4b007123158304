// Package stats keeps count, bucket by bucket, of what a replica's refill calls
// tell: tokens credited against tokens due, tokens taken in between, refills
// that came late or found the bucket empty, and refills taken over from another
// replica.
//
// A replica sees the buckets that it refills itself; a sum over replicas sees
// all. Each refill is counted by the replica that won it, so nothing is counted
// twice.
package stats

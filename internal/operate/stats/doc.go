// Package stats counts, bucket by bucket, the results of a replica's refill calls: tokens credited against tokens due,
// tokens taken in between, refills that came late or found the bucket empty, and refills taken over from another
// replica.
//
// A replica counts the buckets that it refills itself; a sum over replicas has all. Each refill is counted by the
// replica that won it, so nothing is counted twice.
package stats

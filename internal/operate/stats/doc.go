// Package stats counts, bucket by bucket, the results of a replica's refill calls: tokens credited against tokens due,
// tokens taken in between, refills that came late or found the bucket empty, and refills taken over from another
// replica.
//
// A replica counts only its own refills. Each refill is counted by the replica that won it, so the sum over all
// replicas has each refill once. The package doesn't export the counts: see packages admin and metrics.
package stats

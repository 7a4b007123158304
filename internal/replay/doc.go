// Package replay computes what a policy would have done to the requests of an access log: each request takes one token
// from the bucket of its key.
//
// The log's clock governs credit, whatever the speed of the replay. It is the highest time so far, since servers write
// a line when its request ends and lines come a little out of order. A bucket starts full and is refilled at each take
// with exactly what is due since the take before. So the outcome is that of a bucket with ideally short refill
// intervals, and the same on every run.
//
// [Buckets] is the model, on the arithmetic of the Redis scripts ([policy.Bucket]). [Run] feeds it a log and makes the
// [Report].
package replay

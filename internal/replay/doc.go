// Package replay computes what a policy would have done to the requests of an access log: each request takes one token
// from the bucket of its key. It needs no server, and is not a load test.
//
// Credit depends on the log's clock, and not on the speed of the replay. The log's clock is the highest time so far,
// because servers write a line when its request ends, so lines are a little out of order. A bucket starts full. At each
// take it is refilled with exactly the tokens that are due since the take before. So the result is that of a bucket
// with very short refill intervals, and it is the same on every run.
//
// [Buckets] is the model, on the arithmetic of the Redis scripts ([policy.Bucket]). [Run] feeds it a log and makes the
// [Report].
package replay

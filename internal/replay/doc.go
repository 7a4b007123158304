// Package replay computes the effect that a policy would have had on the requests of an access log. Each request takes
// one token from the bucket of its key. The package needs no server, and is not a load test.
//
// Credit depends on the log's clock, and not on the speed of the replay. The log's clock is the highest time so far.
// The reason is that servers write a line when its request ends, so lines are a little out of order.
//
// A bucket starts full. At each take it is refilled with exactly the tokens that fell due since the take before. So it
// behaves like a bucket with very short refill intervals, and the result is the same on every run.
//
// [Buckets] is the model. It uses the arithmetic of the Redis scripts ([policy.Bucket]). [Run] passes the requests of a
// log to it and makes the [Report].
package replay

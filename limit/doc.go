// Package limit and the packages below it are limiters that need no refiller.
// They answer with the same [fetch.Result] as buckets do, so what sits in front
// of them, such as the HTTP middleware, works with any of them.
//
//   - [github.com/tokenrefill/refiller/limit/lazy]: a bucket that is credited
//     when it is asked, stored as one instant, as GCRA does. The default for many
//     keys.
//   - [github.com/tokenrefill/refiller/limit/window]: tokens per window of time,
//     fixed or sliding.
//   - [github.com/tokenrefill/refiller/limit/pacing]: evenly spaced places in a
//     queue.
//   - [github.com/tokenrefill/refiller/limit/schedule]: reservations of instants
//     to come.
//
// This package has what they share: the interface [Limiter], [Many] limits in
// one decision, and [Reset], which drops the state of all keys with a prefix.
//
// # What they have in common
//
// New makes a Limiter on Redis, single, Sentinel or Cluster; NewLocal one for a
// single process, which behaves alike. All methods are safe for concurrent use.
// A call costs one script call, which is sent once: after an error that is
// [fetch.ErrUnavailable] what was asked for may have been taken. A call ends when
// its context does, whatever the options of the Redis client.
package limit

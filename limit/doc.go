// Package limit and the packages below it are limiters that need no refiller.
// They answer with the same [fetch.Result] as buckets do, so what sits in front
// of them, such as the HTTP middleware, works with any of them.
//
//   - [github.com/tokenrefill/refiller/limit/lazy]: a bucket that is credited
//     when it is asked. The default for many keys.
//   - [github.com/tokenrefill/refiller/limit/window]: tokens per window of time,
//     fixed or sliding.
//   - [github.com/tokenrefill/refiller/limit/pacing]: evenly spaced places in a
//     queue.
//   - [github.com/tokenrefill/refiller/limit/schedule]: reservations of instants
//     to come.
//
// This package has what they share: the interface [Limiter], [Many] limits in
// one decision, and [Reset], which drops the state of all keys with a prefix.
package limit

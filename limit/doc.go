// Package limit and the packages below it are limiters that need no refiller. They return the same [fetch.Result] as
// buckets do, so code that uses buckets, such as the HTTP middleware, works with each of them. They are not for a rate
// that several regions share, or for buckets that refillers fill: see packages pool and fetch.
//
//   - [github.com/tokenrefill/refiller/limit/lazy]: a bucket that each take first credits. Its state is a single
//     instant, as in GCRA. Use it for many keys, unless you need another limiter.
//   - [github.com/tokenrefill/refiller/limit/window]: tokens per window of time,
//     fixed or sliding.
//   - [github.com/tokenrefill/refiller/limit/pacing]: evenly spaced places in a
//     queue.
//   - [github.com/tokenrefill/refiller/limit/schedule]: reservations of future instants.
//
// This package has their common interface, [Limiter]. It also has [Many], which decides by several limits at once, and
// [Reset], which drops the state of all keys with a prefix.
//
// # What they have in common
//
// New makes a Limiter on Redis (single, Sentinel or Cluster). NewLocal makes one in the memory of the process, which
// behaves in the same way. All methods are safe for concurrent use. A call makes one script call, which is sent once.
// So after the error [fetch.ErrUnavailable] the tokens may have been taken. A call ends when its context ends, whatever
// the options of the Redis client are.
package limit

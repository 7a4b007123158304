// Package fetch takes tokens from the buckets that refillers keep full. Refillers set the policies and refill the
// buckets. This package sets no policy. It refills a bucket only in the case that [WithRescue] describes.
//
// A bucket holds tokens in Redis, at most its capacity. Refillers add tokens as they fall due; consumers take them with
// one atomic script. A take of n tokens takes all n or none. If a bucket has too few tokens for a take, that is no
// error: the take is denied. OK of its [Result] is then false, and RetryAfter is the time after which to try again.
//
// [New] makes a [Client] from the caller's go-redis client (single, Sentinel, Cluster or Ring). No option is required.
//
// # Which method to call
//
//   - [Client.Take] for work that is refused when there are too few tokens.
//   - [Client.TakeUpTo] for work that can be done in part, such as a batch.
//   - [Client.TakeAll] for work that needs tokens of several buckets, such as a team's bucket and a user's bucket. It
//     takes from all of them or from none.
//   - [Client.Wait] for work that is worth waiting for. It fails at once if the context ends before the tokens come.
//   - [Client.Reserve] for work whose cost is known only afterwards.
//   - [Client.Undo] and [Client.UndoAll] to return the tokens of a take whose work was not done, and [Client.Return] if
//     the Result of the take was not kept.
//   - [Client.Peek] to read a bucket without taking.
//
// A call for a bucket that doesn't exist returns [ErrUnknownBucket], unless a published template matches: then the
// first take creates the bucket. A call for more tokens than the bucket can ever hold returns [ErrExceedsCapacity].
//
// If the bucket is empty, Take and TakeUpTo return a denial, and Wait sleeps until the tokens are due. The waiters of a
// Client form a line. The Client remembers a denial until its tokens are due, but at most for a second
// ([WithDenyCache]). If no refiller runs, a denied take makes the refill that is due ([WithRescue]).
//
// If Redis is unavailable, a call ends at its context's deadline or when its timeout has passed ([WithTimeout]). The
// policy's degraded mode then decides the result, which has [SourceFallback] and the [Reason]. [Client] has the
// details.
//
// # Concurrency
//
// All methods are safe for concurrent use; one Client serves a whole process. Concurrent calls share round trips, and
// takes share script calls. Each take has the same result as if the takes were made one by one, in the order of their
// arrival. With [WithLease] takes from busy buckets need no call at all. Once [Client.Close] is called, every new call
// returns [ErrClosed]. Close waits for the calls under way.
//
// docs/sdk.md lists the guarantees, and describes how the Client uses the options of the Redis client.
package fetch

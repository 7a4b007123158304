// Package fetch takes tokens from the buckets that refillers keep full. It does not set policies, and it refills only
// as [WithRescue] says: refillers do both.
//
// A bucket holds tokens in Redis, at most its capacity. Refillers add tokens as they fall due; consumers take them with
// one atomic script. A take of n tokens takes all n or none. An empty bucket is an answer and not an error: a take that
// doesn't fit is denied, with a [Result] whose OK is false and whose RetryAfter says when to come back.
//
// [New] makes a [Client] of the caller's go-redis client (single, Sentinel, Cluster or Ring). It needs no option.
//
// # Which method to call
//
//   - [Client.Take] for work that is refused when there are too few tokens.
//   - [Client.TakeUpTo] for work that can be done in part, such as a batch.
//   - [Client.TakeAll] for work that wants tokens of several buckets, all or none, such as a team's and a user's.
//   - [Client.Wait] for work that is worth waiting for. It fails at once if the context ends before the tokens come.
//   - [Client.Reserve] for work whose use is known only afterwards.
//   - [Client.Undo] and [Client.UndoAll] when the work of a take was not done; [Client.Return] for tokens whose Result
//     was not kept.
//   - [Client.Peek] to read a bucket without taking.
//
// A call for a bucket that doesn't exist returns [ErrUnknownBucket], unless a published template matches: then the
// first take creates the bucket. A call for more tokens than the bucket can ever hold returns [ErrExceedsCapacity].
//
// If the bucket is empty, Take and TakeUpTo return a denial, and Wait sleeps until the tokens are due. The waiters of a
// Client form a line. A denial is remembered until its tokens are due, for at most a second ([WithDenyCache]). If no
// refiller runs, a denied take makes the refill that is due ([WithRescue]).
//
// If Redis is unavailable, a call ends with its context's deadline or its timeout ([WithTimeout]). The policy's
// degraded mode then decides the result, which has [SourceFallback] and the [Reason]. [Client] has the details.
//
// # Concurrency
//
// All methods are safe for concurrent use; one Client serves a whole process. Concurrent calls share round trips, and
// takes share script calls. Each take has the same result as if the takes were made one by one, in the order of their
// arrival. With [WithLease] takes from busy buckets need no call at all. [Client.Close] waits for the calls under way;
// after that every method returns [ErrClosed].
//
// The guarantees, one by one, and how the Client uses the Redis client's options are in docs/sdk.md.
package fetch

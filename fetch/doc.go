// Package fetch takes tokens from the buckets that refillers keep full.
//
// # The model
//
// A bucket holds tokens in Redis, at most its capacity. Refillers add tokens as they fall due; consumers take them with
// one atomic script. A take of n tokens takes all n or none. An empty bucket is an answer and not an error: a take that
// doesn't fit is denied, with a [Result] whose OK is false and whose RetryAfter says when to come back.
//
// A [Client] is made with [New] of the caller's go-redis client, single, Sentinel, Cluster or Ring, and needs no
// option.
//
// # Which method to call
//
//   - [Client.Take] for work that is refused when there are too few tokens.
//   - [Client.TakeUpTo] for work that can be done in part, such as a batch.
//   - [Client.TakeAll] for work that wants tokens of several buckets, all or nothing, such as a team's and its user's.
//   - [Client.Wait] for work that is worth waiting for. It refuses at once when the context's deadline comes before the
//     tokens.
//   - [Client.Reserve] for work whose use is known only afterwards.
//   - [Client.Undo] and [Client.UndoAll] when the work of a take was not done; [Client.Return] for tokens whose Result
//     was not kept.
//   - [Client.Peek] to read a bucket without taking.
//
// A bucket that doesn't exist is [ErrUnknownBucket] and is not created, unless it is a published template's: then its
// first take creates it. More tokens than the bucket can ever hold is [ErrExceedsCapacity].
//
// # When the bucket is empty
//
// Take and TakeUpTo return a denial, and Wait sleeps until the tokens are due. The waiters of a Client form a line. A
// denial is remembered until its tokens are due, a second at most ([WithDenyCache]). Work of less importance leaves
// tokens to other work ([WithLeave]). If no refiller lives, a denied take makes the refill that is due itself
// ([WithRescue]).
//
// # When Redis is unavailable
//
// A call ends with its context's deadline or its timeout, after a last check for replies that have arrived. Unless
// [WithTimeout] says otherwise the timeout is 50 ms or four round trips, whichever is longer, without the time for
// opening connections. It is a second before the server's first answer, which [Client.Ready] waits for. A take is then
// answered as its policy's degraded mode says, with [SourceFallback] and the [Reason]: closed is [ErrUnavailable], open
// is taken, local is this consumer's share of the rate, in memory. A deadline that is too short for the distance is
// [ErrUnavailable] in every mode, with [ReasonDistance]: the server may be healthy. A context that is cancelled ends
// its call at once. When most calls fail, none is sent until the server answers probes again. This process' own
// slowness is no failure of the server's: a process that was stopped or starved still reads the replies that have
// arrived, and gives the server as long again as it was itself late.
//
// A plain take is sent once. If its reply is lost, it is unknown whether the tokens were taken: count them as spent.
// With a request id ([WithRequestID]) it can be made again and is charged once. If a caller stops waiting, the tokens
// taken for it go back to their bucket; [Stats] counts those that can't.
//
// # Concurrency
//
// All methods are safe for concurrent use; one Client serves a whole process. Concurrent calls share round trips, and
// takes one script call; each has the same result as if they had come one by one, in the order of their arrival. With
// [WithLease] takes of busy buckets need no call at all. [Client.Close] waits for what is under way, and then every
// method is [ErrClosed].
//
// The guarantees, one by one, and how the Client uses the Redis client's options are in docs/sdk.md.
package fetch

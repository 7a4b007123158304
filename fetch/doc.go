// Package fetch takes tokens from the buckets that refillers keep full.
//
// # The model
//
// A bucket holds tokens in Redis, at most its capacity. Refillers add tokens as
// they fall due; consumers take them with one atomic script. A take of n tokens
// takes all n or none. An empty bucket is an answer and not an error: a take
// that doesn't fit is denied, with a [Result] whose OK is false and whose
// RetryAfter says when to come back.
//
// A [Client] wraps the caller's go-redis client: single, Sentinel or Cluster. It
// is made with [New], and its zero value is not usable.
//
// # Which method to call
//
//   - [Client.Take] for work that is refused when there are too few tokens.
//   - [Client.TakeUpTo] for work that can be done in part, such as a batch.
//   - [Client.TakeAll] for work that wants tokens of several buckets, all or
//     nothing, such as one of a team and one of its user.
//   - [Client.Wait] for work that is worth waiting for. It refuses at once when
//     the context's deadline comes before the tokens.
//   - [Client.Return] for tokens that were taken and not used.
//   - [Client.Reserve] for work whose use is known only afterwards.
//   - [Client.Peek] to look without taking.
//
// They differ when the bucket is empty: Take and TakeUpTo say so, Wait sleeps
// until the tokens are due. A bucket that doesn't exist is [ErrUnknownBucket]
// and is never created, so a typo costs nothing; unless a template that refillers
// have published matches its name ([WithPublishedTemplates]): then its first take
// creates it. More tokens than the bucket
// can ever hold is [ErrExceedsCapacity].
//
// # Concurrency
//
// All methods are safe for concurrent use; one Client serves a whole process. No
// caller waits longer than its context and the deadline of the call allow. Set
// ContextTimeoutEnabled in the go-redis client's options: then sockets keep
// deadlines, and a caller makes its call itself, which is the fastest way. Without
// it, or for a call whose deadline is longer than 100 ms and whose context can be
// cancelled, or is shorter than 10 ms, worker goroutines that the Client owns make
// the calls, at most WithConcurrency at once. [Client.Close] waits for callers and
// workers.
//
// # Coalescing
//
// While a call for a bucket is under way, later takes of it wait for the reply
// and then go together in one call. Each is told what it would have been told had
// they gone one by one in the order of their arrival: all or nothing, and one that
// doesn't fit leaves the tokens to those behind it. A take that is given up while
// it waits is dropped. Calls for different buckets share a round trip when more
// than two are under way (not on a Cluster or Ring, where a shared round trip
// takes as long as the slowest server). There is no timer in this: a lone take
// goes at once, and what waits, waits for a reply that is on its way. A cancelled
// take that waits returns within 4 ms. The price is
// shared fate: a merged call that fails, fails for all takes in it.
// [WithCoalescing] turns it off.
//
// # Leases
//
// With [WithLease] the Client holds a block of a busy bucket's tokens in memory, and
// most takes need no call: their Source is leased. A block is as large as what is
// taken within about a third of the hold time, is refilled before it runs dry by a
// goroutine of the Client, and what nobody takes of it goes back within the hold time.
// Others find those tokens gone meanwhile, a crash loses them, and the bucket refills
// behind them: a window's bound grows by what was held when it began, unless the
// policy is strict.
//
// # Denials
//
// A denial is remembered until its tokens are due, a second at most, and takes of
// as many tokens or more are denied meanwhile without a call; their Source says
// so. [WithDenyCache] turns it off. Those who [Client.Wait] for a bucket stand in
// line, first come, first served, and one call asks for all of them when the tokens
// of the first are due. Denials that never reach the server aren't in the demand
// that a pool sees.
//
// # Exactly once
//
// A call is sent once. When its reply is lost, or the caller stops waiting for
// it, nobody knows whether the tokens were taken: take them as spent. A take
// that nobody waits for any more is not sent if that can still be avoided. If a
// worker sent it and its reply comes after all, within about a second, and says
// that tokens were taken, the Client returns them, once and as well as it can. If
// its caller made the call, the connection is closed at the deadline and the reply
// is lost with it. [Stats] counts both.
//
// A take with a request id ([WithRequestID]) is charged once however often it is
// made: after a lost reply, ask again with the same id.
//
// # While Redis is away
//
// A call ends as soon as the connection fails, or at its deadline (50 ms unless
// [WithDeadline] says otherwise). A take is then answered as the degraded mode in its
// bucket's policy says, with [SourceFallback] and the [Reason]:
//
//   - closed: [ErrUnavailable], which wraps the cause; [ReasonOf] names it.
//   - open: taken, always.
//   - local: from this consumer's share, in memory: the policy's rate and capacity
//     divided by the live consumers. Consumers count by heartbeats in Redis, one a
//     second (fewer with more than some hundred buckets), for three seconds. A share
//     begins an outage with its part of what the bucket was last seen to hold, so
//     that all shares together begin with no more than that; takes of more than the
//     share's capacity are denied. A bucket with a schedule gives away what it had,
//     and no instants; one of a pool earns its floor. Before the first heartbeat was
//     answered, and beyond some ten thousand such buckets, local is closed.
//
// Buckets that the Client has not learned of before are closed, or as
// [WithDegraded] says. Consumers that join within the last second before an outage
// are missing in the others' count. What a degraded mode admits is not taken from
// the bucket later.
//
// After five failures in a row a breaker opens ([WithBreaker]): takes are answered
// by the degraded mode at once, and only probes go out, a few a second at random
// distances, until three in a row were answered. So a silent Redis costs few callers
// a deadline, and comes back to a handful of probes. Nothing that was given up is
// sent later. Peek, Return, Settle and Cancel have no degraded mode: they are
// ErrUnavailable, except for reservations that a degraded mode made.
//
// Calls of workers to a silent server occupy them until go-redis gives up on the
// socket: a second beyond the deadline with ContextTimeoutEnabled, without it
// ReadTimeout.
//
// # Reservations
//
// [Client.Reserve] takes tokens for a time. [Reservation.Settle] tells how many were
// used: the rest goes back, and more is charged, or owed with [WithOverrun]. What
// nobody settles goes back when its time is over; a settlement after that charges
// what was used. Each is known by the reservation's id, so both can be repeated, and
// another process can settle with [Client.Settle]. More than the bound of takes can
// be used in a window by what was reserved before it, and by what was used beyond a
// reservation and forgiven or owed.
//
// # While every refiller is away
//
// A denial tells when the bucket was last refilled. If that is more than two refill
// intervals ago, the Client makes the refill itself and asks again: with the
// refillers' own script, which credits what is due and no more, whoever calls it.
// Its answer has [SourceRescued]. Each Client waits a little longer than two
// intervals, each by another bit, and makes one refill per bucket and interval at
// most, so that the first of them does it for all. A bucket whose capacity is less
// than some two and a quarter intervals' tokens earns a little less than its rate
// meanwhile. Buckets with a schedule are not rescued: takes of them go on until they
// are empty. [WithRescue] turns it off.
//
// RetryAfter is half a refill interval while the next refill is overdue, and Wait
// asks ever less often, down to once a second.
package fetch

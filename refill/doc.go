// Package refill keeps buckets full.
//
// The model: a [Refiller] calls the refill script once per refill interval for
// each of its buckets, with the index it last learned. Any number of replicas
// may do so at once: the index lets one of them win each refill, and credit by
// elapsed time makes every win add exactly what is due, so a replica that
// crashes, pauses, or races another neither mints nor loses a token.
//
// # Who refills
//
// In race mode every replica calls. The winner calls again one interval after
// its refill; the others a little later, so that they lose, which writes
// nothing, and take over at once when the winner is gone.
//
// In elected mode ([Config.Elected]) the replica that [Refiller.Lead] was called
// on refills, and the standbys read one pulse per Redis master: a bucket that
// only the leader refills. When the pulse has been silent for two intervals a
// standby races, whatever anyone's lease says, and stands down when the pulse
// beats again. So losing the leader costs two intervals, and losing the election
// service costs nothing: nobody leads, the pulse is silent, everyone races.
//
// # Later configurations
//
// [Refiller.Update] changes buckets and policies while running. Every replica, a
// standby too, brings a later version to the server with one call per bucket, so
// that the first replica that has it puts it in force, whoever leads; the version
// keeps a replica that still has the old one from putting that back.
//
// # Waiting rule
//
// After an answer the next call for that bucket comes at
//
//	max(last + T + j, reply + T/2)
//
// with last the bucket's last refill, T its interval, and j = 0 for the replica
// that wrote, T/20 + U(0, T/10) for the others. A freshly learned index is never
// tried at once.
//
// # Reservations
//
// A refill tells when the first reservation or lease of its bucket ends. Once that
// is past, the replica that refilled ends those whose time is over, in one more
// round trip for the batch: they end with no consumer alive.
//
// # Load on Redis
//
// One batch at a time is on its way to each Redis master. Where slots allow, its
// buckets share script calls; a call takes as many as the server is seen to
// settle in a quarter of a millisecond, 50 at most, so that no call holds the
// server up for 1 ms. A batch takes as many as keep the server busy for a tenth
// of the timeout, and half as many after each one that was not answered: what
// comes due meanwhile waits here, not on the way, and its credit isn't lost.
//
// # Failures
//
// One bad bucket doesn't stop the others: it is retried alone, ever more
// slowly. While Redis is away the buckets on that master wait with growing,
// jittered delays; when it returns, the credit of the gap is added, up to the
// policy's cap. A state that was lost, rolled back or whose clock stepped back is
// recognised by the script (see policy.Status) and reported once.
//
// A Refiller's methods are safe for concurrent use.
package refill

// Package refill keeps buckets full.
//
// The model: a [Refiller] calls the refill script once per refill interval for each of its buckets, with the index it
// last learned. Any number of replicas may do so at once: the index lets one of them win each refill, and credit by
// elapsed time makes every win add exactly what is due, so a replica that crashes, pauses, or races another neither
// mints nor loses a token.
//
// # Who refills
//
// In race mode every replica calls. The winner calls again one interval after its refill; the others a little later,
// so that they lose, which writes nothing, and take over when the winner is gone.
//
// In elected mode ([Config.Elected]) the replica that [Refiller.Lead] was called on refills, and the standbys read
// one pulse per Redis master: a bucket that only the leader refills. When the pulse has been silent for two intervals
// a standby races, whatever anyone's lease says, and stands down when the pulse beats again. So losing the leader
// costs two intervals, and losing the election service costs nothing: nobody leads, the pulse is silent, everyone
// races.
//
// After an answer the next call for a bucket comes at
//
//	max(last + T + j, reply + T/2)
//
// with last the bucket's last refill, T its interval, and j = 0 for the replica that wrote, T/20 + U(0, T/10) for the
// others. A freshly learned index is never tried at once.
//
// # Templates
//
// Of a template's buckets ([Config.Templates]) nobody has a list. Those that are not full are in the template's
// active set: a take that leaves one less than full puts it there, and the refill that fills it takes it out. So cost
// depends on the buckets in use, not on how many exist. On each master one replica refills the active sets: whoever
// has the claim, a bucket raced for like any other, but with a little more patience.
//
// # Later configurations
//
// [Refiller.Update] changes buckets and policies while running. Every replica, a standby too, brings a later version
// to the server with one call per bucket, so the first replica that has it puts it in force, whoever leads. A replica
// that is answered a later version than its own sends no policy, creates nothing, and leaves stepped buckets to those
// that know their schedule.
//
// # Load on Redis
//
// A worker for each master has one call under way, two where it is behind. Where slots allow, buckets share script
// calls; a call takes as many as the server is seen to settle in a quarter of a millisecond, 50 at most. A batch
// takes as many as keep the server busy for a tenth of the timeout, and half as many after each one that was not
// answered: what comes due meanwhile waits here, and its credit isn't lost.
//
// # Failures
//
// One bad bucket doesn't stop the others: a call that is refused because of it is made again one by one, and the
// bucket is retried ever more slowly. While Redis is away the buckets on that master wait with growing, jittered
// delays; when it returns, the credit of the gap is added, up to the policy's cap. A state that was lost, rolled back
// or whose clock stepped back is recognised by the script (see policy.Status) and reported once.
//
// A Refiller's methods are safe for concurrent use.
package refill

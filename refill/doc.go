// Package refill keeps buckets full.
//
// The model: a [Refiller] calls the refill script once per refill interval for each of its buckets, with the index of
// the last reply. Any number of replicas may do so at once: the index lets one of them win each refill, and credit by
// elapsed time makes every win add exactly what is due, so a replica that crashes, pauses, or races another neither
// mints nor loses a token.
//
// # Who refills
//
// In race mode every replica calls. The winner calls again one interval after its refill. The others call a little
// later: they lose, which writes nothing, and take over if the winner has stopped.
//
// In elected mode ([Config.Elected]) the replica that [Refiller.Lead] was called on refills, and the standbys read
// one pulse per Redis master: a bucket that only the leader refills. When the pulse has been silent for two intervals
// a standby races, whatever anyone's lease says, until the pulse beats again.
//
// docs/protocol.md says when the next call for a bucket comes.
//
// # Templates
//
// A template's buckets ([Config.Templates]) that are not full are in its active set: takes put them there, and the
// refill that fills one removes it. On each master one replica refills the active sets: the one that has the claim.
// Replicas race for the claim as for any bucket, but wait a little longer.
//
// # Later configurations
//
// [Refiller.Update] changes buckets and policies while running. The policies of the latest version that a living
// replica has are in force within a second, or two refill intervals if that is longer, whichever replica leads:
//
//   - Every replica, a standby too, brings a later version to the server with one call per bucket.
//   - If the server reports a later version for a bucket, the replica stops sending its policy and does not create the
//     bucket. Otherwise it would restore an earlier policy after a loss. If the bucket is stepped, only replicas that
//     know the schedule refill it. This ends when the replica's own file reaches that version.
//   - A leader to which a later version was reported, by the server or by [Refiller.RecordVersion], stops its pulse.
//     Then the standbys race.
//   - A standby races while the pulse is of an earlier version than its own: the leader has not got the later file.
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
// A call that is refused because of one bad bucket is made again one by one, and that bucket is retried ever more
// slowly. While Redis is unavailable the buckets on that master wait with growing, jittered delays; then the credit of
// the gap is added, up to the policy's cap. A state that was lost, rolled back or whose clock stepped back is
// recognised by the script (see policy.Status) and reported once.
//
// A Refiller's methods are safe for concurrent use.
package refill

// Package refill keeps buckets full. It decides when a replica calls the refill script for which bucket. It does not
// compute credit, which the script does (package lua), and it does not elect a leader (package election).
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
// It keeps the claim until it stops; then the others race for it as for any bucket.
//
// [Refiller] describes its load on Redis and what it does on failures, and [Refiller.Update] how a later configuration
// reaches all replicas. A Refiller's methods are safe for concurrent use.
package refill

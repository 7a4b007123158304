// Package refill keeps buckets full. It decides when a replica calls the refill script, and for which buckets. The
// script computes the credit (package lua), and package election elects a leader.
//
// A [Refiller] calls the refill script once per refill interval for each of its buckets, with the index of the last
// reply. Any number of replicas may do so at once: because of the index, only one of them wins each refill. The credit
// depends on elapsed time only, so every win adds exactly what is due. So no token is added twice or lost if a replica
// crashes, pauses or races another one.
//
// # Who refills
//
// In race mode every replica calls. The winner calls again one interval after its refill. The others call a little
// later. As long as the winner works, their calls lose and write nothing. If the winner has stopped, one of the others
// wins.
//
// In elected mode ([Config.Elected]) the replica whose [Refiller.Lead] was called refills. On each Redis master it also
// refills one more bucket, the pulse, which the standbys read. When the pulse has been silent for two intervals, the
// standbys race until it beats again, whether or not the leader's lease has ended.
//
// docs/protocol.md says when the next call for a bucket comes.
//
// # Templates
//
// The buckets of a template ([Config.Templates]) that are not full are in its active set. Takes put them there, and the
// refill that fills a bucket removes it. On each master one replica refills the active sets: the one that has the
// claim. It keeps the claim until it stops. Then the others race for the claim as for any bucket.
//
// [Refiller] describes the load on Redis and the behaviour on failures. [Refiller.Update] describes how a later
// configuration reaches all replicas. A Refiller's methods are safe for concurrent use.
package refill

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
// # Templates
//
// Of a template's buckets ([Config.Templates]) nobody has a list. Those that are not
// full are in the template's active set: a take that leaves one less than full puts it
// there, and the refill that fills it takes it out. So the work follows what is taken
// from, and full buckets cost nothing, however many there are.
//
// The set has 16 shards. Who refills a shard is decided by a race on its turns, by the
// waiting rule below: the taker of the last turn takes the next, the others lose, which
// writes nothing, and take over within two intervals when it is gone. The replica that
// has fewer shards than another takes some of them over, until all have as many, give or
// take one; nobody has to know who the replicas are. In elected mode the leader refills
// every shard, and those who stand in for a silent one race.
//
// A replica goes over each of its shards twice in an interval: a bucket that has entered
// is found in one round, which learns its index, and refilled in the next. Shards in which
// nobody is are looked at with one command for all of them (on a Cluster one for each of
// the 16), every half interval but nine commands in a second at most: on a Cluster, the
// first bucket to enter an empty shard may wait for two seconds longer than the others,
// which is less than the longest stretch that a refill credits.
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
// with last the bucket's last refill or the shard's last turn, T its interval, and j = 0
// for the replica that wrote, T/20 + U(0, T/10) for the others; at turns, which a busy
// replica may be late for, T/5 + U(0, T/10). A freshly learned index is never
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
// comes due meanwhile waits here, not on the way, and its credit isn't lost. A batch
// of a shard has 100 buckets at most, because takes wait for as long as the server is
// busy with it; the shards' rounds are spread over the interval.
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

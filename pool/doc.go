// Package pool shares one rate and one capacity between regions that each have their own Redis. A take stays within its
// region, and the rate is never exceeded, whichever parts of the network are cut off from each other.
//
// The package itself neither refills buckets nor takes from them. The refill script puts grants in force, and consumers
// take from a pool's bucket as from any other. For several Redis servers in one place, use a Redis Cluster instead.
//
// # Model
//
// A [Pool] is a bucket of the same name in every region. Each region has a floor, which is always reserved for it. A
// coordinator lends the rest of the rate to the regions as grants, according to their demand ([policy.Allocate]).
//
// Every replica of a region runs an [Agent]. Once in each period H, one agent of the region reports a ticket to etcd. A
// ticket has the time of the region's Redis, the bucket's era, the fence in force, and the numbers of tokens that were
// consumed and denied. One replica of all regions is elected to run the [Coordinator]. It answers each ticket with a
// grant. A grant is a rate that applies in the ticket's era, until the ticket's time + L on the clock of the region's
// Redis. It has a fence, which consists of the pool epoch and a sequence number. The agent puts the grant in force by
// an ordinary refill call. When the grant ends, the refill script uses the floor again, even if no other process runs.
//
// # Why the rate is never exceeded
//
//   - Floors are reserved. Together they are at most the pool's FloorShare of the rate. No region gets the floor of
//     another one, unless an operator fences or drains that region.
//   - Shrink before grow. A granted rate counts against the pool until the region has acknowledged a smaller one, or
//     until the rate has certainly ended. A region acknowledges terms when its ticket shows their fence, which the
//     agent read from Redis. A rate has certainly ended 1.2 L + 100 ms after its ticket was received, on the
//     coordinator's monotonic clock. Another region gets the rate only after its end was recorded in etcd, or in the
//     same transaction.
//   - Coordinators can't act at the same time. Each write is one transaction. It compares the leader's key, the
//     revision at which the share was last read, and the pool epoch. Each connection to etcd has a pool epoch of its
//     own, which is higher than the earlier ones. So a write that the coordinator gave up arrives before the writes of
//     the next connection, or etcd refuses it.
//   - A grant of one era is void in the next one. If a server loses writes or its clock is set back, a new era begins.
//
// The clocks of two machines are never compared. Each clock is assumed to run fast or slow by at most ρ = 10 %, since
// time daemons slew clocks by up to 8.3 %. A watchdog checks the clock of the region's Redis.
//
// registry.go lists the keys in etcd, and what happens when etcd is restored. docs/pools.md says what is promised on
// each failure.
package pool

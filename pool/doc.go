// Package pool shares one rate and one capacity between regions that each have their own Redis. A take stays within its
// region, and the rate is never exceeded, whichever parts of the network are cut off from each other.
//
// The package does not refill or take: the refill script puts a grant in force, and consumers take as from any bucket.
// It is not for several Redis servers in one place: use a Cluster.
//
// # Model
//
// A [Pool] is a bucket of the same name in every region. Each region has a floor, which is always reserved for it. A
// coordinator lends the rest of the rate to the regions as grants, by their demand ([policy.Allocate]).
//
// Every replica of a region runs an [Agent]. Once in each period H, one agent of the region reports a ticket to etcd:
// the time of the region's Redis, the bucket's era, the fence in force, and how many tokens were consumed and denied.
// One replica of all regions is elected to run the [Coordinator]. It answers each ticket with a grant. A grant is a
// rate that applies in this era, until ticket + L on the clock of the region's Redis, and it has a fence (epoch, seq).
// The agent puts the grant in force by an ordinary refill call. When the grant ends, the refill script uses the floor
// again, even if no other process runs.
//
// # Why the rate is never exceeded
//
//   - Floors are reserved. Together they are at most the pool's FloorShare of the rate. No region gets the floor of
//     another one, unless an operator fences or drains that region.
//   - Shrink before grow. A rate counts against the pool until the region has acknowledged a smaller one, by the fence
//     read from its Redis, or until the rate has certainly ended: 1.2 L + 100 ms after its ticket was received, on the
//     coordinator's monotonic clock. Another region gets it only after that was recorded in etcd, or together with the
//     record.
//   - Coordinators can't act at the same time. Each write is one transaction. It compares the leader's key, the
//     revision at which the share was last read, and the pool epoch. Each connection has an epoch of its own, above
//     that of its term. So a write that was given up arrives before the later writes, or never.
//   - A grant of one era is void in the next one. If a server loses writes or its clock is set back, an era begins.
//
// The clocks of two machines are never compared. Each clock is assumed to run fast or slow by at most ρ = 10 %, since
// time daemons slew clocks by up to 8.3 %. A watchdog checks the clock of the region's Redis.
//
// registry.go lists the keys in etcd, and what happens when etcd is restored. docs/pools.md says what is promised on
// each failure.
package pool

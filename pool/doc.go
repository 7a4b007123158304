// Package pool shares one rate and one capacity between regions that each have their own Redis. A take stays within its
// region, and the rate is never exceeded, whatever is cut off from what.
//
// The package does not refill or take: the refill script puts a grant in force, and consumers take as from any bucket.
// A pool is for regions. Several Redis servers in one place are a Cluster.
//
// # Model
//
// A [Pool] is a bucket of the same name in every region. Each region has a floor, which is always reserved for it. A
// coordinator lends the rest of the rate as grants, which move to where demand is ([policy.Allocate]).
//
// Every replica of a region runs an [Agent]. Once a period H it reports a ticket to etcd: the time on the region's
// Redis, the bucket's era, the fence in force, and how many tokens were consumed and denied. One replica among those of
// all regions runs the [Coordinator] at a time, by election. It answers each ticket with a grant: so many tokens per
// time, until ticket + L on the region's Redis clock, in this era, under the fence (epoch, seq). The agent puts the
// grant in force by an ordinary refill call. When the grant ends, the refill script itself falls back to the floor,
// even if no process runs.
//
// # Why the rate is never exceeded
//
//   - Floors are reserved: together they are at most the pool's FloorShare of the rate. No other region gets a floor,
//     unless an operator fences or drains its region.
//   - Shrink before grow: a rate counts against the pool until the region has acknowledged a smaller one, by the fence
//     read back from its Redis, or until it has ended for certain: 1.2 L + 100 ms after its ticket was received, on the
//     coordinator's monotonic clock. It is given to another region only with a record of that in etcd, or after it.
//   - Coordinators can't act at the same time: each write is one transaction that also compares the leader's key and
//     the revision at which the share was last read. It compares the pool epoch, too. Each connection has its own,
//     above that of its term, so a write that was given up arrives before the later ones or never.
//   - A grant of an era is void in the next: servers that lose writes or set their clock back begin one.
//
// No two machines' clocks are ever compared. Each is assumed to run fast or slow by at most ρ = 10 %, and the region's
// is watched: time daemons slew by up to 8.3 %.
//
// registry.go lists the keys in etcd, and what happens when etcd is restored. docs/pools.md says what is promised on
// each failure.
package pool

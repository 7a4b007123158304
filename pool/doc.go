// Package pool shares one rate and one capacity over regions that each have
// their own Redis, without a hop between regions on a take, and without ever
// exceeding the rate, whatever is cut off from what.
//
// # Model
//
// A [Pool] is a bucket of the same name in every region. Each region has a
// floor, which is always its own; what is left of the rate is lent out by a
// coordinator as grants, which move to where demand is ([policy.Allocate]).
//
// Every replica of a region runs an [Agent]. It reports a ticket to etcd once a
// period H: the time on the region's Redis, the bucket's era, the fence in force
// and what was consumed and denied. One replica among those of all regions runs
// the [Coordinator] at a time, by election. It answers tickets with grants, of
// which each says: so many tokens per time, until ticket + L on the region's own
// Redis clock, in this era, under the fence (epoch, seq). The agent puts the
// grant in force by an ordinary refill call. When a grant ends the refill script
// itself falls back to the floor, even if no process notices.
//
// # Why the rate is never exceeded
//
//   - Floors are reserved: together they are at most the pool's FloorShare of the rate, and
//     no other region gets one, unless an operator fences its region or drains it.
//   - Shrink before grow: a rate counts against the pool until the region has
//     acknowledged a smaller one, by the fence read back from its Redis, or until
//     it has ended for certain: 1.2 L + 100 ms after its ticket was received, on
//     the coordinator's own monotonic clock. It is given to another only with a
//     record of that in etcd, or after it.
//   - Coordinators can't act at the same time: each write is one transaction that
//     also compares the leader's key and the revision at which the share was last read. It
//     compares the pool epoch, too, of which each connection has its own, above
//     that of its term: a write that was given up arrives before the later ones
//     or never.
//   - A grant of an era is void in the next: servers that lose writes or set
//     their clock back begin one.
//
// No two machines' clocks are ever compared. That each runs fast or slow by no more than ρ = 10 % is assumed, and the
// region's is watched: time daemons slew by up to 8.3 %.
//
// # When etcd is restored
//
// An etcd that was restored or emptied shows older keys and revisions, and may lack grants that are in force.
//
//   - A write at no higher revision than one read before it, or a read at a lower one, returns errRewound. An agent
//     detects it when it reports (Agent.revision). The coordinator detects it when it writes, or after 2.5 H without an
//     event (term.revision). Each then reads everything again, since its watch would deliver nothing.
//   - Agents report what is in force as ever. They write the latest settings that they have read (Agent.newest), if
//     those in etcd are older.
//   - A coordinator that begins a term and finds shares waits 2.5 H for reports (term.incompleteUntil). While it
//     waits, no region gets more than its own ticket shows in force.
//   - A ticket that shows a later fence, or a later end, than was ever offered is foreign (ledger.applyTicket). The
//     coordinator then raises its epoch above the ticket's and waits for the longest lease. Shares record that until
//     then (term.restoredUntil), so that the next coordinator waits, too.
//   - If all grants have ended, the regions may use another etcd by now (ledger.doubted). A pool of which a region is
//     silent is then closed until that region has acknowledged it again.
//   - Where no share is left, a pool opens anew: floors until each region has acknowledged it.
//
// # Keys in etcd, below the prefix
//
//	epoch           the highest pool epoch: a restored etcd would give it out again
//	cfg             settings: those with the highest version of any replica
//	lead/…          the election of the coordinator
//	rep/<region>    the region's tickets, of all pools in one write a period
//	share/<region>  the region's grants, and older ones that it may still use
//	fence/<region>  an operator has declared that the region uses nothing, or is to use nothing
//
// docs/pools.md says what is promised on each failure.
package pool

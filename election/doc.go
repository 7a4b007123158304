// Package election decides who leads: one of several candidates, under which epoch, and trusted until when.
//
// [Elector.Run] campaigns in etcd, calls a function while it leads, resigns, and campaigns again until its context
// ends.
//
// # States
//
//	             key written            no older key left
//	Candidate ──────────────▶ Standby ──────────────────▶ Leader
//	    ▲                        │                          │
//	    │   lease or key lost    │   lead returned, or      │
//	    └────────────────────────┴── lease or key lost ─────┘
//
// A candidate takes a lease and writes a key of its own under Prefix/lead/, bound to that lease. The oldest key, by
// create revision, belongs to the leader; each standby waits for the key just before its own to disappear and then
// reads, in one transaction, that its own key still exists and no older one does.
//
// # Terms and epochs
//
// A term is the time during which one candidate leads. Its epoch is the create revision of the leader's key. A key is
// never reused and leads only when all older ones have been deleted. So epochs strictly increase from term to term in
// the history of one etcd: an epoch is a fencing token. A transaction guarded by "create revision of [Term.Key] equals
// [Term.Epoch]" commits only while etcd itself still regards the writer as the leader.
//
// # Trust window
//
// After the grant and after each renewal of the lease the term is trusted until
//
//	(instant just before the request was sent) + (TTL that etcd granted) − SafetyMargin
//
// on the monotonic clock of this process. etcd counts the TTL from when it handles the request, which is later, so a
// slow answer never stretches the window past the lease. When the window ends unrenewed, the context of lead is
// cancelled with [ErrLeadershipLost] as its cause, and the term never comes back to life. Renewals are sent at a third
// of the window and go on until lead has returned, so the term stays trusted while its leader winds down.
//
// A process that was stopped may run a few instructions of lead before the cancellation reaches it. [Term.Remaining]
// has no such delay: check it before anything that must not be done by two leaders, or better, fence it by epoch.
//
// # What happens when …
//
//   - lead returns: an error is logged; the elector resigns and campaigns again after RetryInterval (with jitter).
//   - the context of Run ends: so does that of lead; Run waits for lead, resigns and returns. The next candidate wins
//     within milliseconds.
//   - the leader dies or is cut off from etcd: its term ends SafetyMargin before its lease. Another leads a TTL after
//     the last renewal at the earliest, and up to two TTL if etcd elects a leader of its own meanwhile.
//   - etcd is unreachable or has no quorum: the term ends with its window; campaigning is retried with growing pauses.
//   - an operator deletes the leader's key or revokes its lease: the term ends when the watch or a renewal detects it,
//     and the candidate begins again with a new key.
//   - resigning fails: the lease ends by itself, and is revoked before the next campaign if etcd is available again by
//     then.
//   - a watch stalls or is compacted: keys are read again at least once a TTL.
//   - etcd is restored or emptied: leaders that lost their keys end their terms, keys that came back end with their
//     leases, and one candidate leads again. Epochs may come again. A caller that fences by them must record the
//     highest one and go above it, as package pool does.
//
// # What is not promised
//
// Two trusted leaders at once are excluded only under these conditions: the clocks of the leader and of etcd run at
// rates that differ by less than SafetyMargin/TTL, no machine is suspended, and keys and leases end by expiry or
// resignation. If an operator deletes the leader's key, a second leader may begin before the first one has detected it.
// lead may ignore its context and continue: the elector can't stop it, and neither resigns nor renews meanwhile.
// Refills are safe without epochs. A caller that needs more than this fences by epoch.
//
// A user of etcd needs read and write permission on the range of Prefix/lead/, and nothing else.
package election

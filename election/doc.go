// Package election decides who leads: one of several candidates, under which epoch, and trusted until when.
//
// [Elector.Run] campaigns in etcd, calls a function while it leads, resigns, and campaigns again until its context
// ends. [Static] leads at once without asking anybody: for race mode, where every replica refills, and for tests. Both
// are a [Candidate].
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
// A term is one stretch of leading. Its epoch is the create revision of the leader's key. A key is never reused and
// leads only when all older ones are gone, so epochs strictly increase from term to term: an epoch is a fencing token.
// A transaction guarded by "create revision of [Term.Key] equals [Term.Epoch]" commits only while etcd itself still
// regards the writer as the leader.
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
// of the window and go on until lead has returned, also after the context of Run has ended: the term stays trusted
// while its leader winds down, and resigning comes after.
//
// A process that was stopped and continues may run a few instructions of lead before the cancellation reaches it.
// [Term.Remaining] has no such delay: check it right before anything that must not be done by two leaders, or better,
// fence it by epoch.
//
// # What happens when …
//
//   - lead returns, with an error or without: the error is logged once, the elector resigns and campaigns again after
//     RetryInterval (with jitter), behind the candidates who waited meanwhile.
//   - the context of Run ends: so does that of lead; Run waits for lead, resigns and returns. The next candidate wins
//     within milliseconds.
//   - the leader dies or is cut off from etcd: its own term ends SafetyMargin before etcd lets the lease end; another
//     leads when etcd has. That is a TTL after the last renewal at the earliest, and up to twice the TTL if etcd
//     elects a leader of its own meanwhile, since that extends every lease.
//   - etcd is unreachable or has no quorum: the term ends with its window. Campaigning is retried with growing pauses
//     and jitter; one line is logged when etcd becomes unavailable and one when it answers again.
//   - the leader's key is deleted or its lease revoked by an operator: the term ends as soon as the watch or a renewal
//     tells. A candidate whose key or lease is lost begins again with a new key.
//   - resigning fails: the lease ends by itself, and is revoked before the next campaign if etcd is back by then.
//   - a watch stalls or its revision is compacted: keys are read anew at least once a TTL, so a watch is only a hint.
//   - etcd grants another TTL than asked: the granted one counts.
//
// # What is not promised
//
// Two trusted leaders at once are excluded only while monotonic clocks of the leader and of etcd run at rates that
// differ by less than SafetyMargin/TTL, and while keys and leases end by expiry or resignation. An operator who deletes
// the leader's key makes a second leader before the first one has heard of it. A clock that stands still with a
// suspended or migrated machine hides that time from the trust window. lead may ignore its context and act on: the
// elector can't stop it, and neither resigns nor renews meanwhile. Epochs start again if etcd is restored from a backup.
// Whoever needs more than this fences by epoch.
//
// A user of etcd needs read and write permission on the range of Prefix/lead/, and nothing else.
package election

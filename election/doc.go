// Package election elects one of several candidates as the leader. It also decides the epoch under which that candidate
// leads, and until when its leadership can be trusted.
//
// [Elector.Run] campaigns in etcd, calls a function while it leads, resigns, and campaigns again until its context
// ends. [Elector] describes its states and what happens on each failure. The package is not a lock: a caller whose
// writes must not overlap fences them by epoch.
//
// # Terms and epochs
//
// A term is the time during which one candidate leads. Its epoch is the create revision of the leader's key. A
// candidate never uses a key again, and leads only when all older keys have been deleted. So epochs strictly increase
// from term to term in the history of one etcd: an epoch is a fencing token. A transaction guarded by "create revision
// of [Term.Key] equals [Term.Epoch]" commits only while etcd itself still regards the writer as the leader.
//
// # Trust window
//
// After the grant and after each renewal of the lease the term is trusted until
//
//	(instant just before the request was sent) + (TTL that etcd granted) − SafetyMargin
//
// on the monotonic clock of this process. etcd counts the TTL from when it handles the request, which is later, so a
// slow answer never stretches the window past the lease. If the window ends before a renewal has extended it, the
// context of lead, the function that Run calls, is cancelled with [ErrLeadershipLost] as its cause, and the term is
// never trusted again. A renewal is sent after each third of the window. Renewals continue after the context of Run has
// ended, until lead has returned, so the term stays trusted while lead finishes.
//
// A process that was stopped may run a few instructions of lead before the cancellation reaches it. [Term.Remaining]
// has no such delay: check it before anything that must not be done by two leaders, or better, fence it by epoch.
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

// Package election elects one of several candidates as the leader. It also gives each leader an epoch, which is the
// number of its term, and the time until which its leadership can be trusted.
//
// [Elector.Run] campaigns in etcd, calls a function while it leads, resigns, and campaigns again until its context
// ends. [Elector] describes its states and what happens on each failure. The package is not a lock. If two leaders must
// not write at once, the caller fences its writes by epoch.
//
// # Terms and epochs
//
// A term is the time during which one candidate leads. Its epoch is the create revision of the leader's key. A
// candidate never uses a key again, and leads only when all older keys have been deleted. So epochs strictly increase
// from term to term in the history of one etcd, and an epoch can serve as a fencing token.
//
// A transaction in etcd can require that the create revision of [Term.Key] equals [Term.Epoch]. Then it commits only
// while the leader's key exists.
//
// # Trust window
//
// After the grant and after each renewal of the lease the term is trusted until
//
//	(instant just before the request was sent) + (TTL that etcd granted) − SafetyMargin
//
// on the monotonic clock of this process. etcd counts the TTL from the time at which it handles the request, which is
// later. So a slow answer never extends the window beyond the lease. A renewal is sent after each third of the window.
//
// Run calls a function lead for each term. If the window ends before a renewal has extended it, the context of lead is
// cancelled with [ErrLeadershipLost] as its cause, and the term is never trusted again. When the context of Run ends,
// renewals continue until lead has returned. So the term stays trusted while lead finishes.
//
// After a process was stopped, it may run a few instructions of lead before lead's context is cancelled. So check
// [Term.Remaining], or better, fence by epoch, before an action that two leaders must not both take.
//
// # What is not promised
//
// Two trusted leaders at once are excluded only under these conditions:
//
//   - The clocks of the leader and of etcd run at rates that differ by less than SafetyMargin/TTL.
//   - No machine is suspended.
//   - Keys and leases end by expiry or resignation. If an operator deletes the leader's key, a second leader may begin
//     before the first one has detected the deletion.
//
// If lead ignores the end of its context and continues, the elector can't stop it. As long as lead continues, the
// elector neither resigns nor renews the lease. A caller that needs more than this fences by epoch. Refills are safe
// even if two leaders refill.
//
// # Permissions
//
// The etcd user of a candidate needs read and write permission on Prefix/lead/, and no other permission.
package election

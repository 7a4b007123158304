// Package membership lists the replicas that are alive.
//
// Each replica writes itself into one sorted set in Redis every few seconds, and the same call returns the other
// entries. The list is only for display: it does not decide which replica refills. The index and the election do that.
// The set is bounded, has replicas of this Redis only, and expires soon after the last of them has ended.
package membership

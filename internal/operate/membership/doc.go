// Package membership lists the replicas that are alive.
//
// Each replica writes itself into one sorted set in Redis every few seconds, and the same call returns the other
// entries. Only displays depend on the list. The index and the election decide which replica refills. The set is
// bounded, has replicas of this Redis only, and expires soon after the last of them has ended.
package membership

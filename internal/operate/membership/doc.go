// Package membership lists the replicas that are alive.
//
// Each replica writes a description of itself into one sorted set in Redis every few seconds. The same call returns the
// descriptions of all replicas. The list is only for display: the index and the election decide which replica refills,
// not this list. The set is bounded, and has only replicas that use this Redis. It expires soon after the last of them
// has ended.
package membership

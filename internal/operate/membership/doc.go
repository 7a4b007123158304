// Package membership tells which replicas are alive.
//
// Each replica writes itself into one sorted set in Redis every few seconds, and
// the same call answers who else has. Nothing depends on it but what people see:
// who refills is settled by the index and the election. The set is bounded, knows
// replicas of this Redis alone, and is gone soon after the last of them.
package membership

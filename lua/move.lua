-- move: moves names of buckets from a shard of one template to the shard of another one. The shards share a slot, so a
-- name is always in one of them.
--
-- KEYS  1 the shard
--       2 the shard of the other template, with the same number
-- ARGV  1 and so on: the names
-- Reply their number
--#include shared/policy
--#include shared/expiry
call('SADD', KEYS[2], unpack(ARGV))
outlast(KEYS[2], floor(call('PEXPIRETIME', KEYS[1]) / 1000))
call('SREM', KEYS[1], unpack(ARGV))
return #ARGV

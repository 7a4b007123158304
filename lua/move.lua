-- move: moves names of buckets from a shard to that of another template. The shards share a slot, so a name is always
-- in one of them.
--
-- KEYS  1 the shard
--       2 the one of the other template with the same number
-- ARGV  1 and so on: the names
-- Reply their number
--#include shared/policy
--#include shared/expiry
call('SADD', KEYS[2], unpack(ARGV))
outlast(KEYS[2], floor(call('PEXPIRETIME', KEYS[1]) / 1000))
call('SREM', KEYS[1], unpack(ARGV))
return #ARGV

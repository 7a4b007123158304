-- enter: puts a bucket in a set of its template. It is used on a Cluster, where they are in different slots. If they
-- share a slot, takes.lua does the same.
--
-- KEYS  1 the shard of the active set; or the set of the buckets alive, sorted by the time at which they expire
-- ARGV  1 the bucket's name
--       2 till_s: when the bucket expires
--       3 1 for the sorted set, 0 otherwise
-- Reply 1 if it wasn't there, 0 if it was
--#include shared/policy
--#include shared/expiry
local new
if ARGV[3] == '1' then
  new = call('ZADD', KEYS[1], ARGV[2], ARGV[1])
else
  new = call('SADD', KEYS[1], ARGV[1])
end
outlast(KEYS[1], ARGV[2])
return new

-- claim: counts a template's bucket that is about to be created, unless the template has as many buckets as it may
-- have. It is used on a Cluster, where the count and the bucket are in different slots. If they share a slot, takes.lua
-- counts the bucket.
--
-- KEYS  1 the set of the template's buckets alive
-- ARGV  1 the bucket's name
--       2 most: buckets alive at once, at least 1
--       3 life_s: how long the bucket is counted, unless enter.lua counts it for longer
-- Reply 0: the bucket is counted
--       n: it is not counted, because n others are alive, and n is at least most
--
-- If a bucket is counted and then not created, the template may have one bucket less until the count expires. It never
-- gets more than most.
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/expiry
local now = now_us()
local n = alive(KEYS[1], now)
if n >= ARGV[2] + 0 and not call('ZSCORE', KEYS[1], ARGV[1]) then return n end
record_alive(KEYS[1], ARGV[1], math.ceil(now / 1000000) + ARGV[3])
return 0

-- alive: how many buckets of a bounded template are alive. Where both share a slot, takes looks itself.
--
-- KEYS  1 the set of the template's buckets alive
-- ARGV  none
-- Reply their number
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/expiry
return alive(KEYS[1], now_us())

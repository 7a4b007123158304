-- claim: counts a template's bucket that is about to be created, unless as many are alive as may be. Where both share a
-- slot, takes does it.
--
-- KEYS  1 the set of the template's buckets alive
-- ARGV  1 the bucket's name
--       2 most: buckets alive at once, at least 1
--       3 life_s: how long the bucket is counted unless it is entered
-- Reply 0: it is counted; or how many others are alive, most or more: it is not
--
-- A bucket that is counted and not created leaves room for fewer others, never for more.
--#include shared/redis
--#include shared/policy
--#include shared/bucket
--#include shared/expiry
local now = now_us()
local n = alive(KEYS[1], now)
if n >= ARGV[2] + 0 and not call('ZSCORE', KEYS[1], ARGV[1]) then return n end
record_alive(KEYS[1], ARGV[1], math.ceil(now / 1000000) + ARGV[3])
return 0

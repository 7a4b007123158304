-- heartbeat: records that a consumer of the bucket is alive, and counts the consumers that are.
--
-- KEYS  1 {K}:live  sorted set: consumer → the instant until which it counts, µs
-- ARGV  1 consumer: its name
--       2 ttl_ms: for how long it counts from now on, 1 to 60,000
-- Reply {1, count, known}: consumers that count, this one included; 1 if this one counted before the call, else 0
--       {3, 1}: KEYS 1 holds something else
--
-- The bucket itself is neither read nor written. The key expires with its last consumer.
--#include shared/redis
--#include shared/policy
--#include shared/bucket
local MOST_US = 60000000 -- no consumer counts for longer: an entry that does was made while the clock was ahead
local now = now_us()
local removed = pcall('ZREMRANGEBYSCORE', KEYS[1], '-inf', format('%d', now))
if type(removed) == 'table' then
  wrong_type(removed)
  return {3, 1}
end
call('ZREMRANGEBYSCORE', KEYS[1], format('(%d', now + MOST_US), '+inf')
local new = call('ZADD', KEYS[1], format('%d', now + tonumber(ARGV[2]) * 1000), ARGV[1])
if call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then call('PEXPIRE', KEYS[1], ARGV[2]) end
return {1, call('ZCARD', KEYS[1]), 1 - new}

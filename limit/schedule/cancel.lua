-- cancel: a reservation whose instant is to come.
--
-- KEYS  1 {K}:sched, as in reserve
-- ARGV  1 id
-- Reply {1}: cancelled
--       {0}: there is none with this id, or its instant has passed
--       {3}: the key holds something else
--
-- The key keeps its expiry, which is at worst later than it need be.
local held = redis.pcall('ZSCORE', KEYS[1], ARGV[1])
if type(held) == 'table' then
  if string.find(held.err, 'WRONGTYPE', 1, true) then return {3} end
  return held
end
local time = redis.call('TIME')
if not held or tonumber(held) <= time[1] * 1000000 + time[2] then return {0} end
redis.call('ZREM', KEYS[1], ARGV[1])
return {1}

-- cancel: cancels reservations of an instant that has not passed.
--
-- KEYS  1 {K}:sched, as in reserve
-- ARGV  1 id
--       2 n: how many were reserved under it
--       3 1: even if their instant has passed
-- Reply {1}: cancelled
--       {0}: there is none with this id, or its instant has passed
--       {3}: the key holds something else
--
-- The key keeps its expiry, which may then be later than necessary.
--#include shared/unwritten
local held = redis.pcall('ZSCORE', KEYS[1], ARGV[1])
if type(held) == 'table' then
  if string.find(held.err, 'WRONGTYPE', 1, true) then return {3} end
  return held
end
local time = redis.call('TIME')
if not held or ARGV[3] ~= '1' and tonumber(held) <= time[1] * 1000000 + time[2] then
  return unwritten(KEYS[1], {0})
end
redis.call('ZREM', KEYS[1], ARGV[1])
for i = 2, tonumber(ARGV[2]) do redis.call('ZREM', KEYS[1], string.format('%s#%.0f', ARGV[1], i)) end
return {1}

-- turn: take a turn at refilling a shard of a template's active set.
--
-- KEYS  1 the shard's turns: a string, index last_us load, of the last turn: its number, its time, and ARGV 3 of who took it
--       2 the shard
-- ARGV  1 index: of the last turn that the caller knows of; 0 for none
--       2 interval_us: between two turns
--       3 load: how many shards of the template the caller refills, this one included
-- Reply {taken, count, now_us, index, last_us, load}: whether the turn is the caller's; how many names the shard holds; the last
--             turn, this one if it is the caller's: 0 0 0 if there was none
--       {3, k}: KEYS k holds something else
--
-- As with a bucket's index, of several callers who know the same turn one takes the next, and not before half an interval has
-- passed. A caller that knows of none takes it once it is overdue, which callers who know it don't let happen. Nobody takes a
-- turn at an empty shard. Two who refill a shard at once cost work and nothing else: the buckets have indexes of their own.
--#include state
local raw = redis.pcall('GET', KEYS[1])
if type(raw) == 'table' then
  wrong_type(raw)
  return {3, 1}
end
local count = redis.pcall('SCARD', KEYS[2])
if type(count) == 'table' then
  wrong_type(count)
  return {3, 2}
end
local index, last, load = string.match(raw or '', '^(%d+) (%d+) (%d+)$')
index, last, load = tonumber(index or 0), tonumber(last or 0), tonumber(load or 0)
local exp, interval, now = tonumber(ARGV[1]), tonumber(ARGV[2]), now_us()
local since = now - last
if since < -TOLERANCE_US then since = 2 * interval end -- the clock stepped back
local mine
if index == 0 then
  mine = true
elseif exp == 0 then
  mine = since * 5 >= interval * 7
else
  mine = exp >= index and since * 2 >= interval
end
if count == 0 or not mine then return {0, count, now, index, last, load} end
index = math.max(index, exp) + 1
redis.call('SET', KEYS[1], string.format('%.0f %.0f %s', index, now, ARGV[3]), 'PX',
  string.format('%.0f', math.max(60000, math.ceil(3 * interval / 1000))))
return {1, count, now, index, now, tonumber(ARGV[3])}

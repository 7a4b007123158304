-- reserve: an instant to come, or the present one, if every window that contains it has room.
--
-- KEYS  1 {K}:sched  a sorted set: id by instant, Unix µs
-- ARGV  1 id
--       2 at_us: the instant; 0: now
--       3 n: how many reservations, at least 1; the second has the id with #2 behind it, and so on
--       4 1 reserve, 0 only check
--       5 horizon_us: the furthest instant ahead of now
--       6 longest_us: the length of the longest window
--       then four for each window: its limit; its length in µs, 0 for one of the calendar; and, of the calendar, the
--       beginning and the end of the window that contains the instant, Unix µs
-- Reply {1, now_us, left, until_us}: reserved, or they would fit; left is how many more fit at this instant, until_us
--       when nothing needs to be stored any more
--       {2, now_us, left, until_us}: so it was before
--       {0, now_us, next_us, sure, left, w, ...}: denied by windows w, the first being 1; before next_us they don't
--       fit, and if sure is 1, then they do; left is how many fit at the instant
--       {3}: the key holds something else
--       {4, at_us}: the id is reserved for another instant
--       {5, now_us}: the instant has passed
--       {6, now_us}: the instant is beyond the horizon
--       {7, now_us}: it is now in another window of the calendar
--#include shared/unwritten
local STEPS = 32 -- in search of the next instant that fits
local FIRST = 7 -- the first argument of a window
local key = KEYS[1]
local id = ARGV[1]
local at = tonumber(ARGV[2])
local n = tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if at == 0 then at = now end
local function text(n) return string.format('%.0f', n) end

local held = redis.pcall('ZSCORE', key, id)
if type(held) == 'table' then
  if string.find(held.err, 'WRONGTYPE', 1, true) then return {3} end
  return held
end
if held and tonumber(held) ~= at then return {4, tonumber(held)} end
if not held then
  if at < now then return {5, now} end
  if at > now + tonumber(ARGV[5]) then return {6, now} end
end

-- sliding returns how many more fit at instant t in a window that slides and, if these are fewer than n, an instant
-- before which n don't fit. Every window that contains t is seen in the one of them that begins with its first
-- reservation.
local function sliding(t, limit, length)
  local begins = '(' .. text(t - length)
  local here = text(t)
  local ends = '(' .. text(t + length)
  local behind = redis.call('ZCOUNT', key, begins, here)
  local ahead = redis.call('ZCOUNT', key, '(' .. here, ends)
  -- The counts of both sides are enough if one side alone leaves no room, or if one is empty.
  if behind + n > limit then
    local oldest = redis.call('ZREVRANGEBYSCORE', key, here, begins, 'WITHSCORES', 'LIMIT', limit - n, 1)
    return limit - behind, tonumber(oldest[2]) + length
  end
  if ahead + n > limit then
    local first = redis.call('ZRANGEBYSCORE', key, '(' .. here, ends, 'WITHSCORES', 'LIMIT', 0, 1)
    return limit - ahead, tonumber(first[2]) + length
  end
  if behind == 0 or ahead == 0 then return limit - behind - ahead, t end

  local near, starts = {}, behind
  local found = redis.call('ZRANGEBYSCORE', key, begins, ends, 'WITHSCORES')
  for i = 2, #found, 2 do near[#near + 1] = tonumber(found[i]) end
  local most = 0
  local free = t
  local last = 0
  for first = 1, starts + 1 do -- the last one begins with t
    local begin = t
    if first <= starts then begin = near[first] end
    while last < #near and near[last + 1] < begin + length do last = last + 1 end
    local count = last - first + 1
    most = math.max(most, count)
    if count + n > limit then free = math.max(free, near[first] + length) end
  end
  return limit - most, free
end

-- room is that of window w; nil at an instant that is not in the window of the calendar that the caller gave.
local function room(t, w)
  local a = FIRST + 4 * w - 4
  local limit, length = tonumber(ARGV[a]), tonumber(ARGV[a + 1])
  if length > 0 then return sliding(t, limit, length) end
  if t < tonumber(ARGV[a + 2]) or t >= tonumber(ARGV[a + 3]) then return nil end
  local more = limit - redis.call('ZCOUNT', key, ARGV[a + 2], '(' .. ARGV[a + 3])
  return more, more < n and tonumber(ARGV[a + 3]) or t
end

local windows = (#ARGV - FIRST + 1) / 4
local left = nil
local denied = {}
local next_us = at
for w = 1, windows do
  local more, free = room(at, w)
  if not more then return {7, now} end
  if more < n then denied[#denied + 1] = w end
  next_us = math.max(next_us, free)
  left = math.min(left or more, more)
end
left = math.max(0, left)
if #denied > 0 and not held then
  local sure = 0
  for _ = 1, STEPS do
    local from, known = next_us, true
    for w = 1, windows do
      local more, free = room(from, w)
      if more then next_us = math.max(next_us, free) else known = false end
    end
    if not known then break end
    if next_us == from then
      sure = 1
      break
    end
  end
  local reply = {0, now, next_us, sure, left}
  for _, w in ipairs(denied) do reply[#reply + 1] = w end
  if ARGV[4] == '0' then return reply end
  return unwritten(key, reply)
end
if ARGV[4] == '0' then return {1, now, left, now} end

if not held then
  left = left - n
  -- What lies a whole window back is in no window with an instant to come.
  redis.call('ZREMRANGEBYSCORE', key, '-inf', text(now - tonumber(ARGV[6])))
  redis.call('ZADD', key, text(at), id)
  for i = 2, n do redis.call('ZADD', key, text(at), id .. '#' .. text(i)) end
end
local until_us = tonumber(redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2]) + tonumber(ARGV[6])
redis.call('PEXPIREAT', key, text(math.ceil(until_us / 1000)))
return {held and 2 or 1, now, left, until_us}

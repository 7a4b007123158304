-- reserve: reserves a future instant, or the present one, if every window that contains it has room.
--
-- KEYS  1 {K}:sched  a sorted set: id by instant, Unix µs
-- ARGV  1 id
--       2 at_us: the instant; 0: now
--       3 n: how many reservations, at least 1; the second has the id with #2 behind it, and so on
--       4 1 reserve, 0 only check
--       5 horizon_us: the furthest instant ahead of now
--       6 longest_us: the length of the longest window
--       then four for each window: its limit; its length in µs, 0 for a window of the calendar; and, for such a window,
--       the beginning and the end of the one that contains the instant, Unix µs
-- Reply {1, now_us, left, until_us}: reserved, or they would fit; left is how many more fit at this instant, until_us
--       when nothing needs to be stored any more
--       {2, now_us, left, until_us}: the id was reserved for this instant before
--       {0, now_us, next_us, sure, left, w, ...}: denied by windows w, counted from 1. Before next_us the reservations
--       don't fit. If sure is 1, they fit at next_us. left is how many fit at the instant
--       {3}: the key holds something else
--       {4, at_us}: the id is reserved for another instant
--       {5, now_us}: the instant has passed
--       {6, now_us}: the instant is beyond the horizon
--       {7, now_us}: the present window of the calendar is not the given one
--#include shared/unwritten
local FIRST = 7 -- the first argument of a window
-- The most work of a call, in reservations that are read. A search for the next instant that needs more ends early.
local MOST = 1000
local COUNT = 10 -- the work of counting in a window
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

-- Of the windows.
local limits = {}
local lengths = {}
local begins = {}
local ends = {}
for i = FIRST, #ARGV, 4 do
  local w = #limits + 1
  limits[w] = tonumber(ARGV[i])
  lengths[w] = tonumber(ARGV[i + 1])
  begins[w] = tonumber(ARGV[i + 2])
  ends[w] = tonumber(ARGV[i + 3])
end
local spent = 0

-- counted computes, from the numbers of reservations on both sides of instant t, how many more fit at t in window w. If
-- they are fewer than n, it also returns an instant before which n don't fit. For a window that slides, it also returns
-- how many reservations lie before t and after t. If t is not in the window of the calendar that the caller gave, it
-- returns nothing.
local function counted(t, w)
  local limit, length = limits[w], lengths[w]
  if length == 0 then
    if t < begins[w] or t >= ends[w] then return end
    local more = limit - redis.call('ZCOUNT', key, text(begins[w]), '(' .. text(ends[w]))
    return more, more < n and ends[w] or t, 0, 0
  end
  local from = '(' .. text(t - length)
  local here = text(t)
  local to = '(' .. text(t + length)
  local behind = redis.call('ZCOUNT', key, from, here)
  if behind + n > limit then
    local oldest = redis.call('ZREVRANGEBYSCORE', key, here, from, 'WITHSCORES', 'LIMIT', limit - n, 1)
    return limit - behind, tonumber(oldest[2]) + length, behind, 0
  end
  local ahead = redis.call('ZCOUNT', key, '(' .. here, to)
  if ahead + n > limit then
    local first = redis.call('ZRANGEBYSCORE', key, '(' .. here, to, 'WITHSCORES', 'LIMIT', 0, 1)
    return limit - ahead, tonumber(first[2]) + length, 0, ahead
  end
  return limit - behind - ahead, t, behind, ahead
end

-- fullest returns how many of the sorted instants near lie in the fullest stretch that contains t. If n more don't fit
-- at t, it also returns an instant before which they don't fit. The first starts instants of near are at or before t;
-- the last behind of these are within a length of t, and so are the first ahead of those after t. It is enough to check
-- the stretches that begin with a reservation or with t, because any other stretch has no more reservations than one of
-- them.
local function fullest(near, starts, t, w, behind, ahead)
  local limit, length = limits[w], lengths[w]
  local oldest, most = starts - behind + 1, math.max(behind, ahead)
  for first = oldest, starts do
    local stop = near[first] + length
    while (near[first + most] or math.huge) < stop do most = most + 1 end
  end
  if most + n <= limit then return most, t end
  for first = starts, oldest, -1 do
    if (near[first + limit - n] or math.huge) < near[first] + length then return most, near[first] + length end
  end
end

-- room returns how many more fit at instant t in each window. If they are fewer than n in one of them, it also returns
-- an instant before which n don't fit. For a search the numbers need not be exact. room returns nothing if t is not in
-- the windows of the calendar that the caller gave, or if the call has done as much work as it may.
local function room(t, search)
  local more = {}
  local behind = {}
  local ahead = {}
  local crowded = {}
  local free = t
  -- These are for the longest window that needs the instants around t.
  local reach = 0
  local reads = 0
  local starts = 0
  spent = spent + COUNT * #limits
  for w, length in ipairs(lengths) do
    local left, later, before, after = counted(t, w)
    if not left then return end
    more[w] = left
    behind[w] = before
    ahead[w] = after
    free = math.max(free, later)
    -- Otherwise the counts of both sides are enough.
    if before > 0 and after > 0 and not (search and left >= n) then
      crowded[#crowded + 1] = w
      if length > reach then
        reach = length
        reads = before + after
        starts = before
      end
    end
  end
  spent = spent + reads
  if search and spent > MOST then return end
  if reads == 0 then return more, free end

  local near = {}
  local found = redis.call('ZRANGEBYSCORE', key, '(' .. text(t - reach), '(' .. text(t + reach), 'WITHSCORES')
  for i = 2, #found, 2 do near[i / 2] = tonumber(found[i]) end
  for _, w in ipairs(crowded) do
    local most, later = fullest(near, starts, t, w, behind[w], ahead[w])
    more[w] = limits[w] - most
    free = math.max(free, later)
  end
  return more, free
end

local more, next_us = room(at, false)
if not more then return {7, now} end
local left = nil
local denied = {}
for w, fits in ipairs(more) do
  if fits < n then denied[#denied + 1] = w end
  left = math.min(left or fits, fits)
end
left = math.max(0, left)
if #denied > 0 and not held then
  local sure = 0
  repeat
    local fits, later = room(next_us, true)
    if fits then
      if later == next_us then sure = 1 end
      next_us = later
    end
  until not fits or sure == 1
  local reply = {0, now, next_us, sure, left}
  for _, w in ipairs(denied) do reply[#reply + 1] = w end
  if ARGV[4] == '0' then return reply end
  return unwritten(key, reply)
end
if ARGV[4] == '0' then return {1, now, left, now} end

if not held then
  left = left - n
  -- A reservation that is a whole longest window old is in no window with a future instant.
  redis.call('ZREMRANGEBYSCORE', key, '-inf', text(now - tonumber(ARGV[6])))
  local score = text(at)
  local added = {score, id}
  for i = 2, n do
    added[2 * i - 1] = score
    added[2 * i] = id .. '#' .. text(i)
  end
  redis.call('ZADD', key, unpack(added))
end
local until_us = tonumber(redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2]) + tonumber(ARGV[6])
redis.call('PEXPIREAT', key, text(math.ceil(until_us / 1000)))
return {held and 2 or 1, now, left, until_us}

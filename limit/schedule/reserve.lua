-- reserve: an instant to come, if every window that contains it has room.
--
-- KEYS  1 {K}:sched  a sorted set: id by instant, Unix µs
-- ARGV  1 id
--       2 at_us: the instant
--       3 horizon_us: the furthest instant ahead of now
--       4 longest_us: the length of the longest window
--       then two for each window: its limit and its length in µs
-- Reply {1, now_us, left, until_us}: reserved; left is how many more fit at this instant, until_us when nothing needs to be
--       stored any more
--       {2, now_us, left, until_us}: so it was before
--       {0, now_us, next_us, w, ...}: denied by windows w, the first being 1; at next_us or later it fits
--       {3}: the key holds something else
--       {4, at_us}: the id is reserved for another instant
--       {5, now_us}: the instant has passed
--       {6, now_us}: the instant is beyond the horizon
local STEPS = 32 -- in search of the next instant that fits
local key, id, at = KEYS[1], ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function text(n) return string.format('%.0f', n) end

local held = redis.pcall('ZSCORE', key, id)
if type(held) == 'table' then
  if string.find(held.err, 'WRONGTYPE', 1, true) then return {3} end
  return held
end
if held and tonumber(held) ~= at then return {4, tonumber(held)} end
if not held then
  if at < now then return {5, now} end
  if at > now + tonumber(ARGV[3]) then return {6, now} end
end

-- room returns how many more fit at instant t in a window, or at most 0 and an instant before which none does. Every window
-- that contains t is seen in the one of them that begins with its first reservation.
local function room(t, limit, length)
  local begins, here, ends = '(' .. text(t - length), text(t), '(' .. text(t + length)
  local behind = redis.call('ZCOUNT', key, begins, here)
  local ahead = redis.call('ZCOUNT', key, '(' .. here, ends)
  -- Where one side fills the window, or one is empty, their numbers tell.
  if behind >= limit then
    return 0, tonumber(redis.call('ZREVRANGEBYSCORE', key, here, begins, 'WITHSCORES', 'LIMIT', limit - 1, 1)[2]) + length
  end
  if ahead >= limit then
    return 0, tonumber(redis.call('ZRANGEBYSCORE', key, '(' .. here, ends, 'WITHSCORES', 'LIMIT', 0, 1)[2]) + length
  end
  if behind == 0 or ahead == 0 then return limit - behind - ahead, t end

  local near, starts = {}, behind
  local found = redis.call('ZRANGEBYSCORE', key, begins, ends, 'WITHSCORES')
  for i = 2, #found, 2 do near[#near + 1] = tonumber(found[i]) end
  local most, free, last = 0, t, 0
  for first = 1, starts + 1 do -- the last one begins with t
    local begin = t
    if first <= starts then begin = near[first] end
    while last < #near and near[last + 1] < begin + length do last = last + 1 end
    local count = last - first + 1
    most = math.max(most, count)
    if count >= limit then free = math.max(free, near[first] + length) end
  end
  return limit - most, free
end

local left, denied = nil, {}
local next_us = at
for w = 1, (#ARGV - 4) / 2 do
  local more, free = room(at, tonumber(ARGV[2 * w + 3]), tonumber(ARGV[2 * w + 4]))
  if more < 1 then denied[#denied + 1] = w end
  next_us = math.max(next_us, free)
  left = math.min(left or more, more)
end
if #denied > 0 and not held then
  for _ = 1, STEPS do
    local from = next_us
    for w = 1, (#ARGV - 4) / 2 do
      local _, free = room(from, tonumber(ARGV[2 * w + 3]), tonumber(ARGV[2 * w + 4]))
      next_us = math.max(next_us, free)
    end
    if next_us == from then break end
  end
  local reply = {0, now, next_us}
  for _, w in ipairs(denied) do reply[#reply + 1] = w end
  return reply
end

local code = 2
if not held then
  code, left = 1, left - 1
  -- What lies a whole window back is in no window with an instant to come.
  redis.call('ZREMRANGEBYSCORE', key, '-inf', text(now - tonumber(ARGV[4])))
  redis.call('ZADD', key, text(at), id)
end
local until_us = tonumber(redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2]) + tonumber(ARGV[4])
redis.call('PEXPIREAT', key, text(math.ceil(until_us / 1000)))
return {code, now, math.max(0, left), until_us}

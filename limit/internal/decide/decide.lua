-- decide: asks limits for tokens and takes from all of them or from none.
--
-- KEYS  one for each limit
-- ARGV  1 what to do: 1 take, 0 peek, -1 return
--       2 n: tokens, at least 1
--       then four for each limit: the name of its rule, and the rule's three numbers
-- Reply {1, now_us, ...}: taken, peeked or returned
--       {0, now_us, ...}: denied; nothing is taken from any limit
--       both with five integers for each limit: 1 if n tokens fit, else 0; tokens left; wait_us until n tokens fit;
--       reset_us until nothing needs to be stored; delay_us before the tokens may be used
--       {3, i}: KEYS i holds something else; nothing is taken
--
-- A rule is a function of key, what, n, now and its three numbers. It reads its key and returns whether n tokens fit; the
-- tokens left, wait_us, reset_us and delay_us as they are without this call; and a function that writes and returns tokens
-- left and reset_us after it. It returns nil if the key holds something else. Only when every rule has read does one write.
local EXACT = 9007199254740992 -- 2^53
local rules = {}

-- get reads a string: nil if the key is missing, false if it holds something else.
local function get(key)
  local v = redis.pcall('GET', key)
  if type(v) == 'table' then
    if not string.find(v.err, 'WRONGTYPE', 1, true) then error(v) end
    return false
  end
  return v or nil
end

-- integer reads a decimal integer that doubles hold exactly, as get does.
local function integer(key)
  local v = get(key)
  if not v then return v end
  if not (v == '0' or string.find(v, '^%-?[1-9]%d*$')) then return false end
  local n = tonumber(v)
  if n >= EXACT or n <= -EXACT then return false end
  return n
end

-- store writes a value that means nothing from the instant until_us on.
local function store(key, value, until_us)
  redis.call('SET', key, value, 'PXAT', string.format('%.0f', math.ceil(until_us / 1000)))
end

-- An instant to come is stored exactly: its key expires with the millisecond in which it falls, and holds how much earlier
-- than that it is, in units of 1/tokens of a microsecond. The number is small, so that Redis need not allocate it.

-- ahead returns how many units the stored instant lies ahead of now, at most most; nil if the key holds something else.
local function ahead(key, now, tokens, most)
  local before = integer(key)
  if not before then return before == nil and 0 or nil end
  local expires = redis.call('PEXPIRETIME', key)
  if before < 0 or expires < 0 then return nil end
  -- More than most lies ahead when the clock went back. Stored under another rate, the instant is right to the millisecond.
  local d = (expires * 1000 - now) * tokens - math.min(before, 1000 * tokens)
  return math.min(math.max(d, 0), most)
end

-- store_ahead stores the instant d units ahead of now and returns the time until then, in µs.
local function store_ahead(key, now, tokens, d)
  if d == 0 then
    redis.call('DEL', key)
    return 0
  end
  local us = math.ceil(d / tokens)
  local expires = math.ceil((now + us) / 1000)
  store(key, string.format('%.0f', (expires * 1000 - now) * tokens - d), now + us)
  return us
end
--#rules
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local what, n = tonumber(ARGV[1]), tonumber(ARGV[2])
local reply, writes, granted = {1, now}, {}, true
for i, key in ipairs(KEYS) do
  local a = 4 * i - 1
  local fits, left, wait, reset, delay, write =
    rules[ARGV[a]](key, what, n, now, tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3]))
  if fits == nil then return {3, i} end
  fits = fits or what == -1
  granted = granted and fits
  local r = 5 * i - 2
  reply[r], reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = fits and 1 or 0, left, fits and 0 or wait, reset, delay
  writes[i] = write
end
if what == 0 then return reply end
if what == 1 and not granted then
  reply[1] = 0
  return reply
end
for i, write in ipairs(writes) do
  local r = 5 * i - 2
  reply[r + 1], reply[r + 3] = write()
end
return reply

-- Shared by the scripts of buckets and limits that no refiller refills, and by the rules of limiters. Include it after
-- redis.

-- store writes a value to a key that expires at the instant until_us, rounded up to a millisecond.
local function store(key, value, until_us)
  redis.call('SET', key, value, 'PXAT', string.format('%.0f', math.ceil(until_us / 1000)))
end

-- A future instant is stored exactly, in two parts. Its key expires at the end of the millisecond in which the instant
-- falls. The value of the key is how much earlier than that the instant is, in units of 1/tokens of a microsecond. The
-- value is a small number, for which Redis needs no memory of its own.

-- ahead returns how many units the stored instant lies ahead of now, at most MOST_AHEAD; nil if the key holds something
-- else. If the clock went back, or another program has a larger limit, the number may exceed what the limit allows.
local MOST_AHEAD = EXACT / 2 -- no limit is larger: see decide.NewSpacing
local function ahead(key, now, tokens)
  local before = get_integer(key)
  if not before then return before == nil and 0 or nil end
  local expires = redis.call('PEXPIRETIME', key)
  if before < 0 or expires < 0 then return nil end
  -- If the instant was stored under another rate, it is right to the millisecond.
  local d = (expires * 1000 - now) * tokens - math.min(before, 1000 * tokens)
  return math.min(math.max(d, 0), MOST_AHEAD)
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

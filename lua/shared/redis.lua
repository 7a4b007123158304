-- Shared by the scripts that read keys; it comes before the other pieces.
local EXACT = 9007199254740992 -- 2^53; 2^53 + 1 is read as this too, so only smaller numbers are valid

local function now_us()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end

-- wrong_type returns false if the error says that a key has another type. It raises every other error.
local function wrong_type(reply)
  if not string.find(reply.err, 'WRONGTYPE') then error(reply) end
  return false
end

-- get_text reads a string: nil if the key is missing, false if it holds something else.
local function get_text(key)
  local v = redis.pcall('GET', key)
  if type(v) == 'table' then return wrong_type(v) end
  return v or nil
end

-- get_integer reads a decimal integer: nil if the key is missing, false if it holds something else. It accepts only
-- numbers that INCRBY accepts and that doubles hold exactly. Otherwise a write could fail after another was made.
local function get_integer(key)
  local v = get_text(key)
  if not v then return v end
  if v ~= '0' and not string.find(v, '^%-?[1-9]%d*$') then return false end
  local n = v + 0
  return n < EXACT and n > -EXACT and n
end

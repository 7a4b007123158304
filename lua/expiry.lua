-- Shared by the scripts that give a template's bucket its expiry; the build puts it where a script says "--#include expiry".
-- All keys of a bucket expire at the same instant: twice its drain time, at least a minute, after it was last armed, rounded
-- up to a grid of whole seconds that is finer than an eighth of that, so that the buckets alive can be counted by instant.
local MOST_S = 1000000000

-- ttl_s is the least time that a bucket of policy p lives after it was armed.
local function ttl_s(p)
  return math.min(math.max(60, 2 * p.capacity * p.per / p.tokens / 1000000), MOST_S)
end

-- expires_s is when a bucket expires that is armed now and is to live for life_s.
local function expires_s(life_s, now)
  local grid = 1
  while grid * 16 < life_s do grid = grid * 2 end
  return math.ceil((now / 1000000 + life_s) / grid) * grid
end

-- arm gives the keys of a bucket of policy p an expiry, unless more than least_s of their time is left; it returns the instants
-- of before and after, in s, 0 for none. Of keep_s, 0 if it isn't given, more is always left.
local function arm(keys, p, now, least_s, keep_s)
  local life_s = ttl_s(p)
  if keep_s and keep_s > 0 then least_s, life_s = math.max(least_s, keep_s), math.max(life_s, 1.25 * keep_s) end
  local was = redis.call('PEXPIRETIME', keys[1]) / 1000
  if was < 0 then was = 0 end
  if was - now / 1000000 > least_s then return was, was end
  local till = expires_s(life_s, now)
  for i = 1, 3 do redis.call('PEXPIREAT', keys[i], string.format('%.0f', till * 1000)) end
  return was, till
end

-- An active set expires with the last of its buckets, so that nothing is left of a template that is no more.

-- outlast makes an active set live as long as one of its buckets does, which expires at till_s.
local function outlast(set, till)
  local at = redis.pcall('PEXPIRETIME', set)
  if type(at) == 'number' and at ~= -2 and at < till * 1000 then
    redis.call('PEXPIREAT', set, string.format('%.0f', till * 1000))
  end
end

-- enter_set puts a bucket that expires at till_s in an active set; it returns SADD's answer, which may be an error.
local function enter_set(set, name, till)
  local added = redis.pcall('SADD', set, name)
  if type(added) == 'number' then outlast(set, till) end
  return added
end

-- alive is the number of buckets, counted in a hash by instant of expiry, that have not expired; it drops the others.
local function alive(key, now)
  local n, all = 0, redis.pcall('HGETALL', key)
  if all.err then return 0 end
  for i = 1, #all, 2 do
    if tonumber(all[i]) * 1000000 > now then
      n = n + tonumber(all[i + 1])
    else
      redis.call('HDEL', key, all[i])
    end
  end
  return n
end

-- count notes in the hash that a bucket's expiry moves from an instant to another; 0 is none.
local function count(key, was, till, now)
  if was == till then return end
  if was > 0 then redis.pcall('HINCRBY', key, string.format('%.0f', was), -1) end
  if till > 0 and redis.pcall('HINCRBY', key, string.format('%.0f', till), 1) == 1 then
    alive(key, now) -- a new instant: time to drop those that have passed
    local at = string.format('%.0f', till * 1000)
    redis.call('PEXPIREAT', key, at, 'GT')
    redis.call('PEXPIREAT', key, at, 'NX')
  end
end

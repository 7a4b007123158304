-- Shared by the scripts that give a template's bucket its expiry. Include it after policy. To arm a bucket is to give
-- its keys an expiry. All keys of a bucket expire at the same whole second. That is twice the time in which the bucket
-- refills from empty to full, and at least a minute, after it was last armed. A budget expires a minute after steps
-- have filled it twice. Only buckets whose policy in force is a template's are armed.

-- outlast makes a set of the template live at least until till, the second in which one of its buckets expires.
local function outlast(set, till)
  local at = pcall('PEXPIRETIME', set)
  if type(at) == 'number' and at ~= -2 and at < till * 1000 then call('PEXPIREAT', set, format('%d', till * 1000)) end
end

-- first_end returns the first instant, in ms, at which one of a bucket's keys expires. It returns nil if one of the
-- keys has no expiry, or expires at the instant after or before it.
local function first_end(keys, after)
  local first
  for i = 3, 1, -1 do
    local at = pcall('PEXPIRETIME', keys[i])
    if type(at) ~= 'number' or at <= after then return nil end
    first = min(first or at, at)
  end
  return first
end

-- arm gives a bucket, whose keys are K, {K} and {K}:ctl, an expiry after life_s. It changes nothing if each key has an
-- expiry, and the time left is longer than part * life_s and longer than hold_s. It returns the second in which the
-- bucket expires, and whether arm has set it.
local function arm(keys, life_s, now, part, hold_s)
  local first = first_end(keys, now / 1000 + max(part * life_s, hold_s) * 1000)
  if first then return math.ceil(first / 1000), false end
  local till = math.ceil(now / 1000000 + max(life_s, 1.25 * hold_s))
  for i = 1, 3 do call('PEXPIREAT', keys[i], format('%d', till * 1000)) end
  return till, true
end

-- rejoin gives K and {K} the expiry of {K}:ctl. It is called when one of them was lost and created again.
local function rejoin(keys)
  local at = pcall('PEXPIRETIME', keys[3])
  if type(at) ~= 'number' or at < 0 then return end
  for i = 1, 2 do call('PEXPIREAT', keys[i], format('%d', at)) end
end

-- disarm removes the expiry of a bucket's keys.
local function disarm(keys)
  for i = 1, 3 do call('PERSIST', keys[i]) end
end

-- alive drops the expired buckets from the sorted set of those alive, and returns how many remain.
local function alive(set, now)
  local n = pcall('ZREMRANGEBYSCORE', set, '-inf', format('%d', floor(now / 1000000)))
  n = type(n) == 'number' and pcall('ZCARD', set)
  return type(n) == 'number' and n or 0
end

-- record_alive records in the set of the buckets alive that a bucket expires at the second till. If only_known is set,
-- it changes only a bucket that the set has already.
local function record_alive(set, name, till, only_known)
  local added = only_known and pcall('ZADD', set, 'XX', format('%d', till), name)
    or not only_known and pcall('ZADD', set, format('%d', till), name)
  if type(added) == 'number' then outlast(set, till) end
end
